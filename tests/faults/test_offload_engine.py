"""The table of vllm#37883 and the parity of engines: what cells become of results, without any engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from moedoctor.faults import offload_engine as table
from moedoctor.faults.offload_engine import COPIES, TABLE, UVA, Cell
from moedoctor.faults.offload_parity import ParityParameters, first_parting, judge_model
from moedoctor.faults.offload_parity_engine import compare, own_request
from moedoctor.results import CaseVerdict, Death
from moedoctor.upstream.engine import EngineError, EngineResult
from moedoctor.upstream.engine_log import LogFacts

SETATTR = (
    "Failed to trace builtin operator\n"
    "  Explanation: Dynamo does not know how to trace builtin operator `setattr`"
    " with argument types ['OrderedDict', 'str', 'OrderedDict']"
)


def ran(tokens: Sequence[int] = (1, 2, 3), logprob: float = -0.5, **more: Any) -> EngineResult:
    steps = tuple({str(one): logprob} for one in tokens)
    values: dict[str, Any] = {"log": LogFacts(moe_backend="MARLIN"), "version": "0.21.0", **more}
    return EngineResult("x", (tuple(tokens),), logprobs=(steps,), **values)


def died(message: str, death: Death = Death.EXCEPTION, kind: str = "RuntimeError") -> EngineResult:
    return EngineResult("x", error=EngineError(kind, message, "load", death))


def seen(*results: EngineResult, backends: Sequence[str] = ("NVFP4 MARLIN",)) -> dict[str, Any]:
    return table.evidence(table.cells(backends, "eager", table.PLACES, ""), results)


def test_cells_and_their_engines() -> None:
    made = table.cells(TABLE, "compiled", table.PLACES, "offload")
    assert len(made) == 9
    control, mapped, copied = (table.request(one, "/m") for one in made[3:6])
    assert control.arguments["moe_backend"] == "marlin"
    assert "cpu_offload_gb" not in control.arguments
    assert mapped.arguments["cpu_offload_params"] == ["experts"]
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA" not in mapped.environ
    assert copied.environ["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
    assert copied.environ["MOEDOCTOR_FIXES"] == "offload"
    assert copied.arguments["enforce_eager"] is False
    alone = table.request(Cell("NVFP4 MARLIN", "eager", table.WEIGHTS), "/m")
    assert alone.arguments["cpu_offload_params"] == ["w13_weight", "w2_weight"]
    assert alone.environ["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
    assert table.request(Cell("BF16 TRITON", "eager", UVA), "/m").arguments["enforce_eager"] is True


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


def test_a_near_tie_is_forgiven_compiled_code_alone() -> None:
    def steps(lead: float) -> EngineResult:
        return replace(ran(), logprobs=(tuple({"1": -0.1, "9": -0.1 - lead} for _ in range(3)),))

    other = ran((1, 9, 3))
    assert [table._tie(Cell("BF16 TRITON", mode, COPIES)) for mode in ("eager", "compiled")] == [-1.0, 0.2]
    for lead, tie, outcome in [
        (0.1, 0.2, "same"),
        (0.5, 0.2, "other"),
        (0.1, -1.0, "other"),
        (0.0, -1.0, "other"),
    ]:
        found, detail = table.compare(other, steps(lead), is_control=False, tie=tie)
        assert found == f"{outcome} tokens"
        assert ("near tie: prompt 1, token 2, lead 0.1" in detail) == (outcome == "same")
    more = (*(steps(0.1).logprobs or ()), ({"4": -0.1}, {"5": -0.1}))
    two = replace(steps(0.1), tokens=((1, 2, 3), (4, 5)), logprobs=more)
    apart = replace(two, tokens=((1, 9, 3), (4, 6)))
    assert table.compare(apart, two, is_control=False, tie=0.2)[0] == "other tokens"
    unknown = replace(ran(), logprobs=None)
    assert table.compare(other, unknown, is_control=False, tie=0.2)[0] == "other tokens"


def test_rounding_to_fp4_decides_nothing_where_it_is_compiled() -> None:
    for mode, backend, outcome in [
        ("compiled", "NVFP4 EMULATION", "not decided"),
        ("eager", "NVFP4 EMULATION", "other tokens"),
        ("compiled", "NVFP4 MARLIN", "other tokens"),
    ]:
        chosen = table.cells((backend,), mode, (table.ON_GPU, UVA, COPIES), "offload")
        found = table.evidence(chosen, [ran(), ran(), ran((1, 9, 3))])
        assert found["table"][2]["outcome"] == outcome
        clean = table.judge(found).verdict is CaseVerdict.CLEAN
        assert clean == (outcome == "not decided")
    found = table.evidence(
        table.cells(("NVFP4 EMULATION",), "compiled", (table.ON_GPU, COPIES), ""), [ran(), ran((7, 7, 7))]
    )
    assert table.judge(found).figure.startswith("0 of 1 cells give the tokens")
    died_too = table.evidence(
        table.cells(("NVFP4 EMULATION",), "compiled", (table.ON_GPU, COPIES), ""), [ran(), died("x")]
    )
    assert table.judge(died_too).verdict is CaseVerdict.REPRODUCED


def test_counts_and_the_figure() -> None:
    found = seen(ran(), ran((1, 2, 4)), died("b_scales is not on GPU"))
    assert [found[name] for name in ("cells", "same", "other_tokens", "crashed")] == [2, 0, 1, 1]
    assert found["errors"][0]["message"] == "b_scales is not on GPU"
    assert table.judge(found).figure.startswith("2 of 2 cells fail: NVFP4 MARLIN, UVA: prompt 1, token 3")


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
    assert table.logprob_distance(ran(), other) == math.inf
    assert table.logprob_distance(ran(), replace(ran(), logprobs=None)) == math.inf


def probe(*norms: float, digest: str = "") -> dict[str, Any]:
    outputs = [
        {
            "layer": f"layers.{index}",
            "tokens": 4,
            "digest": digest or str(norm),
            "finite": math.isfinite(norm),
            "projection": [norm, 1.0],
        }
        for index, norm in enumerate(norms)
    ]
    return {"layers": len(outputs), "outputs": outputs}


def test_the_first_layer_that_parts() -> None:
    found = first_parting(probe(1.0, 2.0, 3.0), probe(1.0, 2.001, 9.0))
    assert (found["first_bit"], found["first_layer"], found["layers_compared"]) == ("layers.1", "layers.2", 3)
    assert first_parting(probe(1.0), probe(1.0)) == {
        "layers_compared": 1,
        "first_bit": None,
        "first_layer": None,
    }
    broken = first_parting(probe(1.0, 2.0), probe(1.0, math.nan))
    assert (broken["first_layer"], broken["relative_difference"]) == ("layers.1", "not finite")
    assert first_parting(None, probe(1.0))["layers_compared"] == 0


MINE = ParityParameters(mode="eager", model="/models/mine", expected="Paris", moe_backend="marlin")


def said(text: str, tokens: Sequence[int], norms: Sequence[float] = (1.0, 2.0)) -> EngineResult:
    return EngineResult("x", (tuple(tokens),), (text,), probe=probe(*norms))


@pytest.mark.parametrize(
    ("control", "other", "verdict", "figure"),
    [
        (said("Paris", [1]), said("Paris", [1]), CaseVerdict.CLEAN, "the same tokens"),
        (
            said("Paris", [1]),
            said("word", [2], (1.0, 9.0)),
            CaseVerdict.REPRODUCED,
            "other tokens; .*layers.1",
        ),
        (said("Paris", [1]), said("Paris!", [2]), CaseVerdict.CLEAN, "other tokens after a while"),
        (said("Paris", [1]), said("no", [2]), CaseVerdict.REPRODUCED, "parts: not seen"),
        (died("CUDA out of memory"), said("Paris", [1]), CaseVerdict.CLEAN, "no run without offload"),
        (died("CUDA out of memory"), said("no", [1]), CaseVerdict.REPRODUCED, "not 'Paris' in the answer"),
        (said("Rome", [1]), said("Rome", [1]), CaseVerdict.ERROR, "the control is wrong"),
        (said("Paris", [1]), died("b_scales is not on GPU"), CaseVerdict.REPRODUCED, "with offload: Runtime"),
    ],
)
def test_ones_own_model(
    control: EngineResult, other: EngineResult, verdict: CaseVerdict, figure: str
) -> None:
    import re

    judged = judge_model(compare(control, other, MINE))
    assert judged.verdict is verdict
    assert re.search(figure, judged.figure)


def test_without_a_control_and_an_expectation_nothing_is_judged() -> None:
    parameters = ParityParameters(mode="eager", model="/m")
    judged = judge_model(compare(died("CUDA out of memory"), said("x", [1]), parameters))
    assert judged.verdict is CaseVerdict.ERROR


def test_the_engine_of_ones_own_model_keeps_nothing_of_the_tiny_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moedoctor.upstream.engine import _document

    parameters = MINE.model_copy(update={"cpu_offload_gb": 5.0, "arguments": '{"max_model_len": 512}'})
    arguments = _document(own_request(parameters, offload=True, fixes="offload"))["arguments"]
    assert "kv_cache_memory_bytes" not in arguments
    assert "attention_backend" not in arguments
    assert (arguments["max_model_len"], arguments["cpu_offload_gb"], arguments["moe_backend"]) == (
        512,
        5.0,
        "marlin",
    )
    assert arguments["skip_tokenizer_init"] is False
    assert "cpu_offload_gb" not in _document(own_request(parameters, offload=False, fixes=""))["arguments"]
    assert arguments["model"] == "/models/mine"
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    beside = own_request(parameters.model_copy(update={"model": "mine"}), offload=False, fixes="")
    assert beside.model == str(tmp_path / "mine")


@pytest.mark.parametrize("arguments", ["[1]", "{", "max_model_len=4"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    with pytest.raises(ValidationError, match="must be a JSON object"):
        ParityParameters(arguments=arguments)
