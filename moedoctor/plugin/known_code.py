"""Compares vLLM's functions with those of the known releases, by their syntax trees: nothing is imported.

Layout, comments, docstrings and annotations do not count. `make release` makes known_code.json: for each
function that a fix or trace changes or relies on, its hash in each release, and what each of them needs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from moedoctor.text import read_bytes

Read = Callable[[str], str]
"""Returns the text of a file such as ``vllm/envs.py``; raises any exception if there is none."""
MAX_BYTES = 8 << 20
_LEFT_OUT = frozenset(("annotation", "returns", "ctx", "kind", "type_comment", "type_ignores", "type_params"))
"""Fields of nodes that change nothing, or that only some releases of Python have."""
_MOST_STEPS = 6
"""The most steps that a name is followed through imports and base classes."""


def find_difference(extension: str, release: str, read: Read | None = None) -> str | None:
    """Return why the functions of an extension are not known to be those of a release, or None if they are.

    `read` gives vLLM's files, by default those of the installed vLLM.
    """
    table, code = load_table(), Code(read or read_installed)
    needed = table["needs"].get(extension, {}).get(release)
    if needed is None:
        return f"no functions of {release} are stored for {extension}, so nothing was compared"
    for name in needed:
        expected, actual = table["functions"][name].get(release), code.hash(name)
        if expected is None:
            return f"{name} of {release} is not stored, so it was not compared"
        if actual != expected:
            return f"its {name} differs from {release}'s" if actual else f"{name} was not found in it"
    return None


@functools.cache
def load_table() -> Mapping[str, Any]:
    """Return ``{"needs": extension -> release -> names, "functions": name -> release -> hash}``."""
    packed = json.loads(files(__package__).joinpath("known_code.json").read_text(encoding="utf-8"))
    names = list(packed["functions"])
    return {
        "functions": packed["functions"],
        "needs": {
            extension: {release: [names[number] for number in numbers] for release, numbers in rows.items()}
            for extension, rows in packed["needs"].items()
        },
    }


def read_installed(file: str) -> str:
    """Return a file of the installed vLLM. Raises FileNotFoundError or TextFileError."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        return read_bytes(Path(folder).parent / file, MAX_BYTES).decode("utf-8")
    raise FileNotFoundError(file)


class Code:
    """The functions of one vLLM."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._trees: dict[str, ast.Module | None] = {}
        self._packages: set[str] = set()

    def hash(self, name: str) -> str | None:
        """Return the hash of ``module.function`` or ``module:Class.function``; None if it is not there."""
        module, _, path = name.rpartition(".") if ":" not in name else name.partition(":")
        try:
            node = self._find(module, path.split("."), _MOST_STEPS)
            return None if node is None else hash_code(node)
        except RecursionError:
            return None

    def _find(self, module: str, path: list[str], steps: int) -> ast.AST | None:
        """Follow a path of names from a module, through imports and base classes."""
        tree = self._parse(module)
        if tree is None or steps == 0:
            return None
        found = find_name(tree, path[0])
        if found is None:
            package = module if module in self._packages else module.rpartition(".")[0]
            source = next((each for each in _list_imports(tree, package) if each[0] == path[0]), None)
            return None if source is None else self._find(source[1], [source[2], *path[1:]], steps - 1)
        for name in path[1:]:
            inner = find_name(found, name)
            if inner is None and isinstance(found, ast.ClassDef):
                bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
                inherited = (self._find(module, [base, name], steps - 1) for base in bases)
                inner = next((each for each in inherited if each is not None), None)
            if inner is None:
                return None
            found = inner
        return found

    def _parse(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            tree = _parse_file(self._read, f"{path}.py")
            if tree is None and (tree := _parse_file(self._read, f"{path}/__init__.py")):
                self._packages.add(module)
            self._trees[module] = tree
        return self._trees[module]


def _parse_file(read: Read, file: str) -> ast.Module | None:
    try:
        return ast.parse(read(file))
    except Exception:  # not there, not Python, nested on purpose, or the reader's own error
        return None


def _list_imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, module, name there) of what a file imports by ``from … import``."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            steps = package.split(".")
            parents = steps[: len(steps) - node.level + 1] if node.level else []
            origin = ".".join((*parents, *([node.module] if node.module else [])))
            yield from ((each.asname or each.name, origin, each.name) for each in node.names)


def find_name(scope: ast.AST, name: str) -> ast.AST | None:
    """Return the last function, class or assignment of this name in the body of a file or class."""
    return next((node for node in reversed(getattr(scope, "body", [])) if name in list_names(node)), None)


def list_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement gives to a function, class or variable."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def hash_code(node: ast.AST) -> str:
    """Return a hash of the syntax tree, the same in all releases of Python. Raises RecursionError."""
    return hashlib.sha256(_write(node).encode("utf-8", errors="replace")).hexdigest()[:16]


def _write(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(_write(item) for item in value if not is_docstring(item))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    kept = {
        name: each
        for name, each in ast.iter_fields(value)
        if name not in _LEFT_OUT and each not in (None, [])
    }
    if isinstance(value, ast.Constant):
        kept["value"] = value.value
    return f"{type(value).__name__}({','.join(f'{name}={_write(kept[name])}' for name in sorted(kept))})"


def is_docstring(node: Any) -> bool:
    """Return True for a string that stands alone as a statement."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
