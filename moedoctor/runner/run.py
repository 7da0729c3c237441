"""Runs a plan: every case and claim unit in a child of its own, then the verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import moedoctor
from moedoctor.processes import interrupts
from moedoctor.redaction import Redactor
from moedoctor.results import Report
from moedoctor.runner.judge import judge, summarize
from moedoctor.runner.plan import Plan, order_by_cost
from moedoctor.runner.pool import Finished, run_requests

Progress = Callable[[int, int, str], None]
"""(finished, total, what finished) -> None."""


def run(
    plans: Sequence[Plan],
    environment: Mapping[str, Any],
    *,
    parallel: int = 1,
    progress: Progress = lambda done, total, what: None,
    time_budget: float | None = None,
) -> Report:
    """Run the plans, up to `parallel` cases of the CPU at once, and return the report.

    On Ctrl-C, or after `time_budget` seconds, the children are killed and what finished is reported; what was
    left is in the `unfinished` of its scenario. Ctrl-C also sets `summary.interrupted`. The exit code is left
    to `moedoctor.gate`.
    """
    units = order_by_cost(plans)
    count = 0

    def note_finished(ended: Finished) -> None:
        nonlocal count
        count += 1
        progress(count, len(units), units[ended.index].label)

    progress(0, len(units), "starting")
    interrupted = False
    try:
        requests = [unit.request for unit in units]
        ended = run_requests(requests, parallel=parallel, on_finished=note_finished, seconds=time_budget)
    except interrupts.Interrupted as stop:
        ended, interrupted = stop.ended, True
    by_unit = {units[done.index]: done for done in ended}
    why = "interrupted" if interrupted else f"--time-budget {time_budget or 0:g} s ended"
    results = tuple(judge(plan, by_unit, why, parallel, environment.get("gpu")) for plan in plans)
    results = Redactor.from_this_process().record(results)
    summary = summarize(results, interrupted=interrupted)
    return Report("run", environment, results, summary, version=moedoctor.__version__)
