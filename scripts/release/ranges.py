"""Writes the ranges of releases in entries from the stored answers of the releases' sources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_RANGE = re.compile(r"(?m)^  - package: .*\n(?:    .*\n)+")
_LINES = re.compile(r'(?m)^    first: ".*"\n    last: ".*"\n(?:    fixed: ".*"\n)?')
Answers = Mapping[str, Mapping[str, str]]


def write_ranges(entries: Path, answers: Answers) -> Iterator[str]:
    """Write the ranges of each entry in a folder; yield a line for each that needs a person."""
    for file in sorted(entries.glob("MD*.md")):
        text = file.read_text(encoding="utf-8")
        try:
            changed = replace_ranges(text, file.stem, answers)
        except ValueError as error:
            yield f"person: moedoctor/entries/{file.name}: {error}"
            continue
        if changed != text:
            file.write_text(changed, encoding="utf-8")


def replace_ranges(text: str, id: str, answers: Answers) -> str:
    """Return an entry whose ranges are those of the answers.

    Raises ValueError if there are more or fewer ranges for a question than were written.
    """
    names = dict.fromkeys(re.findall(r"(?m)^    question: (\w+)$", text))
    left = {name: list_spans(answers[f"{id}.{name}"]) for name in names}

    def replace(match: re.Match[str]) -> str:
        asked = re.search(r"(?m)^    question: (\w+)$", match[0])
        if asked is None:
            return match[0]
        if not left[asked[1]]:
            raise ValueError(f"a range of question {asked[1]} ended")
        first, last, fixed = left[asked[1]].pop(0)
        lines = f'    first: "{first}"\n    last: "{last}"\n' + (f'    fixed: "{fixed}"\n' if fixed else "")
        return _LINES.sub(lambda _: lines, match[0])

    changed = _RANGE.sub(replace, text)
    for name, spans in left.items():
        if spans:
            raise ValueError(f"a range of question {name} began: {spans[0][0]} to {spans[0][1]}")
    return changed


def list_spans(row: Mapping[str, str]) -> list[tuple[str, str, str | None]]:
    """Return the first, the last and the release after it of each run of releases that are affected."""
    spans: list[tuple[str, str, str | None]] = []
    for name, following in zip(row, [*list(row)[1:], None], strict=True):
        if row[name] == "affected":
            first = spans.pop()[0] if spans and spans[-1][2] == name else name
            spans.append((first, name, following))
    return spans
