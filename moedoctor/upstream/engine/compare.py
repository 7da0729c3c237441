"""What an engine did, against the engine without offload: the same tokens, others, or a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moedoctor.results import Death

if TYPE_CHECKING:
    from moedoctor.upstream.engine.engine import EngineResult

SAME, OTHER, ROUNDING = "same tokens", "other tokens", "rounding"
"""`ROUNDING`: other tokens than the control's, and in every bit those of the control with the same code."""
NO_OFFLOAD = "no offload"
"""The engine ran, and what it was to keep on the host is not seen there."""


def compare(result: EngineResult, control: EngineResult | None, *, is_control: bool) -> tuple[str, str]:
    """What became of a cell in one word or two, and the detail."""
    if result.error is not None:
        return f"crash{_number(result)}", short_error(result)
    if is_control:
        return "control", " ".join(str(one) for one in result.tokens[0][:6])
    if control is None or control.error is not None:
        return "no control", "the engine without offload did not run"
    for prompt, (mine, wanted) in enumerate(zip(result.tokens, control.tokens, strict=True)):
        if mine != wanted:
            at = next(i for i, (a, b) in enumerate(zip(mine, wanted, strict=True)) if a != b)
            return OTHER, f"prompt {prompt + 1}, token {at + 1}: {mine[at]}, not {wanted[at]}"
    distance = logprob_distance(result, control)
    return SAME, "same logprobs" if distance == 0 else f"logprobs differ by up to {distance:.2g}"


def _number(result: EngineResult) -> str:
    """Which of vllm#37883's crashes it is: `` 1``, `` 2``, `` 3``, or nothing."""
    error = result.error
    assert error is not None
    if "OrderedDict" in error.message and "setattr" in error.message:
        return " 1"
    if "is not on GPU" in error.message:
        return " 2"
    return " 3" if error.death is Death.ILLEGAL_MEMORY_ACCESS else ""


def short_error(result: EngineResult) -> str:
    """The error in one line: the line of the message that says most."""
    error = result.error
    assert error is not None
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    telling = next((line for line in lines if "OrderedDict" in line or "is not on GPU" in line), None)
    said = telling or (lines[0] if lines else "")
    said = said.removeprefix("Explanation: ").partition(" with argument types")[0]
    return f"{error.kind.rpartition('.')[2]}: {said}"[:240]


def logprob_distance(result: EngineResult, control: EngineResult) -> float:
    """The largest difference between logprobs of tokens that both report; inf where they report none."""
    if result.logprobs is None or control.logprobs is None:
        return float("inf")
    distance = 0.0
    for mine, wanted in zip(result.logprobs, control.logprobs, strict=True):
        for step, other in zip(mine, wanted, strict=True):
            both = set(step) & set(other)
            if not both:
                return float("inf")
            distance = max(distance, *(abs(float(step[token]) - float(other[token])) for token in both))
    return distance
