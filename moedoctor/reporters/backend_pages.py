"""Writes the selection reports of `reports/backends`: one table a GPU family, over all releases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import moedoctor
from moedoctor.fixes.backends import Selection, select
from moedoctor.fixes.backends.release_tables import SCHEMES, releases
from moedoctor.reporters.output import write
from moedoctor.results import SCHEMA_VERSION

FAMILIES = {
    "7.5": "Turing (T4, RTX 20)",
    "8.0": "Ampere (A100)",
    "8.9": "Ada (L4, L40S, RTX 40)",
    "9.0": "Hopper (H100, H200, GH200)",
    "10.0": "Blackwell (B200, GB200)",
    "10.3": "Blackwell Ultra (B300, GB300)",
    "11.0": "Thor",
    "12.0": "Blackwell (RTX 50, RTX PRO 6000)",
    "12.1": "GB10 (DGX Spark)",
}
ACTIVATIONS = {
    "silu": "",
    "relu2_no_mul": " without a gate (relu2, as Nemotron)",
    "swigluoai": " as gpt-oss (swigluoai)",
}
PARALLEL = {"tp": (False, False), "ep": (True, False), "dp": (False, True), "dp+ep": (True, True)}
LAYERS = (
    *((scheme, "silu") for scheme in SCHEMES if scheme != "mxfp4"),
    ("nvfp4", "relu2_no_mul"),
    ("mxfp4", "swigluoai"),
)
"""The layers that the reports are about: each scheme as most models have it, and the two well-known
exceptions."""


@dataclass(frozen=True)
class Line:
    """What a run of releases does with one layer, under one or more parallel settings."""

    parallel: tuple[str, ...]
    selections: tuple[Selection, ...]
    """One a release; they say the same."""

    @property
    def first(self) -> Selection:
        """The oldest release's."""
        return self.selections[0]

    @property
    def releases(self) -> str:
        """The run of releases, in words."""
        last = self.selections[-1].release
        return last if last == self.first.release else f"{self.first.release} to {last}"


def write_reports(folder: Path) -> list[Path]:
    """Write ``sm75.md``, ``json/sm75.json`` … and an index into `folder`, which is made where it is
    missing."""
    (folder / "json").mkdir(parents=True, exist_ok=True)
    texts = {folder / "README.md": _index()}
    for capability, name in FAMILIES.items():
        lines = [line for scheme, activation in LAYERS for line in _lines(capability, scheme, activation)]
        stem = f"sm{capability.replace('.', '')}"
        texts[folder / f"{stem}.md"] = report_markdown(capability, name, lines)
        texts[folder / "json" / f"{stem}.json"] = report_json(capability, name, lines)
    for file, text in texts.items():
        write(file, text)
    return list(texts)


def report_json(capability: str, name: str, lines: Sequence[Line]) -> str:
    """Every selection with the reasons, one line a run of releases."""
    head: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "moedoctor": moedoctor.__version__,
        "command": "backends",
        "capability": capability,
        "gpu": name,
    }
    rows = ",\n  ".join(json.dumps(_plain(line), ensure_ascii=False) for line in lines)
    return json.dumps(head, ensure_ascii=False)[:-1] + f', "selections": [\n  {rows}\n]}}\n'


def report_markdown(capability: str, name: str, lines: Sequence[Line]) -> str:
    """One table, a row a layer, parallel setting and run of releases."""
    text = [
        f"# MoE backends on compute capability {capability}: {name}",
        "",
        "What each vLLM release selects by itself, with the optional libraries that it requires or brings;",
        "`--moe-backend` takes the value in brackets. Every backend and its reason is in the JSON file.",
        "",
        "| layer | parallel | releases | selected | would also work | passed over before it, and why |",
        "|---|---|---|---|---|---|",
    ]
    runs: list[list[Line]] = []
    for line in lines:
        if runs and _cells(runs[-1][-1]) == _cells(line):
            runs[-1].append(line)
        else:
            runs.append([line])
    text += map(_row, runs)
    return "\n".join(text) + "\n"


def _lines(capability: str, scheme: str, activation: str) -> list[Line]:
    runs: dict[str, list[Line]] = {}
    for parallel, (ep, dp) in PARALLEL.items():
        found: list[list[Selection]] = []
        for release in releases():
            one = select(capability, scheme, release=release, ep=ep, dp=dp, activation=activation)
            if found and _said(found[-1][-1]) == _said(one):
                found[-1].append(one)
            else:
                found.append([one])
        runs[parallel] = [Line((parallel,), tuple(run)) for run in found]
    return _together(runs)


def _together(runs: Mapping[str, Sequence[Line]]) -> list[Line]:
    """Parallel settings under which everything is the same share their lines."""
    alike: dict[str, list[str]] = {}
    for parallel, lines in runs.items():
        key = json.dumps([(line.releases, _said(line.first)) for line in lines])
        alike.setdefault(key, []).append(parallel)
    return [
        replace(line, parallel=tuple(parallels))
        for parallels in alike.values()
        for line in runs[parallels[0]]
    ]


def _said(selection: Selection) -> tuple[Any, ...]:
    return selection.chosen, [(one.backend, one.supported, one.reason) for one in selection.candidates]


def _row(lines: Sequence[Line]) -> str:
    """Lines that differ in what the table does not show share a row."""
    releases_shown = Line((), tuple(one for line in lines for one in line.selections)).releases
    layer, parallel, *rest = _cells(lines[0])
    return f"| {' | '.join([layer, parallel, releases_shown, *rest])} |"


def _cells(line: Line) -> list[str]:
    first = line.first
    chosen = next((one for one in first.candidates if one.chosen), None)
    selected = "none"
    if chosen is not None:
        selected = f"**{chosen.backend}**" + (f" ({chosen.flag})" if chosen.flag else "")
    others = ", ".join(one.backend for one in first.candidates if one.supported and not one.chosen)
    before = first.candidates[: first.candidates.index(chosen)] if chosen else first.candidates
    why: dict[str, list[str]] = {}
    for one in before:
        if not (one.reason.startswith("for ") and one.reason.endswith(" only")):  # no NVIDIA backend
            why.setdefault(one.reason, []).append(one.backend)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in why.items())
    layer = first.scheme + ACTIVATIONS[first.activation]
    return [layer, ", ".join(line.parallel), selected, others or "-", reasons or "-"]


def _plain(line: Line) -> dict[str, Any]:
    first = line.first
    return {
        "scheme": first.scheme,
        "activation": first.activation,
        "parallel": line.parallel,
        "releases": [one.release for one in line.selections],
        "chosen": first.chosen,
        "error": first.error,
        "candidates": [
            {"backend": one.backend, "flag": one.flag, "supported": one.supported, "reason": one.reason}
            for one in first.candidates
        ],
        "source": first.source,
    }


def _index() -> str:
    lines = [
        "# Which MoE backend vLLM selects",
        "",
        "One report a GPU family, written by `make backendreports` from the tables of `moedoctor backends`.",
        "Nothing here was measured on a GPU: it is what the selection code of each release answers.",
        "",
        "| capability | GPU | report |",
        "|---|---|---|",
    ]
    for capability, name in FAMILIES.items():
        stem = f"sm{capability.replace('.', '')}"
        lines.append(f"| {capability} | {name} | [Markdown]({stem}.md), [JSON](json/{stem}.json) |")
    return "\n".join(lines) + "\n"
