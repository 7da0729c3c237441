"""What `moedoctor bench --backend` measured, as a record and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import moedoctor
from moedoctor.json_value import Node, plain
from moedoctor.results import SCHEMA_VERSION

_VERDICTS = ("proved", "found", "absent", "failed", "skipped", "error")
_SIZES = ("hidden", "intermediate", "experts", "top_k")
_MEASURED = (
    *(f"{name}{part}" for name in ("time_us", "warm_us", "eager_us") for part in ("", "_p20", "_p80")),
    "tflops",
    "gigabytes_per_second",
    "roofline_share",
    "bytes",
    "workspace_bytes",
    "peak_memory_bytes",
)
_TIMED = ("time_us", "time_us_p20", "time_us_p80", "tflops", "gigabytes_per_second", "roofline_share")
"""What every row has that was timed."""


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
    """The record that `to_dict` wrote. Raises ShapeError (a ValueError) that names what is wrong."""
    root = Node(document, ())
    backends = root["bench"]["backends"]
    layers = {name: _layer(backends["layers"][name]) for name in backends["layers"].mapping()}
    roofline = backends["roofline"]
    roofline["bytes_per_second"].number()
    for name in roofline["flops"].mapping():
        roofline["flops"][name].number()
    harness = backends["harness"]
    if "graph_overhead" in harness.mapping():
        for name in ("graph_us", "graph_cold_us", "do_bench_us"):
            harness[name].number()
        for name in ("graph_overhead", "graph_cold_overhead"):
            harness[name].number(minimum=-1)
    if "launch_us" in harness.mapping():  # reports of before have no more than do_bench to go by
        harness["launch_us"].number()
        harness["kernel_us"].number()
        harness["launch_gap_us"].number(minimum=-1)
        harness["do_bench_overhead"].number(minimum=-1)
        harness["within_limit"].boolean()
    return BackendBench(
        layers=layers,
        routing=backends["routing"].text(),
        device=backends["device"].text(),
        rows=tuple(_row(one, layers) for one in backends["rows"].elements()),
        roofline=roofline.mapping(),
        harness=harness.mapping(),
        environment=root["environment"].mapping(),
        exit_code=root["summary"]["exit_code"].integer(),
    )


def is_backend_bench(document: Any) -> bool:
    """Whether a JSON report is one of `bench --backend`."""
    bench = document.get("bench") if isinstance(document, dict) else None
    return isinstance(bench, dict) and "backends" in bench


def _layer(node: Node) -> dict[str, Any]:
    for name in _SIZES:
        node[name].integer(minimum=1)
    node["activation"].text()
    return node.mapping()


def _row(node: Node, layers: Mapping[str, Any]) -> dict[str, Any]:
    """A row that every reporter can show: known layer, and the figures that go with its kind."""
    for name in ("backend", "quantization"):
        node[name].text()
    if node["model"].text() not in layers:
        raise node["model"].wrong("expected one of the layers")
    row = node.mapping()
    for name in (one for one in _MEASURED if one in row):
        node[name].number()
    if "controls_noticed" in row:
        node["controls_noticed"].text()
    if "time_us" in row:
        for name in _TIMED:
            node[name].number()
        node["tokens"].integer(minimum=1)
        node["active_experts"].integer()
        node["cosine"].number()
        node["deterministic"].boolean()
        node["timed"].text()
    elif "unavailable" not in row and "failed" not in row:
        node["wrong"].text()
    return row
