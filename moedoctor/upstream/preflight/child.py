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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

from moedoctor.models.tensor_names import OPTIONAL, name_pattern
from moedoctor.processes.ask import answer

_SHOWN = ("vllm", "torch", "transformers", "compressed-tensors", "flashinfer-python", "humming-kernels")
_MOST_RANKS = 6
_OBJECTS = 100_000
"""New objects after which garbage is looked for: a loader makes very many, and few of them are garbage."""
_Rank = tuple[dict[str, Any], dict[str, tuple[bool, float, list[int]]], bool]
"""A rank's answer, what it took of each tensor (`OnMeta.taken`), and True if it came to the last tensor."""
_MOST_ROWS = 50
_ONE_GPU = ("--tensor-parallel-size=1", "--pipeline-parallel-size=1", "--data-parallel-size=1")


def respond(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the environment, then an answer for each command line, in order."""
    started = time.perf_counter()
    gc.disable()  # imports make hundreds of thousands of objects, and all of them stay
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
    for folder in find_package_folders("vllm"):
        define_operators(folder, partial(loads_extension, folder=folder), OPERATORS)
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
        "seconds": round(time.perf_counter() - started, 1),
    }
    gc.freeze()
    gc.set_threshold(_OBJECTS)
    gc.enable()
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
    """Return the release's requirements on packages of `_SHOWN`, but torch, that this environment breaks."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    broken, versions = [], list_versions()
    for text in importlib.metadata.requires("vllm") or ():
        requirement = Requirement(text)
        name, marker, required = requirement.name, requirement.marker, requirement.specifier
        if name not in _SHOWN or name == "torch" or (marker and not marker.evaluate({"extra": ""})):
            continue
        version = versions.get(name, "")
        if not version or not required.contains(version, prereleases=True):
            newer = bool(version) and all(Version(version) >= Version(each.version) for each in required)
            broken.append({"name": name, "version": version, "required": str(required), "newer": newer})
    return broken


def ask_command(command: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the release does with one command line, ``{"words", "variables"}``."""
    from moedoctor.upstream.preflight import stages
    from moedoctor.upstream.preflight.meta import OnMeta

    started = time.perf_counter()
    reply: dict[str, Any] = {"words": command["words"], "post": request["post"], "seconds": {}, "ranks": []}
    with mock.patch.dict(os.environ, command.get("variables", {})):
        try:
            config, arguments = stages.configure(command["words"], reply["seconds"])
            reply["config"] = stages.describe_config(config)
            headers = request["headers"]
            if not headers and request["names"]:
                headers, reply["made"] = make_headers(command["words"])

            def run(rank: int) -> _Rank:
                on_meta = OnMeta(headers)
                row = stages.run_rank(config, arguments, rank, on_meta, post=request["post"])
                return row, on_meta.taken, not on_meta.current

            ranks = fork_ranks(run, choose_ranks(config.parallel_config, request.get("ranks")))
            broken = (place for place, (row, _, _) in enumerate(ranks, 1) if "error" in row)
            ranks = ranks[: next(broken, None)]
            reply["ranks"] = [row for row, _, _ in ranks]
            if ranks[-1][2]:
                taken = [taken for _, taken, _ in ranks]
                reply |= describe_taken(taken, config.parallel_config.tensor_parallel_size)
        except stages.StageError as stop:
            reply["error"] = stop.record
        except Exception as error:
            reply["error"] = {**stages.describe_error("config", error), "last_module": "moedoctor"}
    # An upper bound: the ranks of two processes share most of their memory.
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)[: len(reply["ranks"]) or 1]
    reply["peak_memory"] = sum(resource.getrusage(each).ru_maxrss for each in processes) * 1024
    reply["elapsed"] = round(time.perf_counter() - started, 1)
    return reply


def make_headers(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the tensors that the release would read for a configuration, and why there are none.

    They are made for one GPU, and read by the release's own loader.
    """
    from moedoctor.upstream.preflight import stages
    from moedoctor.upstream.preflight.meta import MADE, OnMeta

    try:
        config, arguments = stages.configure([*words, *_ONE_GPU], {})
        if config.speculative_config is not None:
            return {}, "the tensors of a draft model are not made"
        row = stages.run_rank(config, arguments, 0, OnMeta({}), post=False, names=True)
        if "error" not in row:
            headers = {MADE: row["tensors"]}
            on_meta = OnMeta(headers)
            row = stages.run_rank(config, arguments, 0, on_meta, post=False)
    except stages.StageError as stop:
        row = {"error": stop.record}
    if "error" in row:
        return {}, f"{row['error']['type']}: {row['error']['message'][:300]}"
    holes = [
        hole["pattern"]
        for hole in row["loaded"]["holes"]
        if not (hole["padded"] or hole["unused"] or OPTIONAL.search(hole["pattern"]))
    ]
    holes += [each["pattern"] for each in describe_taken([on_meta.taken], 1)["skipped"]]
    return ({}, f"the loader does not read {holes[0]} as it was made") if holes else (headers, "")


def fork_ranks(run: Callable[[int], _Rank], ranks: Sequence[int]) -> list[_Rank]:
    """Return what `run` answers for each rank: the first here, others in forks, or here if a fork died."""
    rows: list[_Rank] = []
    workers = max(1, min(len(ranks), os.cpu_count() or 1) - 1)
    # A fork has the functions and objects of this process, which cannot be sent to another one.
    pool = ProcessPoolExecutor(workers, get_context("fork"), _RUN.append, (run,))
    with pool, contextlib.suppress(BrokenExecutor):  # a fork may be ended, or die beside threads
        answers = pool.map(_run_rank, ranks[1:])
        rows.append(run(ranks[0]))
        rows.extend(answers)
    return rows + [run(rank) for rank in ranks[len(rows) :]]


_RUN: list[Callable[[int], _Rank]] = []


def _run_rank(rank: int) -> _Rank:
    return _RUN[0](rank)


def describe_taken(
    ranks: Sequence[Mapping[str, tuple[bool, float, list[int]]]], tensor_parallel: int
) -> dict[str, Any]:
    """Return the names that no rank took anything of, and the tensors of which every rank left out a part."""
    taken: collections.Counter[str] = collections.Counter()
    skipped: collections.Counter[str] = collections.Counter()
    too_large = []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        rows = [rank[name] for rank in ranks if name in rank]
        used, share, shape = any(row[0] for row in rows), max(row[1] for row in rows), rows[0][2]
        (taken if used else skipped)[name_pattern(name)] += 1
        if 0 < share * tensor_parallel < 1 - 1e-6:
            too_large.append({"tensor": name, "shape": shape, "read": round(share, 4)})
    # With expert parallelism a rank skips the experts of others: a pattern counts if nothing of it was read.
    unread = [{"pattern": each, "count": count} for each, count in skipped.items() if not taken[each]]
    return {"skipped": unread, "too_large": too_large[:_MOST_ROWS]}


def choose_ranks(parallel: Any, wanted: Sequence[int] | None) -> list[int]:
    """Return the given ranks, or the first, the last, and the first of each pipeline stage."""
    world = parallel.world_size
    if wanted is not None:
        return sorted({rank for rank in wanted if rank < world}) or [0]
    stages = range(0, world, max(1, world // parallel.pipeline_parallel_size))
    return sorted({0, world - 1, *list(stages)[: _MOST_RANKS - 2]})


if __name__ == "__main__":
    answer(respond)
