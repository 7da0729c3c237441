"""The comparison of two reports, a baseline and a current one.

What is a regression (R), an improvement (I) or a note (N):

| what changed | |
|---|---|
| scenario's verdict, to a higher rank in `VERDICTS` | R |
| scenario `found` -> `absent` or `skipped`: the failure is not gone, it is no longer looked for | R |
| scenario to `found`, only through cases of named releases that were reproduced in the baseline too | N |
| scenario's verdict, to a lower rank: to `proved` or `found` I, to anything else | N |
| case ran and is now skipped; any case -> error | R |
| case -> what its subject should show (`faulty`: reproduced, others: clean) I, the opposite | R |
| named release (``vllm@0.19.1``) reproduced <-> clean: its kernels do not change, so the detection did | R |
| named release skipped or error -> reproduced or clean | I |
| case error -> skipped | N |
| claim confirmed -> refuted | R |
| claim in any other way: an untested claim decides nothing | N |
| scenario or case missing: R, in a partial run | N |
| scenario, case or claim new; claim missing | N |
| metric beyond its tolerance: worse R, better | I |
| metric not finite any more | R |
| metric new or missing | N |

In a partial run (chosen scenarios, subjects or cases) a scenario's verdict rests on fewer cases, so its
change to `skipped`, or to something better, is a note.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PureWindowsPath
from typing import Any, Literal, TypeVar

from moedoctor.results import (
    VERDICTS,
    CaseResult,
    CaseVerdict,
    ClaimResult,
    ClaimVerdict,
    Report,
    ScenarioResult,
    ScenarioVerdict,
    to_plain,
)
from moedoctor.text import shorten

_SAME_FOR_VERDICTS = ("gpu", "vllm", "flashinfer")
_SAME_FOR_METRICS = ("driver", "torch")
_RAN = (CaseVerdict.REPRODUCED, CaseVerdict.CLEAN)

_T = TypeVar("_T")
_Judged = ScenarioResult | CaseResult | ClaimResult
Outcome = Literal["regression", "improvement", "note"]


class Incomparable(ValueError):  # noqa: N818 (a fact about two reports)
    """Two reports about different machines or releases; the message names what differs."""


@dataclass(frozen=True)
class Change:
    """One difference between a baseline and a current report."""

    outcome: Outcome
    what: str
    """``verdict``, ``missing``, ``new``, ``environment``, or the dotted name of a metric."""
    baseline: Any
    """The value there; None if there is none."""
    current: Any
    reason: str
    scenario: str = ""
    """Catalogue id; empty if it is about the whole report."""
    case: str = ""
    """Subject, tier, device and parameters, or the claim's text; empty if it is about the scenario."""

    def __str__(self) -> str:
        where = " ".join(part for part in (self.scenario, self.case) if part)
        values = f" {_show(self.baseline)} -> {_show(self.current)}" if where else ""
        return f"{where or 'report'}: {self.what}{values}: {self.reason}"


@dataclass(frozen=True)
class Comparison:
    """The changes between two reports."""

    regressions: tuple[Change, ...] = ()
    improvements: tuple[Change, ...] = ()
    notes: tuple[Change, ...] = ()

    @property
    def findings(self) -> tuple[str, ...]:
        """The regressions in words, as `Report.findings` holds them."""
        return tuple(str(change) for change in self.regressions)


def compare(baseline: Report, current: Report, tolerance: Tolerance, *, partial: bool = False) -> Comparison:
    """Return what got worse, what got better and what cannot be decided, from `baseline` to `current`.

    `partial` says that the current run left out scenarios, subjects or cases on purpose. Metrics are
    compared only between equal GPUs, drivers, torch and vLLM versions (without a GPU also equal CPUs).
    Raises `Incomparable` if GPU, vLLM or FlashInfer differ: the verdicts are not about the same thing.
    """
    facts = baseline.environment, current.environment
    check_comparable(*facts)
    names = _SAME_FOR_METRICS if baseline.environment.get("gpu") else (*_SAME_FOR_METRICS, "cpu")
    changes: list[Change] = []
    if differing := _name_differing(*facts, names):
        changes.append(Change("note", "environment", None, None, f"metrics not compared: {differing}"))
    limits = None if differing else tolerance
    for _, before, after in _pair(baseline.scenarios, current.scenarios, _name_scenario):
        id = before.id if before else after.id if after else ""
        places: list[tuple[str, str, _Judged | None, _Judged | None]] = [("scenario", "", before, after)]
        if before and after:
            places += [("case", *pair) for pair in _pair(before.cases, after.cases, name_case)]
            places += [("claim", *pair) for pair in _pair(before.claims, after.claims, _name_claim)]
        for kind, key, old, new in places:
            found = _compare(kind, old, new, limits, partial)
            changes += (replace(change, scenario=id, case=key) for change in found)
    kinds: tuple[Outcome, ...] = ("regression", "improvement", "note")
    return Comparison(*(tuple(change for change in changes if change.outcome == kind) for kind in kinds))


def check_comparable(baseline: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise `Incomparable` if the two environments differ in GPU, vLLM or FlashInfer.

    `compare` does so itself; this is for checking before the current run.
    """
    if differing := _name_differing(baseline, current, _SAME_FOR_VERDICTS):
        raise Incomparable(f"this and the baseline cannot be compared: {differing}")


def list_held(baseline: Report, current: Report) -> tuple[ScenarioResult, ...]:
    """Return the scenarios whose failures are all of named releases and all in the baseline already."""
    pairs = _pair(baseline.scenarios, current.scenarios, _name_scenario)
    return tuple(after for _, before, after in pairs if before and after and _is_held(before, after))


def _is_held(before: ScenarioResult, after: ScenarioResult) -> bool:
    known = {name_case(case) for case in before.cases if case.verdict is CaseVerdict.REPRODUCED}
    affected = [case for case in after.cases if case.affected]
    return bool(affected) and all("@" in case.subject and name_case(case) in known for case in affected)


def expect_verdict(subject: str) -> CaseVerdict | None:
    """Return what a subject should show; None for a named release, which may show either."""
    if "@" in subject:
        return None
    return CaseVerdict.REPRODUCED if subject == "faulty" else CaseVerdict.CLEAN


def _compare(
    kind: str, before: _Judged | None, after: _Judged | None, limits: Tolerance | None, partial: bool
) -> Iterator[Change]:
    """Give what changed in one scenario, case or claim, without its parts."""
    if before is None:
        verdict = after.verdict.value if after else None
        yield Change("note", "new", None, verdict, f"the {kind} is not in the baseline")
    elif after is None:
        outcome: Outcome = "note" if partial or kind == "claim" else "regression"
        reason = f"the {kind} is in the baseline and not in this run"
        yield Change(outcome, "missing", before.verdict.value, None, reason)
    else:
        if before.verdict is not after.verdict:
            outcome, reason = _judge(before, after, partial)
            reason += f" ({after.reason})" if after.reason else ""
            yield Change(outcome, "verdict", before.verdict.value, after.verdict.value, reason)
        if limits is None:
            return
        old, new = (list_metrics(_select_evidence(judged)) for judged in (before, after))
        for name in dict.fromkeys((*old, *new)):
            if name not in old or name not in new:
                reason = "measured in only one of the two reports"
                yield Change("note", name, old.get(name), new.get(name), reason)
            elif judgement := judge_metric(name, old[name], new[name], limits):
                yield Change(judgement[0], name, old[name], new[name], judgement[1])


def _judge(before: _Judged, after: _Judged, partial: bool) -> tuple[Outcome, str]:
    """Return what it means that the verdict changed; see the table above."""
    if isinstance(before, ScenarioResult) and isinstance(after, ScenarioResult):
        if after.verdict is ScenarioVerdict.FOUND and _is_held(before, after):
            return "note", "the baseline holds what the named releases show"
        return _judge_scenario(before.verdict, after.verdict, partial)
    if isinstance(before, CaseResult) and isinstance(after, CaseResult):
        return _judge_case(before.subject, before.verdict, after.verdict)
    if (before.verdict, after.verdict) == (ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED):
        return "regression", "the claim does not hold any more"
    return "note", "the claim's verdict changed"


def _judge_scenario(before: ScenarioVerdict, after: ScenarioVerdict, partial: bool) -> tuple[Outcome, str]:
    lost = before is ScenarioVerdict.FOUND and after in (ScenarioVerdict.ABSENT, ScenarioVerdict.SKIPPED)
    worse = VERDICTS[after].rank > VERDICTS[before].rank
    if partial and (after is ScenarioVerdict.SKIPPED or not worse):
        return "note", "a partial run, which rests on fewer cases"
    if lost:
        return "regression", "the failure was not shown to be gone, it was not looked for"
    if worse:
        return "regression", "worse than the baseline"
    if after in (ScenarioVerdict.PROVED, ScenarioVerdict.FOUND):
        return "improvement", "better than the baseline"
    return "note", "different from the baseline, and no proof"


def _judge_case(subject: str, before: CaseVerdict, after: CaseVerdict) -> tuple[Outcome, str]:
    if after is CaseVerdict.ERROR:
        return "regression", "the case does not run to its end any more"
    if after is CaseVerdict.SKIPPED:
        ran = before in _RAN
        return ("regression", "the case does not run any more") if ran else ("note", "still no result")
    expected = expect_verdict(subject)
    if expected is None:
        if before in _RAN:
            return "regression", "a named release does not change, so what detects the failure did"
        return "improvement", "the case runs now"
    if after is expected:
        return "improvement", f"{subject} is {expected.value} now, as it should be"
    return "regression", f"{subject} should be {expected.value}"


def _select_evidence(judged: _Judged) -> Mapping[str, Any]:
    evidence = judged.conclusions if isinstance(judged, ScenarioResult) else judged.evidence
    # So that a report in memory and one read from a file give the same metrics.
    plain: Mapping[str, Any] = to_plain(evidence)
    return plain


def _name_differing(baseline: Mapping[str, Any], current: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(
        f"{name} differs (baseline {_show(baseline.get(name))}, current {_show(current.get(name))})"
        for name in names
        if baseline.get(name) != current.get(name)
    )


def _pair(
    before: Iterable[_T], after: Iterable[_T], key: Callable[[_T], str]
) -> Iterator[tuple[str, _T | None, _T | None]]:
    """Yield what has the same key in both, in the baseline's order; then what is new."""
    old, new = _number(before, key), _number(after, key)
    for place in dict.fromkeys((*old, *new)):
        yield place[0], old.get(place), new.get(place)


def _number(items: Iterable[_T], key: Callable[[_T], str]) -> Mapping[tuple[str, int], _T]:
    """Number the items of the same key: two scenario files may be about the same failure."""
    counts: Counter[str] = Counter()
    result: dict[tuple[str, int], _T] = {}
    for item in items:
        name = key(item)
        result[name, counts[name]] = item
        counts[name] += 1
    return result


def name_case(case: CaseResult) -> str:
    """Return the case in words, the same in every run and on each of several GPUs."""
    device = case.device.partition(":")[0]
    parameters = (f"{key}={json.dumps(to_plain(case.parameters[key]))}" for key in sorted(case.parameters))
    return " ".join((f"{case.subject}/{case.tier.value}/{device}", *parameters))


def _name_scenario(scenario: ScenarioResult) -> str:
    # The folder differs between machines and installations, and understands both kinds of slash here.
    return f"{scenario.id} {PureWindowsPath(scenario.file).name}"


def _name_claim(claim: ClaimResult) -> str:
    return f"claim: {claim.text} ({claim.source})"


def _show(value: Any) -> str:
    return "none" if value is None else (f"{value:.4g}" if isinstance(value, float) else str(value))


GROUPS: Mapping[str, tuple[str, ...]] = {
    "latency": ("_us", "_ms", "_seconds"),
    "ratio": ("_ratio",),
    "bandwidth": ("_gb_s",),
    "throughput": ("_per_second",),
}
_LOWER_IS_BETTER = frozenset({"latency", "ratio"})
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})
_PART = re.compile(r"(?:(?P<key>[A-Za-z_][\w.\[\]-]*)\s*[:=]\s*)?(?P<percent>\d{1,6}(?:\.\d{1,6})?)\s*%")
_MAX_PERCENT = 1000.0
_ROUNDING = 1e-9  # 1.05 against 1.0 is 5 % in decimals and a hair more in binary


def group_of(name: str) -> str | None:
    """Return the group of a metric, by the last part of its dotted name; None if it is not a metric."""
    last = name.rpartition(".")[2]
    return next((group for group, ends in GROUPS.items() if last.endswith(ends)), None)


def list_metrics(evidence: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the metrics in `evidence` by dotted name, e.g. ``rows[0].kernel_us``.

    A figure that was not finite is the text ``nan``, ``inf`` or ``-inf``, as in JSON.
    """
    return {name: value for name, value in _list_leaves(evidence, "") if group_of(name) and _is_figure(value)}


@dataclass(frozen=True)
class Tolerance:
    """The fraction of its baseline by which a metric may be worse."""

    default: float = 0.05
    by_key: Mapping[str, float] = field(default_factory=dict)
    """Metric name, the last part of a dotted one, or group name -> fraction; the most exact name decides."""

    @classmethod
    def parse(cls, text: str | Iterable[str]) -> Tolerance:
        """Read ``5%``, ``latency:5%,ratio:2%`` or several such texts (``kernel_us=3%``).

        Raises ValueError that names the part it cannot read, the unknown metric, or the one given twice.
        """
        texts = (text,) if isinstance(text, str) else tuple(text)
        limits: dict[str, float] = {}
        for part in (part.strip() for text in texts for part in text.split(",")):
            key, limit = _parse_part(part)
            if key in limits:
                raise ValueError(f"tolerance {part!r}: {key or 'the general tolerance'} is given twice")
            limits[key] = limit
        return cls(limits.pop("", cls.default), limits)

    def limit(self, name: str) -> float:
        """Return the tolerated fraction for the metric called `name`."""
        for key in (name, name.rpartition(".")[2], group_of(name) or ""):
            if key in self.by_key:
                return self.by_key[key]
        return self.default


def judge_metric(
    name: str, baseline: float | str, current: float | str, tolerance: Tolerance
) -> tuple[Outcome, str] | None:
    """Return what a metric's change from `baseline` to `current` means; None within the tolerance."""
    if isinstance(current, str) and not isinstance(baseline, str):
        return "regression", "is not a finite number any more"
    if isinstance(baseline, str) or isinstance(current, str):
        return None if baseline == current else ("note", "the baseline is not a finite number")
    if baseline <= 0:
        return None if baseline == current else ("note", "not compared, the baseline is not above zero")
    limit = tolerance.limit(name)
    change = (current - baseline) / baseline
    rise = change if group_of(name) in _LOWER_IS_BETTER else -change
    if abs(change) <= limit + _ROUNDING:
        return None
    words = f"{abs(change):.1%} {'higher' if change > 0 else 'lower'}, tolerated {limit * 100:g}%"
    return ("regression" if rise > 0 else "improvement"), words


def _parse_part(part: str) -> tuple[str, float]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"tolerance {shorten(part)!r}: expected a percentage such as 5%, or METRIC:5%")
    key, percent = match["key"] or "", float(match["percent"])
    if percent > _MAX_PERCENT:
        raise ValueError(f"tolerance {part!r}: expected 0% to {_MAX_PERCENT:.0f}%")
    if key and key not in GROUPS and group_of(key) is None:
        groups = ", ".join(GROUPS)
        raise ValueError(
            f"tolerance {part!r}: unknown metric {key}, expected one of {groups}, or a name like kernel_us"
        )
    return key, percent / 100


def _list_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _list_leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _list_leaves(item, f"{name}[{index}]")
    else:
        yield name, value


def _is_figure(value: Any) -> bool:
    if isinstance(value, str):
        return value in _NOT_FINITE
    return isinstance(value, (int, float)) and not isinstance(value, bool)
