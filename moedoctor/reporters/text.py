"""Text that the formats share: values on one line, and the line of counts at the end."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from moedoctor.results import CaseResult, CaseVerdict, Evidence, Report, Scalar, ScenarioVerdict
from moedoctor.text import join_lines, shorten

Unit = tuple[str, float, int]
_FACTS = ("gpu", "driver", "torch", "vllm", "flashinfer", "python")
_LISTED = 6
_LONG = 160
UNSTEADY = 0.2
"""Share of the median by which p20 and p80 of a time may differ."""
UNSTEADY_REMARK = (
    f"! p20 and p80 differ by more than {UNSTEADY:.0%} of the median, so the figure is worthless for "
    f"differences of {UNSTEADY:.0%}. End other work on this machine, and measure again."
)
TIMES = (("s", 1e6, 3), ("ms", 1e3, 3), ("µs", 1.0, 1), ("ns", 1e-3, 0))
SIZES = (("GiB", 2.0**30, 2), ("MiB", 2.0**20, 1), ("KiB", 2.0**10, 1), ("bytes", 1.0, 0))
"""Unit, its size in microseconds or bytes, and its decimals."""


def format_value(value: Any) -> str:
    """Return a value from evidence on one line: numbers with four digits, long text and long lists cut."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0") if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(format_value(element) for element in value[:_LISTED])
        return f"[{shown}, … {len(value)} in all]" if len(value) > _LISTED else f"[{shown}]"
    if isinstance(value, Mapping):
        pairs = (f"{join_lines(str(key))}: {format_value(inner)}" for key, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    return shorten(join_lines(str(value)), _LONG)


def format_parameters(parameters: Mapping[str, Scalar]) -> str:
    """Return ``tokens=128 top_k=8``, without the parameters that are null."""
    given = ((key, value) for key, value in parameters.items() if value is not None)
    return " ".join(f"{join_lines(key)}={format_value(value)}" for key, value in given)


def list_figures(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Give the evidence as (name, short text). Nested mappings get dotted names; empty ones are left out."""
    for key, value in evidence.items():
        name = join_lines(str(key))
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", text) for inner, text in list_figures(value))
        else:
            yield name, format_value(value)


def format_evidence(evidence: Evidence) -> str:
    """Return ``kernel_us = 3.43, clamped_us = 3.43``."""
    return ", ".join(f"{name} = {text}" for name, text in list_figures(evidence))


def explain_case(case: CaseResult) -> str:
    """Return what decides a case's verdict: its figure, or why it was skipped or went wrong."""
    figure, reason = join_lines(case.figure), join_lines(case.reason or "")
    if case.verdict is CaseVerdict.SKIPPED:
        return reason or figure
    if figure and "death" in case.evidence:
        return figure  # the message is shown with the child's last words
    if figure and reason and reason != figure:
        return f"{figure}: {reason}"
    return figure or reason or format_evidence({k: v for k, v in case.evidence.items() if k != "stderr_tail"})


def format_environment(report: Report) -> str:
    """Return ``moedoctor 0.1.0 run · gpu none · torch 2.13.0 · …``: the facts that verdicts depend on."""
    facts = format_facts(report.environment)
    return " · ".join(filter(None, (join_lines(f"moedoctor {report.version} {report.command}"), facts)))


def format_facts(environment: Mapping[str, Any]) -> str:
    """Return ``gpu none · torch 2.13.0 · …``: the facts that verdicts depend on, if they are known."""
    return " · ".join(f"{name} {format_value(environment[name])}" for name in _FACTS if name in environment)


def summarize(report: Report) -> str:
    """Return ``1 proved · 0 found · … — cases: 24 reproduced, …``, counted from the scenarios."""
    verdicts = Counter(scenario.verdict for scenario in report.scenarios)
    cases = Counter(case.verdict for scenario in report.scenarios for case in scenario.cases)
    scenarios = " · ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in ScenarioVerdict)
    always = (CaseVerdict.REPRODUCED, CaseVerdict.CLEAN, CaseVerdict.SKIPPED)
    shown = (verdict for verdict in CaseVerdict if verdict in always or cases[verdict])
    return f"{scenarios} — cases: " + ", ".join(f"{cases[verdict]} {verdict.value}" for verdict in shown)


def is_unsteady(median: float, low: float, high: float) -> bool:
    """Return whether p20 and p80 of a time differ by more than `UNSTEADY` of its median.

    If the middle 60 % of the measurements of one call differ by 20 %, a difference of that size between two
    calls says nothing.
    """
    return high - low > UNSTEADY * median


def has_unsteady(row: Mapping[str, Any]) -> bool:
    """Return whether `is_unsteady` holds for a figure of a record that has ``_p20`` and ``_p80``."""
    return any(
        is_unsteady(value, row[f"{key}_p20"], row[f"{key}_p80"])
        for key, value in row.items()
        if f"{key}_p20" in row and f"{key}_p80" in row
    )


def choose_unit(values: Collection[float], units: Sequence[Unit] = TIMES) -> Unit:
    """Return the largest of `units` in which the median of `values` is at least 1, or the smallest one."""
    middle = statistics.median_low(values) if values else 0.0
    return next((unit for unit in units if middle >= unit[1]), units[-1])


def count_of(number: int, noun: str) -> str:
    """Return ``1 file`` or ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
