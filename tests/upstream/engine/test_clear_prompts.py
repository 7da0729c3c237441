"""Engines compared on clear prompts: which are started with which checkpoint, and how rows are made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_stub import died

from moedoctor.upstream.engine import clear_prompts, moe_activations, moe_formats
from moedoctor.upstream.engine.engine import EngineResult, LogFacts
from moedoctor.upstream.engine.experiment import Ran, Trial, pair
from moedoctor.upstream.engine.moe_layers import (
    EAGER,
    ENGINES,
    GRAPHS,
    OURS,
    PLANTED,
    REFERENCE_ENGINE,
    THEIRS,
)

LEAD = {"1": -0.25, "2": -0.75}


def answered(*prompts: tuple[int, dict[str, float]], ours: int = 2, **changes: Any) -> EngineResult:
    """An engine that answered each prompt with one token and these logprobs, by default two alike."""
    prompts = prompts or ((1, LEAD), (1, LEAD))
    return EngineResult(
        "x",
        **{
            "tokens": tuple((token,) for token, _ in prompts),
            "logprobs": tuple((logprobs,) for _, logprobs in prompts),
            "probe": {"layers": 2, "ours": ours},
            "log": LogFacts(moe_backend="TRITON"),
            **changes,
        },
    )


def test_every_model_and_format_has_a_reference_a_fault_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {}

    def run(trials: Sequence[Trial]) -> list[Ran]:
        for trial in trials:
            columns, request = trial.columns, trial.request
            configs[request.model] = json.loads(Path(request.model, "config.json").read_text("utf-8"))
            fixes = {THEIRS: "", REFERENCE_ENGINE: "reference"}.get(str(columns["computer"]), "kernels")
            assert request.environ.get("MOEDOCTOR_MOE", "") == fixes
            assert ("compilation_config" in request.arguments) == (columns["mode"] == GRAPHS)
            assert (
                request.arguments["moe_backend"]
                == {"BF16": "triton", "NVFP4": "marlin"}[columns["quantization"]]
            )
            assert str(request.probe).endswith("exchange_experts") == (columns["computer"] == PLANTED)
        return pair(
            trials,
            [answered(*[(5, LEAD)] * 2 if trial.columns["computer"] == PLANTED else ()) for trial in trials],
        )

    monkeypatch.setattr(moe_activations, "run_trials", run)
    rows = moe_activations.tokens({})
    assert len(rows) == 16
    for model in moe_activations.MODELS:
        for quantization in moe_activations.SCHEMES:
            kinds = {
                (row["computer"], row["mode"], row["outcome"])
                for row in rows
                if (row["model"], row["quantization"]) == (model, quantization)
            }
            assert kinds == {
                (REFERENCE_ENGINE, EAGER, "control"),
                (OURS, GRAPHS, "same tokens"),
                (THEIRS, GRAPHS, "same tokens"),
                (PLANTED, EAGER, "other tokens"),
            }
    assert len(configs) == 4
    architectures = {config["architectures"][0] for config in configs.values()}
    assert architectures == {"Gemma4ForCausalLM", "NemotronHForCausalLM"}
    quantized = [
        config["quantization_config"]["ignore"]
        for config in configs.values()
        if "quantization_config" in config
    ]
    assert len(quantized) == 2
    assert all({"*shared_experts*", "*latent_proj*"} <= set(ignored) for ignored in quantized)


def test_every_format_has_a_reference_a_fault_and_both_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = {}

    def run(trials: Sequence[Trial]) -> list[Ran]:
        for trial in trials:
            request = trial.request
            config = json.loads(Path(request.model, "config.json").read_text("utf-8"))
            schemes[trial.columns["quantization"]] = config["quantization_config"]["quant_method"]
            assert request.prompts == clear_prompts.prompts()
            assert (request.max_tokens, request.logprobs) == (clear_prompts.TOKENS, clear_prompts.LOGPROBS)
            assert clear_prompts.ARGUMENTS.items() <= request.arguments.items()
            assert request.arguments["enforce_eager"] == (trial.columns["mode"] == EAGER)
        return pair(trials, [answered() for _ in trials])

    monkeypatch.setattr(moe_formats, "run_trials", run)
    rows = moe_formats.tokens({})
    assert schemes == {"FP8 of ModelOpt": "modelopt", "FP8 of compressed-tensors": "compressed-tensors"}
    for quantization in moe_formats.FORMATS:
        kinds = [(row["computer"], row["mode"]) for row in rows if row["quantization"] == quantization]
        assert kinds == list(ENGINES)
    assert all("clear_prompts" in row for row in rows)


def ran(result: EngineResult, control: EngineResult | None, computer: str = OURS) -> dict[str, Any]:
    trial = moe_activations.trial("Gemma-4", "BF16", computer, GRAPHS, "/m")
    return clear_prompts.row(Ran(trial, result, control))


def test_only_prompts_that_the_reference_decides_clearly_are_compared() -> None:
    near = {"1": -0.25, "2": -0.74}
    reference = answered((1, LEAD), (1, near), (1, LEAD), (1, {"1": -0.25}), (1, LEAD))
    assert clear_prompts.clear(reference) == [0, 2, 4]
    other = answered(
        (1, {"1": -0.5, "2": -0.75}),
        (7, near),
        (7, LEAD),
        (1, {"1": -9.0}),
        (1, {"1": -0.375, "2": -0.75}),
    )
    row = ran(other, reference)
    assert (row["clear_prompts"], row["same_prompts"], row["outcome"]) == (3, 2, "other tokens")
    assert row["logprob_distance"] == 0.125
    assert row["detail"] == "2 of 3 clear prompts"


def test_a_prompt_is_clear_only_if_every_step_is() -> None:
    steps = EngineResult("x", tokens=((1, 2),), logprobs=((LEAD, {"2": -0.25, "3": -0.5}),))
    assert clear_prompts.clear(steps) == []


@pytest.mark.parametrize(
    ("result", "control", "words"),
    [
        (died("no memory"), answered(), "RuntimeError: no memory"),
        (answered(), died("no memory"), "no reference: RuntimeError: no memory"),
        (answered(ours=0), answered(), "no layer of this engine was computed by moedoctor"),
    ],
)
def test_an_engine_that_proves_nothing_is_not_compared(
    result: EngineResult, control: EngineResult, words: str
) -> None:
    row = ran(result, control)
    assert (row["outcome"], row["detail"]) == ("not compared", words)
    assert "clear_prompts" not in row


def test_vllms_own_engine_needs_no_layer_of_ours() -> None:
    assert ran(answered(ours=0), answered(), THEIRS)["outcome"] == "same tokens"


def test_prompts_are_always_the_same_and_fit() -> None:
    prompts = clear_prompts.prompts()
    assert prompts == clear_prompts.prompts()
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == clear_prompts.PROMPTS
    assert all(4 <= len(prompt) <= 9 and all(3 <= token < 512 for token in prompt) for prompt in prompts)
