"""Cases of parametrized tests as data: the file ``arch.yaml`` beside ``test_arch.py``."""

from pathlib import Path
from typing import Any

import yaml


def load_cases(test_file: str) -> dict[str, list[Any]]:
    """Return the rows of each test by its name without ``test_``."""
    file = Path(test_file)
    data = file.with_name(f"{file.stem.removeprefix('test_')}.yaml")
    cases: dict[str, list[Any]] = yaml.safe_load(data.read_text(encoding="utf-8"))
    return cases
