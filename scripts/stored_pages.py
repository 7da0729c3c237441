"""Writes the Markdown of each stored report from its JSON, and checks it.

With ``--write`` every page becomes what ``moedoctor show REPORT --format markdown --full`` makes of the JSON
now; without it each must be so already.

Exit code: 0 every page is what it would be, 1 one is not.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent


def list_reports() -> Iterator[Path]:
    """Give the JSON file of each stored report of a command; not of capsules, which have another page."""
    for folder in ("nvidia-*", "releases"):
        yield from sorted((ROOT / "reports").glob(f"{folder}/*.json"))


def render(file: Path) -> str:
    """Return the page of a stored report; its charts are not drawn, only named."""
    from moedoctor.commands.show import show

    undrawn = patch("moedoctor.reporters.plots.draw")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()), undrawn:
        page = Path(folder) / f"{file.stem}.md"  # charts beside a page have its name
        show(file, "markdown", page, full=True)
        return page.read_text(encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Check; with ``--write`` write what is not up to date."""
    stale = 0
    for file in list_reports():
        page, made = file.with_suffix(".md"), render(file)
        if page.read_text(encoding="utf-8") != made:
            stale += 1
            if "--write" in arguments:
                page.write_text(made, encoding="utf-8")
            else:
                print(f"{page.relative_to(ROOT)}: is not the page of its JSON: make reports", file=sys.stderr)
    return 1 if stale and "--write" not in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
