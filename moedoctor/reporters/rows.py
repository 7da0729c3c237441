"""Cases arranged for reading: grouped by subject, shared parameters said once, equal skips in one row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moedoctor.reporters.text import clean, deciding_figure, one_line, short_parameters, short_value
from moedoctor.results import CaseResult, CaseVerdict, Scalar


@dataclass(frozen=True)
class Row:
    """One line of a table of cases."""

    parameters: Mapping[str, str]
    """Those that vary within the scenario and are not null, as short text."""
    verdict: CaseVerdict
    figure: str
    """What decides the verdict."""
    cases: int = 1
    """How many cases share the row; more than one only where they were skipped for the same reason."""

    @property
    def label(self) -> str:
        """``experts=128 top_k=8``, or ``24 cases``."""
        if self.cases > 1:
            return f"{self.cases} cases"
        return " ".join(f"{key}={value}" for key, value in self.parameters.items())


@dataclass(frozen=True)
class Group:
    """The rows of one subject at one tier on one device."""

    subject: str
    tier: str
    device: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """``vllm@0.19.1 · kernel · cuda:0``; the CPU goes without saying."""
        return " · ".join((self.subject, self.tier, *(() if self.device == "cpu" else (self.device,))))


@dataclass(frozen=True)
class CrashNote:
    """How a child died, and which cases died just so."""

    where: str
    """The first of the cases."""
    others: int
    death: str
    message: str
    stderr_tail: tuple[str, ...]


def shared_parameters(cases: Sequence[CaseResult]) -> dict[str, Scalar]:
    """The parameters that have the same value in every case."""
    if not cases:
        return {}
    first = cases[0].parameters
    return {key: value for key, value in first.items() if all(_has(case, key, value) for case in cases)}


def group_cases(cases: Sequence[CaseResult]) -> tuple[Group, ...]:
    """The cases by subject, tier and device, in the order in which these first appear."""
    shared = shared_parameters(cases)
    groups: dict[tuple[str, str, str], list[CaseResult]] = {}
    for case in cases:
        groups.setdefault((case.subject, case.tier.value, case.device), []).append(case)
    return tuple(
        Group(one_line(subject), tier, one_line(device), tuple(_rows(members, shared)))
        for (subject, tier, device), members in groups.items()
    )


def crash_notes(cases: Iterable[CaseResult]) -> tuple[CrashNote, ...]:
    """The deaths among the cases; those that look the same are told once, with their number."""
    deaths: dict[tuple[str, str, tuple[str, ...]], list[CaseResult]] = {}
    for case in cases:
        if "death" in case.evidence:
            tail = case.evidence.get("stderr_tail") or ()
            lines = [tail] if isinstance(tail, str) else [str(line) for line in tail]
            cleaned = tuple(part for line in lines for part in clean(line).split("\n"))
            death = one_line(str(case.evidence["death"])).replace("_", " ")
            message = one_line(str(case.evidence.get("message", "")))
            deaths.setdefault((death, message, cleaned), []).append(case)
    return tuple(
        CrashNote(_where(members[0]), len(members) - 1, death, message, tail)
        for (death, message, tail), members in deaths.items()
    )


def _rows(cases: Sequence[CaseResult], shared: dict[str, Scalar]) -> Iterator[Row]:
    skips: dict[str, int] = {}
    for case in cases:
        if case.verdict is CaseVerdict.SKIPPED:
            skips[deciding_figure(case)] = skips.get(deciding_figure(case), 0) + 1
    for case in cases:
        figure = deciding_figure(case)
        number = skips.pop(figure, 0) if case.verdict is CaseVerdict.SKIPPED else 1
        if number == 1:
            varying = ((k, v) for k, v in case.parameters.items() if k not in shared and v is not None)
            parameters = {one_line(key): short_value(value) for key, value in varying}
            yield Row(parameters, case.verdict, figure)
        elif number:
            yield Row({}, case.verdict, figure, number)


def _has(case: CaseResult, key: str, value: Scalar) -> bool:
    # Python takes True for 1 and 1 for 1.0; a reader does not.
    return key in case.parameters and repr(case.parameters[key]) == repr(value)


def _where(case: CaseResult) -> str:
    return " ".join(
        filter(None, (one_line(case.subject), case.tier.value, short_parameters(case.parameters)))
    )
