"""Read the labeled texts of `threads`: short texts of ours in the style of the named threads."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "threads"


@dataclass(frozen=True)
class Thread:
    """A text, the known failures that it is about, and the kind of thread that it imitates."""

    ids: frozenset[str]
    source: str
    text: str
    file: str

    @property
    def lookalike_of(self) -> frozenset[str]:
        """The failures that the text resembles but is not about."""
        return frozenset(re.findall(r"MD\d{3}", self.source)) if "lookalike" in self.source else frozenset()


def threads(folder: Path = FOLDER) -> Iterator[Thread]:
    """Yield all texts in the order of the files."""
    for path in sorted(folder.glob("*.txt")):
        for part in re.split(r"(?m)^=== ", path.read_text(encoding="utf-8"))[1:]:
            head, _, text = part.partition("\n")
            ids, _, source = head.partition(" | ")
            yield Thread(frozenset(re.findall(r"MD\d{3}", ids)), source.strip(), text, path.name)
