"""One call of the kernels held against the reference."""

from __future__ import annotations

from typing import Any

import torch
from routing_cases import Call, assert_agrees, rows_of_every_kind

from moedoctor.kernels.routing.launch import Shape, launch_topk


def assert_kernel_agrees(
    name: str,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    *,
    device: str,
    shape: Shape | None = None,
    bias: bool = False,
    strided: bool = False,
    ordinary: int = 4,
    seed: int = 0,
    **options: Any,
) -> None:
    """Route rows of every kind; the outputs are poisoned before, and must be written whole and not beyond."""
    x = rows_of_every_kind(experts, dtype, ordinary=ordinary, seed=seed)
    if strided:
        wide = torch.zeros(experts, 3, x.shape[0], dtype=dtype)
        wide[:, 1] = x.t()
        x = wide[:, 1].t()
    correction = torch.linspace(-0.5, 0.5, experts) if bias else None
    if correction is not None:
        correction[experts // 2] = float("nan")
    call = Call(name, x, top_k, options | {"bias": correction})
    assert_agrees(*launch(call, device=device, shape=shape), call)


def launch(call: Call, *, device: str, shape: Shape | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' weights and ids of `call`, on the CPU."""
    tokens = call.logits.shape[0]
    weights = torch.full((tokens + 1, call.top_k), -7.0, dtype=torch.float32, device=device)  # [T + 1, K]
    ids = torch.full((tokens + 1, call.top_k), -7, dtype=torch.int32, device=device)  # [T + 1, K]
    options = dict(call.options)
    bias = options.pop("bias", None)
    plain = "sigmoid" if call.name == "grouped_topk" else call.name.removeprefix("topk_")
    launch_topk(
        call.logits.to(device),
        weights[:tokens],
        ids[:tokens],
        scoring=options.pop("scoring", plain),
        bias=None if bias is None else bias.to(device),
        shape=shape,
        **options,
    )
    assert (weights[tokens] == -7.0).all()
    assert (ids[tokens] == -7).all()
    return weights[:tokens].cpu(), ids[:tokens].cpu()
