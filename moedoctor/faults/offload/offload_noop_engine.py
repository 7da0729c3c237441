"""MD013 in a real engine: bytes that were to be on the host against bytes that are, as the CUDA driver
says."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.results import Observation
from moedoctor.upstream.engine.engine import EngineResult, run_engine
from moedoctor.upstream.engine.offload_cells import UVA, Cell, request
from moedoctor.upstream.engine.offload_engine import need_engine

WEIGHTS = ("w13_weight", "w2_weight")
_HOST = ("host", "cpu")


def observe(environ: Mapping[str, str]) -> Observation:
    """One engine with its expert weights offloaded, under these variables. Raises UnavailableError,
    RuntimeError."""
    need_engine()
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = write_qwen3_moe(Path(name) / "nvfp4", scheme="nvfp4")
        asked = request(Cell("NVFP4 MARLIN", "eager", UVA), str(folder))
        result = run_engine(
            dataclasses.replace(
                asked,
                arguments={**asked.arguments, "cpu_offload_params": list(WEIGHTS)},
                environ={**asked.environ, **environ},
                probe="moedoctor.upstream.engine.probes:where_weights_live",
                probe_options={"names": "experts"},
            )
        )
    return Observation(evidence(result, environ))


def evidence(result: EngineResult, environ: Mapping[str, str]) -> dict[str, Any]:
    """The bytes by place. Raises RuntimeError for an engine that did not answer."""
    if result.error is not None or not result.probe:
        said = "no probe" if result.error is None else f"{result.error.kind}: {result.error.message}"
        raise RuntimeError(f"the engine did not run: {said[:300]}")
    chosen = [one for one in result.probe["parameters"] if one["name"].rpartition(".")[2] in WEIGHTS]
    return {
        "vllm": result.version,
        "variables": dict(environ),
        "asked_bytes": sum(one["bytes"] for one in chosen),
        "host_bytes": sum(one["bytes"] for one in chosen if one["place"] in _HOST),
        "device_bytes": sum(one["bytes"] for one in chosen if one["place"] not in _HOST),
        "offloader_in_the_log": result.log.offloader,
        "offloaded_in_the_log": result.log.offloaded,
        "allocated_bytes": result.memory.get("after_load", {}).get("allocated"),
    }
