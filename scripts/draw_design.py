"""Draws docs/design.svg from the code: the layers, and the way of `moedoctor run` through them.

The layers are those of the import contract in pyproject.toml, with the first line of each package's
docstring. The way is what the function `run` of `moedoctor/commands/run.py` calls, in its order, and what
`moedoctor/runner/run.py` calls in turn.

scripts/made_blocks.py writes it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SKIP = {"text", "redaction", "results"}
"""Layers whose helpers are called everywhere: they would hide the way of the run."""
ROW, LEFT, NAME, STEP = 30, 16, 106, 620
"""Height of a row, and columns in pixels: margin, names, steps."""


class Step(NamedTuple):
    """One call of a run."""

    layer: str
    name: str
    """``scenario.targets: load_targets``."""


def layers() -> list[str]:
    """Return the layers from the top down."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == "layers")
    return [name.strip("()") for line in contract["layers"] for name in line.split(" | ")]


def summary(layer: str) -> str:
    """Return the first sentence of a layer's docstring."""
    package = ROOT / "moedoctor" / layer / "__init__.py"
    file = package if package.exists() else ROOT / "moedoctor" / f"{layer}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("`", "").split(". ")[0].rstrip(".:")


def calls(module: str, function: str) -> list[Step]:
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


def way() -> list[Step]:
    """Return the steps of a run, from the command line to the report."""
    steps = [Step("cli", "cli: main"), Step("commands", "commands.run: run")]
    for step in calls("moedoctor.commands.run", "run"):
        steps.append(step)
        if step.name == "runner.run: run":
            steps += [*calls("moedoctor.runner.run", "run"), *_judging()]
    return list(dict.fromkeys(steps))


def _judging() -> list[Step]:
    """Return the methods of a failure that the verdicts call."""
    text = (ROOT / "moedoctor" / "runner" / "judge.py").read_text(encoding="utf-8")
    names = dict.fromkeys(
        node.func.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value).endswith("fault")
    )
    return [Step("faults", f"fault.{name}") for name in names]


def picture() -> str:
    """Return the picture as SVG."""
    names, steps = layers(), way()
    rows = {name: 56 + ROW * index for index, name in enumerate(names)}
    width, height = STEP + 26 * len(steps) + 300, 56 + ROW * len(names) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13" '
        'font-family="DejaVu Sans, Verdana, sans-serif">',
        "<title>The layers of moedoctor, and the way of moedoctor run through them</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">A layer imports only the layers below it</text>',
        f'<text x="{STEP}" y="24" font-weight="bold">moedoctor run, step by step</text>',
    ]
    for index, (name, top) in enumerate(rows.items()):
        shade = "#eef3f8" if index % 2 else "#f8fafc"
        parts += [
            f'<rect x="8" y="{top - 19}" width="{width - 16}" height="{ROW - 2}" fill="{shade}"/>',
            f'<text x="{LEFT}" y="{top}" font-weight="bold">{escape(name)}</text>',
            f'<text x="{LEFT + NAME}" y="{top}" font-size="11" fill="#59636e">{_short(summary(name))}</text>',
        ]
    points = [(STEP + 12 + 26 * index, rows[step.layer] - 4) for index, step in enumerate(steps)]
    line = " ".join(f"{x},{y}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="1.5"/>')
    for number, (x, y) in enumerate(points, 1):
        parts += [
            f'<circle cx="{x}" cy="{y}" r="9" fill="#0072b2"/>',
            f'<text x="{x}" y="{y + 4}" font-size="10" fill="#ffffff" text-anchor="middle">{number}</text>',
        ]
    left, top = STEP + 26 * len(steps) + 20, 56
    for number, step in enumerate(steps, 1):
        label = f"{number} {escape(step.name)}"
        parts.append(f'<text x="{left}" y="{top + 22 * (number - 1)}" font-size="12">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(text: str) -> str:
    return escape(text if len(text) <= 82 else text[:81].rstrip() + "…")
