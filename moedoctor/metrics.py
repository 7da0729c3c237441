"""Figures that are compared with a baseline: what is a metric, which way is better, how far it may move.

A metric is recognised by the end of its name, which also gives its unit and its direction:

| group | ends in | better |
|---|---|---|
| latency | ``_us`` ``_ms`` ``_seconds`` | lower |
| ratio | ``_ratio`` | lower |
| bandwidth | ``_gb_s`` | higher |
| throughput | ``_per_second`` | higher |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Outcome = Literal["regression", "improvement", "note"]

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "latency": ("_us", "_ms", "_seconds"),
        "ratio": ("_ratio",),
        "bandwidth": ("_gb_s",),
        "throughput": ("_per_second",),
    }
)
_LOWER_IS_BETTER = frozenset({"latency", "ratio"})
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})
_PART = re.compile(r"(?:(?P<key>[A-Za-z_][\w.\[\]-]*)\s*[:=]\s*)?(?P<percent>\d{1,6}(?:\.\d{1,6})?)\s*%")
_MAX_PERCENT = 1000.0
_ROUNDING = 1e-9  # 1.05 against 1.0 is 5 % in decimals and a hair more in binary


def group_of(name: str) -> str | None:
    """The group of a metric, or None where `name` is none; of a dotted name the last part counts."""
    last = name.rpartition(".")[2]
    return next((group for group, ends in GROUPS.items() if last.endswith(ends)), None)


def metrics(evidence: Mapping[str, Any]) -> dict[str, float | str]:
    """The metrics in `evidence` by dotted name, e.g. ``rows[0].kernel_us``.

    A figure that was not finite is the text ``nan``, ``inf`` or ``-inf``, as in JSON.
    """
    return {name: value for name, value in _leaves(evidence, "") if group_of(name) and _is_figure(value)}


@dataclass(frozen=True)
class Tolerance:
    """How much worse a metric may be than its baseline, as a fraction of the baseline."""

    default: float = 0.05
    by_key: Mapping[str, float] = field(default_factory=dict)
    """Metric name, the last part of a dotted one, or group name -> fraction; the most exact one counts."""

    @classmethod
    def parse(cls, text: str | Iterable[str]) -> Tolerance:
        """From ``5%``, ``latency:5%,ratio:2%`` or several such texts (``kernel_us=3%``).

        Raises ValueError that names the part it cannot read, the unknown metric, or the one given twice.
        """
        texts = (text,) if isinstance(text, str) else tuple(text)
        limits: dict[str, float] = {}
        for part in (one.strip() for whole in texts for one in whole.split(",")):
            key, limit = _parse_part(part)
            if key in limits:
                raise ValueError(f"tolerance {part!r}: {key or 'the general tolerance'} is given twice")
            limits[key] = limit
        return cls(limits.pop("", cls.default), limits)

    def limit(self, name: str) -> float:
        """The tolerated fraction for the metric called `name`."""
        for key in (name, name.rpartition(".")[2], group_of(name) or ""):
            if key in self.by_key:
                return self.by_key[key]
        return self.default


def judge_metric(
    name: str, baseline: float | str, current: float | str, tolerance: Tolerance
) -> tuple[Outcome, str] | None:
    """What a metric's move from `baseline` to `current` means; None within the tolerance."""
    if isinstance(current, str) and not isinstance(baseline, str):
        return "regression", "is no finite number any more"
    if isinstance(baseline, str) or isinstance(current, str):
        return None if baseline == current else ("note", "the baseline is no finite number")
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
        raise ValueError(f"tolerance {part[:60]!r}: expected a percentage such as 5%, or METRIC:5%")
    key, percent = match["key"] or "", float(match["percent"])
    if percent > _MAX_PERCENT:
        raise ValueError(f"tolerance {part!r}: expected 0% to {_MAX_PERCENT:.0f}%")
    if key and key not in GROUPS and group_of(key) is None:
        groups = ", ".join(GROUPS)
        raise ValueError(
            f"tolerance {part!r}: unknown metric {key}, expected one of {groups}, or a name like kernel_us"
        )
    return key, percent / 100


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _leaves(one, f"{name}[{index}]")
    else:
        yield name, value


def _is_figure(value: Any) -> bool:
    if isinstance(value, str):
        return value in _NOT_FINITE
    return isinstance(value, (int, float)) and not isinstance(value, bool)
