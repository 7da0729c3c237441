"""The process that asks a release whether command lines would start."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib.metadata
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from moedoctor.models.tensor_names import name_pattern
from moedoctor.processes.ask import answer

_SHOWN = ("vllm", "torch", "transformers", "compressed-tensors", "flashinfer-python", "humming-kernels")
_MOST_RANKS = 6
_MOST_ROWS = 50


def respond(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the environment, then an answer for each command line, in order."""
    started = time.perf_counter()
    limit = request["memory_limit"]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    sys.stdout = sys.stderr  # vLLM prints; the answer goes through its own file
    from moedoctor.upstream.preflight.operators import define_operators
    from moedoctor.upstream.preflight.substitutes import Gpu, substitute_torch, substitute_vllm
    from moedoctor.upstream.releases.wheel import find_package_folders
    from moedoctor.upstream.selection.substitute import OPERATORS, SubstituteError, loads_extension

    gpu = Gpu(tuple(request["capability"]), request["memory"], request["gpus"])
    gone = substitute_torch(gpu)
    operators = sum(
        define_operators(folder, partial(loads_extension, folder=folder), OPERATORS)
        for folder in find_package_folders("vllm")
    )
    try:
        notes, missing = substitute_vllm(gpu)
    except SubstituteError as error:
        yield {"problem": " ".join(str(error).split()), "versions": list_versions()}
        return
    yield {
        "versions": list_versions(),
        "unsatisfied": list_unsatisfied(),
        "answered": notes,
        "gone": [*gone, *missing],
        "operators": operators,
        "seconds": round(time.perf_counter() - started, 1),
    }
    gc.freeze()  # what was imported stays: to look through it again takes a tenth of the time
    for command in request["commands"]:
        yield ask_command(command, request)


def list_versions() -> dict[str, str]:
    """Return the versions of the packages that decide an answer; those that are missing are left out."""
    versions = {}
    for name in _SHOWN:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def list_unsatisfied() -> list[dict[str, Any]]:
    """Return the requirements on transformers and compressed-tensors that this environment breaks."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    broken = []
    for text in importlib.metadata.requires("vllm") or ():
        requirement = Requirement(text)
        if requirement.name not in ("transformers", "compressed-tensors"):
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "0"
        if not requirement.specifier.contains(version, prereleases=True):
            required = [Version(each.version) for each in requirement.specifier]
            newer = Version(version) >= max(required)
            row = {"name": requirement.name, "version": version, "required": str(requirement.specifier)}
            broken.append({**row, "newer": newer})
    return broken


def ask_command(command: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the release does with one command line, ``{"words", "variables"}``."""
    from moedoctor.upstream.preflight import stages
    from moedoctor.upstream.preflight.meta import OnMeta

    reply: dict[str, Any] = {"words": command["words"], "seconds": {}, "ranks": []}
    with set_variables(command.get("variables", {})):
        try:
            config, arguments = stages.configure(command["words"], reply["seconds"])
            reply["config"] = stages.describe_config(config)
            on_meta = OnMeta(request["headers"])
            for rank in choose_ranks(config.parallel_config, request.get("ranks")):
                row = stages.run_rank(config, arguments, rank, on_meta, post=request["post"])
                reply["ranks"].append(row)
                if "error" in row:
                    break
            if not on_meta.current:  # the checkpoint was read to its end
                reply |= describe_taken(on_meta, config.parallel_config.tensor_parallel_size)
        except stages.StageError as stop:
            reply["error"] = stop.record
        except Exception as error:
            reply["error"] = {**stages.describe_error("config", error), "last_module": "moedoctor"}
    reply["peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return reply


def describe_taken(on_meta: Any, tensor_parallel: int) -> dict[str, Any]:
    """Return the names that no rank took anything of, and the tensors of which every rank left out a part."""
    taken: collections.Counter[str] = collections.Counter()
    skipped: collections.Counter[str] = collections.Counter()
    too_large = []
    for name, (used, share, shape) in on_meta.taken.items():
        (taken if used else skipped)[name_pattern(name)] += 1
        if 0 < share * tensor_parallel < 1 - 1e-6:
            too_large.append({"tensor": name, "shape": shape, "read": round(share, 4)})
    # With expert parallelism a rank skips the experts of others: a pattern counts if nothing of it was read.
    unread = [{"pattern": each, "count": count} for each, count in skipped.items() if not taken[each]]
    return {"skipped": unread, "too_large": too_large[:_MOST_ROWS]}


@contextlib.contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for one command line."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def choose_ranks(parallel: Any, wanted: Sequence[int] | None) -> list[int]:
    """Return the given ranks, or the first, the last, and the first of each pipeline stage."""
    world = parallel.world_size
    if wanted is not None:
        return sorted({rank for rank in wanted if rank < world}) or [0]
    stages = range(0, world, max(1, world // parallel.pipeline_parallel_size))
    return sorted({0, world - 1, *list(stages)[: _MOST_RANKS - 2]})


if __name__ == "__main__":
    answer(respond)
