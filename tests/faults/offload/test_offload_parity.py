"""MD008 on one's own model: two engines compared, without any engine."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import ValidationError
from torch import nn

from moedoctor.entries import entries
from moedoctor.faults.offload.parity_engines import compare, fit_together, own_request
from moedoctor.faults.offload.parity_engines_judge import (
    ParityParameters,
    between_backends,
    first_parting,
    judge_model,
)
from moedoctor.fixes.backends.release_tables import releases as vllm_releases
from moedoctor.results import CaseResult, CaseVerdict, Death, Tier
from moedoctor.runner.plan import Options, plan
from moedoctor.scenario.targets import load_targets
from moedoctor.upstream.engine import probes as engine_probes
from moedoctor.upstream.engine.engine import EngineError, EngineResult
from moedoctor.upstream.engine.log import LogFacts


def died(message: str) -> EngineResult:
    return EngineResult("x", error=EngineError("RuntimeError", message, "load", Death.EXCEPTION))


def probe(*norms: float, later: Sequence[float] = (), digests: str = "") -> dict[str, Any]:
    """Outputs of the call for a prompt of 4 tokens, and of calls for the last layer's next tokens; `digests`
    makes bits differ where norms do not."""

    def output(index: int, call: int, tokens: int, norm: float) -> dict[str, Any]:
        return {
            "layer": f"layers.{index}",
            "call": call,
            "tokens": tokens,
            "digest": f"{norm}{digests}",
            "finite": math.isfinite(norm),
            "projection": [[norm, 1.0]] * tokens,
        }

    outputs = [output(index, 1, 4, norm) for index, norm in enumerate(norms)]
    outputs += [output(0, 2 + index, 1, norm) for index, norm in enumerate(later)]
    return {"layers": len(norms), "outputs": outputs, "host_bytes": 8, "parameter_bytes": 8}


def test_the_first_layer_that_parts() -> None:
    found = first_parting(probe(1.0, 2.0, 3.0), probe(1.0, 2.001, 9.0))
    assert (found["first_bit"], found["first_layer"], found["layers_compared"]) == ("layers.1", "layers.2", 3)
    assert first_parting(probe(1.0), probe(1.0)) == {
        "layers_compared": 1,
        "calls_compared": 1,
        "until_parting": False,
        "first_bit": None,
        "first_layer": None,
    }
    broken = first_parting(probe(1.0, 2.0), probe(1.0, math.nan))
    assert (broken["first_layer"], broken["relative_difference"]) == ("layers.1", "not finite")
    assert first_parting(None, probe(1.0))["layers_compared"] == 0


def test_calls_are_compared_until_the_tokens_part_and_no_further() -> None:
    control = probe(1.0, later=(2.0, 3.0, 4.0))
    found = first_parting(control, probe(1.0, later=(2.0, 9.0, 9.0)), alike=2)
    assert (found["first_layer"], found["first_call"], found["until_parting"]) == ("layers.0", 3, True)
    before = first_parting(control, probe(1.0, later=(2.0, 9.0, 9.0)), alike=1)
    assert (before["first_layer"], before["calls_compared"], before["until_parting"]) == (None, 2, True)
    short = first_parting(control, probe(1.0, later=(2.0,)), alike=2)
    assert (short["first_layer"], short["calls_compared"], short["until_parting"]) == (None, 2, False)


def test_a_prompt_in_pieces_is_several_calls() -> None:
    control, other = probe(1.0, later=(2.0, 3.0)), probe(1.0, later=(2.0, 9.0))
    for one in (control, other):
        one["outputs"][1]["tokens"], one["outputs"][1]["projection"] = 2, [[2.0, 1.0]] * 2
    assert first_parting(control, other, alike=0)["calls_compared"] == 2
    assert first_parting(control, other, alike=1)["first_call"] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda state: -state,
        lambda state: state.flip(0),
        lambda state: state * torch.tensor([1.0, -1.0] * (len(state) // 2))[:, None],
        lambda state: torch.cat([state[:-1], -state[-1:]]),
        lambda state: torch.cat([state[:7], state[:1], state[8:]]),
    ],
    ids=["negated", "reversed", "signs", "one token negated", "one token is another"],
)
@pytest.mark.parametrize("tokens", [8, 100])
def test_layers_that_part_are_seen_whatever_their_size(change: Any, tokens: int) -> None:
    """An average over tokens, or of squares, sees none of these."""

    def recorded(state: torch.Tensor) -> dict[str, Any]:
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Identity()])
        engine = SimpleNamespace(apply_model=lambda function: [function(model)])
        after = engine_probes.layer_outputs(engine)
        model.layers[0](state)
        return after()

    state = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(3))
    found = first_parting(recorded(state), recorded(change(state)))
    assert found["first_layer"] == "layers.0"
    rounded = first_parting(recorded(state), recorded(state.bfloat16().float()))
    assert (rounded["first_bit"], rounded["first_layer"]) == ("layers.0", None)
    assert sum(len(row) for row in recorded(state)["outputs"][0]["projection"]) <= 128


MINE = ParityParameters(mode="eager", model="/models/mine", expected="Paris", moe_backend="marlin")


def test_on_wsls_branch_both_engines_have_its_variables() -> None:
    copies = MINE.model_copy(update={"access": "copies"})
    for offload in (False, True):
        made = own_request(copies, offload=offload, fixes="").environ
        assert made["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
        assert made["VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"] == "1"
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA" not in own_request(MINE, offload=True, fixes="").environ


def test_backends_are_compared_without_offload() -> None:
    def case(backend: str, text: str, norms: Sequence[float], **more: Any) -> CaseResult:
        parameters = MINE.model_copy(update={"moe_backend": backend, **more})
        control = said(text, [1], norms)
        evidence = compare(control, control, parameters)
        given = parameters.model_dump()
        return CaseResult("installed", Tier.ENGINE, given, CaseVerdict.CLEAN, dict(evidence))

    first = case("marlin", "Paris", (1.0, 2.0, 3.0))
    same, other = case("triton", "Paris", (1.0, 2.0, 3.0)), case("emulation", "Rome", (1.0, 9.0, 3.0))
    copied = case("cutlass", "Oslo", (5.0, 5.0, 5.0), access="copies")
    fixed = case("humming", "Oslo", (5.0, 5.0, 5.0), fixes="offload")
    asked = case("humming", "Oslo", (5.0, 5.0, 5.0), prompt="another")
    (rows,) = between_backends([first, copied, fixed, asked, same, other]).values()
    seen = [(row["backend"], row["beside"], row["same_answer"], row["first_layer"]) for row in rows]
    assert seen == [("triton", "marlin", True, None), ("emulation", "marlin", False, "layers.1")]
    assert between_backends([first]) == {}


def said(text: str, tokens: Sequence[int], norms: Sequence[float] = (1.0, 2.0), **more: Any) -> EngineResult:
    """An engine that held token 1 for likelier than 2 by 0.25, and than 3 by 2."""
    steps = tuple({"1": -0.5, "2": -0.75, "3": -2.5} for _ in tokens)
    return EngineResult(
        "x",
        (tuple(tokens),),
        (text,),
        (steps,),
        probe=more.pop("probe", probe(*norms)),
        log=LogFacts(offloader="UVAOffloader", **more),
    )


ROUNDED = probe(1.001, 2.0)


@pytest.mark.parametrize(
    ("control", "other", "verdict", "figure"),
    [
        (said("Paris", [1]), said("Paris", [1]), CaseVerdict.CLEAN, "the same tokens"),
        (
            said("Paris", [1]),
            said("word", [2], (1.0, 9.0)),
            CaseVerdict.REPRODUCED,
            "other tokens from the 1. on: 'Paris' is not in the answer",
        ),
        (said("Paris", [1]), said("Paris!", [2]), CaseVerdict.REPRODUCED, "what follows the layers parts"),
        (
            said("Paris", [1]),
            said("Paris!", [2], probe=ROUNDED),
            CaseVerdict.CLEAN,
            r"other tokens from the 1\. on, 0.25 apart",
        ),
        (said("Paris", [1]), said("no", [2], probe=ROUNDED), CaseVerdict.REPRODUCED, "'Paris' is not in"),
        (
            said("Paris", [1]),
            said("Paris!", [3], probe=ROUNDED),
            CaseVerdict.REPRODUCED,
            "2 less likely without",
        ),
        (
            said("Paris", [1]),
            said("Paris!", [4], probe=ROUNDED),
            CaseVerdict.REPRODUCED,
            "not among the likely",
        ),
        (
            said("Paris", [1, 1]),
            said("Paris!", [1, 2], probe=ROUNDED),
            CaseVerdict.REPRODUCED,
            "parts: not seen",
        ),
        (
            said("Paris", [1, 1], probe=probe(1.0, later=(2.0,))),
            said("Paris!", [1, 2], probe=probe(1.0, later=(9.0,))),
            CaseVerdict.REPRODUCED,
            "from the 2. on: the first layer that parts: layers.0, in call 2",
        ),
        (died("CUDA out of memory"), said("Paris", [1]), CaseVerdict.CLEAN, "no run without offload"),
        (died("CUDA out of memory"), said("no", [1]), CaseVerdict.REPRODUCED, "not 'Paris' in the answer"),
        (said("Rome", [1]), said("Rome", [1]), CaseVerdict.ERROR, "the control is wrong"),
        (said("Paris", [1]), died("b_scales is not on GPU"), CaseVerdict.REPRODUCED, "with offload: Runtime"),
        (
            died("CUDA out of memory"),
            died("b_scales is not on GPU"),
            CaseVerdict.REPRODUCED,
            "with offload: Runtime",
        ),
    ],
)
def test_ones_own_model(
    control: EngineResult, other: EngineResult, verdict: CaseVerdict, figure: str
) -> None:
    judged = judge_model(compare(control, other, MINE))
    assert judged.verdict is verdict
    assert re.search(figure, judged.figure)


@pytest.mark.parametrize(
    ("without", "with_offload"),
    [
        ("no such model: /models/mime", "no such model: /models/mime"),
        tuple(
            f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 139.72 GiB of"
            f" which {free} is free. Including non-PyTorch memory, this process has {used} memory in use. Of"
            f" the allocated memory {used} is allocated by PyTorch, and {free} is reserved but unallocated"
            for asked, free, used in (
                ("9 GiB", "8 GiB", "131 GiB"),
                ("768.00 MiB", "512.25 MiB", "138.6 GiB"),
            )
        ),
        ("illegal access at 0x7f3a10", "illegal access at 0x55bc99ff"),
    ],
    ids=["a folder that is not there", "too little memory", "addresses"],
)
@pytest.mark.parametrize("expected", ["Paris", None])
def test_two_engines_that_stop_with_the_same_error_say_nothing_of_offload(
    without: str, with_offload: str, expected: str | None
) -> None:
    parameters = MINE.model_copy(update={"expected": expected})
    judged = judge_model(compare(died(without), died(with_offload), parameters))
    assert (judged.verdict, judged.figure) == (CaseVerdict.ERROR, "no control")
    assert f"stops with the same error: RuntimeError: {without[:60]}" in (judged.reason or "")


def test_garbage_after_the_prompt_without_anything_expected_is_no_rounding() -> None:
    """Weights that are overwritten after the first call: the layers of that call are the control's."""
    parameters = MINE.model_copy(update={"expected": None})
    control = said("Paris", [1, 1], probe=probe(1.0, later=(2.0, 2.0)))
    for later, layer in (((2.0, 2.0), "what follows the layers"), ((-2.0, 2.0), "layers.0, in call 2")):
        garbage = said("zzz", [1, 2], probe=probe(1.0, later=later))
        judged = judge_model(compare(control, garbage, parameters))
        assert judged.verdict is CaseVerdict.REPRODUCED
        assert layer in judged.figure


FIXED = MINE.model_copy(update={"fixes": "offload"})


@pytest.mark.parametrize(
    ("other", "verdict", "figure"),
    [
        (said("Paris", [1], fixes="offload (…)"), CaseVerdict.CLEAN, "the same tokens"),
        (said("Paris", [1]), CaseVerdict.ERROR, "the fix was not active"),
        (died("b_scales is not on GPU"), CaseVerdict.ERROR, "the fix was not active"),
    ],
)
def test_an_engine_without_the_fix_that_it_was_to_have_is_not_judged(
    other: EngineResult, verdict: CaseVerdict, figure: str
) -> None:
    judged = judge_model(compare(said("Paris", [1]), other, FIXED))
    assert judged.verdict is verdict
    assert judged.figure.startswith(figure)


def test_an_engine_that_offloads_nothing_is_not_judged() -> None:
    for looked in ({**probe(1.0, 2.0), "host_bytes": 0}, None):
        judged = judge_model(compare(said("Paris", [1]), said("Paris", [1], probe=looked), MINE))
        assert (judged.verdict, judged.figure) == (CaseVerdict.ERROR, "nothing was offloaded")


def test_an_engine_that_could_not_be_looked_into_is_not_judged() -> None:
    blind = EngineResult("x", error=EngineError("ValueError", "2 workers", "probe", Death.EXCEPTION))
    judged = judge_model(compare(said("Paris", [1]), blind, MINE))
    assert (judged.verdict, judged.reason) == (CaseVerdict.ERROR, "ValueError: 2 workers")


def test_both_engines_are_asked_for_calls_bytes_and_logprobs() -> None:
    for offload in (False, True):
        eager = own_request(MINE, offload=offload, fixes="")
        assert str(eager.probe).endswith(":layers_and_places")
        assert eager.probe_options["calls"] > MINE.max_tokens
        compiled = own_request(MINE.model_copy(update={"mode": "compiled"}), offload=offload, fixes="")
        assert (compiled.probe, compiled.probe_options) == (eager.probe, {"calls": 0})
        assert eager.logprobs == 5


def test_without_a_control_and_an_expectation_nothing_is_judged() -> None:
    parameters = ParityParameters(mode="eager", model="/m")
    judged = judge_model(compare(died("CUDA out of memory"), said("x", [1]), parameters))
    assert judged.verdict is CaseVerdict.ERROR


def test_the_engine_of_ones_own_model_keeps_nothing_of_the_tiny_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moedoctor.upstream.engine.engine import _document

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


@pytest.mark.parametrize(
    ("arguments", "together"),
    [
        ('{"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 1}', True),
        ('{"gpu_memory_utilization": 0.4}', False),
        ('{"gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 1}', False),
        ("{}", False),
    ],
)
def test_two_engines_run_together_only_where_both_fit(arguments: str, together: bool) -> None:
    assert fit_together(ParityParameters(mode="eager", model="/m", arguments=arguments)) is together


@pytest.mark.parametrize("arguments", ["[1]", "{", "max_model_len=4"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    with pytest.raises(ValidationError, match="must be a JSON object"):
        ParityParameters(arguments=arguments)


def test_the_scenarios_for_ones_own_model_ask_for_engines_and_a_control(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    guide = (root / "docs" / "wsl.md").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(guide.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    for file, engines in ((root / "scenarios/engine/own_model.yaml", 3), (tmp_path / "mine.yaml", 8)):
        (scenario,) = load_targets((str(file),))
        cases = [one.case for one in plan([scenario], Options(), {})[0].cases]
        counts = Counter((one.subject, one.tier.value) for one in cases)
        assert counts == {("faulty", "model"): 1, ("fixed", "model"): 1, ("installed", "engine"): engines}
        asked = [one.parameters for one in cases if one.tier is Tier.ENGINE]
        assert all(one["mode"] == "eager" and one["model"] for one in asked)
        assert {"marlin"} < {one["moe_backend"] for one in asked}
        assert {(one["access"], one["fixes"]) for one in asked} >= {("auto", "none"), ("copies", "offload")}


def test_the_guide_names_the_older_runner_for_the_releases_whose_v2_runner_does_not_start() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "wsl.md").read_text(encoding="utf-8")
    (struck,) = (one.when for one in entries()["MD002"].affects if one.severity == "error")
    ((older, value),) = struck.variables_not.items()
    affected = SpecifierSet(struck.packages["vllm"])
    wanted = [release for release in vllm_releases() if release in affected]
    listed = []
    for first, last, row in re.findall(r"^\| (0[\d.]+)(?: to (0[\d.]+))? \|(.*)\|$", guide, re.MULTILINE):
        releases = [
            one for one in vllm_releases() if Version(first) <= Version(one) <= Version(last or first)
        ]
        listed += releases
        without, with_fix = row.split(" | ")
        for cell in (without, with_fix):
            assert (f"`{older}={value}`" in cell) == any(one in affected for one in releases), first
    assert listed == list(vllm_releases())
    assert f"{wanted[0]} to {wanted[-1]} stops at start" in guide
