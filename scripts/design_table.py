"""Finds in the code what docs/design.md shows: the layers of the import contract in pyproject.toml.

scripts/made_blocks.py writes the table.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def list_layers() -> list[str]:
    """Return the layers from the top down."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == "layers")
    return [name.strip("()") for line in contract["layers"] for name in line.split(" | ")]


def summarize(layer: str) -> str:
    """Return the first sentence of a layer's docstring."""
    package = ROOT / "moedoctor" / layer / "__init__.py"
    file = package if package.exists() else ROOT / "moedoctor" / f"{layer}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".:")


def table() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and rows of the table: a layer and its subject."""
    return ("layer", "what it is"), [(f"`{name}`", summarize(name)) for name in list_layers()]
