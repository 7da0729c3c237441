"""The tables of `data` as records: the kernels of each vLLM release, what each takes, and their order.

`scripts/backend_tables.py` makes them from what the releases themselves answer. Every row names its source.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

SCHEMES = ("nvfp4", "nvfp4-w4a16", "mxfp4", "fp8", "fp8-block", "bf16")
"""Weights and activations: fp8 is per tensor with static scales, fp8-block 128 x 128, mxfp4 as in gpt-oss."""
CAPABILITIES = (
    *("7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0"),
    *("10.0", "10.3", "10.7", "11.0", "12.0", "12.1"),
)
PARALLEL = ("tp", "ep", "dp", "dp+ep")

Point = tuple[str, str, str]
"""(capability, parallel, activation)."""
Values = frozenset[str] | None
"""Values of one side of the grid; None for all of them."""


@dataclass(frozen=True)
class Box:
    """A part of the grid of capabilities, parallel settings and activations."""

    capabilities: Values = None
    parallel: Values = None
    activations: Values = None

    def contains(self, point: Point) -> bool:
        """Whether the point is inside."""
        sides = (self.capabilities, self.parallel, self.activations)
        return all(side is None or value in side for side, value in zip(sides, point, strict=True))


@dataclass(frozen=True)
class Order:
    """The automatic order of backends in a part of the grid."""

    backends: tuple[str, ...]
    box: Box
    source: str


@dataclass(frozen=True)
class Flag:
    """What a value of --moe-backend leads to."""

    value: str
    backends: tuple[str, ...]
    ignored: bool
    """vLLM selects as if it had not been given."""
    refused: str | None
    """What vLLM answers if it refuses the value on every GPU."""
    batched: bool
    """The value also brings the batched activation format."""
    source: str


@dataclass(frozen=True)
class Kernel:
    """One kernel class of a backend, and what it takes."""

    backend: str
    name: str
    """The class of its experts; empty for releases that select without one."""
    devices: Values
    scheme_devices: Values
    """The capabilities on which it takes the scheme; a part of `devices`."""
    activations: Values
    ungated: bool
    """Whether it takes layers without a gate, such as Nemotron's (activations that end in ``_no_mul``)."""
    parallel: Values
    then: tuple[tuple[str, Box], ...]
    """(reason, box): what it refuses beyond the columns above."""
    needs: tuple[str, ...]
    """Optional libraries that it needs."""
    asked_with: str | None
    """Variables without which vLLM does not try it."""
    source: str


@dataclass(frozen=True)
class Release:
    """What a release requires and brings."""

    name: str
    torch: str
    cuda: str
    """The CUDA release that its wheel on the package index is built with."""
    flashinfer: str
    """The flashinfer-python that it requires."""
    flashinfer_cubin: str | None
    """The flashinfer-cubin that it requires. Without it and nvcc, vLLM treats FlashInfer as missing."""
    provides: frozenset[str]
    """Optional libraries that come with it or that it requires."""
    activations: tuple[str, ...]
    moe_backends: tuple[str, ...]
    """What --moe-backend takes."""


@dataclass(frozen=True)
class Rule:
    """What a combination of variables does to the automatic order."""

    when: Mapping[str, bool | str | None]
    effect: str
    """remove, only, force or allow."""
    backends: tuple[str, ...]
    capabilities: Values


@dataclass(frozen=True)
class Override:
    """Rules; the first that fits counts."""

    rules: tuple[Rule, ...]
    source: str


@dataclass(frozen=True)
class Tables:
    """Everything about one scheme in one release."""

    orders: tuple[Order, ...]
    flags: Mapping[str, Flag]
    kernels: tuple[Kernel, ...]
    overrides: tuple[Override, ...]

    def order(self, point: Point) -> Order:
        """The automatic order at this point."""
        return next(order for order in self.orders if order.box.contains(point))


@functools.cache
def releases() -> Mapping[str, Release]:
    """The vLLM releases that moedoctor knows, oldest first."""
    lists = {"provides": frozenset, "activations": tuple, "moe_backends": tuple}
    return {
        name: Release(name, **{key: lists.get(key, lambda value: value)(row[key]) for key in row})
        for name, row in _json("releases.json")["releases"].items()
    }


@functools.cache
def tables(scheme: str, release: str) -> Tables:
    """The tables of a scheme as they are for a release. Raises KeyError for one that is not known."""
    release = releases()[release].name
    generated, written = _json(f"{scheme}.json"), _handwritten()
    by_hand = written.get(scheme, {})

    def rows(name: str) -> Iterator[Mapping[str, Any]]:
        for row in (*by_hand.get(name, ()), *generated[name]):
            if _covers(str(row["releases"]), release):
                yield row

    return Tables(
        orders=tuple(Order(tuple(row["order"]), _box(row), row["source"]) for row in rows("orders")),
        flags={row["flag"]: _flag(row) for row in rows("flags")},
        kernels=tuple(_kernel(row) for row in rows("kernels")),
        overrides=tuple(
            Override(tuple(map(_rule, row["rules"])), row["source"])
            for row in written["overrides"]
            if scheme in row["schemes"] and _covers(str(row["releases"]), release)
        ),
    )


def _flag(row: Mapping[str, Any]) -> Flag:
    return Flag(
        value=row["flag"],
        backends=tuple(row.get("backends", ())),
        ignored=bool(row.get("ignored")),
        refused=row.get("refused"),
        batched=bool(row.get("batched")),
        source=row["source"],
    )


def _kernel(row: Mapping[str, Any]) -> Kernel:
    return Kernel(
        backend=row["backend"],
        name=row.get("kernel", ""),
        devices=_values(row["devices"]),
        scheme_devices=_values(row.get("scheme_devices", row["devices"])),
        activations=_values(row["activations"]),
        ungated=row["ungated"],
        parallel=_values(row["parallel"]),
        then=tuple((part["reason"], _box(part)) for part in row.get("then", ())),
        needs=tuple(row.get("needs", ())),
        asked_with=row.get("asked_with"),
        source=row["source"],
    )


def _rule(row: Mapping[str, Any]) -> Rule:
    return Rule(row["when"], row["effect"], tuple(row["backends"]), _values(row.get("capabilities", "*")))


def _box(row: Mapping[str, Any]) -> Box:
    return Box(*(_values(row.get(name, "*")) for name in ("capabilities", "parallel", "activations")))


def _values(text: str) -> Values:
    """``*``, or values with spaces between; a run of capabilities is written ``9.0-10.7``."""
    if text == "*":
        return None
    values: list[str] = []
    for part in text.split():
        first, dash, last = part.partition("-")
        run = CAPABILITIES[CAPABILITIES.index(first) : CAPABILITIES.index(last) + 1] if dash else (part,)
        values += run
    return frozenset(values)


def _covers(span: str, release: str) -> bool:
    first, _, last = span.partition("-")
    known = list(releases())
    return known.index(first) <= known.index(release) <= known.index(last or first)


@functools.cache
def _json(name: str) -> Any:
    return json.loads((files("moedoctor.fixes.backends") / "data" / name).read_text(encoding="utf-8"))


@functools.cache
def _handwritten() -> Any:
    import yaml

    text = (files("moedoctor.fixes.backends") / "data" / "handwritten.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)
