"""The operators that a release's compiled parts declare, without loading them: their .so files hold schemas.

Each is defined with what a meta tensor needs: one that returns nothing does nothing. vLLM's own
``register_fake`` says what most others return.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

_NO_TEXT = re.compile(rb"[^\x20-\x7e]")
_MOST_TEXT = 4000
_SCHEMA = re.compile(
    r"\b([A-Za-z_]\w{0,99}(?:\.\w{1,99})?) ?(\(.{0,4000}\)) ?-> "
    r"?(\(?[A-Z(].{0,80}|\(\)|(?:bool|int|float|str)(?:\[\])?)"
)
_NAMESPACES = {
    "_C": ("_C", "_C_cache_ops", "_C_cuda_utils", "_C_custom_ar"),
    "_moe_C": ("_moe_C",),
    "_qutlass_C": ("_qutlass_C",),
    "_flashmla_C": ("_flashmla_C",),
}
"""File name without suffixes -> the namespaces of ``torch.ops`` that it registers."""
_MOST_BYTES = 2 << 30
_KEPT: list[torch.library.Library] = []
"""A library that is collected takes its operators with it."""
_IDLE: dict[str, torch.library.Library] = {}
"""Operator -> the library that lets it do nothing with meta tensors."""


def define_operators(folder: Path, loads: Callable[[str], bool], leave: Collection[str] = ()) -> int:
    """Define the operators of the .so files in `folder` but those in `leave`; return how many.

    `loads` tells for a module's name if it can be imported: then torch has its operators, and to define them
    again would end the process. They only learn to do nothing with meta tensors.
    """
    made = 0
    for file in sorted(folder.glob("*.so")):
        module = file.name.partition(".")[0]
        stem = module.removesuffix("_stable_libtorch")
        if stem not in _NAMESPACES:
            continue
        is_there, schemas = loads(module), list(read_schemas(file))
        for namespace in _NAMESPACES[stem]:
            library = torch.library.Library(namespace, "FRAGMENT")
            _KEPT.append(library)
            for name, schema in schemas:
                if name in leave:
                    continue
                with contextlib.suppress(RuntimeError, ValueError):  # a type that this torch does not have
                    if not is_there:
                        library.define(schema)
                        made += 1
                    if schema.endswith("-> ()"):
                        _skip_meta(f"{namespace}::{name}")
    _replace_by_fakes()
    return made


def _skip_meta(operator: str) -> None:
    """Let an operator do nothing with meta tensors. Raises RuntimeError if it does not exist."""
    namespace, _, name = operator.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    library.impl(name, lambda *_, **__: None, "Meta")
    _IDLE[operator] = library


def _replace_by_fakes() -> None:
    """Let a release's own ``register_fake`` replace what was given to its operator here.

    torch refuses a second one, which would end an import where the compiled parts load.
    """
    original = torch.library.register_fake

    def register(operator: Any, *arguments: Any, **options: Any) -> Any:
        library = _IDLE.pop(operator, None) if isinstance(operator, str) else None
        if library is not None:
            library._destroy()
        return original(operator, *arguments, **options)

    torch.library.register_fake = register


def read_schemas(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, schema) of the operators that a shared object declares."""
    if file.stat().st_size > _MOST_BYTES:
        return
    data = file.read_bytes()
    arrow = data.find(b"->")  # few bytes of machine code look like one, and to match each byte takes seconds
    while arrow >= 0:
        end = data.find(b"\0", arrow)
        near = data[max(0, arrow - _MOST_TEXT) : end] if 0 < end < arrow + _MOST_TEXT else b""
        found = _NO_TEXT.split(near.rpartition(b"\0")[2])[-1].decode()
        if match := _SCHEMA.fullmatch(" ".join(found.split())):
            yield match[1], f"{match[1]}{match[2]} -> {match[3]}"
        arrow = data.find(b"->", end if found else arrow + 2)
