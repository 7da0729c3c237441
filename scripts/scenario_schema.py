"""Writes scenarios/schema.json, which editors read, from the models; ``--check`` compares it."""

import json
import sys
from pathlib import Path

from moedoctor.scenario.file import make_schema

FILE = Path(__file__).resolve().parent.parent / "scenarios" / "schema.json"


def main(file: Path = FILE) -> int:
    text = json.dumps(make_schema(), indent=2) + "\n"
    if "--check" not in sys.argv:
        file.write_text(text, encoding="utf-8")
    elif not file.is_file() or file.read_text(encoding="utf-8") != text:
        print(f"{file.name}: differs from the models; run: make schema", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
