"""MD008: weights in host memory that another buffer overwrites, and engines with CPU offload."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from moedoctor.faults.base import EngineFault, Judgement, Parameters, list_tiers
from moedoctor.faults.offload import engine_table
from moedoctor.results import (
    UNKNOWN_CAUSE,
    Case,
    CaseResult,
    CaseVerdict,
    Evidence,
    Observation,
    Scalar,
    Tier,
)
from moedoctor.upstream.engine.probes import find_first_difference

DECIDED = 0.5
"""Lead of a token's logprob from which rounding in the layers does not explain another token."""
_FIGURES = re.compile(r"0x[0-9a-f]+|\d[\d.,]*(?: ?[KMGT]?i?B\b)?", re.IGNORECASE)
"""Parts that differ between two messages of the same error: sizes, addresses, process numbers."""
_COMPARED = 160
"""Characters of two messages that are compared: long messages are cut, and figures shift the place."""


class OffloadGarbageParameters(Parameters):
    """One point of the matrix: with `mode` it is about real engines, else about a weight in host memory."""

    mode: Literal["eager", "compiled"] | None = Field(None, description="how the engine runs")
    model: str | None = Field(
        None, max_length=300, description="a folder or a name on the hub; left out, tiny checkpoints are used"
    )
    prompt: str = Field("The capital of France is", max_length=4000)
    expected: str | None = Field(None, max_length=300, description="text that the answer must hold")
    cpu_offload_gb: float = Field(1.0, gt=0, le=4096)
    moe_backend: str = Field("auto", max_length=40, pattern=r"[a-z0-9_]+")
    max_tokens: int = Field(32, ge=1, le=512)
    arguments: str = Field(
        "{}", max_length=2000, description="more arguments of vllm.LLM as a JSON object, for `model` alone"
    )
    access: Literal["auto", "copies"] = Field(
        "auto", description="copies: without UVA and pinned memory, as on WSL; for `model` alone"
    )
    fixes: Literal["none", "offload"] = Field("none", description="MOEDOCTOR_FIXES of the engines")
    online: bool = Field(False, description="whether the model may be downloaded")
    cause: Literal["freed", "view"] = Field(
        "freed", description="of a weight: its host memory is freed early, or a buffer was made of it before"
    )
    bytes: int = Field(1 << 20, ge=1024, le=1 << 28, description="of the offloaded weight")
    seed: int = Field(0, ge=0)

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        example = "must be a JSON object such as '{\"max_model_len\": 4096}'"
        try:
            document = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{example}: {error}") from None
        if not isinstance(document, dict):
            raise ValueError(f"{example}, not '{value[:60]}'")
        return value


class OffloadGarbage(EngineFault):
    """Offloaded weights whose host memory is freed early, or of which a buffer was made before they moved."""

    id = "MD008"
    parameters = OffloadGarbageParameters
    tiers = list_tiers(Tier.MODEL, Tier.KERNEL, installed=Tier.ENGINE)
    restated_on_cpu = True
    summary = "a weight of {bytes} bytes"
    engine_by = "mode"
    engine_summary = "{model}, {mode}, {moe_backend}, {access}, fixes: {fixes}"

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        if case.tier is Tier.ENGINE:
            tiny = case.parameters["model"] is None
            return engine_table.judge(evidence) if tiny else judge_own_model(evidence)
        is_view = case.parameters["cause"] == "view"
        if evidence["weights_changed"]:
            what = "the weights became another buffer's"
            if is_view:
                what = "a buffer made of the weight is not what was loaded"
            figure = f"{evidence['weights_changed']:.0%} of {what}, without any error"
            return Judgement(CaseVerdict.REPRODUCED, figure)
        if is_view:
            return Judgement(CaseVerdict.CLEAN, "the buffer made of the weight is what was loaded")
        if not evidence["same_bits"]:
            return Judgement(CaseVerdict.REPRODUCED, "the weights are right and the result is not")
        return Judgement(CaseVerdict.CLEAN, "the view keeps its memory: the same bits")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return whether garbage was seen, and where backends differ without any offload."""
        restated = any(case.subject == "faulty" and case.evidence for case in results)
        doubt = {UNKNOWN_CAUSE: "nobody upstream has confirmed a cause of vllm#38718, so this may not be it"}
        return {
            **(doubt if restated else {}),
            **count_garbage_in_engines(results),
            **compare_backends_without_offload(results),
        }

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        return super().describe({**parameters, "model": parameters["model"] or "tiny checkpoints"})


def judge_own_model(evidence: Evidence) -> Judgement:
    """The user's own model: reproduced if offload changes the answer, or if expected text is missing from it.

    There is no verdict on engines that lack the fix that they should have, that offloaded nothing, or that
    both stop with the same error.
    """
    unfit = _find_misfit(evidence)
    if unfit is not None:
        return Judgement(CaseVerdict.ERROR, *unfit)
    error, control_error = evidence["offload_error"], evidence["control_error"]
    if error:
        if control_error is not None and _hide_figures(control_error) == _hide_figures(error):
            reason = f"the engine without offload stops with the same error: {control_error}"
            return Judgement(CaseVerdict.ERROR, "no control", reason)
        return Judgement(CaseVerdict.REPRODUCED, f"with offload: {error}"[:200])
    expected, control = evidence["expected"], evidence["control_text"]
    missing = expected is not None and expected not in (evidence["offload_text"] or "")
    if control is None and expected is None:
        reason = f"without offload: {control_error}; give `expected`"
        return Judgement(CaseVerdict.ERROR, "no control", reason)
    if control is None:
        answer = f"{'not ' if missing else ''}{expected!r} in the answer"
        verdict = CaseVerdict.REPRODUCED if missing else CaseVerdict.CLEAN
        return Judgement(verdict, f"{answer}; no run without offload to compare with")
    if expected is not None and expected not in control:
        reason = f"{expected!r} is not in the answer without offload either, so offload is not the cause"
        return Judgement(CaseVerdict.ERROR, "the control is wrong", reason)
    if evidence["same_tokens"]:
        return Judgement(CaseVerdict.CLEAN, "the same tokens of one prompt with and without offload")
    unexplained = f"{expected!r} is not in the answer" if missing else _find_other_cause(evidence)
    place = f"other tokens from number {evidence['tokens_alike'] + 1} on"
    if unexplained is not None:
        return Judgement(CaseVerdict.REPRODUCED, f"{place}: {unexplained}"[:200])
    lead = f"{evidence['lead']:.2g} apart without offload"
    return Judgement(CaseVerdict.CLEAN, f"{place}, {lead}; no layer differs by more than rounding until then")


def _find_misfit(evidence: Evidence) -> tuple[str, str] | None:
    """Return why the engine with offload is not the one that was asked for: a figure and the reason."""
    error = evidence["offload_error"]
    if evidence.get("fixes_asked", "none") != "none" and not evidence["fixes"]:
        asked = f"fixes: {evidence['fixes_asked']} was asked for and is not active"
        return "the fix was not active", f"{asked}; {error or 'the engine ran without it'}"
    if evidence.get("not_looked_into"):
        return "the engine could not be looked into", str(error)
    if not error and not evidence.get("host_bytes"):
        return "nothing was offloaded", "the engine ran with cpu_offload_gb, and no weight is on the host"
    return None


def _hide_figures(message: str) -> str:
    """Hide the figures of a message: they differ between two engines that stop for the same reason."""
    return _FIGURES.sub("#", message)[:_COMPARED]


def _find_other_cause(evidence: Evidence) -> str | None:
    """Return why rounding does not explain another token than without offload; None if it does.

    Rounding explains it if each call until then was compared, a layer differs in bits, none differs by more
    than rounding, and the two tokens were about equally likely without offload.
    """
    if evidence["first_layer"] is not None:
        return f"the first layer that differs: {evidence['first_layer']}, in call {evidence['first_call']}"
    if not evidence["until_parting"]:
        return "the first layer that differs was not seen, because not every call until then was compared"
    if evidence["first_bit"] is None:
        return "every layer gave the same bits until then, so what follows the layers differs"
    lead = evidence["lead"]
    if lead is None or lead > DECIDED:
        likely = "not among the likely ones" if lead is None else f"{lead:.2g} less likely"
        return f"no layer differs by more than rounding, but the token was {likely} without offload"
    return None


def count_garbage_in_engines(results: Sequence[CaseResult]) -> Evidence:
    """Return whether vllm#38718 was seen in the tiny checkpoints' engines; empty if none ran with offload."""
    tables = [case.evidence for case in results if case.evidence.get("cells")]
    without = ("not_offloaded", "moved_back")
    engines = sum(table["cells"] - sum(table.get(key, 0) for key in without) for table in tables)
    if not engines:
        return {}
    other, same = (sum(table[key] for table in tables) for key in ("other_tokens", "same"))
    outcome = f"reproduced in {other} of" if other else "not reproduced on this GPU in any of"
    text = f"{outcome} {engines} engines with offload: {same} give the tokens of the one without"
    return {"garbage_of_vllm_38718": text}


def compare_backends_without_offload(results: Sequence[CaseResult]) -> Evidence:
    """Compare each backend with the first that ran one's own model with the same prompt and mode."""
    first: dict[tuple[Any, ...], CaseResult] = {}
    rows = []
    for case in results:
        evidence, given = case.evidence, case.parameters
        if evidence.get("control_text") is None or given["fixes"] != "none" or given["access"] != "auto":
            continue
        other = first.setdefault((given["model"], given["mode"], given["prompt"]), case)
        if other is case:
            continue
        parting = find_first_difference(
            {"outputs": other.evidence["control_layers"]}, {"outputs": evidence["control_layers"]}
        )
        rows.append(
            {
                "backend": evidence["backend"] or given["moe_backend"],
                "beside": other.evidence["backend"] or other.parameters["moe_backend"],
                "same_answer": evidence["control_text"] == other.evidence["control_text"],
                # Only first calls are compared, so figures about calls and tokens mean nothing.
                **{
                    key: value
                    for key, value in parting.items()
                    if key not in ("calls_compared", "until_parting")
                },
            }
        )
    return {"backends_without_offload": rows} if rows else {}
