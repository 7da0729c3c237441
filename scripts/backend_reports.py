"""Writes the reports in `reports/backends`: what each release selects, one table a GPU family.

Usage: ``backend_reports.py FOLDER``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedoctor.fixes.backends import Selection, select
from moedoctor.fixes.backends.release_tables import PARALLEL, SCHEMES, load_releases
from moedoctor.processes.files import write
from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.page import Heading, Paragraph, Span, Table, Text

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
LAYERS = (
    *((scheme, "silu") for scheme in SCHEMES if scheme != "mxfp4"),
    ("nvfp4", "relu2_no_mul"),
    ("mxfp4", "swigluoai"),
)
"""The layers in the reports: each scheme as most models have it, and the two well-known exceptions."""
_HEADER = ("layer", "parallel", "releases", "selected", "would also work", "passed over before it, and why")


@dataclass(frozen=True)
class Line:
    """Releases that follow each other and answer the same for one layer and some parallel settings."""

    parallel: tuple[str, ...]
    selections: tuple[Selection, ...]
    """One a release, oldest first."""

    @property
    def first(self) -> Selection:
        return self.selections[0]


def write_reports(folder: Path) -> list[Path]:
    """Write ``sm75.md`` … into `folder`, and make it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    for capability, name in FAMILIES.items():
        lines = [
            line for scheme, activation in LAYERS for line in _make_lines(capability, scheme, activation)
        ]
        texts[folder / f"{_name_file(capability)}.md"] = report_markdown(capability, name, lines)
    for file, text in texts.items():
        write(file, text)
    return list(texts)


def report_markdown(capability: str, name: str, lines: Sequence[Line]) -> str:
    """Return one table, a row for each layer, parallel setting and run of releases."""
    rows: list[Sequence[Text]] = []
    # Lines that differ in what the table does not show share a row.
    for (layer, parallel, *rest), group in itertools.groupby(lines, key=_write_cells):
        rows.append(
            (layer, parallel, _write_span(tuple(s for line in group for s in line.selections)), *rest)
        )
    return to_markdown(
        (
            Heading(f"MoE backends on compute capability {capability}: {name}", 1),
            Paragraph(
                (
                    "What each vLLM release selects by itself, with the optional libraries that it requires "
                    "or brings; ",
                    Span("--moe-backend", "code"),
                    " takes the value in brackets. Every backend and its reason: ",
                    Span(f"moedoctor backends --sm {capability}", "code"),
                )
            ),
            Table(_HEADER, rows),
        )
    )


def _make_lines(capability: str, scheme: str, activation: str) -> Iterator[Line]:
    """Give the runs of releases; parallel settings with the same runs share their lines."""
    alike: dict[Any, list[str]] = {}
    runs: dict[str, list[tuple[Selection, ...]]] = {}
    for parallel in PARALLEL:
        selections = [
            select(
                capability,
                scheme,
                release=release,
                ep="ep" in parallel,
                dp="dp" in parallel,
                activation=activation,
            )
            for release in load_releases()
        ]
        runs[parallel] = [tuple(group) for _, group in itertools.groupby(selections, key=_answer)]
        key = tuple((_write_span(run), _answer(run[0])) for run in runs[parallel])
        alike.setdefault(key, []).append(parallel)
    for parallels in alike.values():
        yield from (Line(tuple(parallels), run) for run in runs[parallels[0]])


def _answer(selection: Selection) -> tuple[Any, ...]:
    candidates = (
        (candidate.backend, candidate.supported, candidate.reason) for candidate in selection.candidates
    )
    return selection.chosen, tuple(candidates)


def _write_span(selections: Sequence[Selection]) -> str:
    first, last = selections[0].release, selections[-1].release
    return first if first == last else f"{first} to {last}"


def _write_cells(line: Line) -> list[Text]:
    """Return the cells of a row, but for the releases."""
    candidates = line.first.candidates
    chosen = next((candidate for candidate in candidates if candidate.chosen), None)
    selected: Text = "none"
    if chosen is not None:
        selected = (Span(chosen.backend, "bold"), f" ({chosen.flag})" if chosen.flag else "")
    others = [candidate.backend for candidate in candidates if candidate.supported and not candidate.chosen]
    why: dict[str, list[str]] = {}
    for candidate in candidates[: candidates.index(chosen)] if chosen else candidates:
        # "for AMD only" and the like are not about an NVIDIA GPU.
        if not (candidate.reason.startswith("for ") and candidate.reason.endswith(" only")):
            why.setdefault(candidate.reason, []).append(candidate.backend)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in why.items())
    layer = line.first.scheme + ACTIVATIONS[line.first.activation]
    return [layer, ", ".join(line.parallel), selected, ", ".join(others) or "none", reasons or "none"]


def _name_file(capability: str) -> str:
    return f"sm{capability.replace('.', '')}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: backend_reports.py FOLDER")
    write_reports(Path(sys.argv[1]))
