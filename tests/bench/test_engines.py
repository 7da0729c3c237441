"""`bench --engine`: variants are read, engines compared and timed, with a stand-in for vLLM."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_stub
import pytest

from moedoctor.bench import engines
from moedoctor.bench.engines import REFERENCE, Plan, Variant, make_request, measure
from moedoctor.upstream.engine.engine import LogFacts

BASE = Variant("base")
MOE = {"MOEDOCTOR_FIXES": "moe"}


def plan(tiny: Path, *variants: Variant, **changes: Any) -> Plan:
    return replace(Plan(tiny, variants or (BASE,), tokens=4, repeats=2, batches=(1, 2)), **changes)


def answers(shift: int = 0, count: int = 10, lead: float = 1.0) -> dict[str, Any]:
    """Answers to `count` prompts; the second best token is behind by `lead`."""
    tokens = [[prompt + shift, prompt + shift + 1] for prompt in range(count)]
    steps = [[{str(token): -0.1, str(token + 1): -0.1 - lead} for token in ids] for ids in tokens]
    return {"tokens": tokens, "logprobs": steps}


def result(seconds: float = 1.0, shift: int = 0, lead: float = 1.0, **more: Any) -> Any:
    """Return the result of a decode that takes so long; `more` are fields of the probe and of the result."""
    speed = {"batch": 1, "decoded": 10, "first_s": [0.1, 0.1], "whole_s": [0.1 + seconds] * 2}
    speed |= {"gpu_step_ms": [seconds * 50] * 2, "gpu_clock": ["graphs"] * 2}
    probe = {"experts": {"TritonExperts": 2}, "answers": answers(shift, lead=lead), "speeds": [speed]}
    probe |= more.pop("probe", {})
    return engine_stub.answered((), probe=probe, **more)


def run_of(results: Sequence[Any]) -> Any:
    given = iter(results)
    return lambda request: next(given)


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("base=", BASE),
        ("fast=--moe-backend marlin", Variant("fast", {}, ("--moe-backend", "marlin"))),
        (
            "both=A=1 MOEDOCTOR_FIXES='a,b' --compilation-config '{\"mode\": 0}'",
            Variant("both", {"A": "1", "MOEDOCTOR_FIXES": "a,b"}, ("--compilation-config", '{"mode": 0}')),
        ),
    ],
)
def test_a_variant_is_read_as_a_shell_reads_it(text: str, variant: Variant) -> None:
    assert Variant.parse(text) == variant
    assert Variant.parse(f"{variant.name}={variant}") == variant


@pytest.mark.parametrize("text", ["base", "=A=1", "a b=", "x=marlin", "x=A=1 marlin", "x='"])
def test_what_is_no_variant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Variant.parse(text)


@pytest.mark.slow
def test_real_processes_take_turns_and_only_right_engines_are_timed(tiny: Path) -> None:
    """The stand-in's `wrong` takes another token; one that does not start stops no other."""
    started = []

    def run(request: Any) -> Any:
        started.append(request.label)
        if request.label == "broken":
            return engine_stub.died("no such backend")
        # The stand-in's parser is not vLLM's, so backends are arguments.
        backend = "wrong" if request.label == "wrong" else "marlin"
        return engines.run_engine(replace(request, arguments={**request.arguments, "moe_backend": backend}))

    chosen = plan(tiny, BASE, Variant("wrong"), Variant("broken"), together=True)
    measured = measure(chosen, run=run)
    assert sorted(started) == ["base", "broken", "wrong"]
    base, wrong, _ = measured.engines
    assert base.tokens_of == base.tokens_same == 128
    assert (base.moe_backend, base.starts, base.wrong, base.failed) == ("MARLIN", 1, None, None)
    assert base.host_bytes > 1 << 20 > abs(base.host_growth_bytes)
    assert wrong.wrong == "0 of 128 clear prompts have the tokens of the first engine that answered"
    assert [(row.variant, row.batch) for row in measured.speeds] == [("base", 1), ("base", 2)]
    row = measured.speeds[1]
    assert row.tokens_per_second_p20 <= row.tokens_per_second <= row.tokens_per_second_p80
    assert row.first_token_ms >= 4
    assert row.gpu_step_ms is None
    request = make_request(chosen, BASE, "folder")
    assert request.arguments["kv_cache_memory_bytes"] == 256 << 20
    assert (request.probe_options["meet"], request.probe_options["engines"]) == ("folder", 3)
    assert make_request(chosen, BASE).arguments["gpu_memory_utilization"] == 0.9


def test_ratios_are_the_bases_and_rounds_go_forth_and_back(tiny: Path) -> None:
    ran: list[str] = []
    steps: list[tuple[int, int, str]] = []

    def run(request: Any) -> Any:
        ran.append(request.label)
        return result(1.0 if request.label == "base" else 0.5)

    measured = measure(
        plan(tiny, BASE, Variant("fast"), rounds=2), run=run, progress=lambda *step: steps.append(step)
    )
    assert ran == ["base", "fast", "fast", "base"]
    assert [step[:2] for step in steps] == [(done, 4) for done in range(4)]
    base, fast = measured.speeds
    assert (base.ratio, fast.ratio, fast.gpu_ratio, fast.repeats) == (1.0, 2.0, 2.0, 4)
    assert (base.tokens_per_second, fast.gpu_step_ms) == (10.0, 25.0), "the first tokens do not count"


def test_an_engine_that_fails_is_a_row_and_the_next_one_is_the_base(tiny: Path) -> None:
    run = run_of([engine_stub.died("no such\nbackend"), result(), result(shift=50)])
    measured = measure(plan(tiny, BASE, Variant("second"), Variant("third")), run=run)
    assert [row.failed for row in measured.engines] == ["load: RuntimeError: no such", None, None]
    assert [bool(row.wrong) for row in measured.engines] == [False, False, True]
    assert [(row.variant, row.ratio) for row in measured.speeds] == [("second", 1.0)]


@pytest.mark.parametrize(
    ("environ", "more", "failed"),
    [
        ({"MOEDOCTOR_FIXES": "offload"}, {"fixes": "offload (copies)"}, None),
        ({"MOEDOCTOR_FIXES": "offload"}, {"fixes": None}, "offload was asked for and is not active"),
        ({"MOEDOCTOR_FIXES": "routing"}, {}, None),  # 0.21.0 does not need it
        ({"MOEDOCTOR_FIXES": "all"}, {}, None),
        ({"MOEDOCTOR_TRACE": "nan"}, {}, "nan was asked for and is not active"),
        ({"MOEDOCTOR_RECORD": "x"}, {}, "record was asked for and is not active"),
        (MOE, {"fixes": "moe (x)"}, "no MoE layer of this engine was computed by moedoctor"),
        (MOE, {"fixes": "moe (x)", "probe": {"experts": {"MoedoctorExperts": 2}}}, None),
        (MOE, {"log": LogFacts(refused=("moe is not applied",))}, "moe is not applied"),
        ({}, {"log": LogFacts(refused=("cpu computes nothing: x",))}, "cpu computes nothing: x"),
    ],
)
def test_a_fix_that_is_not_active_is_a_failure(tiny, environ, more, failed):
    measured = measure(plan(tiny, BASE, Variant("x", environ)), run=run_of([result(), result(**more)]))
    assert measured.engines[1].failed == failed


def test_with_too_few_clear_prompts_nothing_is_compared(tiny: Path) -> None:
    run = run_of([result(lead=0.4), result(shift=50, lead=0.4)])
    measured = measure(plan(tiny, BASE, Variant("other")), run=run)
    assert [(row.tokens_of, row.wrong) for row in measured.engines] == [(None, None)] * 2
    assert len(measured.speeds) == 2


@pytest.mark.parametrize(("shift", "wrong"), [(50, False), (0, True)])
def test_a_planted_fault_that_changes_no_token_is_a_failure_of_the_comparison(tiny, shift, wrong):
    probe = {"wrong_answers": answers(shift)}
    measured = measure(plan(tiny, control=True), run=run_of([result(probe=probe)]))
    assert measured.engines[0].control_same == (0 if shift else 10)
    assert ("equal tokens prove nothing" in (measured.engines[0].wrong or "")) == wrong
    assert bool(measured.speeds) != wrong


def test_the_reference_is_an_engine_of_its_own_that_is_not_timed(tiny: Path) -> None:
    chosen = plan(tiny, Variant("base", {}, ("--moe-backend", "triton")), reference=True, control=True)
    requests = []

    def run(request: Any) -> Any:
        requests.append(request)
        if request.label == REFERENCE:
            probe = {"experts": {"MoedoctorExperts": 2}, "speeds": []}
            return result(lead=1.25, fixes="moe (x)", probe=probe)
        return result()

    measured = measure(chosen, run=run)
    assert requests[1].environ["MOEDOCTOR_MOE"] == "reference"
    assert list(requests[1].flags) == ["--moe-backend", "triton", "--enforce-eager"]
    assert requests[1].probe_options["batches"] == []
    assert (requests[0].probe_options["control"], requests[1].probe_options["control"]) == (True, False)
    base, reference = measured.engines
    assert (base.reference_same, base.reference_of, base.reference_distance) == (10, 10, 0.25)
    assert (reference.variant, reference.reference_of) == (REFERENCE, None)
    assert [row.variant for row in measured.speeds] == ["base"]


def test_memory_that_weights_leave_goes_to_the_kv_cache(tiny: Path) -> None:
    def engine(allocated: int, gib: str, tokens: str) -> Any:
        return result(allocated=allocated << 30, log=LogFacts(kv_cache_gib=gib, kv_cache_tokens=tokens))

    # What torch holds includes the KV cache: 40, 30 and 41 GiB beside it.
    run = run_of([engine(60, "20.0", "1,000"), engine(60, "29.8", "1,490"), engine(60, "19.0", "950")])
    measured = measure(plan(tiny, BASE, Variant("cache"), Variant("more")), run=run)
    assert [row.kv_cache_tokens for row in measured.engines] == [1000, 1490, 950]
    assert [row.freed_to_kv_cache for row in measured.engines] == [None, 1.0, None]
    assert measured.engines[0].gpu_bytes == 40 << 30


def test_what_the_user_set_for_vllm_holds_in_every_engine(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    variant = Variant("x", {"A": "1", "MOEDOCTOR_FIXES": "offload"}, ("--enforce-eager", "--model", "other"))
    request = make_request(plan(tiny, arguments={"max_model_len": 64}), variant)
    assert request.environ == {"VLLM_USE_DEEP_GEMM": "1", "A": "1", "MOEDOCTOR_FIXES": "offload"}
    assert request.arguments["max_model_len"] == 64
    assert request.flags == ("--enforce-eager", "--model", os.path.abspath("other")), (
        "a child has other folders"
    )
    assert request.arguments["skip_tokenizer_init"] is True
    (tiny / "tokenizer.json").write_text("{}")
    assert make_request(plan(tiny), BASE).arguments["skip_tokenizer_init"] is False


def test_times_between_other_events_are_not_compared(tiny: Path) -> None:
    other = result(0.5)
    other.probe["speeds"][0]["gpu_clock"] = ["steps"] * 2
    mixed = result(0.5)
    mixed.probe["speeds"][0]["gpu_clock"] = ["steps", "graphs"]
    measured = measure(plan(tiny, BASE, Variant("a"), Variant("b")), run=run_of([result(), other, mixed]))
    rows = [(row.ratio, row.gpu_ratio, row.gpu_clock) for row in measured.speeds]
    assert rows == [(1.0, 1.0, "graphs"), (2.0, None, "steps"), (2.0, None, None)]
