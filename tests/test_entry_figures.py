"""The figures in catalogue entries are those of stored reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "reports"


def entry(id: str) -> str:
    text = (ROOT / "moedoctor" / "entries" / f"{id}.md").read_text(encoding="utf-8")
    return " ".join(text.split())


def evidence(report: str, id: str, subject: str, **wanted: Any) -> list[Mapping[str, Any]]:
    """Of the cases of one subject with these parameters that ran, in the order of the report."""
    document = json.loads((REPORTS / report).read_text(encoding="utf-8"))
    (scenario,) = (one for one in document["scenarios"] if one["id"] == id)
    found = [
        one["evidence"]
        for one in scenario["cases"]
        if one["subject"] == subject
        and one["verdict"] != "skipped"
        and wanted.items() <= one["parameters"].items()
    ]
    assert found, f"{report} holds no such case of {id}"
    return found


def test_md014_layers() -> None:
    for ratio in (1.25, 2.0):
        (seen,) = evidence("baselines/cpu.json", "MD014", "faulty", ratio=ratio, merged="gate")
        error = seen["ways"]["gate"]["worst_token_error"]
        assert f"{error:.1%} at {'a ratio of ' if ratio == 1.25 else ''}{ratio:g}" in entry("MD014")
    repaired = evidence("baselines/cpu.json", "MD014", "fixed")
    worst = max(one["ways"]["rescaled"]["worst_token_error"] for one in repaired)
    assert f"by up to {worst:.1%}" in entry("MD014")
    assert max(one["ways"]["folded"]["worst_token_error"] for one in repaired) < 1e-5


def test_md014_engines() -> None:
    for backend, before in (("marlin", "logprobs differ by "), ("emulation", "EMULATION (")):
        report = f"nvidia-h200/global_scale_mismatch_{backend}.json"
        (damaged,) = evidence(report, "MD014", "faulty", moe_backend=backend)
        assert f"{before}{damaged['largest_logprob_difference']:g}" in entry("MD014")
        assert damaged["prompts_with_other_tokens"] == damaged["prompts"]
        assert damaged["vllm"] == "0.21.0"
        (repaired,) = evidence(report, "MD014", "fixed", moe_backend=backend)
        assert repaired["largest_logprob_difference"] == repaired["prompts_with_other_tokens"] == 0


def test_md015() -> None:
    repaired = evidence("baselines/cpu.json", "MD015", "fixed")
    shown = {f"{one['error']:.0%}" for one in repaired}
    (whole,) = {f"{one['healthy_error']:.0%}" for one in repaired}
    assert f"as far off as with a whole checkpoint, {whole}" in entry("MD015")
    (worse,) = shown - {whole}
    assert f"from the activations at hand, {worse}" in entry("MD015")
    (damaged,) = evidence("nvidia-h200/input_scale_missing.json", "MD015", "faulty", moe_backend="emulation")
    assert damaged["error"] is None
    assert damaged["prompts_with_other_tokens"] == damaged["prompts"]
    assert damaged["vllm"] == "0.21.0"


def test_md012() -> None:
    (damaged,) = evidence("nvidia-h200/kv_scales_missing_marlin.json", "MD012", "faulty")
    (repaired,) = evidence("nvidia-h200/kv_scales_missing_marlin.json", "MD012", "fixed")
    text = entry("MD012")
    assert f"gives {damaged['tested_distance']:.0%} of the probability" in text
    assert f"with computed scales {repaired['tested_distance']:.0%}, as much as" in text
    assert f"{repaired['tested_distance']:.0%}" == f"{repaired['control_distance']:.0%}"
    triton = repaired["triton_attn"]
    assert triton["kv_cache"]["tested"] == repaired["kv_cache"]["tested"], "the same scales"
    assert f"it moves {triton['tested_distance']:.0%} with the right scales" in text


@pytest.mark.parametrize(("id", "name"), [("MD017", "gate_up_order"), ("MD018", "scale_layout")])
@pytest.mark.parametrize("backend", ["marlin", "emulation"])
def test_layouts_in_engines(id: str, name: str, backend: str) -> None:
    assert f"reports/nvidia-h200/{name}_*.md" in entry(id)
    (damaged,) = evidence(f"nvidia-h200/{name}_{backend}.json", id, "faulty", moe_backend=backend)
    assert damaged["error"] is None, "it starts"
    assert damaged["prompts_with_other_tokens"] == damaged["prompts"]
    assert damaged["vllm"] == "0.21.0"
