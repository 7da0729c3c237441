"""Experiments with real engines: run them, compare each with its control, make rows of a report.

An experiment is a list of `Trial`, each one engine with the columns that name it. `run_trials` runs them side
by side; `Ran.compare` then compares tokens, logprobs and errors with those of the control.
"""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moedoctor.results import UnavailableError
from moedoctor.upstream.engine import engine
from moedoctor.upstream.engine.clear_prompts import measure_distance
from moedoctor.upstream.engine.engine import EngineError, EngineRequest, EngineResult

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme

PARALLEL = 16
"""Engines at once: each takes one core while it starts and about 1 GiB of the GPU."""
ON_HOST = (
    "is not on GPU",  # MARLIN
    "is_cuda() != true",  # HUMMING
    "cannot be accessed from Triton",
    "Expected all tensors to be on the same device",
)
"""Messages of MoE backends about a tensor that is in host memory."""
_PYDANTIC = "Value error, "
"""The beginning of pydantic's line that says what is wrong; its first line only counts errors."""


class Outcome(str, enum.Enum):
    """The end of an engine's run, as reports show it."""

    CONTROL = "control"
    NO_CONTROL = "no control"
    SAME = "same tokens"
    OTHER = "other tokens"
    ROUNDING = "rounding"
    """Other tokens than the control's, but bit for bit those of another control that runs the same code."""
    CRASH = "crash"
    CRASH_1 = "crash 1"
    """`CRASH_1` to `CRASH_3` are those of vllm#37883."""
    CRASH_2 = "crash 2"
    CRASH_3 = "crash 3"
    NO_OFFLOAD = "no offload"
    """The engine ran, but what it should keep on the host was not seen there."""
    MOVED_BACK = "back on the GPU"
    """The control's tokens, but most of what should be on the host was on the GPU again (MD013)."""
    NO_FIX = "no fix"
    """The engine ran without the fix that it should have."""

    @property
    def crashed(self) -> bool:
        """True if the engine stopped with an error."""
        return self in (Outcome.CRASH, Outcome.CRASH_1, Outcome.CRASH_2, Outcome.CRASH_3)


@dataclass(frozen=True)
class Trial:
    request: EngineRequest
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns that name the engine in a row of the report."""
    control: str | None = None
    """The label of the engine that it is compared with."""


@dataclass(frozen=True)
class Ran:
    trial: Trial
    result: EngineResult
    control: EngineResult | None = None

    def compare(self) -> tuple[Outcome, str]:
        """Return what became of the engine beside its control, and the detail."""
        result, control = self.result, self.control
        if result.error is not None:
            return Outcome.CRASH, shorten_error(result.error)
        if control is None:
            return Outcome.CONTROL, " ".join(str(token) for token in result.tokens[0][:6])
        if control.error is not None:
            return Outcome.NO_CONTROL, shorten_error(control.error)
        for prompt, (ids, expected) in enumerate(zip(result.tokens, control.tokens, strict=True)):
            if ids != expected:
                at = next(i for i, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1])
                return Outcome.OTHER, f"prompt {prompt + 1}, token {at + 1}: {ids[at]}, not {expected[at]}"
        distance = measure_logprob_distance(result, control)
        return Outcome.SAME, "same logprobs" if distance == 0 else f"logprobs differ by up to {distance:.2g}"


def run_trials(trials: Sequence[Trial], *, parallel: int = PARALLEL) -> list[Ran]:
    """Run all engines, up to `parallel` side by side. Raises UnavailableError if none can run here."""
    engine.need_engine()
    return attach_controls(trials, engine.run_engines([trial.request for trial in trials], parallel=parallel))


def attach_controls(trials: Sequence[Trial], results: Sequence[EngineResult]) -> list[Ran]:
    by_label = {trial.request.label: result for trial, result in zip(trials, results, strict=True)}
    return [
        Ran(trial, result, None if trial.control is None else by_label[trial.control])
        for trial, result in zip(trials, results, strict=True)
    ]


def make_rows(ran: Sequence[Ran], columns: Callable[[Ran], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each engine: `columns` of it, or ``error`` if it failed."""
    return [
        {
            **each.trial.columns,
            **({"error": each.result.error.summarize()} if each.result.error else columns(each)),
        }
        for each in ran
    ]


def require_a_run(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows. Raises UnavailableError if every one is an error."""
    if all("error" in row for row in table):
        raise UnavailableError(f"no engine ran: {table[0]['error']}")
    return table


def shorten_error(error: EngineError) -> str:
    """Return the error in one line, with the line of its message that says most."""
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    telling = ("OrderedDict", *ON_HOST, _PYDANTIC)
    known = next((line for line in lines if any(words in line for words in telling)), None)
    text = known or (lines[0] if lines else "")
    text = text.removeprefix("Explanation: ").partition(" with argument types")[0]
    text = text.removeprefix(_PYDANTIC).partition(" [type=")[0]
    return f"{error.kind.rpartition('.')[2]}: {text}"[:240]


def measure_logprob_distance(result: EngineResult, control: EngineResult) -> float:
    """Return the largest difference between logprobs of tokens that both report; inf without any."""
    if result.logprobs is None or control.logprobs is None:
        return float("inf")
    prompts = zip(result.logprobs, control.logprobs, strict=True)
    return max((measure_distance(steps, others) for steps, others in prompts), default=0.0)


@contextmanager
def write_checkpoints(*schemes: Scheme, **shape: Any) -> Iterator[Mapping[Scheme, str]]:
    """Write a tiny Qwen3-MoE checkpoint for each scheme; the folder of each, removed at the end."""
    from moedoctor.reference.checkpoints import write_qwen3_moe

    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        yield {
            scheme: str(write_qwen3_moe(Path(name) / scheme, scheme=scheme, **shape))
            for scheme in dict.fromkeys(schemes)
        }
