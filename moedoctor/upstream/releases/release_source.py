"""Functions of a vLLM release out of its Python files, run without importing vLLM.

For questions that one function answers: its source is read from a wheel, an unpacked folder or the
installed package, cut out by its name and executed among names that the caller gives. What runs is
upstream's own code, every line of it; what it calls is listed by the caller."""

from __future__ import annotations

import ast
import importlib.util
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_BYTES = 8 << 20


class SourceError(Exception):
    """Source that cannot be had or does not hold what is asked for; one line says which."""


@dataclass(frozen=True)
class ReleaseSource:
    """The Python files of one release."""

    path: Path
    """A wheel, or the folder that holds the package ``vllm``."""

    @classmethod
    def installed(cls) -> ReleaseSource:
        """The vLLM of this environment; it is not imported."""
        spec = importlib.util.find_spec("vllm")
        folders = list(spec.submodule_search_locations or []) if spec else []
        if not folders:
            raise SourceError("vllm is not installed here")
        return cls(Path(folders[0]).parent)

    def text(self, member: str) -> str:
        """The text of a file such as ``vllm/model_executor/utils.py``. Raises SourceError."""
        try:
            if self.path.is_dir():
                data = (self.path / member).read_bytes()
            else:
                with zipfile.ZipFile(self.path) as wheel:
                    if wheel.getinfo(member).file_size > _MAX_BYTES:
                        raise SourceError(f"{self.path.name}: {member} is larger than {_MAX_BYTES} bytes")
                    data = wheel.read(member)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise SourceError(f"{self.path.name}: {member} cannot be read: {error}") from error
        return data.decode("utf-8")

    def function(self, member: str, name: str, names: Mapping[str, Any]) -> Any:
        """The function ``name`` or ``Class.name`` of a file, made among `names`, which are what it may use.

        Decorators are kept, annotations are not looked at. Raises SourceError where it is not there.
        """
        tree = ast.parse(self.text(member))
        scope: list[ast.stmt] = tree.body
        *owners, last = name.split(".")
        for owner in owners:
            found = next((one for one in scope if isinstance(one, ast.ClassDef) and one.name == owner), None)
            if found is None:
                raise SourceError(f"{self.path.name}: {member} has no class {owner}")
            scope = found.body
        wanted = next((one for one in scope if isinstance(one, ast.FunctionDef) and one.name == last), None)
        if wanted is None:
            raise SourceError(f"{self.path.name}: {member} has no function {name}")
        future = ast.parse("from __future__ import annotations").body
        module = ast.Module(body=[*future, wanted], type_ignores=[])
        space = dict(names)
        exec(compile(module, f"{self.path.name}/{member}", "exec"), space)
        return space[last]
