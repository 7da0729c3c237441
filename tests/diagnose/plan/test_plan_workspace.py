"""The computed workspace against the peak of memory that an H200 measured, for every backend that ran."""

import json
from pathlib import Path

import pytest

from moedoctor.bench.moe import backends as registry
from moedoctor.diagnose.plan.kv_cache import PlanError
from moedoctor.diagnose.plan.workspace import SCHEMES_OF, workspace
from moedoctor.models.layer_shape import LayerShape
from moedoctor.models.presets import preset

MIB = 1 << 20
REPORT = Path(__file__).parents[3] / "reports" / "nvidia-h200" / "moe_backends.json"
BENCH = json.loads(REPORT.read_text())["bench"]["backends"]
MEASURED = [row for row in BENCH["rows"] if "workspace_bytes" in row]
QWEN = preset("qwen3-30b-a3b").experts.layer


def test_every_backend_that_is_computed_was_measured():
    ran = {(row["backend"], row["quantization"]) for row in MEASURED}
    computed = {
        (name, scheme)
        for name, schemes in SCHEMES_OF.items()
        for scheme in schemes
        if workspace(name, scheme, QWEN, 1).bytes is not None
    }
    assert computed - ran == {("MARLIN", "mxfp4")}  # the same code as for nvfp4
    assert ran <= computed
    assert len(MEASURED) > 150


@pytest.mark.parametrize(
    "row",
    MEASURED,
    ids=lambda row: "-".join(str(row[item]) for item in ("backend", "quantization", "model", "tokens")),
)
def test_the_computed_workspace_is_close_to_the_measured_one(row):
    """Within 1.25 MiB or 1/500: small index lists and the rounding of the allocator are not computed."""
    sizes = {name: value for name, value in BENCH["layers"][row["model"]].items() if name != "source"}
    found = workspace(row["backend"], row["quantization"], LayerShape(**sizes), row["tokens"])
    bound = max(1.25 * MIB, row["workspace_bytes"] / 500)
    assert found.bytes == pytest.approx(row["workspace_bytes"], abs=bound, rel=0)


def test_the_names_are_those_that_bench_knows():
    assert set(SCHEMES_OF) == set(registry.names()) - {"REFERENCE"}
    for name, schemes in SCHEMES_OF.items():
        known = {item.quantization for item in registry.find(name)}
        if name == "OURS":
            known.remove("fp8")  # on a CPU only
        assert set(schemes) - {"mxfp4"} == known


@pytest.mark.parametrize("name", ["NONSENSE", "", "REFERENCE"])
def test_an_unknown_backend_is_refused_with_the_known_ones(name):
    with pytest.raises(PlanError, match=rf"--backend '{name}': expected one of MARLIN, EMULATION"):
        workspace(name, "nvfp4", QWEN, 1)


@pytest.mark.parametrize(
    ("name", "scheme", "message"),
    [
        ("flashinfer-cutlass", "nvfp4", "inside FlashInfer's own library"),
        ("VLLM_CUTLASS", "nvfp4", "measured on no GPU yet"),
        ("MARLIN", "bf16", "MARLIN has nvfp4, mxfp4, fp8, not bf16"),
        ("EMULATION", "fp8", "EMULATION has nvfp4, not fp8"),
    ],
)
def test_an_unknown_workspace_has_a_reason_and_no_size(name, scheme, message):
    found = workspace(name, scheme, QWEN, 4096)
    assert found.bytes is None
    assert message in found.how
    assert found.how.endswith("give --workspace")


def test_vllms_cutlass_has_no_relu2():
    layer = preset("nemotron-3-super-120b").experts.layer
    assert "has no relu2" in workspace("VLLM_CUTLASS", "fp8", layer, 1).how
