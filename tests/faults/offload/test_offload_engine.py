"""The table of vllm#37883 and the parity of engines: what cells become of results, without any engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moedoctor.faults.offload.offload_garbage import OffloadGarbage
from moedoctor.faults.offload.parity_engines_judge import ParityParameters
from moedoctor.results import CaseResult, CaseVerdict, Death, Tier
from moedoctor.upstream.engine import offload_cells as cells
from moedoctor.upstream.engine import offload_engine as table
from moedoctor.upstream.engine.compare import logprob_distance
from moedoctor.upstream.engine.engine import EngineError, EngineResult
from moedoctor.upstream.engine.log import LogFacts
from moedoctor.upstream.engine.offload_cells import COPIES, ON_GPU, PLACES, TABLE, UVA, WEIGHTS, Cell, request

SETATTR = (
    "Failed to trace builtin operator\n"
    "  Explanation: Dynamo does not know how to trace builtin operator `setattr`"
    " with argument types ['OrderedDict', 'str', 'OrderedDict']"
)


def ran(tokens: Sequence[int] = (1, 2, 3), logprob: float = -0.5, **more: Any) -> EngineResult:
    steps = tuple({str(one): logprob} for one in tokens)
    log = LogFacts(moe_backend="MARLIN", offloader="UVAOffloader")
    there = {"host_bytes": 8, "parameter_bytes": 16}
    values: dict[str, Any] = {"log": log, "version": "0.21.0", "probe": there, **more}
    return EngineResult("x", (tuple(tokens),), logprobs=(steps,), **values)


def died(
    message: str, death: Death = Death.EXCEPTION, kind: str = "RuntimeError", stage: str = "load"
) -> EngineResult:
    return EngineResult("x", error=EngineError(kind, message, stage, death))


def seen(*results: EngineResult, backends: Sequence[str] = ("NVFP4 MARLIN",)) -> dict[str, Any]:
    return table.evidence(cells.cells(backends, "eager", PLACES, ""), results)


def test_cells_and_their_engines() -> None:
    made = cells.cells(TABLE, "compiled", PLACES, "offload")
    assert [one.place for one in made] == [*PLACES, cells.SAME_GRAPH] * 3
    control, mapped, copied = (request(one, "/m") for one in made[4:7])
    assert control.arguments["moe_backend"] == "marlin"
    assert "cpu_offload_gb" not in control.arguments
    assert mapped.arguments["cpu_offload_params"] == ["experts"]
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA" not in mapped.environ
    assert copied.environ["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
    assert copied.environ["MOEDOCTOR_FIXES"] == "offload"
    assert copied.arguments["enforce_eager"] is False
    alone = request(Cell("NVFP4 MARLIN", "eager", WEIGHTS), "/m")
    assert alone.arguments["cpu_offload_params"] == ["w13_weight", "w2_weight"]
    assert alone.environ["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
    assert request(Cell("BF16 TRITON", "eager", UVA), "/m").arguments["enforce_eager"] is True


@pytest.mark.parametrize(
    ("result", "outcome", "detail"),
    [
        (
            died(SETATTR, kind="torch._dynamo.exc.Unsupported"),
            "crash 1",
            "Unsupported: Dynamo does not know how to trace builtin operator `setattr`",
        ),
        (died("b_scales is not on GPU"), "crash 2", "RuntimeError: b_scales is not on GPU"),
        (died("illegal memory access", Death.ILLEGAL_MEMORY_ACCESS), "crash 3", "RuntimeError: illegal"),
        (died("something else"), "crash", "RuntimeError: something else"),
        (ran((1, 9, 3)), "other tokens", "prompt 1, token 2: 9, not 2"),
        (ran(), "same tokens", "same logprobs"),
        (ran(logprob=-0.75), "same tokens", "logprobs differ by up to 0.25"),
    ],
)
def test_what_a_cell_becomes(result: EngineResult, outcome: str, detail: str) -> None:
    found = seen(ran(), ran(), result)
    row = found["table"][2]
    assert (row["outcome"], row["experts"]) == (outcome, COPIES)
    assert row["detail"].startswith(detail)
    verdict = table.judge(found).verdict
    assert verdict is (CaseVerdict.CLEAN if outcome == "same tokens" else CaseVerdict.REPRODUCED)


FIXED = LogFacts(fixes="offload (…)", offloader="UVAOffloader")
BACKEND = ("NVFP4 EMULATION",)


def fixed(tokens: Sequence[int] = (1, 2, 3), logprob: float = -0.5, **more: Any) -> EngineResult:
    return ran(tokens, logprob, log=FIXED, **more)


def served(tokens: Sequence[int] = (1, 2, 3), logprob: float = -0.5, nbytes: int = 8) -> EngineResult:
    """The second control: the code of the copies, with its weights on the GPU."""
    return fixed(tokens, logprob, probe={"bytes": nbytes})


def compiled(copied: EngineResult, second: EngineResult) -> dict[str, Any]:
    """The cells of one backend with the fix: control, UVA, copies, second control."""
    return table.evidence(cells.cells(BACKEND, "compiled", PLACES, "offload"), [ran(), ran(), copied, second])


@pytest.mark.parametrize(
    ("copied", "second", "outcome", "verdict"),
    [
        (fixed(), served(), "same tokens", CaseVerdict.CLEAN),
        (fixed(), served((1, 9, 3)), "same tokens", CaseVerdict.CLEAN),
        (fixed((1, 9, 3)), served((1, 9, 3)), "rounding", CaseVerdict.CLEAN),
        (fixed((1, 9, 3)), served((1, 9, 3), logprob=-0.4), "other tokens", CaseVerdict.REPRODUCED),
        (fixed((1, 9, 3)), served(), "other tokens", CaseVerdict.REPRODUCED),
        (fixed((1, 9, 3)), served((1, 9, 3), nbytes=0), "other tokens", CaseVerdict.ERROR),
        (fixed((1, 9, 3)), ran((1, 9, 3), probe={"bytes": 8}), "other tokens", CaseVerdict.ERROR),
        (fixed((1, 9, 3)), died("x"), "other tokens", CaseVerdict.ERROR),
        (died("x"), served(), "crash", CaseVerdict.REPRODUCED),
    ],
)
def test_other_tokens_are_rounding_only_where_the_same_code_gives_the_same_bits(
    copied: EngineResult, second: EngineResult, outcome: str, verdict: CaseVerdict
) -> None:
    found = compiled(copied, second)
    assert found["table"][2]["outcome"] == outcome
    assert found["cells"] == 2
    assert table.judge(found).verdict is verdict


def test_the_table_says_what_both_controls_gave() -> None:
    found = compiled(fixed((1, 9, 3)), served((1, 9, 3)))
    wanted = "prompt 1, token 2: 9, not 2; same tokens and logprobs on the GPU, in the graph of the copies"
    assert found["table"][2]["detail"] == wanted
    assert (found["table"][3]["outcome"], found["table"][3]["detail"][:15]) == ("control", "prompt 1, token")
    figure = table.judge(found).figure
    assert figure.startswith("1 of 2 cells give the tokens of the run without offload, 1 those of the same")
    assert found["table"][2]["same_bits_in_the_same_code"] is True
    row = compiled(fixed(logprob=-0.25), served())["table"][2]
    told = row["detail"]
    assert row["same_bits_in_the_same_code"] is False
    assert told == f"logprobs differ by up to 0.25; other tokens and logprobs {cells.SAME_GRAPH}"


def test_eager_engines_and_uva_are_never_excused() -> None:
    eager = table.evidence(
        cells.cells(BACKEND, "eager", (ON_GPU, COPIES), "offload"), [ran(), fixed((1, 9, 3))]
    )
    assert eager["table"][1]["outcome"] == "other tokens"
    chosen = cells.cells(BACKEND, "compiled", PLACES, "offload")
    mapped = table.evidence(chosen, [ran(), fixed((1, 9, 3)), fixed(), served((1, 9, 3))])
    assert mapped["table"][1]["outcome"] == "other tokens"


def test_the_second_control_is_the_engine_with_copies_and_a_probe() -> None:
    chosen = cells.cells(BACKEND, "compiled", PLACES, "offload")
    copied, second = (request(one, "/m") for one in chosen[2:])
    assert (copied.arguments, copied.environ) == (second.arguments, second.environ)
    assert str(copied.probe).endswith(":layers_and_places")
    assert (copied.probe_when, second.probe_when) == ("before", "before")
    assert str(second.probe).endswith(":serve_from_gpu")
    assert len(cells.cells(BACKEND, "compiled", (ON_GPU, UVA), "offload")) == 2
    assert len(cells.cells(BACKEND, "compiled", PLACES, "")) == 3


@pytest.mark.parametrize("backend", TABLE)
def test_no_graph_pads_the_batches_of_the_control(backend: str) -> None:
    """The fix leaves CUDA graphs out: with padding the control would compute other batches."""
    compilation = request(cells.Cell(backend, "compiled", ON_GPU), "/m").arguments["compilation_config"]
    sizes = compilation["cudagraph_capture_sizes"]
    assert set(range(1, len(cells.PROMPTS[backend]) + 1)) <= set(sizes)


def test_a_right_answer_without_the_fix_that_was_asked_for_proves_nothing() -> None:
    unfixed = compiled(ran(), served())
    assert unfixed["table"][2]["outcome"] == "no fix"
    assert table.judge(unfixed).verdict is CaseVerdict.ERROR


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (ran(probe={"host_bytes": 0, "parameter_bytes": 16}), "no byte of the weights is on the host"),
        (ran(probe=None), "no byte of the weights is on the host"),
        (ran(log=LogFacts(offloaded="0.0")), "the log says nothing of its offloader, expected UVAOffloader"),
        (died("no driver", stage="probe"), "what it offloaded was not seen: RuntimeError: no driver"),
    ],
)
def test_an_engine_that_offloaded_nothing_is_no_evidence(engine: EngineResult, said: str) -> None:
    """As with MD013: the right tokens, and every weight on the GPU."""
    found = seen(ran(), engine, ran())
    assert (found["table"][1]["outcome"], found["table"][1]["detail"]) == ("no offload", said)
    assert (found["not_offloaded"], found["same"]) == (1, 1)
    judged = table.judge(found)
    assert judged.verdict is CaseVerdict.ERROR
    assert said in (judged.reason or "")


def test_the_table_has_the_bytes_that_are_on_the_host() -> None:
    rows = seen(ran(probe=None, log=LogFacts()), ran(), ran())["table"]
    assert [(one["host_bytes"], one["parameter_bytes"]) for one in rows] == [(None, None), (8, 16), (8, 16)]
    assert [one["offloader"] for one in rows] == [None, "UVAOffloader", "UVAOffloader"]
    for cell in cells.cells(TABLE, "eager", (*PLACES, WEIGHTS), ""):
        asked = request(cell, "/m")
        probe = None if cell.place == ON_GPU else "moedoctor.upstream.engine.probes:layers_and_places"
        assert (asked.probe, asked.probe_options.get("names")) == (probe, probe and "experts")


def test_counts_and_the_figure() -> None:
    found = seen(ran(), ran((1, 2, 4)), died("b_scales is not on GPU"))
    assert [found[name] for name in ("cells", "same", "other_tokens", "crashed")] == [2, 0, 1, 1]
    assert found["errors"][0]["message"] == "b_scales is not on GPU"
    assert table.judge(found).figure.startswith("2 of 2 cells fail: NVFP4 MARLIN, UVA: prompt 1, token 3")


def test_an_error_names_upstreams_line_and_not_where_it_is_installed() -> None:
    frame = 'File "/home/me/site/vllm/model_executor/offloader/uva.py", line 120, in forward'
    error = seen(ran(), ran(), died(f"{SETATTR}\nfrom user code:\n   {frame}"))["errors"][0]
    assert error["offloader_frame"] == 'File "vllm/model_executor/offloader/uva.py", line 120, in forward'


def test_without_a_control_nothing_is_judged() -> None:
    found = seen(died("no"), ran(), ran())
    assert found["table"][1]["outcome"] == "no control"
    assert table.judge(found).verdict is CaseVerdict.ERROR


def test_each_backend_has_its_own_control() -> None:
    results = [ran(), ran(), ran(), ran((7, 7)), ran((7, 7)), ran((7, 8))]
    found = seen(*results, backends=("BF16 TRITON", "NVFP4 MARLIN"))
    assert [row["outcome"] for row in found["table"]] == [
        *("control", "same tokens", "same tokens"),
        *("control", "same tokens", "other tokens"),
    ]


def test_logprobs_that_cannot_be_compared() -> None:
    other = replace(ran(), logprobs=(({"9": -0.5}, {"2": -0.5}, {"3": -0.5}),))
    assert logprob_distance(ran(), other) == math.inf
    assert logprob_distance(ran(), replace(ran(), logprobs=None)) == math.inf


NOTHING = {"cells": 2, "not_offloaded": 2, "same": 0, "other_tokens": 0}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (ran(), "not reproduced on this GPU in any of 2 engines with offload: 2 give"),
        (ran((1, 9, 3)), "reproduced in 1 of 2 engines with offload: 1 give"),
        (died("x"), "not reproduced on this GPU in any of 2 engines with offload: 1 give"),
    ],
)
def test_whether_garbage_was_seen(other: EngineResult, said: str) -> None:
    parameters = ParityParameters(mode="eager").model_dump()
    evidence = seen(ran(), ran(), other)
    case = CaseResult("installed", Tier.ENGINE, parameters, CaseVerdict.CLEAN, evidence)
    idle = CaseResult("installed", Tier.ENGINE, parameters, CaseVerdict.ERROR, {**evidence, **NOTHING})
    assert OffloadGarbage().conclude([idle]) == {}
    elsewhere = CaseResult("faulty", Tier.MODEL, parameters, CaseVerdict.CLEAN, {"same_bits": True})
    (text,) = OffloadGarbage().conclude([elsewhere, case]).values()
    assert str(text).startswith(said)
    assert OffloadGarbage().conclude([elsewhere]) == {}
