"""The table of vllm#37883: the engines that it starts, and their outcomes. No engine runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_stub import answered, died

from moedoctor.faults.offload.engine_table import judge
from moedoctor.results import CaseVerdict, Death
from moedoctor.upstream.engine import offload_table as table
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult, LogFacts
from moedoctor.upstream.engine.experiment import attach_controls, measure_logprob_distance, shorten_error
from moedoctor.upstream.engine.offload_table import COPIES, ON_GPU, PLACES, SAME_GRAPH, TABLE, UVA, WEIGHTS

SETATTR = (
    "Failed to trace builtin operator\n"
    "  Explanation: Dynamo does not know how to trace builtin operator `setattr`"
    " with argument types ['OrderedDict', 'str', 'OrderedDict']"
)
FOLDERS: Any = dict.fromkeys(("bf16", "nvfp4", "fp8"), "/m")


def evidence(
    results: Sequence[EngineResult],
    *,
    backends: Sequence[str] = ("NVFP4 MARLIN",),
    mode: str = "eager",
    places: Sequence[str] = PLACES,
    fixes: str = "",
) -> dict[str, Any]:
    trials = table.list_trials(backends, mode, places, fixes, FOLDERS)
    return table.make_evidence(attach_controls(trials, results))


def request(backend: str, mode: str, place: str, fixes: str = "") -> EngineRequest:
    return table.make_trial(backend, mode, place, "/m", fixes).request


def test_the_engines() -> None:
    trials = table.list_trials(TABLE, "compiled", PLACES, "offload", FOLDERS)
    assert [trial.columns["experts"] for trial in trials] == [*PLACES, SAME_GRAPH] * len(TABLE)
    control, mapped, copied, second = (trial.request for trial in trials[4:8])
    assert control.arguments["moe_backend"] == "marlin"
    assert "cpu_offload_gb" not in control.arguments
    assert mapped.arguments["cpu_offload_params"] == ["experts"]
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA" not in mapped.environ
    assert copied.environ["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
    assert copied.environ["MOEDOCTOR_FIXES"] == "offload"
    assert copied.arguments["enforce_eager"] is False
    weights = request("NVFP4 MARLIN", "eager", WEIGHTS)
    assert weights.arguments["cpu_offload_params"] == ["w13_weight", "w2_weight"]
    assert weights.environ["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
    assert request("BF16 TRITON", "eager", UVA).arguments["enforce_eager"] is True
    # The second control is the engine with copies and another probe.
    assert (copied.arguments, copied.environ) == (second.arguments, second.environ)
    assert second.probe == "moedoctor.upstream.engine.probes:serve_from_gpu"
    assert {engine.probe_when for engine in (mapped, copied, second)} == {"before"}
    assert len(table.list_trials(TABLE[:1], "compiled", (ON_GPU, UVA), "offload", FOLDERS)) == 2
    assert len(table.list_trials(TABLE[:1], "compiled", PLACES, "", FOLDERS)) == 3


@pytest.mark.parametrize("backend", TABLE)
def test_every_engine_but_the_control_is_asked_for_its_bytes_and_no_graph_pads_a_batch(backend: str) -> None:
    """The fix uses no CUDA graphs; with padding the control would compute other batches."""
    for place in (*PLACES, WEIGHTS):
        engine = request(backend, "compiled", place)
        probe = None if place == ON_GPU else "moedoctor.upstream.engine.probes:record_layers_and_places"
        assert (engine.probe, engine.probe_options.get("names")) == (probe, probe and "experts")
        sizes = engine.arguments["compilation_config"]["cudagraph_capture_sizes"]
        assert set(range(1, len(table.PROMPTS[backend]) + 1)) <= set(sizes)


@pytest.mark.parametrize(
    ("result", "outcome", "detail"),
    [
        (
            died(SETATTR, kind="torch._dynamo.exc.Unsupported"),
            "crash 1",
            "Unsupported: Dynamo does not know how to trace builtin operator `setattr`",
        ),
        (died("b_scales is not on GPU"), "crash 2", "RuntimeError: b_scales is not on GPU"),
        (
            died("check_tensor_common\nlauncher/tensor.h:39, error: bs.is_cuda() != true"),
            "crash 2",
            "RuntimeError: launcher/tensor.h:39, error: bs.is_cuda() != true",
        ),
        (died("illegal access", death=Death.ILLEGAL_MEMORY_ACCESS), "crash 3", "RuntimeError: illegal"),
        (died("something else"), "crash", "RuntimeError: something else"),
        (answered((1, 9, 3)), "other tokens", "prompt 1, token 2: 9, not 2"),
        (answered(), "same tokens", "same logprobs"),
        (answered(logprob=-0.75), "same tokens", "logprobs differ by up to 0.25"),
    ],
)
def test_outcomes(result: EngineResult, outcome: str, detail: str) -> None:
    figures = evidence([answered(), answered(), result])
    row = figures["table"][2]
    assert (row["outcome"], row["experts"]) == (outcome, COPIES)
    assert row["detail"].startswith(detail)
    clean = outcome == "same tokens"
    assert judge(figures).verdict is (CaseVerdict.CLEAN if clean else CaseVerdict.REPRODUCED)


def with_fix(tokens: Sequence[int] = (1, 2, 3), logprob: float = -0.5, **options: Any) -> EngineResult:
    return answered(tokens, logprob=logprob, fixes="offload (…)", **options)


def from_gpu(tokens: Sequence[int] = (1, 2, 3), logprob: float = -0.5, nbytes: int = 8) -> EngineResult:
    """The second control: the code of the copies, with its weights on the GPU."""
    return with_fix(tokens, logprob, probe={"bytes": nbytes})


def make_table(
    copied: EngineResult, second: EngineResult, mapped: EngineResult | None = None
) -> dict[str, Any]:
    """The engines of one backend with the fix: control, UVA, copies, second control."""
    results = [answered(), mapped or answered(), copied, second]
    return evidence(results, backends=("NVFP4 EMULATION",), mode="compiled", fixes="offload")


@pytest.mark.parametrize(
    ("copied", "second", "outcome", "verdict"),
    [
        (with_fix(), from_gpu(), "same tokens", CaseVerdict.CLEAN),
        (with_fix(), from_gpu((1, 9, 3)), "same tokens", CaseVerdict.CLEAN),
        (with_fix((1, 9, 3)), from_gpu((1, 9, 3)), "rounding", CaseVerdict.CLEAN),
        (with_fix((1, 9, 3)), from_gpu((1, 9, 3), logprob=-0.4), "other tokens", CaseVerdict.REPRODUCED),
        (with_fix((1, 9, 3)), from_gpu(), "other tokens", CaseVerdict.REPRODUCED),
        (with_fix((1, 9, 3)), from_gpu((1, 9, 3), nbytes=0), "other tokens", CaseVerdict.ERROR),
        (with_fix((1, 9, 3)), answered((1, 9, 3), probe={"bytes": 8}), "other tokens", CaseVerdict.ERROR),
        (with_fix((1, 9, 3)), died("x"), "other tokens", CaseVerdict.ERROR),
        (died("x"), from_gpu(), "crash", CaseVerdict.REPRODUCED),
        (answered(), from_gpu(), "no fix", CaseVerdict.ERROR),
    ],
)
def test_other_tokens_are_rounding_only_if_the_same_code_gives_the_same_bits(
    copied: EngineResult, second: EngineResult, outcome: str, verdict: CaseVerdict
) -> None:
    figures = make_table(copied, second)
    assert figures["table"][2]["outcome"] == outcome
    assert figures["cells"] == 2
    assert judge(figures).verdict is verdict


def test_eager_engines_and_uva_are_never_excused() -> None:
    eager = evidence([answered(), with_fix((1, 9, 3))], places=(ON_GPU, COPIES), fixes="offload")
    assert eager["table"][1]["outcome"] == "other tokens"
    mapped = make_table(with_fix(), from_gpu((1, 9, 3)), with_fix((1, 9, 3)))
    assert mapped["table"][1]["outcome"] == "other tokens"


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (answered(probe={"host_bytes": 0, "parameter_bytes": 16}), "no byte of the weights is on the host"),
        (answered(probe=None), "no byte of the weights is on the host"),
        (answered(log=LogFacts(offloaded="0.0")), "its offloader in the log is missing"),
        (died("no driver", stage="probe"), "what it offloaded was not seen: RuntimeError: no driver"),
    ],
)
def test_an_engine_that_offloaded_nothing_is_no_evidence(engine: EngineResult, reason: str) -> None:
    """As with MD013: right tokens, but every weight on the GPU."""
    figures = evidence([answered(), engine, answered()])
    row = figures["table"][1]
    assert row["outcome"] == "no offload"
    assert row["detail"].startswith(reason)
    assert (figures["not_offloaded"], figures["same"]) == (1, 1)
    judgement = judge(figures)
    assert judgement.verdict is CaseVerdict.ERROR
    assert reason in (judgement.reason or "")


def test_weights_that_were_moved_back_to_the_gpu_prove_nothing() -> None:
    """As in 0.33.0, where MARLIN repacks its weights on the GPU: 64 of 884,864 bytes stay on the host."""
    back = answered(probe={"host_bytes": 7, "parameter_bytes": 16})
    figures = evidence([answered(), back, answered()])
    row = figures["table"][1]
    assert (row["outcome"], row["detail"]) == ("back on the GPU", "7 of 16 bytes are on the host (MD013)")
    assert (figures["moved_back"], figures["same"], figures["not_offloaded"]) == (1, 1, 0)
    assert judge(figures).verdict is CaseVerdict.CLEAN
    assert judge(evidence([answered(), back], places=(ON_GPU, UVA))).verdict is CaseVerdict.ERROR
    half = evidence([answered(), answered(probe={"host_bytes": 8, "parameter_bytes": 16}), answered()])
    assert half["moved_back"] == 0
    other = answered((1, 9, 3), probe={"host_bytes": 7, "parameter_bytes": 16})
    assert evidence([answered(), other, answered()])["other_tokens"] == 1


def test_each_backend_has_its_own_control() -> None:
    results = [answered()] * 3 + [answered((7, 7)), answered((7, 7)), answered((7, 8))]
    figures = evidence(results, backends=("BF16 TRITON", "NVFP4 MARLIN"))
    assert [row["outcome"] for row in figures["table"]] == [
        *("control", "same tokens", "same tokens"),
        *("control", "same tokens", "other tokens"),
    ]
    broken = evidence([died("no"), answered(), answered()])
    assert broken["table"][1]["outcome"] == "no control"
    assert judge(broken).verdict is CaseVerdict.ERROR


def test_logprobs_that_cannot_be_compared() -> None:
    other = replace(answered(), logprobs=(({"9": -0.5}, {"2": -0.5}, {"3": -0.5}),))
    assert measure_logprob_distance(answered(), other) == math.inf
    assert measure_logprob_distance(answered(), replace(answered(), logprobs=None)) == math.inf
    for value, distance in (("nan", math.inf), ("-inf", 0.0)):
        same = replace(answered(), logprobs=(({"1": -0.5}, {"2": value}, {"3": -0.5}),))
        assert measure_logprob_distance(same, same) == distance


UNKNOWN_MODEL = """1 validation error for ModelConfig
  Value error, The checkpoint has model type `gemma4` [type=value_error, input_value=ArgsKwargs((), {'m': 1})]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""
"""In pydantic's form: the first line only counts errors."""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (UNKNOWN_MODEL, "ValidationError: The checkpoint has model type `gemma4`"),
        ("\n  no room left \n of 3 GiB", "ValidationError: no room left"),
        ("", "ValidationError: "),
    ],
)
def test_an_error_is_told_by_the_line_that_says_what_is_wrong(message: str, line: str) -> None:
    error = EngineError("pydantic_core.ValidationError", message, "load", Death.EXCEPTION)
    assert shorten_error(error) == line
