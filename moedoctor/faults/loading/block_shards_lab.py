"""MD022 in the child: shards by the loaders of two releases, by MARLIN's tiles, and by our rules."""

from __future__ import annotations

import math
from typing import Any

import torch

from moedoctor.faults.loading.block_shards import BlockShardsParameters
from moedoctor.faults.loading.loading_lab import ask_installed
from moedoctor.fixes.moe.shard_scales import expand_scales, pad_to_tiles, take_shard_scales
from moedoctor.reference.checkpoints import Tensors
from moedoctor.results import Case, Evidence

# I = intermediate size, H = hidden size; one expert, since all are cut in the same way

_BLOCK = 128
_LEAST = 32
"""The smallest block of a Triton kernel, by `refine_fp8_moe_block_shape`."""
_TILE_N, _TILE_K = 128, 64


def model(case: Case, parameters: BlockShardsParameters, release: object) -> Evidence:
    """Load the scales of every rank, and compare the scale of each weight with that of its block."""
    if parameters.loader == "MARLIN 0.23.0":
        return multiply_tiles(parameters, padded=case.subject == "fixed")
    width, hidden = parameters.intermediate, parameters.hidden
    generator = torch.Generator().manual_seed(parameters.seed)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    stored = {  # float32 [ceil(N / 128), ceil(K / 128)] each
        name: torch.rand(-(-rows // _BLOCK), -(-columns // _BLOCK), generator=generator)
        for name, (rows, columns) in shapes.items()
    }
    ranks = 1 if parameters.expert_parallel else parameters.tensor_parallel
    size, wrong, total = width // ranks, 0, 0
    for rank in range(ranks):
        part = range(rank * size, (rank + 1) * size)
        for name, (rows, columns) in shapes.items():
            place = (range(rows), part) if name == "down" else (part, range(columns))
            try:
                if case.subject == "fixed":
                    given = expand_scales(*take_shard_scales(stored[name], (_BLOCK, _BLOCK), *place))
                else:
                    given = take_upstream(stored[name], name, ranks, place, parameters)  # [N, K]
            except (ValueError, RuntimeError) as error:
                stopped = f"rank {rank}, {name}: {type(error).__name__}: {error}"
                return {"stopped": stopped, "wrong": None, "right": None}
            whole = expand_scales(stored[name], (_BLOCK, _BLOCK))[:rows, :columns]
            expected = whole[place[0].start : place[0].stop, place[1].start : place[1].stop]
            wrong += int((given != expected).sum())
            total += expected.numel()
    return {
        "stopped": None,
        "wrong": f"{wrong / total:.1%} of the weights have the scale of another block" if wrong else None,
        "right": f"all {total} weights on {ranks} ranks have the scale of their block",
    }


def multiply_tiles(parameters: BlockShardsParameters, *, padded: bool) -> Evidence:
    """Add up what an expert's shards give, multiplied by MARLIN, and compare it with the whole expert."""
    generator = torch.Generator().manual_seed(parameters.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate, up = draw(2, parameters.intermediate, parameters.hidden)  # [I, H] each
    down, x = draw(parameters.hidden, parameters.intermediate), draw(4, parameters.hidden)  # [H, I], [T, H]
    silu = torch.nn.functional.silu
    expected = silu(x @ gate.T) * (x @ up.T) @ down.T  # [T, H]
    given = torch.zeros_like(expected)
    ranks = 1 if parameters.expert_parallel else parameters.tensor_parallel
    for shards in zip(*(each.chunk(ranks) for each in (gate, up, down.T)), strict=True):
        parts = [pad_to_tiles(each, (_TILE_K, 1)) if padded else each for each in shards]  # [I / ranks, H]
        try:
            gated, raised = multiply_marlin(x, torch.cat(parts[:2])).chunk(2, 1)  # [T, I / ranks] each
            given += multiply_marlin(silu(gated) * raised, parts[2].T)
        except RuntimeError as error:
            return {"stopped": f"RuntimeError: {error}", "wrong": None, "right": None}
    wrong = int((given - expected).abs().gt(1e-9 * expected.abs().max()).sum())
    return {
        "stopped": None,
        "wrong": f"{wrong} of {expected.numel()} values differ from the whole expert's" if wrong else None,
        "right": f"the sum over {ranks} ranks is the whole expert's",
    }


def multiply_marlin(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [T, K] times a weight [N, K], as MARLIN of 0.23.0 does. Raises its RuntimeError.

    csrc/moe/marlin_moe_wna16/ops.cu finds no configuration of threads for other sizes.
    """
    if weight.shape[0] % _TILE_N or weight.shape[1] % _TILE_K:
        raise RuntimeError("Invalid thread config: thread_m_blocks = 1, thread_k = -1, thread_n = -1")
    return x @ weight.T


def take_upstream(
    stored: torch.Tensor, name: str, ranks: int, place: tuple[range, range], parameters: BlockShardsParameters
) -> torch.Tensor:
    """Return a scale for each weight of a shard as a release does. Raises its ValueError or RuntimeError.

    0.28.0: vllm/model_executor/layers/quantization/fp8.py:527-552. 0.33.0: fused_moe/oracle/fp8.py:292-321
    chooses smaller blocks, quantization/fp8.py:555 refuses without them, fused_moe/routed_experts.py:947-960
    repeats the scales, and :529-577 cuts and copies them.
    """
    size = parameters.intermediate // ranks
    unit = _BLOCK
    if size % _BLOCK and parameters.loader == "0.33.0":
        unit = math.gcd(_BLOCK, size, parameters.hidden)
    if size % unit or unit < _LEAST:
        raise ValueError(
            f"The output_size of gate's and up's weight = {size} is not divisible by weight quantization "
            f"block_n = {_BLOCK}."
        )
    repeat = _BLOCK // unit
    scales = stored.repeat_interleave(repeat, 0).repeat_interleave(repeat, 1)
    dim = 1 if name == "down" else 0  # the dimension that is cut
    local = scales.shape[dim] // ranks
    scales = scales.narrow(dim, place[dim].start // size * local, local)
    parameter = torch.zeros([-(-len(part) // unit) for part in place])  # float32 [N / unit, K / unit]
    for axis in (0, 1):
        if parameter.shape[axis] > scales.shape[axis]:
            parameter = parameter.narrow(axis, 0, scales.shape[axis])
    parameter.copy_(scales)
    return expand_scales(parameter, (unit, unit))


def library(case: Case, parameters: BlockShardsParameters, release: object) -> Evidence:
    """Ask the installed vLLM to load experts of this size."""
    width, ranks = parameters.intermediate, parameters.tensor_parallel

    def cut_experts(tensors: Tensors, config: dict[str, Any]) -> None:
        """Make each expert `width` wide, with a scale for each block that begins."""
        config["moe_intermediate_size"] = width
        for name in [name for name in tensors if ".experts." in name]:
            dim = 1 if ".down_proj." in name else 0
            length = -(-width // _BLOCK) if name.endswith("scale_inv") else width
            tensors[name] = tensors[name].narrow(dim, 0, length)

    words = ["--tensor-parallel-size", str(ranks)] + ["--enable-expert-parallel"] * parameters.expert_parallel
    sizes = {"hidden": 512, "intermediate": -(-width // _BLOCK) * _BLOCK, "layers": 1}
    return ask_installed("fp8", cut_experts, *words, **sizes)
