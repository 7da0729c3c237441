"""What `moedoctor bench --backend` measured, as a record and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import Required, TypedDict

import moedoctor
from moedoctor.results import SCHEMA_VERSION, ReportError, from_json, plain
from moedoctor.text import show

_VERDICTS = ("proved", "found", "absent", "failed", "skipped", "error")
_Positive = Annotated[int, Field(ge=1)]
_Figure = Annotated[float, Field(ge=0)]
_Change = Annotated[float, Field(ge=-1)]


class _Layer(TypedDict):
    hidden: _Positive
    intermediate: _Positive
    experts: _Positive
    top_k: _Positive
    activation: str


class _Roofline(TypedDict):
    bytes_per_second: _Figure
    flops: dict[str, _Figure]


class _Harness(TypedDict, total=False):
    graph_overhead: _Change
    graph_us: _Figure
    graph_cold_us: _Figure
    graph_cold_overhead: _Change
    do_bench_us: _Figure
    launch_us: _Figure
    kernel_us: _Figure
    launch_gap_us: _Change
    do_bench_overhead: _Change
    within_limit: bool


class _Row(TypedDict, total=False):
    backend: Required[str]
    quantization: Required[str]
    model: Required[str]
    tokens: _Positive
    active_experts: Annotated[int, Field(ge=0)]
    time_us: _Figure
    time_us_p20: _Figure
    time_us_p80: _Figure
    warm_us: _Figure
    warm_us_p20: _Figure
    warm_us_p80: _Figure
    eager_us: _Figure
    eager_us_p20: _Figure
    eager_us_p80: _Figure
    tflops: _Figure
    gigabytes_per_second: _Figure
    roofline_share: _Figure
    bytes: _Figure
    workspace_bytes: _Figure
    peak_memory_bytes: _Figure
    controls_noticed: str
    cosine: float
    deterministic: bool
    timed: str


class _Backends(TypedDict):
    layers: dict[str, _Layer]
    routing: str
    device: str
    roofline: _Roofline
    harness: _Harness
    rows: list[_Row]


_GO_TOGETHER = (
    (_Harness, "graph_overhead", ("graph_us", "graph_cold_us", "graph_cold_overhead", "do_bench_us")),
    (_Harness, "launch_us", ("kernel_us", "launch_gap_us", "do_bench_overhead", "within_limit")),
    (
        _Row,
        "time_us",
        (
            *("tokens", "active_experts", "time_us_p20", "time_us_p80", "tflops", "gigabytes_per_second"),
            *("roofline_share", "cosine", "deterministic", "timed"),
        ),
    ),
)
"""(record, key, keys that it must have too if it has this one)."""


@dataclass(frozen=True)
class BackendBench:
    """What `moedoctor bench --backend` measured."""

    layers: Mapping[str, Mapping[str, Any]]
    """Name of the layer -> its sizes, and where they come from."""
    routing: str
    device: str
    rows: tuple[Mapping[str, Any], ...]
    roofline: Mapping[str, Any]
    harness: Mapping[str, Any]
    environment: Mapping[str, Any]
    exit_code: int = 0


def to_dict(bench: BackendBench) -> dict[str, Any]:
    """The report as plain JSON values: the shape of every report, with `bench` in addition."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "moedoctor": moedoctor.__version__,
        "command": "bench",
        "environment": dict(bench.environment),
        "scenarios": [],
        "bench": {
            "backends": {
                "layers": {name: dict(facts) for name, facts in bench.layers.items()},
                "routing": bench.routing,
                "device": bench.device,
                "roofline": dict(bench.roofline),
                "harness": dict(bench.harness),
                "rows": [dict(row) for row in bench.rows],
            }
        },
        "summary": {**dict.fromkeys(_VERDICTS, 0), "exit_code": bench.exit_code},
    }
    result: dict[str, Any] = plain(document)
    return result


def from_dict(document: Any) -> BackendBench:
    """Return the record that `to_dict` wrote. Raises ReportError that names what is wrong."""
    try:
        backends, summary = document["bench"]["backends"], document["summary"]
        environment = document["environment"]
    except (KeyError, TypeError) as error:
        raise ReportError("report", f"is not from `bench --backend`: {error}") from None
    from_json(_Backends, backends)
    _check_together(_Harness, "harness", backends["harness"])
    for index, row in enumerate(backends["rows"]):
        where = f"rows[{index}]"
        if row["model"] not in backends["layers"]:
            raise ReportError("report", f"{where}.model: {show(row['model'])}: expected one of the layers")
        _check_together(_Row, where, row)
        if row.keys().isdisjoint(("time_us", "unavailable", "failed")) and not isinstance(
            row.get("wrong"), str
        ):
            raise ReportError("report", f"{where}.wrong: must be text")
    record = {**backends, "environment": environment, "exit_code": summary.get("exit_code")}
    return from_json(BackendBench, record)


def _check_together(kind: type, where: str, values: Mapping[str, Any]) -> None:
    for record, key, others in _GO_TOGETHER:
        for other in others if record is kind and key in values else ():
            if other not in values:
                raise ReportError("report", f"{where}.{other}: is missing, expected a value")


def is_backend_bench(document: Any) -> bool:
    """Whether a JSON report is one of `bench --backend`."""
    bench = document.get("bench") if isinstance(document, dict) else None
    return isinstance(bench, dict) and "backends" in bench
