"""The expert cache's kernels in Triton's interpreter, against the engine ``host`` and the reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.interpreted import run_check
from tests.kernels.test_moe_every_gpu import CAPABILITIES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"
)


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param("stateful many_ids packed packed_exponents mapped early", marks=pytest.mark.slow),
        pytest.param("forward grouped overlapping", marks=pytest.mark.slow),
        "wrong_ids",
        "padding",
        pytest.param("one_expert_or_slot", marks=pytest.mark.slow),
    ],
)
def test_interpreted(checks: str) -> None:
    run_check(Path(__file__).parent / "interpreted_cache.py", *checks.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "experts", "ids"),
    [*((capability, 128, 64) for capability in CAPABILITIES), (90, 512, 64), (90, 128, 4096)],
)
def test_bookkeeping_compiled(capability: int, experts: int, ids: int) -> None:
    from expert_cases import compile_kernel

    from moedoctor.kernels.cache import lookup

    few, chunk = lookup._chunk(ids)
    shape = {
        "experts": experts,
        "capacity": 32,
        "few": few,
        "chunk": chunk,
        "lanes": experts,
        "together": lookup._together(experts),
    }
    types = {"uses": "i64", "last": "i64", "loaded": "i64", "clock": "i64", "counts": "i64"}
    types |= {"stamp": "i64", "keys": "i64", "count": "=i32", "width": "=i32", "group": "=i32"}
    grouped = {"policy": "aging", "grouped": True, "splits": False, "counted": True, "slot_lanes": 32}
    for kernel, constants in (
        (lookup.group_kernel, shape),
        (lookup.lookup_kernel, shape | grouped),
        (lookup.lookup_kernel, shape | grouped | {"grouped": False, "splits": True}),
    ):
        names = [name.removesuffix("_ptr") for name in kernel.arg_names if name not in constants]
        kinds = [types.get(name, "i32") for name in names]
        done = compile_kernel(kernel, capability, kinds, constants, warps=4 if few else 8)
        assert done.asm["cubin"][:4] == b"\x7fELF"
