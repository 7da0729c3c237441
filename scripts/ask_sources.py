"""Asks the sources of all known releases the questions of the entries, on which their ranges rest.

``python scripts/ask_sources.py FOLDER`` reads ``FOLDER/X.Y.Z/vllm`` of each known release and writes
reports/sources/answers.json: the releases that were read, and for each question their answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moedoctor.entries import load_entries
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.upstream.releases.questions import Inquiry
from moedoctor.upstream.releases.release_source import ReleaseSource

TABLE = Path(__file__).resolve().parent.parent / "reports" / "sources" / "answers.json"


def main(folder: Path) -> None:
    """Write the table."""
    answers: dict[str, dict[str, str]] = {}
    for release in load_releases():
        inquiry = Inquiry(ReleaseSource(folder / release))
        for entry in load_entries().values():
            for question in entry.questions:
                row = answers.setdefault(f"{entry.id}.{question.name}", {})
                row[release] = inquiry.answer(question).value
    TABLE.parent.mkdir(exist_ok=True)
    rows = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in answers.items())
    releases = json.dumps(list(load_releases()))
    TABLE.write_text(f'{{"releases": {releases},\n "answers": {{\n  {rows}\n }}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
