"""The tables of `data` as records: the kernels of each vLLM release, what each takes, and their order.

`make release` makes them from what the releases themselves answer. Every row names its source.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

SCHEMES = ("nvfp4", "nvfp4-w4a16", "mxfp4", "fp8", "fp8-block", "bf16")
"""Weights and activations: fp8 is per tensor with static scales, fp8-block 128 x 128, mxfp4 as in gpt-oss."""
CAPABILITIES = (
    *("7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0"),
    *("10.0", "10.3", "10.7", "11.0", "12.0", "12.1"),
)
PARALLEL = ("tp", "ep", "dp", "dp+ep")

Point = tuple[str, str, str]
"""(capability, parallel, activation)."""


def _read_values(text: str) -> frozenset[str] | None:
    """Read ``*``, or values with spaces between; a run of capabilities is written ``9.0-10.7``."""
    if text == "*":
        return None
    values: list[str] = []
    for part in text.split():
        first, dash, last = part.partition("-")
        run = CAPABILITIES[CAPABILITIES.index(first) : CAPABILITIES.index(last) + 1] if dash else (part,)
        values += run
    return frozenset(values)


Values = Annotated[frozenset[str] | None, BeforeValidator(_read_values)]
"""Values of one side of the grid; None for all of them."""


class _Row(BaseModel):
    """A row of a table. The releases and schemes that it is for are not kept."""

    model_config = ConfigDict(frozen=True)


class Box(_Row):
    """A part of the grid of capabilities, parallel settings and activations."""

    capabilities: Values = None
    parallel: Values = None
    activations: Values = None

    def contains(self, point: Point) -> bool:
        """Return True if the point is inside."""
        sides = (self.capabilities, self.parallel, self.activations)
        return all(side is None or value in side for side, value in zip(sides, point, strict=True))


class Order(Box):
    """The automatic order of backends in a part of the grid."""

    backends: tuple[str, ...] = Field(alias="order")
    source: str


class Refusal(Box):
    """The layers that a kernel refuses beyond its columns."""

    reason: str
    """In words, or ``format`` for the batched activation format."""


class Flag(_Row):
    """The kernels that a value of --moe-backend leads to."""

    value: str = Field(alias="flag")
    backends: tuple[str, ...] = ()
    ignored: bool = False
    """vLLM selects as if it had not been given."""
    refused: str | None = None
    """The answer of vLLM if it refuses the value on every GPU."""
    batched: bool = False
    """The value also brings the batched activation format."""
    source: str


class Kernel(_Row):
    """One kernel class of a backend, and what it takes."""

    backend: str
    name: str = Field("", alias="kernel")
    """The class of its experts; empty for releases that select without one."""
    devices: Values
    scheme_devices: Values
    """The capabilities on which it takes the scheme, a part of `devices`; by default all of them."""
    activations: Values
    ungated: bool
    """True if it takes layers without a gate, such as Nemotron's (activations that end in ``_no_mul``)."""
    parallel: Values
    then: tuple[Refusal, ...] = ()
    needs: tuple[str, ...] = ()
    """Optional libraries that it needs."""
    asked_with: str | None = None
    """Variables without which vLLM does not try it."""
    source: str

    @model_validator(mode="before")
    @classmethod
    def _all_devices(cls, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"scheme_devices": row["devices"], **row}


class Release(_Row):
    """The packages that a release requires and brings."""

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
    """The values that --moe-backend takes."""


class Rule(_Row):
    """The effect of a combination of variables on the automatic order."""

    when: Mapping[str, bool | str | None]
    effect: str
    """remove, refuse, only, force or allow."""
    backends: tuple[str, ...]
    capabilities: Values = None


class Override(_Row):
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
        return next(order for order in self.orders if order.contains(point))


@functools.cache
def load_releases() -> Mapping[str, Release]:
    """The vLLM releases that moedoctor knows, oldest first."""
    rows = _load_data("releases.json")["releases"]
    return {name: Release(name=name, **row) for name, row in rows.items()}


_AnyRow = TypeVar("_AnyRow", bound=_Row)


@functools.cache
def list_backend_names() -> frozenset[str]:
    """The MoE backends of all releases, in capitals: the names in logs and the values of --moe-backend."""
    names = {value for release in load_releases().values() for value in release.moe_backends}
    for scheme in SCHEMES:
        rows = _load_data(f"{scheme}.json")
        names |= {name for row in rows["orders"] for name in row["order"]}
        names |= {row["backend"] for row in rows["kernels"]}
    return frozenset(name.upper().replace(" ", "_") for name in names) - {"AUTO"}


@functools.cache
def load_tables(scheme: str, release: str) -> Tables:
    """The tables of a scheme as they are for a release. Raises KeyError for one that is not known."""
    written, known = _load_data("handwritten.yaml"), list(load_releases())
    number = known.index(load_releases()[release].name)
    overrides = [row for row in written["overrides"] if scheme in row["schemes"]]
    sources = (written.get(scheme, {}), _load_data(f"{scheme}.json"), {"overrides": overrides})

    def covers(span: str) -> bool:
        first, _, last = span.partition("-")
        return known.index(first) <= number <= known.index(last or first)

    def read_rows(kind: type[_AnyRow], name: str) -> tuple[_AnyRow, ...]:
        given = itertools.chain.from_iterable(source.get(name, ()) for source in sources)
        return tuple(kind.model_validate(row) for row in given if covers(str(row["releases"])))

    return Tables(
        orders=read_rows(Order, "orders"),
        flags={flag.value: flag for flag in read_rows(Flag, "flags")},
        kernels=read_rows(Kernel, "kernels"),
        overrides=read_rows(Override, "overrides"),
    )


@functools.cache
def _load_data(name: str) -> Any:
    if name.endswith(".json"):
        return json.loads((files("moedoctor.fixes.backends") / "data" / name).read_text(encoding="utf-8"))
    from moedoctor.text import load_yaml

    return load_yaml("moedoctor.fixes.backends", f"data/{name}")
