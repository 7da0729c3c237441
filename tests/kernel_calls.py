"""Checks of the top-k kernels against the reference, on a GPU or, as a script, in Triton's interpreter."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from routing_cases import GROUP_EDGES, Call, assert_agrees, rows_of_every_kind

from moedoctor.kernels.routing.launch import Shape, launch_topk
from moedoctor.kernels.routing.sorting import sort_lane, split_lanes


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
    out = weights[:tokens], ids[:tokens]
    given = {"scoring": options.pop("scoring", plain), "bias": None if bias is None else bias.to(device)}
    launch_topk(call.logits.to(device), *out, shape=shape, **given, **options)
    assert (weights[tokens] == -7.0).all()
    assert (ids[tokens] == -7).all()
    return weights[:tokens].cpu(), ids[:tokens].cpu()


def _group_edges() -> None:
    for row, bias, policy, expected in GROUP_EDGES:
        _, ids = launch(Call.group_edge(row, bias, policy), device="cpu", shape=Shape(2, 4, 1, 1))
        assert ids.tolist() == [expected], (row, bias, policy, ids)


def _inf_ranks_by_logit() -> None:
    """Under "finite" a row that holds an Inf is ranked by its logits, although these scores are all 1."""
    x = torch.tensor([[30.0, 20.0, float("inf"), 25.0], [30.0, 20.0, 26.0, 25.0]])
    call = Call("topk_sigmoid", x, 3, {"nan_policy": "finite"})
    _, ids = launch(call, device="cpu", shape=Shape(2, 4, 1, 1))
    assert ids.tolist() == [[2, 0, 3], [0, 1, 2]], ids


@triton.jit
def _sort(x_ptr, rows: tl.constexpr, width: tl.constexpr):
    place = tl.arange(0, rows)[None, :, None] * width + tl.arange(0, width)[None, None, :]  # [1, rows, width]
    lists = sort_lane(split_lanes(tl.load(x_ptr + place), width), width)
    for i in tl.static_range(width):
        tl.store(x_ptr + tl.arange(0, rows)[None, :] * width + i, lists[i])


def _sorts_every_arrangement() -> None:
    """A network that sorts all sequences of zeros and ones sorts everything."""
    for width in (1, 2, 4, 8, 16):
        rows = 1 << width
        x = (torch.arange(rows)[:, None] >> torch.arange(width)[None, :] & 1).int()  # [rows, width]
        expected = x.sort(dim=-1, descending=True).values
        _sort[(1,)](x, rows, width)
        assert torch.equal(x, expected), width


_CHECKS = {
    "group edges": _group_edges,
    "inf ranks by logit": _inf_ranks_by_logit,
    "sorts every arrangement": _sorts_every_arrangement,
}

if __name__ == "__main__":
    for text in sys.argv[1:]:
        if text in _CHECKS:
            _CHECKS[text]()
            continue
        name, experts, top_k, dtype, shape, options = json.loads(text)
        assert_kernel_agrees(
            name, experts, top_k, getattr(torch, dtype), device="cpu", shape=Shape(*shape), **options
        )
