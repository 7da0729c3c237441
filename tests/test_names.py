"""Names say what a thing is. These five say only that there is one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EMPTY = {"one", "said", "seen", "both", "told"}


def names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each name that the file gives to a variable, a parameter, a function or a class, and its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name.strip("_"), node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


@pytest.mark.parametrize("folder", ["moedoctor", "scripts", "tests"])
def test_no_name_is_empty(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    places = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for name, line in names(path)
        if name in EMPTY
    ]
    assert not places


def test_empty_names_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.write_text("def _said(told):\n    for one in told:\n        seen = both = one\n")
    assert {name for name, _ in names(file)} == EMPTY
