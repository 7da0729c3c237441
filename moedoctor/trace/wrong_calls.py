"""Keeps wrong MoE calls of `moedoctor run` as capsules, for `moedoctor replay`.

A lab compares an output with the reference and calls `keep_if_wrong`. Nothing is kept before `keep_in` named
a folder, which the child of a case does if the run was started with ``--keep-capsules``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from moedoctor.reference.agreement import Agreement
from moedoctor.reference.moe_layer import Problem
from moedoctor.trace.capsule import MAX_BYTES, SUFFIX, CapsuleError, fit, make_whole_capsule, save

_folder: Path | None = None
_name = _case = ""
_kept: list[str] = []


def keep_in(folder: Path, name: str, case: str) -> None:
    """Keep the wrong calls of this process in `folder`, in files whose names begin with `name`.

    `case` says in words what computed them.
    """
    global _folder, _name, _case
    _folder, _name, _case = folder, name, case
    _kept.clear()


def list_kept_files() -> list[str]:
    """Return what was kept since `keep_in`: names of files, or why a call could not be kept."""
    return list(_kept)


def keep_if_wrong(
    problem: Problem, output: torch.Tensor, agreement: Agreement, activations: str, backend: str
) -> None:
    """Keep the call if `agreement` says that its `output` [T, H] is wrong.

    `activations` says how the backend quantizes them, as in `Variant`.
    """
    if _folder is None or agreement.right:
        return
    name = f"{_name}{f'-{len(_kept) + 1}' if _kept else ''}{SUFFIX}"
    reason = f"{agreement.wrong_tokens} of {agreement.tokens} tokens are wrong: {agreement.reason}"
    try:
        capsule = make_whole_capsule(
            problem, output, activations, layer=f"{_name}: {_case}"[:900], backend=backend, reason=reason
        )
        save(fit(capsule, MAX_BYTES), _folder / name)
    except (CapsuleError, OSError) as error:
        name = f"not kept: {error}"
    _kept.append(name)
