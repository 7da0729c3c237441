"""The questions that `moedoctor check` asks beside `moedoctor.environment`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moedoctor.diagnose.check import fix_plugin
from moedoctor.diagnose.check.pinning import Pinning, try_pinning
from moedoctor.diagnose.cuda.jit_cache import JitCache, read_jit_cache
from moedoctor.processes.cuda_tools import Tool, find_tools
from moedoctor.upstream.releases.collectors import Collected, collect_flashinfer, collect_vllm


def _find_nvcc(environ: Mapping[str, str]) -> Tool | None:
    """Return the nvcc that FlashInfer would call: the newest on this machine."""
    return max(find_tools(("nvcc",), environ), key=lambda tool: tool.cuda, default=None)


@dataclass(frozen=True)
class Probes:
    """The collectors beside `moedoctor.environment`. Tests replace them; each may raise anything."""

    pinning: Callable[[], Pinning] = try_pinning
    vllm: Callable[[], Collected] | None = collect_vllm
    """None: not asked, as the package would be imported."""
    flashinfer: Callable[[], Collected] | None = collect_flashinfer
    nvcc: Callable[[Mapping[str, str]], Tool | None] = _find_nvcc
    jit_cache: Callable[[Mapping[str, str]], JitCache] = read_jit_cache
    fix_plugin: Callable[..., Mapping[str, Any]] = fix_plugin.state
    """Takes variables, the version of vLLM, and `read`."""
    requires: Callable[[str], Iterable[str] | None] = importlib.metadata.requires
    """The requirements of a distribution."""
