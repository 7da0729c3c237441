"""Runs single functions of a vLLM release out of its Python files, without importing vLLM.

The source of a function is read from a wheel, an unpacked folder or the installed package, and executed among
names that the caller gives. Every line that runs is upstream's own; the caller lists what it calls.
"""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedoctor.plugin.known_code import find_name
from moedoctor.results import UnavailableError
from moedoctor.text import TextFileError, read_bytes, walk
from moedoctor.upstream.releases.wheel import KernelError, find_package_folders, open_wheel

_MAX_BYTES = 8 << 20


class SourceError(Exception):
    """Source that is not available, or that lacks what is asked for; one line says which."""


@dataclass(frozen=True)
class ReleaseSource:
    path: Path
    """A wheel, or the folder that holds the package ``vllm`` or ``flashinfer``."""

    @classmethod
    def installed(cls, package: str = "vllm") -> ReleaseSource:
        """Return a package of this environment, which is not imported. Raises UnavailableError."""
        folders = find_package_folders(package)
        if not folders:
            raise UnavailableError(f"{package} is not installed here")
        return cls(folders[0].parent)

    def read_text(self, member: str) -> str:
        """Return the text of a file such as ``vllm/model_executor/utils.py``. Raises SourceError."""
        try:
            if os.path.isdir(self.path):
                data = read_bytes(self.path / member, _MAX_BYTES)
            else:
                with open_wheel(self.path) as wheel:
                    if wheel.getinfo(member).file_size > _MAX_BYTES:
                        raise SourceError(f"{self.path.name}: {member} is larger than {_MAX_BYTES} bytes")
                    data = wheel.read(member)
        except TextFileError as error:
            raise SourceError(f"{self.path.name}: {member} {error.message}") from error
        except (KeyError, KernelError) as error:
            raise SourceError(f"{self.path.name}: {member} cannot be read: {error}") from error
        return data.decode("utf-8", errors="replace")

    def has_file(self, member: str) -> bool:
        try:
            return bool(self.read_text(member))
        except SourceError:
            return False

    def list_files(self, path: str) -> list[str]:
        """Return `path` if it is a Python file, else those below it: none in a wheel or a hostile tree."""
        if path.endswith(".py"):
            return [path]
        found: list[Path] = []
        with contextlib.suppress(TextFileError):
            found += (parent / name for parent, names in walk(self.path / path) for name in names)
        return [file.relative_to(self.path).as_posix() for file in sorted(found) if file.suffix == ".py"]

    def load_function(self, member: str, name: str, names: Mapping[str, Any]) -> Any:
        """Return the function ``name`` or ``Class.name`` of a file; it can use only `names`.

        Decorators are kept, annotations are ignored. Raises SourceError if it is not there.
        """
        owner, _, last = name.rpartition(".")
        tree = ast.parse(self.read_text(member))
        if find_place(tree, owner) is None:
            raise SourceError(f"{self.path.name}: {member} has no class {owner}")
        function = find_place(tree, name)
        if not isinstance(function, ast.FunctionDef):
            raise SourceError(f"{self.path.name}: {member} has no function {name}")
        future = ast.parse("from __future__ import annotations").body
        module = ast.Module(body=[*future, function], type_ignores=[])
        space = dict(names)
        exec(compile(module, f"{self.path.name}/{member}", "exec"), space)
        return space[last]


def find_place(tree: ast.Module, path: str) -> ast.AST | None:
    """Return a function, class or assignment by its path, ``Class.method``; the file for an empty path."""
    place: ast.AST | None = tree
    for name in path.split(".") if path else ():
        place = None if place is None else find_name(place, name)
    return place
