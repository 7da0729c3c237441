"""The plan of a run: the cases and claims of each scenario, and why some of them cannot run here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moedoctor import catalogue
from moedoctor.environment import explain_missing_gpu
from moedoctor.interfaces import Fault
from moedoctor.results import Case, Scalar, Tier
from moedoctor.runner.child import Request
from moedoctor.scenario.file import Scenario
from moedoctor.text import find_closest, shorten, suggest_expected, suggest_names

_TOGETHER = {Tier.MODEL: 4, Tier.ENGINE: 1}
"""Cases of a tier that share a GPU, whatever their failure: restated algorithms measure no time."""
_SUBJECTS = ("faulty", "fixed", "installed", "vllm@X.Y.Z", "flashinfer@X.Y.Z")


@dataclass(frozen=True)
class Options:
    """The choices of the caller; the defaults run everything that can run."""

    subjects: tuple[str, ...] = ()
    """Only these subjects; empty means those of the scenario and every named release in `sources`."""
    only: tuple[tuple[str, str], ...] = ()
    """(key, value) pairs that a case must have: a parameter, or ``id``, ``name``, ``subject``, ``tier``."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Subject name -> path of its kernels."""
    timeout: float | None = None
    """Seconds for every case, in place of the scenario's own."""
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda:N``; auto is the first GPU that torch can use, else the CPU."""
    capsules: str | None = None
    """The folder for MoE calls that turn out wrong; the control's are not kept."""

    @property
    def partial(self) -> bool:
        """True if some cases were left out on purpose."""
        return bool(self.subjects or self.only)


@dataclass(frozen=True, eq=False)
class Planned:
    """A case, or one unit of a claim test, or the reason why it cannot run."""

    request: Request
    skip: str | None
    label: str
    """The name to show while it runs."""
    short: bool = False
    """True if the caller gave it less time than the scenario file."""

    @property
    def kind(self) -> tuple[str, int]:
        """The failure, and the place of the tier among all tiers, from cheap to costly; claims come last."""
        tiers, case = list(Tier), self.request.case
        return self.request.fault, tiers.index(case.tier) if case else len(tiers)

    @property
    def case(self) -> Case:
        """The case; a unit of a claim has none."""
        assert self.request.case is not None
        return self.request.case


@dataclass(frozen=True)
class Plan:
    """The runs of one scenario, the cases of the control first."""

    scenario: Scenario
    fault: Fault
    cases: Sequence[Planned]
    claims: Mapping[str, Sequence[Planned]]
    """The units of each claim; claims with the same measurement share them."""
    problem: Exception | None = None
    """The error of the failure's own code, after which nothing can run."""

    @property
    def runs(self) -> list[Planned]:
        """Everything once: the cases, then the units of claims."""
        return [*self.cases, *dict.fromkeys(unit for units in self.claims.values() for unit in units)]


def order_by_cost(plans: Sequence[Plan]) -> list[Planned]:
    """Return what can run: the cheap tiers of all failures first, and in a tier the failure with least to do.

    A tier begins with the first case of each subject of every failure. The cost of a failure in a tier is the
    sum of the time limits of its cases.
    """
    units = [unit for plan in plans for unit in plan.runs if unit.skip is None]
    limits: Counter[tuple[str, int]] = Counter()
    for unit in units:
        limits[unit.kind] += int(unit.request.timeout / unit.request.together)
    begins: dict[Any, Planned] = {}
    for unit in units:
        begins.setdefault((*unit.kind, unit.request.case and unit.request.case.subject), unit)
    first = set(begins.values())
    return sorted(units, key=lambda unit: (unit.kind[1], unit not in first, limits[unit.kind]))


def plan(scenarios: Sequence[Scenario], options: Options, environment: Mapping[str, Any]) -> list[Plan]:
    """Return the plan of each scenario of which the options leave a case.

    Raises ValueError for a subject, id or GPU that does not exist, and if no case is left.
    """
    options = _check(options, environment)
    plans = []
    for scenario in scenarios:
        try:
            plans.append(_plan(scenario, options, environment))
        except Exception as error:  # a plug-in's; what a user can get wrong has been checked
            plans.append(Plan(scenario, catalogue.load_faults()[scenario.id], [], {}, error))
    if not options.partial:
        return plans
    if not any(scenario.cases or scenario.problem for scenario in plans):
        raise ValueError(
            "--only and --subject leave no case to run; `moedoctor run --format json` shows all parameters"
        )
    return [scenario for scenario in plans if scenario.cases or scenario.problem]


def _check(options: Options, environment: Mapping[str, Any]) -> Options:
    """Return the options with catalogue ids in place of what was given for them."""
    only = []
    for name in options.subjects:
        if catalogue.find_subject_kind(name) is None:
            raise ValueError(f"--subject {shorten(name)}: {suggest_expected(name, _SUBJECTS)}")
    for key, value in options.only:
        fault = catalogue.find_fault(value) if key == "id" else None
        if key == "id" and fault is None:
            hint = suggest_names(find_closest(value, catalogue.load_faults()))
            expected = "expected KEY=VALUE, such as experts=128, or a catalogue id"
            raise ValueError(f"--only {value}: {hint}{' ' if hint else ''}{expected}")
        only.append((key, fault.id if fault else value))
    if options.device.startswith("cuda"):
        reason = explain_missing_gpu(environment)
        if reason is None and int(options.device.partition(":")[2]) >= len(environment.get("gpus") or ()):
            reason = "there is no such GPU"
        if reason is not None:
            raise ValueError(f"--device {options.device}: {reason}")
    return replace(options, only=tuple(only))


def _plan(scenario: Scenario, options: Options, environment: Mapping[str, Any]) -> Plan:
    fault = catalogue.load_faults()[scenario.id]
    timeout = options.timeout or scenario.timeout
    short = timeout < scenario.timeout
    device = options.device
    if device == "auto":
        device = "cpu" if explain_missing_gpu(environment) else "cuda:0"
    cases: list[Planned] = []
    runnable: list[str] = []
    for name in _choose_subjects(scenario, fault, options):
        kind = catalogue.find_subject_kind(name) or ""
        provider = catalogue.load_subjects()[kind]
        tiers = fault.tiers.get(kind, ())
        skips = {
            tier: provider.unavailable(fault, name, tier, options.sources, environment) for tier in tiers
        }
        if None in skips.values():
            runnable.append(name)
        for tier in (tier for tier in tiers if tier in scenario.tiers):
            for point in scenario.points:
                case = Case(scenario.id, name, tier, point, _choose_device(fault, tier, device))
                if fault.has_point(tier, point) and _is_selected(case, fault, options):
                    together = _TOGETHER.get(tier, fault.together)
                    request = Request(
                        fault.id,
                        options.sources,
                        timeout,
                        case=case,
                        device=case.device,
                        together=together,
                        capsules=None if kind == "faulty" else options.capsules,
                    )
                    cases.append(Planned(request, skips[tier], f"{fault.name} {name}", short))
    if options.partial:
        return Plan(scenario, fault, cases, {})
    gpu = next((planned.request.device for planned in cases if planned.request.device != "cpu"), "cuda:0")
    claims: dict[str, list[Planned]] = {}
    measured: dict[tuple[Any, ...], Planned] = {}
    tests = {test.key: test for test in fault.claims}
    for test in (tests[claim.key] for claim in scenario.claims):
        if test.measure is None:
            continue
        skip = explain_missing_gpu(environment) if test.needs_gpu else None
        if options.device == "cpu" and test.needs_gpu:
            skip = "needs a GPU, and --device cpu was given"
        units = test.units(runnable)
        if not units:
            units, skip = [""], skip or f"needs {test.needs}"
        device = gpu if test.needs_gpu else "cpu"
        for place, unit in enumerate(units):
            request = Request(fault.id, options.sources, timeout, claim=test.key, unit=unit, device=device)
            planned = Planned(request, skip, f"{fault.name} claim {test.key}")
            turn = list(units[:place]).count(unit)  # a unit that comes again is measured again
            shared = measured.setdefault((test.measure, unit, device, skip, turn), planned)
            claims.setdefault(test.key, []).append(shared)
    return Plan(scenario, fault, cases, claims)


def _choose_subjects(scenario: Scenario, fault: Fault, options: Options) -> Sequence[str]:
    named = [name for name in options.sources if catalogue.find_subject_kind(name) in fault.tiers]
    every = dict.fromkeys([*scenario.subjects, *sorted(named, key=_release)])
    return [name for name in every if not options.subjects or name in options.subjects]


def _release(name: str) -> Any:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(name.partition("@")[2])
    except InvalidVersion:
        return Version("0")


def _choose_device(fault: Fault, tier: Tier, device: str) -> str:
    """Return where a tier runs: real kernels and engines always on a GPU, library code never."""
    if tier is Tier.LIBRARY or (tier is Tier.MODEL and fault.restated_on_cpu):
        return "cpu"
    return device if tier is Tier.MODEL or device.startswith("cuda") else "cuda:0"


def _is_selected(case: Case, fault: Fault, options: Options) -> bool:
    """Return True if the case has, for each key of ``--only``, one of the values given for it."""
    facts: dict[str, Scalar] = {
        **case.parameters,
        "id": fault.id,
        "name": fault.name,
        "subject": case.subject,
        "tier": case.tier.value,
    }
    chosen: dict[str, set[str]] = {}
    for key, value in options.only:
        chosen.setdefault(key, set()).add(value.lower())
    return all(key in facts and str(facts[key]).lower() in values for key, values in chosen.items())
