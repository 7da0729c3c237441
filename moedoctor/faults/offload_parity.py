"""MD008 in real engines: the same answers with and without offload, for tiny checkpoints and for one's own
model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moedoctor.faults.base import Judgement
from moedoctor.results import CaseResult, CaseVerdict, Evidence

PARTS = 0.02
"""Relative difference of a layer's output from which two runs count as parted; below it is rounding."""


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


def first_parting(control: Any, other: Any) -> dict[str, Any]:
    """Where the layers' outputs of two runs part: the first that differs in a bit, and the first that
    differs by more than rounding. `control` and `other` are what the probe `layer_outputs` gave."""
    mine, wanted = _outputs(other), _outputs(control)
    found: dict[str, Any] = {"layers_compared": 0, "first_bit": None, "first_layer": None}
    for one, reference in zip(mine, wanted, strict=False):
        if one["layer"] != reference["layer"] or one["tokens"] != reference["tokens"]:
            break
        found["layers_compared"] += 1
        if one["digest"] == reference["digest"]:
            continue
        found["first_bit"] = found["first_bit"] or one["layer"]
        distance = relative(one["projection"], reference["projection"])
        if found["first_layer"] is None and not (one["finite"] and distance <= PARTS):
            found["first_layer"] = one["layer"]
            found["relative_difference"] = round(distance, 6) if one["finite"] else "not finite"
    return found


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
                    **parted,
                }
            )
    return {"backends_without_offload": rows} if rows else {}


def garbage_seen(results: Sequence[CaseResult]) -> Evidence:
    """Whether vllm#38718 was seen in the tiny checkpoints' engines; empty where none ran."""
    runs = [one.evidence for one in results if one.evidence.get("cells")]
    if not runs:
        return {}
    engines, other = sum(one["cells"] for one in runs), sum(one["other_tokens"] for one in runs)
    same = sum(one["same"] for one in runs)
    said = f"reproduced in {other} of" if other else "not reproduced on this GPU in any of"
    told = f"{said} {engines} engines with offload: {same} give the tokens of the one without"
    return {"garbage_of_vllm_38718": told}


def relative(values: Sequence[float], wanted: Sequence[float]) -> float:
    """The distance of two vectors over the length of the second; NaN counts as infinitely far."""
    difference = sum((a - b) ** 2 for a, b in zip(values, wanted, strict=True)) ** 0.5
    length = sum(b * b for b in wanted) ** 0.5
    distance = difference / length if length else difference
    return distance if distance == distance else float("inf")


def _outputs(probe: Any) -> list[Mapping[str, Any]]:
    if not isinstance(probe, Mapping):
        return []
    return [
        {**one, "projection": [float(value) for value in one["projection"]]}
        for one in probe.get("outputs", ())
    ]


def judge_model(seen: Mapping[str, Any]) -> Judgement:
    """The user's own model: reproduced where offload changes the answer, or where what is expected is not
    in it."""
    if seen["offload_error"]:
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
    layer = seen["first_layer"]
    if layer is None and not missing and seen["layers_compared"]:
        return Judgement(
            CaseVerdict.CLEAN, "other tokens after a while; no layer parts by more than rounding"
        )
    return Judgement(
        CaseVerdict.REPRODUCED, f"other tokens; the first layer that parts: {layer or 'not seen'}"
    )
