"""The facts of `moedoctor check` in the few words that a person reads; JSON has them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moedoctor.reporters.text import one_line, short_value

_PACKAGES = (
    ("torch", "torch"),
    ("triton", "triton"),
    ("vllm", "vllm"),
    ("flashinfer", "flashinfer-python"),
    ("flashinfer_cubin", "flashinfer-cubin"),
    ("flashinfer_jit_cache", "flashinfer-jit-cache"),
)
_COLLECTORS = {
    "vllm": ("cuda_runtime_version", "cudnn_version", "vllm_build_flags"),
    "flashinfer": ("Target CUDA archs (resolved)", "flashinfer-cubin", "flashinfer-jit-cache", "flashinfer"),
}
"""What of upstream's own reports is worth a line."""
_UNKNOWN = "unknown"


def fact_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, words) of each fact, in the order in which a report shows them."""
    for name, text in _rows(facts):
        yield name, one_line(text)


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "GPU", _gpus(facts)
    yield "driver", _with(facts.get("driver"), "CUDA", facts.get("cuda_driver"))
    yield "CUDA toolkit", _toolkit(facts)
    yield "system", _system(facts)
    yield "pinned memory", _pinned(facts.get("pinned_memory"))
    yield "locked memory", _limit(facts.get("locked_memory_limit_bytes"))
    for key, name in _PACKAGES:
        if key in ("torch", "vllm", "flashinfer") or facts.get(key):
            yield name, _package(key, facts)
    if facts.get("vllm"):
        yield "CPU offload", _offload(facts.get("vllm_offload"))
    if facts.get("flashinfer"):
        yield "JIT cache", _jit(facts.get("flashinfer_jit_folders"))
    yield "moedoctor fixes", _fixes(facts.get("moedoctor_fixes"))
    yield "variables", _variables(facts.get("env"))
    for package, answer in (facts.get("collectors") or {}).items():
        yield f"{package} says", _said(package, answer)
    for name, error in (facts.get("collector_errors") or {}).items():
        yield f"no {name}", str(error)


def _gpus(facts: Mapping[str, Any]) -> str:
    gpus: Sequence[Mapping[str, Any]] | None = facts.get("gpus")
    if gpus is None:
        return _UNKNOWN
    visible = [one for one in gpus if one.get("visible")]
    if not visible:
        return "none" if not gpus else f"none of {len(gpus)} is visible to CUDA programs"
    names: dict[str, int] = {}
    for one in visible:
        memory = one.get("memory_bytes")
        size = f", {memory / 2**30:.0f} GiB" if memory else ""
        capability = f" ({one['capability']}{size})" if one.get("capability") else ""
        text = f"{one.get('name') or _UNKNOWN}{capability}"
        names[text] = names.get(text, 0) + 1
    return "; ".join(text if count == 1 else f"{count} × {text}" for text, count in names.items())


def _with(value: Any, word: str, other: Any) -> str:
    if not value:
        return "none"
    return f"{value} ({word} {other})" if other else str(value)


def _toolkit(facts: Mapping[str, Any]) -> str:
    nvcc, built = facts.get("nvcc"), facts.get("torch_cuda")
    return ", ".join(
        (
            f"nvcc {nvcc}" if nvcc else "no nvcc",
            f"torch is built for {built}" if built else "torch without CUDA",
        )
    )


def _system(facts: Mapping[str, Any]) -> str:
    parts = [
        str(facts.get("platform") or _UNKNOWN),
        f"kernel {facts.get('kernel')}",
        f"Python {facts.get('python')}",
    ]
    if facts.get("wsl"):
        parts.append("WSL")
    if facts.get("container"):
        parts.append("in a container")
    return ", ".join(parts)


def _pinned(pinning: Mapping[str, Any] | None) -> str:
    if pinning is None:
        return _UNKNOWN
    word = {True: "works", False: "FAILS", None: "not tried"}[pinning["works"]]
    return f"{word}: {pinning['reason']}"


def _limit(limit: Any) -> str:
    if isinstance(limit, int):
        return f"at most {limit / 2**20:.0f} MiB for a process"
    return str(limit or _UNKNOWN)


def _package(key: str, facts: Mapping[str, Any]) -> str:
    version = facts.get(key)
    if not version:
        return "not installed" if key not in (facts.get("collector_errors") or {}) else _UNKNOWN
    name = dict(_PACKAGES)[key]
    wrong = [one for one in facts.get("packages") or () if one["package"] == name and not one["ok"]]
    if not wrong:
        return str(version)
    return f"{version}; " + ", ".join(f"{one['by']} requires {one['expected']}" for one in wrong)


def _offload(path: Mapping[str, Any] | None) -> str:
    if not path:
        return _UNKNOWN
    uva, pins = path["uva"], path["pins"]
    ways = {True: "maps host memory (UVA)", False: "copies in every forward (no UVA)", None: "path unknown"}
    reasons = dict.fromkeys((uva["reason"], pins["reason"]))
    pinned = {True: "pinned", False: "not pinned", None: "pinning unknown"}[pins["value"]]
    return f"{ways[uva['value']]}, {pinned}: {'; '.join(reasons)}"


def _jit(cache: Mapping[str, Any] | None) -> str:
    if cache is None:
        return _UNKNOWN
    if not cache["folders"]:
        return f"{cache['path']}: empty"
    held = (
        f"{one['release']}/{'_'.join(one['targets']) or 'no target'} ({one['modules']} modules)"
        for one in cache["folders"]
    )
    return f"{cache['path']}: {', '.join(held)}"


def _fixes(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return _UNKNOWN
    return f"{'active' if state['active'] else 'not active'}: {state['reason']}"


def _variables(variables: Mapping[str, str] | None) -> str:
    if variables is None:
        return _UNKNOWN
    return (
        " ".join(f"{name}={value}" for name, value in variables.items())
        or "none of VLLM_*, FLASHINFER_*, CUDA_*"
    )


def _said(package: str, answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return f"nothing: {answer['error']}"
    flat = dict(_flat(answer))
    told = [f"{name}: {short_value(flat[name])}" for name in _COLLECTORS.get(package, ()) if name in flat]
    return "; ".join(told) or f"{len(flat)} facts, see --format json"


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield str(name), value
