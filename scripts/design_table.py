"""Finds in the code what docs/design.md shows: the layers, and the way of `moedoctor run` through them.

The layers are those of the import contract in pyproject.toml, with the first line of each package's
docstring. The way is what the function `run` of `moedoctor/commands/run.py` calls, in its order, and what
`moedoctor/runner/run.py` calls in turn.

scripts/made_blocks.py writes the table.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SKIP = {"text", "redaction", "results"}
"""Layers whose helpers are called everywhere: they would hide the way of the run."""


class Step(NamedTuple):
    """One call of a run."""

    layer: str
    name: str
    """``scenario.targets: load_targets``."""


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


def list_calls(module: str, function: str) -> list[Step]:
    """Return the calls of one function into other layers, each once, in the order of the text."""
    file = (ROOT / module.replace(".", "/")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    homes = {
        name.asname or name.name: f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moedoctor")
        for name in node.names
    }

    def steps(body: list[ast.stmt]) -> Iterator[Step]:
        found = [node.func for part in body for node in ast.walk(part) if isinstance(node, ast.Call)]
        for target in sorted(found, key=lambda node: (node.lineno, -node.col_offset)):
            path = ast.unparse(target).split("(")[0].split("[")[0]
            first, _, rest = path.partition(".")
            if path in own and path != function and path not in homes:
                yield from steps(own[path].body)
            layer, _, name = ".".join(filter(None, (homes.get(first, "")[10:], rest))).partition(".")
            if first in homes and name and layer not in {*SKIP, module.split(".")[1]}:
                inner, _, called = name.rpartition(".")
                if called[0].isupper():  # a record that is made
                    continue
                yield Step(layer, f"{'.'.join(filter(None, (layer, inner)))}: {called}")

    return list(dict.fromkeys(steps(own[function].body)))


def list_steps() -> list[Step]:
    """Return the steps of a run, from the command line to the report."""
    steps = [Step("cli", "cli: main"), Step("commands", "commands.run: run")]
    for step in list_calls("moedoctor.commands.run", "run"):
        steps.append(step)
        if step.name == "runner.run: run":
            # The methods of a failure that the verdicts call.
            judge = (ROOT / "moedoctor" / "runner" / "judge.py").read_text(encoding="utf-8")
            steps += list_calls("moedoctor.runner.run", "run")
            steps += [Step("faults", f"fault.{name}") for name in re.findall(r"\bfault\.(\w+)\(", judge)]
    return list(dict.fromkeys(steps))


def table() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and rows of the table: a layer, its subject, and the numbered steps of a run in it."""
    steps: dict[str, list[str]] = {}
    for number, step in enumerate(list_steps(), 1):
        steps.setdefault(step.layer, []).append(f"{number}. `{step.name}`")
    rows = [(f"`{name}`", summarize(name), "<br>".join(steps.get(name, ()))) for name in list_layers()]
    return ("layer", "what it is", "steps of `moedoctor run`, in order"), rows
