"""From scenarios to jobs: which cases there are, which cannot run here and why, what a filter keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moedoctor import catalogue
from moedoctor.environment import no_gpu
from moedoctor.interfaces import ClaimTest, Fault
from moedoctor.results import Case, Scalar, Tier
from moedoctor.scenario.file import Scenario


@dataclass(frozen=True)
class Options:
    """What the caller chose; the defaults run everything that can run."""

    subjects: tuple[str, ...] = ()
    """Only these subjects; empty means those of the scenario and every named release in `sources`."""
    only: tuple[tuple[str, str], ...] = ()
    """(key, value) pairs that a case must show: a parameter, or ``id``, ``name``, ``subject``, ``tier``."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Subject name -> path of its kernels."""
    timeout: float | None = None
    """Seconds for every case, in place of the scenario's own."""
    jobs: int = 1
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda:N``; auto is the first GPU that torch can use, else the CPU."""

    @property
    def partial(self) -> bool:
        """Whether some cases were left out on purpose."""
        return bool(self.subjects or self.only)


@dataclass(frozen=True)
class PlannedCase:
    """A case, and why it cannot run, if so."""

    case: Case
    skip: str | None


@dataclass(frozen=True)
class PlannedClaim:
    """One unit of a claim test, and why it cannot run, if so."""

    test: ClaimTest
    unit: str
    skip: str | None


def choose_device(wanted: str, environment: Mapping[str, Any]) -> str:
    """The device for cases that run anywhere."""
    if wanted != "auto":
        return wanted
    return "cpu" if no_gpu(environment) else "cuda:0"


def plan_cases(
    scenario: Scenario, fault: Fault, options: Options, environment: Mapping[str, Any]
) -> list[PlannedCase]:
    """Every case of the scenario that the options keep, the control's first."""
    device = choose_device(options.device, environment)
    planned = []
    for name in _subjects(scenario, fault, options):
        kind = catalogue.subject_kind(name) or ""
        provider = catalogue.subjects()[kind]
        for tier in (one for one in fault.tiers.get(kind, ()) if one in scenario.tiers):
            where = device if tier is Tier.MODEL else ("cpu" if tier is Tier.LIBRARY else _gpu(device))
            skip = provider.unavailable(fault, name, tier, options.sources, environment)
            for point in scenario.points:
                case = Case(scenario.id, name, tier, point, where)
                if fault.has_point(tier, point) and _kept(case, scenario, options):
                    planned.append(PlannedCase(case, skip))
    return planned


def plan_claims(
    scenario: Scenario, fault: Fault, options: Options, environment: Mapping[str, Any]
) -> list[PlannedClaim]:
    """The units of the scenario's claims that need a measurement of their own."""
    if options.partial:
        return []
    tests = {test.key: test for test in fault.claims}
    runnable = [
        name for name in _subjects(scenario, fault, options) if _runs(name, fault, options, environment)
    ]
    planned = []
    for claim in scenario.claims:
        test = tests[claim.key]
        if test.measure is None:
            continue
        skip = no_gpu(environment) if test.needs_gpu else None
        if options.device == "cpu" and test.needs_gpu:
            skip = "needs a GPU, and --device cpu was given"
        units = test.units(runnable)
        if not units:
            planned.append(PlannedClaim(test, "", skip or f"needs {test.needs}"))
        planned += [PlannedClaim(test, unit, skip) for unit in units]
    return planned


def _subjects(scenario: Scenario, fault: Fault, options: Options) -> Sequence[str]:
    named = sorted(
        (name for name in options.sources if catalogue.subject_kind(name) in fault.tiers), key=_release
    )
    every = list(dict.fromkeys([*scenario.subjects, *named]))
    return [name for name in every if not options.subjects or name in options.subjects]


def _release(name: str) -> Any:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(name.partition("@")[2])
    except InvalidVersion:
        return Version("0")


def _runs(name: str, fault: Fault, options: Options, environment: Mapping[str, Any]) -> bool:
    kind = catalogue.subject_kind(name) or ""
    provider = catalogue.subjects()[kind]
    return any(
        provider.unavailable(fault, name, tier, options.sources, environment) is None
        for tier in fault.tiers.get(kind, ())
    )


def _gpu(device: str) -> str:
    return device if device.startswith("cuda") else "cuda:0"


def _kept(case: Case, scenario: Scenario, options: Options) -> bool:
    facts: dict[str, Scalar] = {
        **case.parameters,
        "id": scenario.id,
        "name": scenario.name,
        "subject": case.subject,
        "tier": case.tier.value,
    }
    wanted: dict[str, set[str]] = {}
    for key, value in options.only:
        wanted.setdefault(key, set()).add(value.lower())
    return all(key in facts and str(facts[key]).lower() in values for key, values in wanted.items())
