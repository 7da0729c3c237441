"""Reports for tests: a full one written by hand, and hypothesis strategies for any report."""

import json
from pathlib import Path
from typing import Any

from hostile import TEXTS
from hypothesis import strategies as st

from moedoctor import results

ENVIRONMENT: dict[str, Any] = {
    "gpu": "NVIDIA H200", "driver": "580.159", "torch": "2.11.0", "vllm": "0.21.0", "flashinfer": None,
    "cpu": "a processor", "env": {"VLLM_MOE": "1"},
    "gpus": [{"name": "NVIDIA H200", "memory_bytes": 150754820096}],
}  # fmt: skip

CAPSULE: dict[str, Any] = json.loads(Path(__file__).with_name("replay_report.json").read_text("utf-8"))
"""The output of `moedoctor replay tests/trace/engine_wrong_scale.moecapsule --format json`."""
_GPU_STATE: dict[str, Any] = {
    "index": 0, "name": "NVIDIA H200", "samples": 8, "busy_samples": 6,
    "sm_clock_mhz": {"min": 1965.0, "median": 1980.0, "max": 1980.0}, "sm_clock_limit_mhz": 1980.0,
    "power_limit_watts": 700.0, "throttle_reasons": {"power_cap": 0.5},
}  # fmt: skip
ORIGIN: dict[str, Any] = {
    "date": "2026-11-23T04:05:06Z", "version": "0.1.0", "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False, "command_line": "moedoctor run MD001",
    "again": ["git checkout 0123456789abcdef0123456789abcdef01234567", "VLLM_MOE=1 moedoctor run MD001"],
    "iterations": {"cases_run": 13}, "gpu_state": {"interval_seconds": 0.25, "gpus": [_GPU_STATE]},
}  # fmt: skip

HOSTILE = (
    "[red]no markup[/] | `code` <b>&bold</b> \x1b[31mred\x1b[0m \x00\x07 :smile: %0A::error::x *a* _b_ "
    "[link](https://example.org) @somebody line\r\nend \u202egnp ]]> --> \udc80"
)
"""Text with markup of rich, Markdown, HTML, XML, terminals and GitHub."""

PULL, ISSUE = "vllm-project/vllm#39391", "vllm-project/vllm#39593"

POINTS = tuple({"tokens": 128, "top_k": k, "scoring": s} for s in ("softmax", "sigmoid") for k in (2, 8))


def case(subject: str, verdict: str, parameters: Any = None, **fields: Any) -> results.CaseResult:
    """Return a case with a figure that fits its verdict."""
    tier = results.Tier.MODEL if subject in ("faulty", "fixed") else results.Tier.KERNEL
    fields.setdefault("device", "cpu" if tier is results.Tier.MODEL else "cuda:0")
    fields.setdefault("figure", {"reproduced": "13 of 128 rows", "clean": "0 of 128 rows"}.get(verdict, ""))
    point = POINTS[0] if parameters is None else parameters
    return results.CaseResult(subject, tier, point, results.CaseVerdict(verdict), **fields)


def crashed(subject: str, parameters: dict[str, Any] | None = None) -> results.CaseResult:
    """Return a case whose child process crashed."""
    message = "CUDA error: an illegal memory access was encountered"
    crash = results.Crash(results.Death.ILLEGAL_MEMORY_ACCESS, message, ("Traceback", "[red]last words[/]"))
    fields = {"evidence": crash.to_evidence(), "reason": message, "figure": "illegal memory access"}
    return case(subject, "error", parameters, **fields)


def scenario(verdict: str = "proved", *cases: results.CaseResult, **fields: Any) -> results.ScenarioResult:
    """Return MD001 with these cases, by default a control and a fix with the expected verdicts."""
    proof = (case("faulty", "reproduced", seconds=0.5), case("fixed", "clean", seconds=0.25))
    values: dict[str, Any] = {
        "id": "MD001",
        "name": "nan_routing",
        "title": "NaN router logits give one token the same expert K times",
        "file": "scenarios/nan_routing.yaml",
        **fields,
    }
    return results.ScenarioResult(verdict=results.ScenarioVerdict(verdict), cases=cases or proof, **values)


def report(*scenarios: results.ScenarioResult, **fields: Any) -> results.Report:
    """Return a report of these scenarios on a machine with a GPU."""
    values = {"environment": ENVIRONMENT, "summary": results.Summary(), "version": "0.1.0", **fields}
    return results.Report(command="run", scenarios=scenarios, **values)


def full_report() -> results.Report:
    """Return a report with every verdict of a case, claims, a crash, findings and an interruption."""
    expected = {"expected": results.CaseVerdict.REPRODUCED}
    cases = [case("faulty", "reproduced", point, evidence={"rows": 13}, **expected) for point in POINTS]
    cases += [case("fixed", "clean", point) for point in POINTS]
    cases += [case("installed", "skipped", point, reason="vllm is not installed here") for point in POINTS]
    cases += [case("vllm@0.19.1", "reproduced", point) for point in POINTS]
    cases += [crashed("vllm@0.20.0", POINTS[0]), case("vllm@0.20.0", "clean", POINTS[1])]
    us, measured = {"with_us": 3.43125}, {"subject": "topk_softmax", "conditions": "128 tokens"}
    claims = (
        results.ClaimResult("the fused clamp is free", PULL, results.ClaimVerdict.CONFIRMED, us, **measured),
        results.ClaimResult("a launch costs 30 %", ISSUE, results.ClaimVerdict.REFUTED, {}, "it costs 35 %"),
        results.ClaimResult("FP8 hides it", ISSUE, results.ClaimVerdict.UNTESTED, {}, "needs a GPU"),
    )
    failing = scenario(
        "error",
        *cases,
        claims=claims,
        conclusions={"first_fixed_release": "0.20.0"},
        reason="vllm@0.20.0: illegal memory access",
        line=3,
        unfinished=results.Unfinished("interrupted", {"vllm@0.33.0": 2}, 1, 9.5, True),
    )
    named = {"id": "MD005", "name": "untraceable_offload"}
    absent = scenario("absent", case("faulty", "clean"), **named, reason="torch 2.13")
    ended = {"exit_code": 1, "interrupted": True, "reasons": ("MD001",)}
    summary = results.Summary(error=1, absent=1, cases={"clean": 6}, **ended)
    findings = ("MD001 faulty: verdict reproduced -> clean",)
    return report(failing, absent, summary=summary, findings=findings, origin=ORIGIN, capsule=CAPSULE)


STRANGE = [*(text[:60] for text in TEXTS if text != "\ud800"), "\ufffe]]>"]
"""Texts of strangers that JSON can hold; XML cannot hold the last."""
_texts = st.text(max_size=12) | st.sampled_from(STRANGE)
_finite = st.floats(allow_nan=False, allow_infinity=False)
_scalars = st.none() | st.booleans() | st.integers() | _finite | _texts
json_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=5,
)
"""Values that JSON has, with texts of strangers."""
evidences = st.dictionaries(_texts, json_values, max_size=3)
"""Evidence of JSON types only."""

crashes = st.builds(
    lambda death, message, tail: {"death": death, "message": message, "stderr_tail": tail},
    _texts,
    _texts,
    st.lists(_texts, max_size=3),
)
"""Evidence of children that died."""

cases = st.builds(
    results.CaseResult,
    subject=st.sampled_from(("faulty", "fixed", "installed", "vllm@0.19.1")),
    tier=st.sampled_from(results.Tier),
    parameters=st.dictionaries(_texts, _scalars, max_size=3),
    verdict=st.sampled_from(results.CaseVerdict),
    evidence=evidences | crashes,
    reason=st.none() | _texts,
    seconds=st.floats(0, 1e6),
    device=st.sampled_from(("cpu", "cuda:0")),
    figure=_texts,
)
claims = st.builds(
    results.ClaimResult,
    text=_texts,
    source=_texts,
    verdict=st.sampled_from(results.ClaimVerdict),
    evidence=evidences,
    reason=st.none() | _texts,
)
scenarios = st.builds(
    results.ScenarioResult,
    id=st.sampled_from(("MD001", "MD002")),
    name=_texts,
    title=_texts,
    verdict=st.sampled_from(results.ScenarioVerdict),
    file=_texts,
    cases=st.lists(cases, max_size=3).map(tuple),
    claims=st.lists(claims, max_size=2).map(tuple),
    reason=st.none() | _texts,
    conclusions=evidences,
    line=st.integers(1, 1000),
)
_counts = st.integers(0, 1000)
summaries = st.builds(
    results.Summary,
    *[_counts] * 7,
    cases=st.dictionaries(st.sampled_from([verdict.value for verdict in results.CaseVerdict]), _counts),
    interrupted=st.booleans(),
)
reports = st.builds(
    results.Report,
    command=_texts,
    environment=evidences,
    scenarios=st.lists(scenarios, max_size=2).map(tuple),
    summary=summaries,
    version=_texts,
    findings=st.lists(_texts, max_size=2).map(tuple),
    schema_version=st.just(1),
)


def list_places(value: Any) -> list[tuple[Any, Any]]:
    """Return the mapping or list and the key of every value inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((value, key), *list_places(item))]
