"""MD008 in real engines: the same answers with and without offload, for tiny checkpoints and for one's own
model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moedoctor.interfaces import Judgement
from moedoctor.results import CaseResult, CaseVerdict, Evidence

PARTS = 0.02
"""Relative difference of a layer's output, in its worst token, from which two runs count as parted; below it
is rounding."""
_OF_TOKENS = ("calls_compared", "until_parting")
"""What `first_parting` says that has no meaning for first calls alone."""
DECIDED = 0.5
"""Lead of a token's logprob from which rounding in the layers does not explain another token."""
_FIGURES = re.compile(r"0x[0-9a-f]+|\d[\d.,]*(?: ?[KMGT]?i?B\b)?", re.IGNORECASE)
"""What differs between two messages of one error: sizes, addresses, process numbers."""
_COMPARED = 160
"""Characters of two messages that are compared: long ones are cut, and figures shift where."""


class ParityParameters(BaseModel):
    """Parameters of the engine tier; without `mode` a point is not for it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

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

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            found = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"must be a JSON object such as '{{\"max_model_len\": 4096}}': {error}"
            ) from None
        if not isinstance(found, dict):
            raise ValueError(
                f"must be a JSON object such as '{{\"max_model_len\": 4096}}', not '{value[:60]}'"
            )
        return value


def first_parting(control: Any, other: Any, alike: int | None = None) -> dict[str, Any]:
    """Where the layers' outputs of two runs part: the first that differs in a bit, and the first that
    differs by more than rounding. `control` and `other` are what the probe `layer_outputs` gave.

    `alike`: how many tokens both generated alike before they part; later calls have other inputs and are not
    compared. None: they do not part. ``until_parting`` says whether the call that parted is among those
    compared.
    """
    mine, wanted = _outputs(other), _outputs(control)
    last = None if alike is None else _prompt_calls(wanted) + alike
    found: dict[str, Any] = {
        "layers_compared": 0,
        "calls_compared": 0,
        "until_parting": False,
        "first_bit": None,
        "first_layer": None,
    }
    names = set()
    for one, reference in zip(mine, wanted, strict=False):
        if any(one[key] != reference[key] for key in ("layer", "call", "tokens")):
            break
        if last is not None and one["call"] > last:
            break
        names.add(one["layer"])
        found |= {"layers_compared": len(names), "calls_compared": one["call"]}
        if one["digest"] == reference["digest"]:
            continue
        found["first_bit"] = found["first_bit"] or one["layer"]
        distance = _distance(one["projection"], reference["projection"])
        if found["first_layer"] is None and not (one["finite"] and distance <= PARTS):
            found |= {"first_layer": one["layer"], "first_call": one["call"]}
            found["relative_difference"] = round(distance, 6) if one["finite"] else "not finite"
    found["until_parting"] = bool(names) and found["calls_compared"] == last
    return found


def first_calls(probe: Any) -> list[Mapping[str, Any]]:
    """Each layer's output in its first call, as it goes into the report."""
    return [one for one in (probe or {}).get("outputs", ()) if one["call"] == 1]


def between_backends(results: Sequence[CaseResult]) -> Evidence:
    """One's own model without offload: each backend beside the first that ran the same prompt and mode."""
    first: dict[tuple[Any, ...], CaseResult] = {}
    rows = []
    for one in results:
        seen, given = one.evidence, one.parameters
        if seen.get("control_text") is None or given["fixes"] != "none" or given["access"] != "auto":
            continue
        other = first.setdefault((given["model"], given["mode"], given["prompt"]), one)
        if other is not one:
            parted = first_parting(
                {"outputs": other.evidence["control_layers"]}, {"outputs": seen["control_layers"]}
            )
            rows.append(
                {
                    "backend": seen["backend"] or given["moe_backend"],
                    "beside": other.evidence["backend"] or other.parameters["moe_backend"],
                    "same_answer": seen["control_text"] == other.evidence["control_text"],
                    **{key: value for key, value in parted.items() if key not in _OF_TOKENS},
                }
            )
    return {"backends_without_offload": rows} if rows else {}


def garbage_seen(results: Sequence[CaseResult]) -> Evidence:
    """Whether vllm#38718 was seen in the tiny checkpoints' engines; empty where none ran with offload."""
    runs = [one.evidence for one in results if one.evidence.get("cells")]
    engines = sum(one["cells"] - one.get("not_offloaded", 0) for one in runs)
    if not engines:
        return {}
    other, same = sum(one["other_tokens"] for one in runs), sum(one["same"] for one in runs)
    said = f"reproduced in {other} of" if other else "not reproduced on this GPU in any of"
    told = f"{said} {engines} engines with offload: {same} give the tokens of the one without"
    return {"garbage_of_vllm_38718": told}


def relative(values: Sequence[float], wanted: Sequence[float]) -> float:
    """The distance of two vectors over the length of the second; NaN counts as infinitely far."""
    difference = sum((a - b) ** 2 for a, b in zip(values, wanted, strict=True)) ** 0.5
    length = sum(b * b for b in wanted) ** 0.5
    distance = difference / length if length else difference
    return distance if distance == distance else float("inf")


def _distance(rows: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    """Of the token that differs most."""
    return max((relative(mine, its) for mine, its in zip(rows, wanted, strict=True)), default=0.0)


def _prompt_calls(outputs: Sequence[Mapping[str, Any]]) -> int:
    """In how many calls the prompt was computed, in pieces where it is long: those of more than one token."""
    return max((int(one["call"]) for one in outputs if one["tokens"] > 1), default=1)


def _outputs(probe: Any) -> list[Mapping[str, Any]]:
    if not isinstance(probe, Mapping):
        return []
    return [
        {**one, "projection": [[float(value) for value in row] for row in one["projection"]]}
        for one in probe.get("outputs", ())
    ]


def judge_model(seen: Mapping[str, Any]) -> Judgement:
    """The user's own model: reproduced where offload changes the answer, or where what is expected is not
    in it. Nothing is said of engines that lack the fix they asked for, or that offloaded nothing, nor where
    both engines stop with the same error."""
    unfit = _unfit(seen)
    if unfit is not None:
        return Judgement(CaseVerdict.ERROR, *unfit)
    if seen["offload_error"]:
        if _same_error(seen["control_error"], seen["offload_error"]):
            said = f"the engine without offload stops with the same error: {seen['control_error']}"
            return Judgement(CaseVerdict.ERROR, "no control", said)
        return Judgement(CaseVerdict.REPRODUCED, f"with offload: {seen['offload_error']}"[:200])
    expected, control = seen["expected"], seen["control_text"]
    missing = expected is not None and expected not in (seen["offload_text"] or "")
    if control is None:
        if expected is None:
            return Judgement(
                CaseVerdict.ERROR, "no control", f"without offload: {seen['control_error']}; give `expected`"
            )
        said = (
            f"{'not ' if missing else ''}{expected!r} in the answer; no run without offload to compare with"
        )
        return Judgement(CaseVerdict.REPRODUCED if missing else CaseVerdict.CLEAN, said)
    if expected is not None and expected not in control:
        said = f"{expected!r} is not in the answer without offload either: it is not about offload"
        return Judgement(CaseVerdict.ERROR, "the control is wrong", said)
    if seen["same_tokens"]:
        return Judgement(CaseVerdict.CLEAN, "the same tokens with and without offload")
    unexplained = f"{expected!r} is not in the answer" if missing else _not_rounding(seen)
    where = f"other tokens from the {seen['tokens_alike'] + 1}. on"
    if unexplained is not None:
        return Judgement(CaseVerdict.REPRODUCED, f"{where}: {unexplained}"[:200])
    said = f"{where}, {seen['lead']:.2g} apart without offload"
    return Judgement(CaseVerdict.CLEAN, f"{said}; no layer parts by more than rounding until then")


def _unfit(seen: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the engine with offload is not the one that was asked for: a figure and the reason."""
    if seen.get("fixes_asked", "none") != "none" and not seen["fixes"]:
        said = f"fixes: {seen['fixes_asked']} was asked for, and the log does not say that it is active"
        return "the fix was not active", f"{said}; {seen['offload_error'] or 'the engine ran without it'}"
    if seen.get("not_looked_into"):
        return "the engine could not be looked into", str(seen["offload_error"])
    if not seen["offload_error"] and not seen.get("host_bytes"):
        return "nothing was offloaded", "the engine ran with cpu_offload_gb, and no weight is on the host"
    return None


def _same_error(control: str | None, other: str) -> bool:
    """Whether both engines stopped for one reason, which then is not the offload: a folder that is not there,
    too little memory. Figures in the two messages may differ."""
    if control is None:
        return False
    mine, wanted = (_FIGURES.sub("#", one)[:_COMPARED] for one in (other, control))
    return mine == wanted


def _not_rounding(seen: Mapping[str, Any]) -> str | None:
    """Why rounding does not explain another token than without offload; None where it does.

    It does where each call until then was compared, some layer differs in bits, none by more than rounding,
    and the two tokens were about as likely without offload.
    """
    if seen["first_layer"] is not None:
        return f"the first layer that parts: {seen['first_layer']}, in call {seen['first_call']}"
    if not seen["until_parting"]:
        return "the first layer that parts: not seen, for not every call until then was compared"
    if seen["first_bit"] is None:
        return "every layer gave the same bits until then, so what follows the layers parts"
    lead = seen["lead"]
    if lead is None or lead > DECIDED:
        told = "not among the likely ones" if lead is None else f"{lead:.2g} less likely"
        return f"no layer parts by more than rounding, but the token was {told} without offload"
    return None
