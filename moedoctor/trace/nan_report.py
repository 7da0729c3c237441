"""The findings of a NaN trace, as frozen records and as text. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """The first place with NaN or Inf."""

    point: str
    """The module's name, for a model's own modules."""
    what: str
    """``NaN`` or ``Inf``."""
    step: int
    """Counted from 1."""
    order: int
    """Its place among all first findings, from 1: of two in one step the smaller came first."""


@dataclass(frozen=True)
class PointCounts:
    """Counts of one point; each tuple is (in real rows, in padding, in rows that may be either)."""

    point: str
    nan_rows: tuple[int, ...]
    inf_rows: tuple[int, ...]
    nan_steps: tuple[int, ...]
    inf_steps: tuple[int, ...]


@dataclass(frozen=True)
class RouterCounts:
    """Rows of expert ids that no kernel should be given; each tuple is (real rows, padding, either)."""

    point: str
    repeated: tuple[int, ...]
    out_of_range: tuple[int, ...]
    sentinel: tuple[int, ...]
    first_repeated: int
    """The first step with a repeated id, 0 for none."""


@dataclass(frozen=True)
class NanReport:
    """One trace."""

    steps: int
    steps_with_padding: int
    pad_tokens: int
    nan_in_padding: int
    """Steps with NaN in padding rows, at any point."""
    inf_in_padding: int
    nan_in_real: int
    inf_in_real: int
    nan_in_unknown: int
    """Steps with NaN in rows that may be real or padding: the output's rows are not those of the step."""
    inf_in_unknown: int
    first_real: Finding | None
    """The first NaN or Inf in a row that is not padding."""
    first_padding: Finding | None
    first_unknown: Finding | None
    points: tuple[PointCounts, ...]
    """Those with NaN or Inf."""
    routers: tuple[RouterCounts, ...]
    """Those that gave unusual ids."""
    watched: int
    """Points that were watched, routers included."""
    routers_watched: int
    """Points whose expert ids were checked."""
    looked_at: int
    """Points that were looked at, in a step or before one, as in the capture of a CUDA graph."""
    passed_over: int
    """Points that gave an output on another device than the record's, sparse or nested."""
    not_reached: int
    """Other points: the module was not called, or its code was compiled before and has no hooks."""

    @property
    def mean_pad_tokens(self) -> float:
        """Padding rows of a step that has any, on average."""
        return self.pad_tokens / self.steps_with_padding if self.steps_with_padding else 0.0

    def to_row(self) -> dict[str, Any]:
        """Return the line of the table that vllm-project/vllm#39593 prints."""
        return make_row(self.to_evidence())

    def to_evidence(self) -> dict[str, Any]:
        """Return everything as plain data."""
        values = asdict(self) | {"mean_pad_tokens": round(self.mean_pad_tokens, 2)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def to_text(self) -> str:
        """Return a few lines for a terminal or a log."""
        row = self.to_row()
        lines = [
            "Steps with padding   NaN in padding    Inf in padding   Mean pad tokens",
            f"{row['steps_with_padding']:>18}   {row['nan_in_padding']:>6} ({row['nan_share']:.1%})"
            f"   {row['inf_in_padding']:>15}   {row['mean_pad_tokens']:>15.1f}",
            f"of {self.steps} steps; real rows: NaN in {self.nan_in_real} steps, Inf in {self.inf_in_real}",
        ]
        if self.looked_at and self.steps:
            which = " that were looked at" if self.not_reached or self.passed_over else ""
            lines += [
                _describe_first(f"real rows{which}", self.first_real),
                _describe_first(f"padding{which}", self.first_padding),
            ]
        elif self.steps:
            lines.append("nothing was looked at, so nothing is known of NaN and Inf")
        if self.first_unknown is not None:
            lines.append(
                f"rows that may be either: NaN in {self.nan_in_unknown} steps, Inf in {self.inf_in_unknown}; "
                + _describe_first("them", self.first_unknown)
            )
        if not self.steps:
            lines.append("no step was traced, so nothing was looked at")
        if self.not_reached:
            lines.append(
                f"{self.not_reached} of {self.watched} modules were never looked at "
                "(compiled before the locator was entered, or not called)"
            )
        if self.passed_over:
            outputs = "1 output" if self.passed_over == 1 else f"{self.passed_over} outputs"
            were = "was" if self.passed_over == 1 else "were"
            lines.append(f"{outputs} on other devices or layouts {were} not looked at")
        lines += [
            f"{router.point}: rows (real, padding, either) with repeated ids {router.repeated}, "
            f"out of range {router.out_of_range}, -1 {router.sentinel}"
            for router in self.routers
        ]
        if not self.routers_watched:
            lines.append("no router was watched, so nothing is known of expert ids")
        elif not self.routers and self.steps:
            lines.append(f"none of {self.routers_watched} routers gave repeated ids, ids out of range or -1")
        return "\n".join(lines)


def _describe_first(rows: str, finding: Finding | None) -> str:
    if finding is None:
        return f"first in {rows}: nothing"
    return f"first in {rows}: {finding.what} at {finding.point}, step {finding.step}"


def make_row(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return `NanReport.to_row` of a report that is plain data."""
    padded, nan = evidence["steps_with_padding"], evidence["nan_in_padding"]
    return {
        "steps": evidence["steps"],
        "steps_with_padding": padded,
        "nan_in_padding": nan,
        "nan_share": round(nan / padded, 4) if padded else 0.0,
        "inf_in_padding": evidence["inf_in_padding"],
        "mean_pad_tokens": evidence["mean_pad_tokens"],
    }
