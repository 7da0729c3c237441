"""MD021, MD022 and MD023: the controls do what the releases do, and the installed vLLM's answer decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fault_cases import case, run

from moedoctor import catalogue
from moedoctor.diagnose.preflight.ask import Release
from moedoctor.diagnose.preflight.judge import answer_unasked
from moedoctor.diagnose.preflight.records import Verdict
from moedoctor.faults.loading import loading_lab
from moedoctor.faults.loading.block_shards import judge_320
from moedoctor.faults.loading.ignore_list import is_excluded, is_ignored, is_skipped_exactly
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Observation, Tier, UnavailableError

NAMES, SHARDS, LIST = (catalogue.load_faults()[id] for id in ("MD021", "MD022", "MD023"))


@pytest.mark.parametrize(
    ("loader", "mistake", "figure"),
    [
        ("0.21.0", "gate_renamed", "no error, and 33%"),
        ("0.33.0", "gate_renamed", "no error, and 33%"),
        ("0.21.0", "one_tensor", "no error, and 100%"),
        ("0.21.0", "one_tensor_renamed", "no error, and 100%"),
        ("0.33.0", "one_tensor_renamed", "stops: AttributeError: Layer model.layers.0.mlp.experts has no"),
    ],
)
def test_a_name_is_skipped_or_stops_the_loader(loader: str, mistake: str, figure: str) -> None:
    judged = run(NAMES, loader=loader, mistake=mistake)
    assert judged.figure.startswith(figure)
    assert (judged.evidence["stopped"] is None) is (judged.evidence.get("skipped", 0) > 0)


@pytest.mark.parametrize(
    ("loader", "width", "ranks", "figure"),
    [
        ("0.28.0", 768, 2, "all "),
        ("0.28.0", 768, 4, "gate: ValueError: The output_size of gate's and up's weight = 192"),
        ("0.33.0", 768, 4, "all "),
        ("0.33.0", 192, 1, "gate: RuntimeError: The size of tensor a (3) must match the size"),
        ("0.33.0", 192, 3, "all "),
        ("0.33.0", 320, 4, "gate: ValueError: The output_size of gate's and up's weight = 80"),
    ],
)
def test_a_shard_is_refused_or_right(loader: str, width: int, ranks: int, figure: str) -> None:
    judged = run(SHARDS, loader=loader, intermediate=width, tensor_parallel=ranks)
    assert judged.figure.removeprefix("stops: rank 0, ").startswith(figure)


def test_the_rules_of_a_list_differ_between_formats() -> None:
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    fused = "model.layers.0.self_attn.qkv_proj"
    for rule in (is_skipped_exactly, is_excluded, is_ignored):
        assert rule(fused, parts)
        assert rule(fused, [fused])
        assert not rule(fused, ["lm_head"])
        with pytest.raises(ValueError, match=r"shards of .*qkv_proj"):
            rule(fused, parts[:2])
    assert is_excluded(fused, ["*self_attn*"])
    assert is_excluded(f"language_model.{fused}", [fused])
    assert not is_skipped_exactly("model.layers.0.self_attn.o_proj", ["*self_attn*"])
    assert is_ignored(fused, ["re:.*self_attn.*"])
    assert is_skipped_exactly("model.layers.0.mlp.experts", ["model.layers.0.mlp.experts.3.up_proj"])


def test_lint_names_a_wrong_list_and_its_repair_also_names_router_and_head() -> None:
    for mistake in ("nothing", "other_names", "one_part", "prefix"):
        for format in ("nvfp4", "fp8", "fp8_compressed"):
            judged = run(LIST, "fixed", format=format, mistake=mistake)
            assert judged.verdict is CaseVerdict.CLEAN, (format, mistake)
            assert "MD023" in judged.evidence["lint"]


ANSWER = replace(answer_unasked("0.33.0", ("M",), "x"), reason="why")


@pytest.mark.parametrize("verdict", [Verdict.REFUSED, Verdict.WRONG, Verdict.STARTS])
@pytest.mark.parametrize("fault", [NAMES, SHARDS, LIST], ids=lambda fault: fault.id)
def test_the_installed_loader_decides(fault, verdict, monkeypatch):
    monkeypatch.setattr(loading_lab, "find_installed", lambda: Release("0.33.0"))
    asked: list[Any] = []

    def answer(release: Release, commands: Any, question: Any, headers: Any) -> list[Any]:
        asked.extend([commands[0].words, headers])
        return [replace(ANSWER, verdict=verdict)]

    monkeypatch.setattr(loading_lab, "ask_release", answer)
    judged = run(fault, "installed", Tier.LIBRARY)
    assert judged.verdict is (CaseVerdict.CLEAN if verdict is Verdict.STARTS else CaseVerdict.REPRODUCED)
    assert judged.evidence["vllm"] == "0.33.0"
    ((_, tensors),) = asked[1].items()
    assert len(tensors) > 10


def test_an_answer_that_says_nothing_skips_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_lab, "find_installed", lambda: None)
    with pytest.raises(UnavailableError, match="vllm is not installed"):
        loading_lab.ask_installed("bf16", None)
    monkeypatch.setattr(loading_lab, "find_installed", lambda: Release("0.33.0"))
    monkeypatch.setattr(loading_lab, "ask_release", lambda *_: [ANSWER])
    with pytest.raises(UnavailableError, match="why"):
        loading_lab.ask_installed("bf16", None)


@pytest.mark.parametrize(
    ("loads", "verdict"),
    [((), ClaimVerdict.CONFIRMED), ((2,), ClaimVerdict.REFUTED), (None, ClaimVerdict.UNTESTED)],
)
def test_a_claim_is_judged_by_the_installed_loader_alone(loads: Any, verdict: ClaimVerdict) -> None:
    cases = []
    for subject in ("faulty", *(["installed"] if loads is not None else [])):
        for size in (2, 4, 8):
            tier = Tier.MODEL if subject == "faulty" else Tier.LIBRARY
            point = case(SHARDS, subject, tier, intermediate=320, tensor_parallel=size)
            clean = subject == "installed" and size in loads
            judged = CaseVerdict.CLEAN if clean else CaseVerdict.REPRODUCED
            evidence = Observation({"stopped": "x"}).evidence
            cases.append(CaseResult(subject, tier, point.parameters, judged, evidence=evidence))
    assert judge_320.judge(cases, (), {}).verdict is verdict
