"""Operators of compiled parts that load: a release's own fake takes the place of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.upstream.preflight.operators import define_operators

register_fake = torch.library.register_fake


def refuse_second(operator: str) -> Callable[[Any], Any]:
    """Do as torch 2.11: newer ones take a fake beside an implementation."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator, "Meta"):
        raise RuntimeError(f"{operator} already has an implementation")
    return register_fake(operator)


def test_an_operator_that_is_there_takes_the_releases_own_fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = "moedoctor_probe.out(Tensor x, *, Tensor(a!) out) -> ()"
    (tmp_path / "_moe_C.abi3.so").write_bytes(b"\0" + schema.encode() + b"\0")
    loaded = torch.library.Library("_moe_C", "FRAGMENT")
    loaded.define(schema)
    monkeypatch.setattr(torch.library, "register_fake", refuse_second)
    assert define_operators(tmp_path, lambda name: True) == 0
    shapes, x = [], torch.empty(2, device="meta")
    torch.ops._moe_C.moedoctor_probe.out(x, out=x)  # does nothing
    torch.library.register_fake("_moe_C::moedoctor_probe.out")(lambda x, *, out: shapes.append(out.shape))
    torch.ops._moe_C.moedoctor_probe.out(x, out=x)
    assert shapes == [x.shape]
