"""MD017 and MD018: controls reproduce, fixes are clean, and a fix that does half of it is noticed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from moedoctor.faults.quantization import gate_up_order_lab, scale_layout_lab
from moedoctor.faults.quantization.gate_up_order import GateUpOrder, GateUpOrderParameters
from moedoctor.faults.quantization.scale_layout import ScaleLayout, ScaleLayoutParameters
from moedoctor.faults.quantization.scale_layout_lab import TiledKernel, places
from moedoctor.fixes.moe.weight_layout import tiled_scales, up_first
from moedoctor.interfaces import Fault
from moedoctor.results import Case, CaseVerdict, Tier

ORDER, LAYOUT = GateUpOrder(), ScaleLayout()
ORDERS = [
    {"quantization": "nvfp4", "mistake": "not_swapped"},
    {"quantization": "nvfp4", "mistake": "only_values"},
    {"quantization": "nvfp4", "mistake": "only_scales"},
    {"quantization": "bf16", "activation": "gelu_tanh"},
    {"quantization": "fp8"},
]
LAYOUTS = [
    {"mistake": "linear_given"},
    {"mistake": "swizzled_given", "activation": "relu2"},
    {"mistake": "linear_given", "hidden": 160, "intermediate": 96},
    {"mistake": "swizzled_given", "hidden": 160, "intermediate": 96},
    {"mistake": "stale_padding", "hidden": 160, "intermediate": 96},
]
CASES = [(ORDER, GateUpOrderParameters, values) for values in ORDERS]
CASES += [(LAYOUT, ScaleLayoutParameters, values) for values in LAYOUTS]


def verdict(fault: Fault, kind: Any, subject: str, values: dict[str, Any]) -> CaseVerdict:
    case = Case(fault.id, subject, Tier.MODEL, kind(**values).model_dump())
    return fault.judge(case, fault.observe(case, None)).verdict


@pytest.mark.parametrize(("fault", "kind", "values"), CASES)
def test_control_and_fix(fault: Fault, kind: Any, values: dict[str, Any]) -> None:
    assert verdict(fault, kind, "faulty", values) is CaseVerdict.REPRODUCED
    assert verdict(fault, kind, "fixed", values) is CaseVerdict.CLEAN


def test_nan_in_the_padding_reaches_every_token() -> None:
    case = Case("MD018", "faulty", Tier.MODEL, ScaleLayoutParameters(**LAYOUTS[-1]).model_dump())
    assert "NaN" in LAYOUT.judge(case, LAYOUT.observe(case, None)).figure


def test_a_fix_that_forgets_the_scales_is_noticed() -> None:
    def careless(w13: Any) -> Any:
        return replace(up_first(w13), block_scales=w13.block_scales)

    evidence = gate_up_order_lab.measure(GateUpOrderParameters(), "cpu", careless).evidence
    assert ORDER.judge_tensors(evidence).verdict is CaseVerdict.REPRODUCED


def test_a_fix_that_exchanges_two_tiles_is_noticed() -> None:
    def careless(scales: torch.Tensor) -> torch.Tensor:
        return tiled_scales(scales.view(torch.uint8).roll(128, 1).view(scales.dtype))

    evidence = scale_layout_lab.measure(ScaleLayoutParameters(), "cpu", TiledKernel(careless)).evidence
    assert LAYOUT.judge_tensors(evidence).verdict is CaseVerdict.REPRODUCED


@pytest.mark.parametrize(("rows", "columns"), [(256, 8), (192, 10), (3, 1)])
def test_the_kernel_reads_where_the_swizzle_writes(rows: int, columns: int) -> None:
    scales = torch.randint(0, 127, (2, rows, columns), dtype=torch.uint8)
    memory = tiled_scales(scales).flatten(1)
    assert torch.equal(memory[:, places(rows, columns, scales.device)], scales)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (GateUpOrderParameters, {"quantization": "bf16", "mistake": "only_scales"}, "no block scales"),
        (GateUpOrderParameters, {"top_k": 9, "experts": 8}, "more than experts"),
        (ScaleLayoutParameters, {"mistake": "stale_padding"}, "padded columns"),
        (ScaleLayoutParameters, {"top_k": 9, "experts": 8}, "more than experts"),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        kind(**values)


@pytest.mark.upstream
@pytest.mark.parametrize("values", ORDERS)
def test_vllm_exchanges_the_halves(values: dict[str, Any]) -> None:
    case = Case("MD017", "installed", Tier.LIBRARY, GateUpOrderParameters(**values).model_dump())
    assert ORDER.judge(case, ORDER.observe(case, None)).verdict is CaseVerdict.CLEAN


@pytest.mark.gpu
@pytest.mark.upstream
@pytest.mark.parametrize("values", LAYOUTS)
def test_vllm_stores_scales_in_tiles(values: dict[str, Any]) -> None:
    parameters = ScaleLayoutParameters(**values).model_dump()
    case = Case("MD018", "installed", Tier.KERNEL, parameters, "cuda:0")
    assert LAYOUT.judge(case, LAYOUT.observe(case, None)).verdict is CaseVerdict.CLEAN
