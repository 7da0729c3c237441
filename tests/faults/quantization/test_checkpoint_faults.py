"""MD012, MD014, MD015, MD017 and MD018 on tensors: control and fix, and judges that notice."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from fault_cases import judge, run

from moedoctor.faults.quantization import gate_up_order_lab, scale_layout_lab
from moedoctor.faults.quantization.gate_up_order import GateUpOrder, GateUpOrderParameters
from moedoctor.faults.quantization.global_scale_mismatch import GlobalScaleMismatch
from moedoctor.faults.quantization.input_scale_missing import InputScaleMissing
from moedoctor.faults.quantization.input_scale_missing_lab import quantize_like_kernel
from moedoctor.faults.quantization.kv_scales_missing import KvScalesMissing
from moedoctor.faults.quantization.scale_layout import ScaleLayout, ScaleLayoutParameters
from moedoctor.faults.quantization.scale_layout_lab import TiledKernel, find_places
from moedoctor.fixes.moe.weight_layout import put_up_first, tile_scales
from moedoctor.interfaces import Fault
from moedoctor.reference.nvfp4 import round_trip
from moedoctor.results import CaseVerdict, Tier
from moedoctor.scenario.targets import load_targets

ORDER, LAYOUT = GateUpOrder(), ScaleLayout()


def list_points(fault: Fault) -> list[Mapping[str, Any]]:
    """Return the points of its scenario that need no engine."""
    (scenario,) = load_targets([fault.id])
    return [point for point in scenario.points if point["moe_backend"] is None]


def test_the_size_of_the_error_is_that_of_the_ratio() -> None:
    ways = run(GlobalScaleMismatch(), "faulty", ratio=2.0).evidence["ways"]
    assert ways["gate"]["worst_token_error"] == pytest.approx(0.5, abs=1e-4)
    ways = run(GlobalScaleMismatch(), "fixed", ratio=3.0).evidence["ways"]
    assert ways["folded"]["worst_token_error"] < 1e-5
    assert 0.005 < ways["rescaled"]["worst_token_error"] < 1 / 16


def test_scales_in_range_are_no_failure() -> None:
    assert run(KvScalesMissing(), part="both", size=50.0).verdict is CaseVerdict.CLEAN


CLEAN, REPRODUCED, ERROR = CaseVerdict.CLEAN, CaseVerdict.REPRODUCED, CaseVerdict.ERROR
MISMATCH: dict[str, Any] = {"lint": ["MD014"], "ways": {"x": {"worst_token_error": 0.06}}}
ONE_NAN = {"ways": {"x": {"worst_token_error": 0.01}, "y": {"worst_token_error": "nan"}}}
MISSING = {"lint": ["MD015"], "tokens": 4, "nonfinite_tokens": 0, "error": 0.2, "healthy_error": 0.2}
KV = {"lint": ["MD012"], "nonfinite_tokens": 0, "error": 0.03, "computed_error": 0.03}
KV |= {"saturated": 0.0, "lost": 0.0}


@pytest.mark.parametrize(
    ("fault", "right", "change", "verdict"),
    [
        (GlobalScaleMismatch(), MISMATCH, {}, CLEAN),
        (GlobalScaleMismatch(), MISMATCH, {"ways": {"x": {"worst_token_error": 0.07}}}, REPRODUCED),
        (GlobalScaleMismatch(), MISMATCH, {"lint": []}, ERROR),
        (InputScaleMissing(), MISSING, {}, CLEAN),
        (InputScaleMissing(), MISSING, {"nonfinite_tokens": 1}, REPRODUCED),
        (InputScaleMissing(), MISSING, {"error": 0.31}, REPRODUCED),
        (InputScaleMissing(), MISSING, {"lint": ["MD014"]}, ERROR),
        (KvScalesMissing(), KV, {}, CLEAN),
        (KvScalesMissing(), KV, {"nonfinite_tokens": 1}, REPRODUCED),
        (KvScalesMissing(), KV, {"error": 0.07}, REPRODUCED),
        (KvScalesMissing(), KV, {"lint": []}, ERROR),
        # Reports hold numbers that are not finite as text.
        (GlobalScaleMismatch(), MISMATCH, ONE_NAN, REPRODUCED),
        (InputScaleMissing(), MISSING, {"error": "nan"}, REPRODUCED),
        (InputScaleMissing(), MISSING, {"healthy_error": "inf"}, ERROR),
        (KvScalesMissing(), KV, {"error": "nan"}, REPRODUCED),
        (KvScalesMissing(), KV, {"computed_error": "inf"}, ERROR),
    ],
)
def test_judges_notice(fault, right, change, verdict):
    assert judge(fault, {**right, **change}).verdict is verdict


def test_with_a_good_scale_the_restated_kernel_is_the_reference() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    scale = x.abs().amax() / (448 * 6)
    # The kernel's reciprocals round once more, which may take a value on an edge to the other side.
    close = torch.isclose(quantize_like_kernel(x, scale), round_trip(x, scale), rtol=1e-5, atol=1e-6)
    assert float(close.float().mean()) > 0.995


def test_nan_in_the_padding_reaches_every_token() -> None:
    assert "NaN" in run(LAYOUT, mistake="stale_padding", hidden=160, intermediate=96).figure


def test_a_fix_that_forgets_the_scales_is_noticed() -> None:
    def careless(w13: Any) -> Any:
        return replace(put_up_first(w13), block_scales=w13.block_scales)

    evidence = gate_up_order_lab.measure(GateUpOrderParameters(), "cpu", careless)
    assert ORDER.judge_tensors(evidence).verdict is CaseVerdict.REPRODUCED


def test_a_fix_that_exchanges_two_tiles_is_noticed() -> None:
    def careless(scales: torch.Tensor) -> torch.Tensor:
        return tile_scales(scales.view(torch.uint8).roll(128, 1).view(scales.dtype))

    evidence = scale_layout_lab.measure(ScaleLayoutParameters(), "cpu", TiledKernel(careless))
    assert LAYOUT.judge_tensors(evidence).verdict is CaseVerdict.REPRODUCED


@pytest.mark.parametrize(("rows", "columns"), [(256, 8), (192, 10), (3, 1)])
def test_the_kernel_reads_where_the_swizzle_writes(rows: int, columns: int) -> None:
    scales = torch.randint(0, 127, (2, rows, columns), dtype=torch.uint8)
    memory = tile_scales(scales).flatten(1)
    assert torch.equal(memory[:, find_places(rows, columns, scales.device)], scales)


@pytest.mark.upstream
@pytest.mark.parametrize("values", list_points(ORDER))
def test_vllm_exchanges_the_halves(values: Mapping[str, Any]) -> None:
    assert run(ORDER, "installed", Tier.LIBRARY, **values).verdict is CaseVerdict.CLEAN


@pytest.mark.gpu
@pytest.mark.upstream
@pytest.mark.parametrize("values", list_points(LAYOUT))
def test_vllm_stores_scales_in_tiles(values: Mapping[str, Any]) -> None:
    assert run(LAYOUT, "installed", Tier.KERNEL, **values).verdict is CaseVerdict.CLEAN
