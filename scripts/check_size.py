"""Prints the lines of each part of the project, and fails above a ceiling of `[tool.moedoctor.size]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parts: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["moedoctor"]["size"]
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    left = [file for file in listed.splitlines() if file.endswith((".py", ".sh"))]
    failed = False
    for name, part in parts.items():
        own = [file for file in left if file.startswith(tuple(part["paths"]))]
        left = [file for file in left if file not in own]
        # A file may be deleted in the checkout only.
        lines = sum(len((ROOT / file).read_bytes().splitlines()) for file in own if (ROOT / file).is_file())
        failed |= lines > part["ceiling"]
        print(f"{name}: {lines:,} lines of at most {part['ceiling']:,}")
    if failed:
        print("size: above a ceiling: lower something else, or raise it in its own commit")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
