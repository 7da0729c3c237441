"""The kernels of an MoE layer against the reference: interpreted on any machine, compiled on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")


@needs_triton
@pytest.mark.parametrize("quantization", ["nvfp4", "bf16"])
def test_interpreted(quantization: str) -> None:
    """Few slots and many, sizes that tiles do not divide."""
    cases = [
        f"{quantization},silu,1,96,32",
        f"{quantization},relu2,3,96,64",
        f"{quantization},gelu_tanh,20,96,32",
    ]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(here / "interpreted_experts.py"), *cases],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == "agreed"


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("quantization", ["nvfp4", "bf16"])
def test_compiled(quantization: str, activation: str) -> None:
    from expert_cases import assert_layer_is_right

    from moedoctor.bench.parity_bounds import bounds_of

    for tokens, hidden, intermediate in ((1, 512, 256), (16, 160, 96), (17, 512, 256), (300, 704, 352)):
        assert_layer_is_right(
            quantization,
            activation,
            tokens,
            hidden,
            intermediate,
            device="cuda:0",
            bounds=bounds_of("none"),
        )


@needs_triton
def test_repacked_bytes_hold_the_same_codes() -> None:
    from moedoctor.kernels.expert_launch import repack
    from moedoctor.reference.e2m1 import pack

    codes = torch.randint(0, 16, (2, 3, 64), dtype=torch.uint8)
    repacked = repack(pack(codes))  # [2, 3, 32]
    for chunk in range(2):
        held = repacked[..., chunk * 16 : chunk * 16 + 16]
        assert torch.equal(held & 15, codes[..., chunk * 32 : chunk * 32 + 16])
        assert torch.equal(held >> 4, codes[..., chunk * 32 + 16 : chunk * 32 + 32])


@needs_triton
@pytest.mark.parametrize("block_m", [1, 16, 64])
@pytest.mark.parametrize("skipped", [0.0, 0.3, 1.0])
def test_the_plan_holds_every_slot_once(block_m: int, skipped: float) -> None:
    from moedoctor.kernels.expert_launch import plan_blocks

    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (40, 3), generator=draw).int()
    ids[torch.rand(40, 3, generator=draw) < skipped] = -1
    order, plan = plan_blocks(ids, 5, block_m)
    seen: list[int] = []
    for expert, first, rows in plan.tolist():
        if expert < 0:
            continue
        slots = order[first : first + rows].tolist()
        assert 1 <= rows <= block_m
        assert all(int(ids.flatten()[slot]) == expert for slot in slots)
        seen += slots
    assert sorted(seen) == (ids.flatten() >= 0).nonzero().flatten().tolist()


@needs_triton
@pytest.mark.parametrize("nvfp4", [True, False])
@pytest.mark.parametrize("slots", [1, 64, 65, 500, 4000, 65_536])
def test_both_products_cut_tokens_alike(slots: int, nvfp4: bool) -> None:
    from moedoctor.kernels.expert_launch import choose_tiles

    first, second = choose_tiles(slots, 128, nvfp4, gated=True)
    assert first.block_m == second.block_m
