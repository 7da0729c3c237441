"""Questions to a router, MoE kernel, expert cache or offloader, and the answers. Imports no torch."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

from moedoctor.results import from_json
from moedoctor.text import load_yaml

KINDS = ("router", "moe", "cache", "offloader")
FORMATS = ("bf16", "fp8", "fp8-block", "nvfp4", "mxfp4")
"""Formats of the weights of a MoE kernel."""
CHECKS = {"router": "check_router", "moe": "check_moe", "cache": "check_expert_cache"}
CHECKS["offloader"] = "check_offloader"
"""Kind -> the public function that asks."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
Sizes = Mapping[str, int]
"""``tokens``, ``experts``, ``top_k`` and so on: what a problem is built with, beside the seed."""


@dataclass(frozen=True)
class Question:
    """One thing that is asked of every implementation of a kind. The YAML file of the kind holds them."""

    name: str
    asks: str
    why: str
    """The effect of a wrong answer."""
    who: str
    """The implementations that must pass it."""
    sizes: tuple[Sizes, ...]
    """The problems, from small to large."""
    entry: str | None = None
    """The id of the known failure that shows this."""
    may_refuse: bool = False
    """True if an error before anything is computed is a right answer."""
    needs: str | None = None
    """The parameter without which a function cannot be asked."""


@functools.cache
def load_questions(kind: str) -> Mapping[str, Question]:
    """Return the questions of a kind by name, in the order in which they are asked. Raises ValueError."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    data = load_yaml("moedoctor.testing", f"{kind}.yaml")
    questions = [
        from_json(Question, {"sizes": data["sizes"], **each}, f"{kind}.yaml") for each in data["questions"]
    ]
    return {question.name: question for question in questions}


class Setting(NamedTuple):
    """The part of a problem that questions share."""

    variant: str = ""
    """``fp8 silu``; empty if the kind has none."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Those of the public functions, as the target or the caller declares them."""
    device: str = "cpu"
    seed: int = 0
    named: bool = True
    """False if a wrong answer need not say which mistake explains it, which takes most of the time."""


class UnfitError(Exception):
    """Raised by the builder of a problem for sizes that make no such problem."""


def declare(**declared: Any) -> Callable[[_Function], _Function]:
    """Return a decorator that declares options of the checks with a function, such as ``formats``.

    Also ``kind``, ``package`` (the package that is asked, if another one than the function's) and
    ``undefined``: question -> where the documentation leaves the case undefined.
    """

    def attach(function: _Function) -> _Function:
        function.moedoctor = declared  # type: ignore[attr-defined]
        return function

    return attach


def takes(function: Any, parameter: str) -> bool:
    """Return True if a function has that parameter, or takes any keyword."""
    parameters = inspect.signature(function).parameters
    return parameter in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def pad_rows(rows: Any, more: int, value: float) -> Any:
    """Return a tensor [T, N] as a part of wider rows, with `more` places of a value behind each."""
    count = rows.shape[1]
    wide = rows.new_full((len(rows), count + more), value)  # [T, N + more]
    wide[:, :count] = rows
    return wide[:, :count]


def requires(function: Any, parameter: str) -> bool:
    """Return True if a function cannot be called without that parameter."""
    found = inspect.signature(function).parameters.get(parameter)
    return found is not None and found.default is found.empty


class Verdict(str, enum.Enum):
    """The kinds of answers."""

    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
    """A Python error, before a wrong result could be used."""
    CRASHED = "crashed"
    """The process died, did not end, or lost the GPU."""
    SKIPPED = "skipped"
    """Not asked: the reason says why."""


@dataclass(frozen=True)
class Answer:
    """The answer of one implementation to one question."""

    question: str
    variant: str
    """Such as ``fp8 silu``; empty if the kind has none."""
    verdict: Verdict
    passes: bool
    """True if it is right, was not asked, or may be as it is: a refusal that is allowed, or documented."""
    reason: str | None = None
    """The fault in the answer, the error, or why it was not asked."""
    entry: str | None = None
    sizes: Sizes | None = None
    """The smallest failing example that was found; None for a right answer."""
    repeat: str | None = None
    """One line of Python that asks this again."""
    undefined: str | None = None
    """The place where the implementation documents that it leaves this case undefined."""

    @property
    def name(self) -> str:
        """The variant and the question."""
        return f"{self.variant} {self.question}".strip()


@dataclass(frozen=True)
class ConformSummary:
    """The number of answers of each kind, and how many of them do not pass."""

    right: int
    wrong: int
    refused: int
    crashed: int
    skipped: int
    failed: int


@dataclass(frozen=True)
class ConformReport:
    """The answers of one implementation to all questions of its kind."""

    command: ClassVar[str] = "conform"
    target: str
    kind: str
    package: str
    """The package that was asked, with its version: ``vllm 0.33.0``."""
    machine: str
    seed: int
    options: Mapping[str, Any]
    answers: tuple[Answer, ...] = field(default=())

    @property
    def summary(self) -> ConformSummary:
        verdicts = [answer.verdict for answer in self.answers]
        counts = {verdict.value: verdicts.count(verdict) for verdict in Verdict}
        return ConformSummary(**counts, failed=len(self.failed))

    @property
    def failed(self) -> Sequence[Answer]:
        return [answer for answer in self.answers if not answer.passes]

    @property
    def badge(self) -> str:
        """One line for a README: ``moedoctor router: 15 of 15 right``."""
        counts = self.summary
        asked = len(self.answers) - counts.skipped
        others = ((counts.wrong, "wrong"), (counts.crashed, "crashed"), (counts.refused, "refused"))
        more = "".join(f", {count} {word}" for count, word in others if count)
        return f"moedoctor {self.kind}: {counts.right} of {asked} right{more}"

    def __str__(self) -> str:
        lines = [f"{self.target} ({self.package}, {self.machine}, seed {self.seed})", self.badge]
        for answer in self.answers:
            if answer.verdict not in (Verdict.RIGHT, Verdict.SKIPPED):
                lines.append(f"  {answer.name}: {answer.verdict.value}: {answer.reason}")
                lines += [f"    {answer.repeat}"] if answer.repeat else []
        return "\n".join(lines)
