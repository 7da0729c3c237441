"""`moedoctor check` as text: JSON, and Markdown for an issue; `check_table` has the one for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from moedoctor.diagnose.check.records import SEVERITIES, CheckResult
from moedoctor.reporters.check_facts import fact_rows
from moedoctor.reporters.markdown import escape
from moedoctor.reporters.text import figures
from moedoctor.results import SCHEMA_VERSION, plain

FORMATS = ("table", "json", "markdown")
PROBLEMS = "What does not work together"
CAN_STRIKE = "Known failures that can strike here"
DEPENDS = "Not decided by this machine"
_DEPENDS_LONG = "Whether these strike depends on the checkpoint, the model or your own code:"


def check_json(result: CheckResult) -> str:
    """The result as JSON (schema_version 1), ``evidence`` where triage has ``excerpt``."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "moedoctor": result.version,
        "command": "check",
        "findings": [asdict(one) for one in result.findings],
        "conditional": [asdict(one) for one in result.conditional],
        "problems": [asdict(one) for one in result.problems],
        "environment": dict(result.environment),
        "summary": {**_counts(result), "exit_code": result.exit_code},
    }
    return json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def check_markdown(result: CheckResult) -> str:
    """The result for an issue: the findings first, the facts in a table behind them."""

    def lines() -> Iterator[str]:
        yield f"# moedoctor {escape(result.version)}: check"
        yield from ("", f"**{escape(summary_line(result))}**", "")
        if result.findings:
            yield from (
                f"## {CAN_STRIKE}",
                "",
                "| entry | severity | why | needs | seen | next |",
                "|---|---|---|---|---|---|",
            )
            for one in result.findings:
                yield _row(
                    f"{one.id} {one.name}",
                    one.severity,
                    one.why,
                    one.needs or "",
                    seen(one.evidence),
                    one.next_step,
                )
            yield ""
        if result.problems:
            yield from (
                f"## {PROBLEMS}",
                "",
                "| what | severity | why | next |",
                "|---|---|---|---|",
            )
            for problem in result.problems:
                yield _row(problem.what, problem.severity, problem.why, problem.next_step)
            yield ""
        yield from ("## Environment", "", "| fact | value |", "|---|---|")
        for name, text in fact_rows(result.environment):
            yield _row(name, text)
        if result.conditional:
            yield from ("", f"## {DEPENDS}", "", _DEPENDS_LONG, "")
            for one in result.conditional:
                yield f"- {escape(f'{one.id} {one.name}: {one.needs or one.why}')}"

    return "\n".join(lines()) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(map(escape, cells))} |"


def summary_line(result: CheckResult) -> str:
    """``2 errors · 1 warning · 0 problems · 5 not decided here · 0 facts missing``."""
    counts = _counts(result)
    missing = len(result.environment.get("collector_errors") or {})
    return " · ".join(
        (
            _many(counts["error"], "error"),
            _many(counts["warning"], "warning"),
            _many(counts["problems"], "problem"),
            f"{counts['conditional']} not decided here",
            f"{_many(missing, 'fact')} missing",
        )
    )


def _counts(result: CheckResult) -> dict[str, int]:
    severities = {name: sum(one.severity == name for one in result.findings) for name in SEVERITIES[:2]}
    return {**severities, "problems": len(result.problems), "conditional": len(result.conditional)}


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def seen(evidence: Mapping[str, Any]) -> str:
    """``vllm 0.18.0, wsl true``."""
    return ", ".join(f"{name.removeprefix('variables.')} {text}" for name, text in figures(evidence))
