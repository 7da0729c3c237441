"""Compiles the product of an MoE layer for a GPU that need not be there, to see what comes out."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moedoctor.kernels.moe.expert_launch import Tile
from moedoctor.kernels.moe.expert_product import expert_product

_POINTERS = ("bf16", "i32", "i32", "fp32", "bf16", "i32", "i32", "i32")


@cache
def compiled(capability: int, tile: Tile, *, nvfp4: bool, second: bool, activation: str) -> Any:
    """The kernel as `run_experts` launches it with a plan, for a layer of 2688 by 1856."""
    types = _POINTERS if nvfp4 else ("bf16", "bf16", "bf16", "bf16", *_POINTERS[4:])
    constants = {
        "width": 2688 if second else 1856,
        "depth": 1856 if second else 2688,
        "top_k": 6,
        "activation": activation,
        "nvfp4": nvfp4,
        "planned": True,
        "second": second,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "block_k": tile.block_k,
        "wide": False,
        "hopper": capability == 90,
    }
    names = expert_product.arg_names
    signature = {name: f"*{kind}" for name, kind in zip(names, types, strict=False)}
    source = ASTSource(
        fn=expert_product,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(len(types))},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
