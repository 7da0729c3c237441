"""The tables of `data` as records: which kernels a vLLM release has, what each takes, in which order
it tries.

Made by `scripts/extract_backends.py` from what the releases themselves answer; every row names its source.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

SCHEMES = ("nvfp4", "nvfp4-w4a16", "mxfp4", "fp8", "fp8-block", "bf16")
"""Weights and activations: fp8 is per tensor with static scales, fp8-block is 128 x 128, mxfp4 is as gpt-oss
has it."""
CAPABILITIES = (
    "7.0",
    "7.5",
    "8.0",
    "8.6",
    "8.7",
    "8.9",
    "9.0",
    "10.0",
    "10.3",
    "10.7",
    "11.0",
    "12.0",
    "12.1",
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
        """Whether the point lies inside."""
        sides = (self.capabilities, self.parallel, self.activations)
        return all(side is None or value in side for side, value in zip(sides, point, strict=True))


@dataclass(frozen=True)
class Order:
    """The automatic order of backends, where `box` says."""

    backends: tuple[str, ...]
    box: Box
    source: str


@dataclass(frozen=True)
class Flag:
    """What a value of --moe-backend leads to."""

    value: str
    backends: tuple[str, ...]
    ignored: bool
    """The selection goes on as if it had not been given."""
    refused: str | None
    """What vLLM answers where it refuses it whatever the GPU is."""
    batched: bool
    """It brings the batched activation format along."""
    source: str


@dataclass(frozen=True)
class Kernel:
    """One kernel class of a backend, and what it takes."""

    backend: str
    name: str
    """The class of its experts; empty for releases that select without one."""
    devices: Values
    scheme_devices: Values
    """Where it takes the scheme at all; a part of `devices`."""
    activations: Values
    ungated: bool
    """Whether it takes layers without a gate, as Nemotron has them (activations that end in ``_no_mul``)."""
    parallel: Values
    then: tuple[tuple[str, Box], ...]
    """(reason, where): what it refuses beyond the columns above."""
    needs: tuple[str, ...]
    """Optional libraries without which it is not there."""
    asked_with: str | None
    """Variables without which vLLM does not try it."""
    source: str


@dataclass(frozen=True)
class Release:
    """What a release brings."""

    name: str
    flashinfer: str | None
    """The flashinfer-python that it requires."""
    flashinfer_cubin: str | None
    """The flashinfer-cubin that it requires; without it, and without nvcc, vLLM takes FlashInfer for
    missing."""
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
    """Rules of which the first that fits counts."""

    rules: tuple[Rule, ...]
    source: str


@dataclass(frozen=True)
class Tables:
    """Everything about one scheme in one release."""

    orders: tuple[Order, ...]
    flags: Mapping[str, Flag]
    kernels: tuple[Kernel, ...]
    overrides: tuple[Override, ...]


@functools.cache
def releases() -> Mapping[str, Release]:
    """The releases that the tables know, oldest first."""
    return {
        name: Release(
            name,
            row["flashinfer"],
            row["flashinfer_cubin"],
            frozenset(row["provides"]),
            tuple(row["activations"]),
            tuple(row["moe_backends"]),
        )
        for name, row in _json("releases.json")["releases"].items()
    }


@functools.cache
def tables(scheme: str, release: str) -> Tables:
    """The tables of a scheme as they are for a release. Raises KeyError for one that is not known."""
    release = releases()[release].name
    generated, written = _json(f"{scheme}.json"), _handwritten()
    by_hand = written.get(scheme, {})

    def rows(name: str) -> Iterable[Mapping[str, Any]]:
        for row in (*by_hand.get(name, ()), *generated[name]):
            if _covers(str(row["releases"]), release):
                yield row

    overrides = [
        one
        for one in written["overrides"]
        if scheme in one["schemes"] and _covers(str(one["releases"]), release)
    ]
    return Tables(
        orders=tuple(Order(tuple(row["order"]), _box(row), str(row["source"])) for row in rows("orders")),
        flags={row["flag"]: _flag(row) for row in rows("flags")},
        kernels=tuple(_kernel(row) for row in rows("kernels")),
        overrides=tuple(Override(tuple(map(_rule, one["rules"])), one["source"]) for one in overrides),
    )


def _flag(row: Mapping[str, Any]) -> Flag:
    backends = tuple(row.get("backends", ()))
    return Flag(
        row["flag"],
        backends,
        bool(row.get("ignored")),
        row.get("refused"),
        bool(row.get("batched")),
        row["source"],
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
        then=tuple((one["reason"], _box(one)) for one in row.get("then", ())),
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
    found: list[str] = []
    for part in text.split():
        first, dash, last = part.partition("-")
        if dash:
            found += CAPABILITIES[CAPABILITIES.index(first) : CAPABILITIES.index(last) + 1]
        else:
            found.append(part)
    return frozenset(found)


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
