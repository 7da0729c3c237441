"""Tells for each fix and trace of the vLLM plug-in what is known of it in each release, from stored reports.

scripts/made_blocks.py writes it for `moedoctor check` and puts the table into docs/plugin.md. `make release`
asks a release if the patches fit its source.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from moedoctor.plugin.extensions import FIXES, TRACES, Basis

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "reports"
SOURCES = ROOT / "evidence" / "plugin_sources.json"
ENGINES = ROOT / "scenarios" / "engine"
EXTENSIONS = {**FIXES, **TRACES}


def evidence() -> dict[str, dict[str, Any]]:
    """Return what is known, release -> extension -> basis with reports or reason; oldest release first."""
    known: dict[str, dict[str, Any]] = {
        release: {name: dict(row) for name, row in rows.items()}
        for release, rows in json.loads(SOURCES.read_text(encoding="utf-8")).items()
    }
    for file in sorted(REPORTS.glob("*/*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        for name in ran_with(report):
            row = known.setdefault(report["environment"]["vllm"], {}).setdefault(name, {})
            reports = [*row.get("reports", ()), f"{file.parent.name}/{file.stem}"]
            row |= {"basis": Basis.RAN.value, "reports": reports}
    return dict(sorted(known.items(), key=lambda item: Version(item[0])))


def ran_with(report: Mapping[str, Any]) -> set[str]:
    """Return the extensions with which engines ran, as this stored report shows."""
    environment = report.get("environment") or {}
    if not (environment.get("vllm") and environment.get("gpu")):
        return set()
    if report["command"] == "replay":
        record = report["capsule"]["record"]
        same = record["packages"].get("vllm") == environment["vllm"]
        return {"record"} if same and "MOEDOCTOR_RECORD" in record["environment"] else set()
    if report["command"] == "bench":
        engines = (report["bench"].get("engines") or {}).get("engines", ())
        return _find_extensions(
            " ".join(row["settings"] for row in engines if not (row.get("failed") or row.get("wrong")))
        )
    if report["command"] != "run":
        return set()
    ran: set[str] = set()
    for scenario in report["scenarios"]:
        for case in scenario["cases"]:
            if (case["tier"], case["verdict"]) == ("engine", "clean"):
                active = str(case["evidence"].get("fixes") or "")
                ran |= {name for name in EXTENSIONS if re.search(rf"(^|; ){name} \(", active)}
        for claim in scenario["claims"]:
            rows = (claim.get("evidence") or {}).get("rows", ())
            decided = claim["verdict"] != "untested" and any("error" not in row for row in rows)
            file = ENGINES / Path(scenario.get("file") or "").name
            if decided and file.is_file():
                ran |= _find_extensions(file.read_text("utf-8"))
            # An engine counted layers that `moe` computed, whatever became of the engines beside it.
            if any(row.get("layers_by_moedoctor") and row["outcome"] == "same tokens" for row in rows):
                ran.add("moe")
    return ran


def _find_extensions(text: str) -> set[str]:
    """Return the extensions that variables in `text` name."""
    values = re.findall(r"\bMOEDOCTOR_(?:FIXES|TRACE)=([\w,]+)", text)
    named = {name for value in values for name in value.split(",")}
    return EXTENSIONS.keys() & (named | ({"record"} if "MOEDOCTOR_RECORD=" in text else set()))


def table(known: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the table, with a row for releases that are alike, and below it why something is refused."""
    lines = [
        f"| vLLM | {' | '.join(f'`{name}`' for name in EXTENSIONS)} |",
        "|---" * (len(EXTENSIONS) + 1) + "|",
    ]
    cells = {
        release: " | ".join(_cell(rows.get(name, {})) for name in EXTENSIONS)
        for release, rows in known.items()
    }
    for alike, group in itertools.groupby(cells, cells.__getitem__):
        lines.append(f"| {_span(list(group))} | {alike} |")
    lines.append("")
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for release, rows in known.items():
        for name, row in rows.items():
            if row.get("reason"):
                reasons.setdefault((name, row["basis"], row["reason"]), []).append(release)
    for (name, basis, reason), releases in reasons.items():
        alike = itertools.groupby(known, lambda release: release in releases)  # noqa: B023
        spans = ", ".join(_span(list(group)) for inside, group in alike if inside)
        lines.append(f"- `{name}` is {basis} in {spans}: {reason}.")
    return "\n".join(lines)


def _span(releases: list[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"


def _cell(row: Mapping[str, Any]) -> str:
    """Return the basis, and the first of the reports that it rests on."""
    links = [f"([report](../reports/{report}.md))" for report in row.get("reports", ())[:1]]
    return " ".join((row["basis"], *links)) if row else ""
