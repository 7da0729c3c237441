"""The last recorded call, computed again by every backend: does its kernel fault alone?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moedoctor.bench.moe import backends
from moedoctor.diagnose.autopsy.autopsy import CallReplay
from moedoctor.diagnose.capsule.replay import ReplayError, replay
from moedoctor.environment import collect, explain_missing_gpu
from moedoctor.processes.deaths import classify
from moedoctor.results import Death

_FAULTS = (Death.ILLEGAL_MEMORY_ACCESS, Death.ILLEGAL_INSTRUCTION, Death.DEVICE_ASSERT, Death.CUDA_ERROR)


def replay_call(capsule: Path, record: Mapping[str, Any], *, seconds: float) -> CallReplay:
    """Compute the call of a capsule with every backend, each in a process of its own for `seconds`."""
    reason = explain_missing_gpu(collect())
    call = CallReplay(capsule.name, str(record.get("layer")), int(record.get("call") or 0))
    if reason or record.get("weights") != "recorded":
        return replace(call, problem=reason or "its capsule has no weights")

    def find_variants(of: Mapping[str, Any]) -> Sequence[Any]:
        return backends.find("all", ("fp8-block" if of["block"] else of["quantization"],))

    try:
        document = replay(capsule, find_variants, "cuda:0", seconds=seconds)
    except ReplayError as error:
        return replace(call, problem=str(error))
    ran = [backend for backend in document.backends if backend.unavailable is None]
    failed = {backend.backend: backend.failed for backend in ran if backend.failed}
    faulted = [name for name, why in failed.items() if classify(why) in _FAULTS or "SIGABRT" in why]
    return replace(
        call,
        faulted=tuple(faulted),
        computed=tuple(backend.backend for backend in ran if backend.failed is None),
        failed=tuple(f"{name}: {why}" for name, why in failed.items() if name not in faulted),
        problem=None if ran else "no backend runs here",
    )
