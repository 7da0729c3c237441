"""Precision and recall of triage over labeled texts.

Half of the texts, by a hash of the name, was held back while the rules were written. The texts are reports of
ours in the style of people, and logs of real engines that `evidence/provoke_failures.py` provoked to fail.
"""

import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moedoctor.diagnose.triage.triage import triage
from tests.diagnose.triage.threads_of_tests import threads

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Labelled:
    """A text and the failures that it shows."""

    name: str
    kind: str
    """``report`` or ``log``."""
    text: str
    ids: frozenset[str]

    @property
    def held_back(self) -> bool:
        """True if the text was not looked at while the rules were written."""
        return zlib.crc32(self.name.encode()) % 2 == 1


@dataclass(frozen=True)
class Score:
    """Findings, certain or likely, against the labels."""

    texts: int
    right: int
    wrong: tuple[tuple[str, str], ...]
    """(name, id) that was found and should not be."""
    missed: tuple[tuple[str, str], ...]
    """(name, id) that was not found."""

    @property
    def precision(self) -> float:
        """Share of the findings that are right; 1 without findings."""
        found = self.right + len(self.wrong)
        return self.right / found if found else 1.0

    @property
    def recall(self) -> float:
        """Share of the failures that were found; 1 without failures."""
        labels = self.right + len(self.missed)
        return self.right / labels if labels else 1.0


def labelled() -> Iterator[Labelled]:
    """Yield the reports and then the logs."""
    for thread in threads(HERE / "reports"):
        yield Labelled(thread.source, "report", thread.text, thread.ids)
    for truth in sorted((HERE / "logs").glob("*/*.json")):
        ids = frozenset(json.loads(truth.read_text(encoding="utf-8"))["ids"])
        log = truth.with_suffix(".log").read_text(encoding="utf-8")
        yield Labelled(f"{truth.parent.name}/{truth.stem}", "log", log, ids)


def score(texts: Iterable[Labelled]) -> Score:
    """Return how triage does on `texts`."""
    right, wrong, missed, count = 0, [], [], 0
    for text in texts:
        found = {finding.id for finding in triage(io.BytesIO(text.text.encode())).findings}
        count += 1
        right += len(found & text.ids)
        wrong += [(text.name, id) for id in sorted(found - text.ids)]
        missed += [(text.name, id) for id in sorted(text.ids - found)]
    return Score(count, right, tuple(wrong), tuple(missed))
