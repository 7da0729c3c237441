"""The parts of a node's report that matter: facts that are equal or not, numbers that vary, and findings.

Every command's JSON is read in the same way, so a command needs nothing of its own here unless its findings
have a shape of their own.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from moedoctor.fleet.rows import Row, mask
from moedoctor.results import VERDICTS
from moedoctor.text import join_lines, shorten

NO_GPU = "no GPU"
_LONG = 200
_MOST = 4000
"""Facts or numbers of one report; a longer one is cut."""

NOT_COMPARED = frozenset(
    {"gpu", "capability", "memory_bytes", "collectors", "not_looked_at", "cuda_visible_devices"}
)
"""Facts that an environment says twice, at length, or as a number that differs between equal nodes."""

_NOT_FACTS = frozenset({"reason", "path", "seconds", "known"})
"""Keys that are not facts about the node. ``known`` is what moedoctor's own reports say."""

_NAMES = {
    "cuda_driver": "CUDA of the driver",
    "torch_cuda": "CUDA of torch",
    "vllm": "vLLM",
    "flashinfer": "FlashInfer",
    "flashinfer_cubin": "flashinfer-cubin",
    "flashinfer_jit_cache": "flashinfer-jit-cache",
    "pinned_memory.works": "pinned memory",
    "python": "Python",
    "platform": "system",
    "cpu_count": "CPUs",
}
_UNIT = re.compile(
    r"(?:^|_)(?:us|ms|ns|seconds|gbps|gb_s|tb_s|tflops|per_second|gb_per_second|share_of_roofline)$"
)
_HIGHER_IS_BETTER = re.compile(r"(?:gbps|gb_s|tb_s|tflops|per_second|share_of_roofline)$")
_NOT_MEASURED = frozenset({"seconds", "limit_seconds", "timeout_seconds"})
"""The time that a case took, with its start, says nothing about a GPU."""

_LABELS = ("id", "subject", "tier", "case", "backend", "quantization", "model", "tokens", "name", "policy")
_MOST_LEVELS = 12
_LARGEST = 1e300
"""Nothing that is measured is as large, and the sum of two larger numbers may be too large for a float."""


@dataclass(frozen=True)
class Member:
    """A node or GPU that answered, as the grouping sees it."""

    name: str
    kind: str
    """The mark of equal nodes: the models of their GPUs, or `NO_GPU`."""
    facts: Mapping[str, str]
    numbers: Mapping[str, float] = field(default_factory=dict)
    findings: Mapping[str, str] = field(default_factory=dict)
    """Id of a finding, or words -> its title."""


def make_member(row: Row, name: str) -> Member:
    """Return what the report of `row` says. Raises nothing: what has another shape is left out."""
    report = row.report or {}
    environment = report.get("environment")
    environment = environment if isinstance(environment, Mapping) else {}
    counts = _count_gpus(environment, row.place.gpu)
    facts = dict(islice(_list_environment(environment), _MOST))
    if row.place.gpu is None:
        shown = ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
        facts["GPU"] = shown or NO_GPU
    if row.python is not None and "Python" not in facts:
        facts["Python"] = row.python
    facts.update((f"kernels {name}", text) for name, text in row.checksums.items())
    findings = dict(islice(_list_findings(report), _MOST))
    facts.update(islice(_list_verdicts(report), _MOST))
    facts.update((f"finding {key}", "strikes") for key in findings)
    # Here and not in the whole report, which is many times as long; nodes say mostly the same things.
    host = row.place.host
    numbers: list[tuple[str, float]] = []
    for key, value in report.items():
        if key not in ("environment", "summary", "origin"):
            _collect_numbers({key: value}, (), numbers)
    return Member(
        name,
        _mask(", ".join(sorted(counts)) or NO_GPU, host),
        {_mask(key, host): _mask(_shorten(value), host) for key, value in facts.items()},
        {_mask(key, host): value for key, value in numbers[:_MOST]},
        {_mask(key, host): _mask(title, host) for key, title in findings.items()},
    )


def is_better_higher(number: str) -> bool:
    """Return whether a larger value of this number is the better one."""
    return _HIGHER_IS_BETTER.search(number.partition(" ")[0]) is not None


def _mask(text: str, host: str) -> str:
    return sys.intern(str(mask(text, host)))


def _count_gpus(environment: Mapping[str, Any], gpu: str | None) -> Counter[str]:
    """Return how many GPUs of each model a report is about."""
    if gpu is not None and environment.get("gpu"):
        return Counter([_shorten(environment["gpu"])])
    listed = environment.get("gpus")
    return Counter(_shorten(row.get("name")) for row in _select_records(listed) if row.get("visible", True))


def _list_environment(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in environment.items():
        if key in NOT_COMPARED or key == "gpus":
            continue
        for name, text in _flatten(str(key), value):
            if name != "env.CUDA_VISIBLE_DEVICES":  # one GPU or another is no difference
                yield _NAMES.get(name, name.removeprefix("env.")), text


def _flatten(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Give the texts in JSON data with dotted names; a list is one sorted text."""
    if isinstance(value, Mapping) and depth < 8:
        for key, inner in value.items():
            if key not in _NOT_FACTS:
                yield from _flatten(f"{name}.{_shorten(key)}", inner, depth + 1)
    elif isinstance(value, list):
        yield name, _shorten(", ".join(sorted(map(_flatten_entry, value)))) or "none"
    else:
        yield name, {None: "none", True: "yes", False: "no"}.get(value) or _shorten(value)


def _flatten_entry(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(text for _, text in sorted(_flatten("", value)))
    return _shorten(value)


def _list_findings(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Give (id, title) of what a report calls wrong."""
    for row in _select_records(report.get("findings")):
        yield _shorten(row.get("id") or row.get("check")), _shorten(row.get("title") or row.get("evidence"))
    for row in _select_records(report.get("problems")):
        yield _shorten(row.get("what")), _shorten(row.get("why"))
    for row in _select_records(report.get("scenarios")):
        if (look := VERDICTS.get(row.get("verdict", ""))) and look.wrong:
            yield _shorten(row.get("id")), f"{_shorten(row.get('title'))}: {row['verdict']}"


def _list_verdicts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Give the verdicts of scenarios, of their cases by subject and tier, of claims and of files."""
    for row in _select_records(report.get("scenarios")):
        name = _shorten(row.get("id"))
        yield f"verdict {name}", _shorten(row.get("verdict"))
        cases: dict[str, Counter[str]] = {}
        for case in _select_records(row.get("cases")):
            tier = f"{_shorten(case.get('subject'))}/{_shorten(case.get('tier'))}"
            cases.setdefault(tier, Counter())[_shorten(case.get("verdict"))] += 1
        for tier, counts in cases.items():
            words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
            yield f"cases {name} {tier}", words
        for claim in _select_records(row.get("claims")):
            yield f"claim {name}: {_shorten(claim.get('text'))}", _shorten(claim.get("verdict"))
    for row in _select_records(report.get("items")):
        yield f"device code {_shorten(row.get('path'))}", _shorten(row.get("verdict"))


def _collect_numbers(
    record: dict[str, Any], inside: tuple[dict[str, Any], ...], measured: list[tuple[str, float]]
) -> None:
    """Add every number of a record whose name ends in a unit, with the texts that say what it is of.

    Most of a report is walked here, so it is kept fast.
    """
    if len(inside) > _MOST_LEVELS or len(measured) > _MOST:
        return
    trail = (*inside, record)
    for key, value in record.items():
        kind = type(value)
        if kind is dict:
            _collect_numbers(value, trail, measured)
        elif kind is list:
            for inner in value:
                if type(inner) is dict:
                    _collect_numbers(inner, trail, measured)
        elif (kind is float or kind is int) and -_LARGEST < value < _LARGEST and _is_measured(key):
            labels = (label for outer in trail for label in _list_labels(outer))
            measured.append((" ".join((_shorten(key), *labels)), float(value)))


@functools.lru_cache(maxsize=65_536)
def _is_measured(name: str) -> bool:
    return name not in _NOT_MEASURED and _UNIT.search(name) is not None


def _list_labels(record: Mapping[str, Any]) -> Iterator[str]:
    """Give the texts that tell a record from others beside it."""
    for key in _LABELS:
        value = record.get(key)
        if isinstance(value, (str, int)):
            yield _shorten(value if isinstance(value, str) else f"{key}={value}")
    parameters = record.get("parameters")
    if isinstance(parameters, Mapping):
        yield from (f"{_shorten(key)}={_shorten(inner)}" for key, inner in sorted(parameters.items()))


def _select_records(value: Any) -> Sequence[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else ()


def _shorten(value: Any) -> str:
    return _shorten_text(str(value))


@functools.lru_cache(maxsize=65_536)
def _shorten_text(text: str) -> str:
    return shorten(join_lines(text), _LONG)
