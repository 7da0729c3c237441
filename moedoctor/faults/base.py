"""Parts of a known failure: the interface, typed parameters, and claims.

`moedoctor.interfaces` defines the interface. Other projects import it from here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, model_validator

from moedoctor.interfaces import ClaimJudgement as ClaimJudgement
from moedoctor.interfaces import ClaimTest as ClaimTest
from moedoctor.interfaces import Explanation as Explanation
from moedoctor.interfaces import Fault as Fault
from moedoctor.interfaces import Judgement as Judgement
from moedoctor.interfaces import Measurement as Measurement
from moedoctor.results import (
    Case,
    CaseResult,
    CaseVerdict,
    ClaimVerdict,
    Evidence,
    Observation,
    Scalar,
    Tier,
    UnavailableError,
)


class Parameters(BaseModel):
    """The parameters of one case. Unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def problems(self) -> Iterator[str]:
        """Yield why the values do not fit together, each as ``parameter: what is wrong``."""
        yield from ()

    @model_validator(mode="after")
    def _fits(self) -> Parameters:
        for problem in (*self._find_misfits(), *self.problems()):
            raise ValueError(problem)
        return self

    def _find_misfits(self) -> Iterator[str]:
        yield from ()


class RoutedParameters(Parameters):
    """Parameters with `experts` and `top_k`, and maybe `ranks` and `rank`, which must fit together."""

    def _find_misfits(self) -> Iterator[str]:
        given = {"ranks": 1, "rank": 0, **self.model_dump()}
        experts, top_k, ranks, rank = (given[name] for name in ("experts", "top_k", "ranks", "rank"))
        if top_k > experts:
            yield f"top_k: {top_k} is more than experts {experts}"
        if experts % ranks:
            yield f"ranks: {ranks} does not divide experts {experts}"
        if rank >= ranks:
            yield f"rank: must be below ranks {ranks}, not {rank}"


class EngineFault(Fault):
    """A failure with two kinds of points: those that give the parameter `engine_by` are for real engines."""

    engine_by: str = "engine"
    engine_summary: str = "engines, {engine}"
    """As `summary`, of those points."""

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        return (parameters[self.engine_by] is not None) == (tier is Tier.ENGINE)

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        if parameters[self.engine_by] is not None:
            return self.engine_summary.format(**parameters)
        return super().describe(parameters)


class CountFault(Fault):
    """A failure whose evidence counts what is wrong, see `judge_counts`."""

    symptoms: ClassVar[Mapping[str, str]]
    """Key of the evidence -> the figure if it counts something; the first one decides."""
    right: str
    """The figure if no symptom was counted."""

    def judge(self, case: Case, observation: Observation) -> Judgement:
        return judge_counts(observation.evidence, self.symptoms, self.right)


def list_tiers(*ours: Tier, **others: Tier) -> dict[str, tuple[Tier, ...]]:
    """Return `Fault.tiers`: those of ``faulty`` and ``fixed``, and the tier of each other kind of subject."""
    return {"faulty": ours, "fixed": ours, **{kind: (tier,) for kind, tier in others.items()}}


@dataclass(frozen=True)
class ClaimCases:
    """The cases, measurements and thresholds that a claim is judged by."""

    cases: Sequence[CaseResult]
    """All cases of the scenario, skipped ones included."""
    measurements: Sequence[Measurement]
    """The measurements of the claim's own units; empty for a claim that the cases decide."""
    limits: Mapping[str, float]
    """The thresholds from the scenario file, by name."""

    def select(
        self, *, subject: str | None = None, tier: Tier | None = None, has: str | None = None
    ) -> list[CaseResult]:
        """Return the cases with evidence that match. `has` names a key that the evidence must hold."""
        return [
            case
            for case in self.cases
            if case.evidence
            and subject in (None, case.subject)
            and tier in (None, case.tier)
            and (has is None or has in case.evidence)
        ]

    def evidence(self) -> list[Evidence]:
        """Return what the units measured. Units that were skipped or died are left out."""
        return [evidence for _, evidence in self.measured()]

    def measured(self) -> list[tuple[str, Evidence]]:
        """Return (unit, what it measured). Units that were skipped or died are left out."""
        return [
            (measurement.unit, measurement.outcome.evidence)
            for measurement in self.measurements
            if isinstance(measurement.outcome, Observation)
        ]

    def rows(self, *, unit_as: str | None = None) -> list[dict[str, Any]]:
        """Return the ``rows`` of all units, in order; `unit_as` is a key for the unit's name in each row."""
        return [
            {**({unit_as: unit} if unit_as else {}), **row}
            for unit, figures in self.measured()
            for row in figures["rows"]
        ]

    def keeps(self, limit: str, values: float | str | Iterable[float | str]) -> bool:
        """Return whether every one of `values` keeps the threshold `limit`; False without any value.

        A threshold ``min_...`` is the least that is allowed, any other the most.
        """
        # A figure that is not finite is text in a report; NaN keeps no threshold.
        figures = [float(value) for value in ([values] if isinstance(values, (int, float, str)) else values)]
        bound = self.limits[limit]
        return bool(figures) and all(
            figure >= bound if limit.startswith("min_") else figure <= bound for figure in figures
        )


@functools.cache
def in_lab(function: str) -> Callable[[str, str, Mapping[str, str]], Observation]:
    """Return a `measure` for `claim`: a function such as ``moedoctor.bench.cache.groups:measure_cold_swap``.

    Only the child imports it. It is given those of ``unit``, ``device`` and ``sources`` (subject name -> path
    of its kernels) that it has parameters for, and returns an Observation, its evidence, or its rows. Claims
    with the same text share what it measured.
    """
    module, _, name = function.partition(":")

    def measure(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
        experiment = getattr(importlib.import_module(module), name)
        wanted = signature(experiment).parameters
        offered = {"unit": unit, "device": device, "sources": sources}
        answer = experiment(**{key: value for key, value in offered.items() if key in wanted})
        if isinstance(answer, list):
            answer = {"rows": answer}
        return answer if isinstance(answer, Observation) else Observation(answer)

    measure.__qualname__ = function
    return measure


def need_gpu() -> None:
    """Raise UnavailableError, which skips the case, if torch can use no GPU here. For labs."""
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("needs an NVIDIA GPU that torch can use")


def claim(key: str, **options: Any) -> Callable[[Callable[[ClaimCases], ClaimJudgement]], ClaimTest]:
    """Make a `ClaimTest` of the function below. `options` are the other fields of `ClaimTest`.

    `measure` may also be the text that `in_lab` takes.
    """
    if isinstance(options.get("measure"), str):
        options["measure"] = in_lab(options["measure"])

    def decorate(judge: Callable[[ClaimCases], ClaimJudgement]) -> ClaimTest:
        def judge_all(
            cases: Sequence[CaseResult], measurements: Sequence[Measurement], limits: Mapping[str, float]
        ) -> ClaimJudgement:
            return judge(ClaimCases(cases, measurements, limits))

        judge_all.__doc__ = judge.__doc__
        return ClaimTest(key, judge_all, **options)

    return decorate


def decide(holds: bool, evidence: Evidence, reason: str | None = None) -> ClaimJudgement:
    """Return confirmed if the claim holds, else refuted, with the figures and what they mean."""
    return ClaimJudgement(ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED, evidence, reason)


def untested(reason: str, evidence: Evidence | None = None) -> ClaimJudgement:
    return ClaimJudgement(ClaimVerdict.UNTESTED, evidence or {}, reason)


def judge_counts(evidence: Evidence, symptoms: Mapping[str, str], clean: str) -> Judgement:
    """Return reproduced with the figure of the first key of `symptoms` that counts something, else `clean`.

    Figures are format strings: ``{}`` is the count, and ``{rows}`` any other key of the evidence.
    """
    for key, figure in symptoms.items():
        if evidence.get(key):
            return Judgement(CaseVerdict.REPRODUCED, figure.format(evidence[key], **evidence))
    return Judgement(CaseVerdict.CLEAN, clean.format(**evidence))


def only(name: str) -> Callable[[Sequence[str]], Sequence[str]]:
    """Return the `units` of a claim that is about the subject `name` alone."""
    return lambda subjects: [subject for subject in subjects if subject == name]


def group_by_release(results: Iterable[CaseResult], has: str | None = None) -> dict[str, list[CaseResult]]:
    """Return named release of vLLM -> its cases with evidence that holds `has`, oldest release first."""
    groups: dict[str, list[CaseResult]] = {}
    for case in results:
        if case.subject.startswith("vllm@") and case.evidence and (has is None or has in case.evidence):
            groups.setdefault(case.subject.removeprefix("vllm@"), []).append(case)
    return {name: groups[name] for name in sorted(groups, key=Version)}


def find_first_after(releases: Sequence[str], failing: Sequence[str]) -> str | None:
    """Return the first of `releases` behind the last failing one; None if none fails, or none follows."""
    after = releases[releases.index(failing[-1]) + 1 :] if failing else ()
    return after[0] if after else None


def releases(subjects: Sequence[str], kind: str) -> list[str]:
    """Return the named releases of `kind`, oldest first, then ``installed`` if it is there."""
    named = [subject for subject in subjects if subject.startswith(f"{kind}@")]
    named.sort(key=lambda subject: Version(subject.partition("@")[2]))
    return [*named, *(subject for subject in subjects if subject == "installed")]
