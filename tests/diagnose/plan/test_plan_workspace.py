"""The computed workspace against the peak of memory that an H200 measured, for every backend that ran."""

import json
from pathlib import Path

import pytest

from moedoctor.bench.moe import backends as registry
from moedoctor.diagnose.plan.kv_cache import PlanError
from moedoctor.diagnose.plan.workspace import SCHEMES_OF, compute_workspace
from moedoctor.models.layer_shape import LayerShape
from moedoctor.models.presets import load_preset

MIB = 1 << 20
REPORTS = Path(__file__).parents[3] / "reports"
FP8 = "nvidia-h200-vllm-0.33.0/moe_backends_fp8"
NAMES = ("nvidia-h200-vllm-0.33.0/moe_backends", FP8, f"{FP8}_block")
STORED = [json.loads((REPORTS / f"{name}.json").read_text())["bench"]["backends"] for name in NAMES]
LAYERS = {name: layer for bench in STORED for name, layer in bench["layers"].items()}
MEASURED = [row for bench in STORED for row in bench["rows"] if "workspace_bytes" in row]
QWEN = load_preset("qwen3-30b-a3b").experts.layer


def drop_block(quantization: str) -> str:
    """Return the scheme in a plan, which has one for FP8 of any kind."""
    return quantization.removesuffix("-block")


def test_every_backend_that_is_computed_was_measured():
    ran = {(row["backend"], drop_block(row["quantization"])) for row in MEASURED}
    pairs = [(name, scheme) for name, schemes in SCHEMES_OF.items() for scheme in schemes]
    computed = {pair for pair in pairs if compute_workspace(*pair, QWEN, 1).bytes is not None}
    assert computed - ran == {("MARLIN", "mxfp4")}  # the same code as for nvfp4
    assert ran <= computed
    assert len(MEASURED) > 300


def test_the_computed_workspaces_are_close_to_the_measured_ones():
    """Within 1.25 MiB or 1/500: small index lists and the rounding of the allocator are not computed."""
    for row in MEASURED:
        sizes = {name: value for name, value in LAYERS[row["model"]].items() if name != "source"}
        scheme = drop_block(row["quantization"])
        found = compute_workspace(row["backend"], scheme, LayerShape(**sizes), row["tokens"])
        blocks = (row["backend"], row["quantization"]) == ("TRITON", "fp8-block")
        width = sizes["hidden"] + sizes["top_k"] * sizes["intermediate"] if blocks else 0
        scales = row["tokens"] * width * 4 // 128  # they are not computed, either
        bound = max(1.25 * MIB, row["workspace_bytes"] / 500)
        assert found.bytes + scales == pytest.approx(row["workspace_bytes"], abs=bound, rel=0), row


@pytest.mark.parametrize("release", ["0.17.1", "0.21.0", "0.24.0+cu129", "0.25.0", "0.33.0", ""])
def test_emulation_dequantized_all_experts_until_0_25(release):
    """By the sources of 0.24.0 and 0.25.0; 0.33.0 was measured."""
    new, old = (compute_workspace("EMULATION", "nvfp4", QWEN, 1, each).bytes for each in ("", release))
    how = compute_workspace("EMULATION", "nvfp4", QWEN, 1, release).how
    assert ("before vLLM 0.25.0 also" in how) == (not release)
    dequantizes = release.startswith(("0.1", "0.21", "0.24"))
    assert old - new == (QWEN.experts * QWEN.expert_parameters * 2 if dequantizes else 0)


def test_the_names_are_those_that_bench_knows():
    assert set(SCHEMES_OF) == set(registry.list_names()) - {"REFERENCE"}
    for name, schemes in SCHEMES_OF.items():
        known = {drop_block(item.quantization) for item in registry.find(name)}
        assert set(schemes) - {"mxfp4"} == known


@pytest.mark.parametrize("name", ["NONSENSE", "", "REFERENCE"])
def test_an_unknown_backend_is_refused_with_the_known_ones(name):
    with pytest.raises(PlanError, match=rf"--backend '{name}': expected one of MARLIN, EMULATION"):
        compute_workspace(name, "nvfp4", QWEN, 1)


@pytest.mark.parametrize(
    ("name", "scheme", "message"),
    [
        ("flashinfer-cutlass", "nvfp4", "inside FlashInfer's own library"),
        ("VLLM_CUTLASS", "nvfp4", "measured on no GPU yet"),
        ("MARLIN", "bf16", "MARLIN has nvfp4, mxfp4, fp8, not bf16"),
        ("EMULATION", "fp8", "EMULATION has nvfp4, not fp8"),
        ("deepgemm", "fp8", "measured on no GPU yet"),
    ],
)
def test_an_unknown_workspace_has_a_reason_and_no_size(name, scheme, message):
    found = compute_workspace(name, scheme, QWEN, 4096)
    assert found.bytes is None
    assert message in found.how
    assert found.how.endswith("give --workspace")


def test_vllms_cutlass_has_no_relu2():
    layer = load_preset("nemotron-3-super-120b").experts.layer
    assert "has no relu2" in compute_workspace("VLLM_CUTLASS", "fp8", layer, 1).how
