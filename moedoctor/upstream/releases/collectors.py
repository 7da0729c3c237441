"""vLLM's and FlashInfer's own reports about this environment, each collected in a child process.

Both import their whole package and torch, so they take seconds and can fail in any way: a failure is reported
as a fact. The reports leave out what moedoctor collects itself (variables, host facts) and what its temporary
folders distort.
`python -m moedoctor.upstream.releases.collectors vllm` is the child.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moedoctor.processes.ask import CACHES, ChildError, answer, ask
from moedoctor.redaction import Redactor
from moedoctor.upstream.releases.wheel import find_package_folders

SECONDS = 30.0
_MAX_TEXT = 2_000
_OURS = re.compile(
    r"env|cpu_info|topo|lsb|^os$|libc|pip_version|conda|^(?:xpu|sycl|intel|one|level|libig|hip|mi)"
)
"""Fields of vLLM's report that are about the host, or about other makers' GPUs."""
_SECTIONS = ("FlashInfer", "CUDA Toolkit", "cuDNN Frontend", "GPU Libraries: loaded vs on disk")
"""Sections of FlashInfer's report with more than moedoctor's own facts."""
_DISTORTED = ("JIT cache", "Cubin store (local)")
"""The child has its own folders for these; moedoctor looks at the real ones itself."""


@dataclass(frozen=True)
class Collected:
    """The report of one collector, or the reason why there is none."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def _collect(package: str) -> Collected:
    redactor = Redactor.from_this_process()
    try:
        facts = ask("moedoctor.upstream.releases.collectors", package, seconds=SECONDS, caches=CACHES)
    except ChildError as error:
        return Collected(error=redactor.mask(str(error)))
    if "error" in facts:
        return Collected(error=redactor.mask(str(facts["error"])))
    return Collected(_shorten(redactor.record(facts)))


collect_vllm, collect_flashinfer = (functools.partial(_collect, name) for name in ("vllm", "flashinfer"))
"""Return what ``collect-env`` of the package reports; FlashInfer before 0.6.16 has no such command."""


def _shorten(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shorten(item) for item in value]
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def _report_vllm() -> Mapping[str, Any]:
    module = importlib.import_module("vllm.collect_env")
    facts = module.get_env_info()._asdict()
    return {
        name: str(value)
        for name, value in facts.items()
        if value not in (None, "") and not _OURS.search(name)
    }


def _report_flashinfer() -> Mapping[str, Any]:
    folders = find_package_folders("flashinfer")
    if not folders:
        return {"error": "there is no module flashinfer, only its metadata"}
    files = [file for folder in folders if (file := folder / "collect_env.py").is_file()]
    if not files:
        return {"error": "this FlashInfer release brings no collect_env.py"}
    # As a file, as upstream recommends: it must report even if `import flashinfer` fails.
    module_spec = importlib.util.spec_from_file_location("flashinfer_collect_env", files[0])
    assert module_spec is not None
    assert module_spec.loader is not None
    module: Any = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    module._force_load_gpu_libs = lambda: None  # it multiplies matrices on the GPU; a diagnosis does not
    report = module.collect_env_info()
    return {
        section: {name: value for name, value in report[section].items() if name not in _DISTORTED}
        for section in _SECTIONS
        if report.get(section)
    }


_COLLECTORS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "vllm": _report_vllm,
    "flashinfer": _report_flashinfer,
}

if __name__ == "__main__":
    answer(lambda package: _COLLECTORS[package]())
