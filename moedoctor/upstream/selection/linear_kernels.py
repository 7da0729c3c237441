"""Asks an importable vLLM why it does not use its other kernels for a quantized linear layer.

Each chooser of vLLM goes through a table of kernel classes, one table for a scheme, and takes the first that
can be used. Here the others are asked the same. For a child process only.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

CHOOSERS = "vllm.model_executor.kernels.linear"
_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
Offers = dict[type, list[type]]
"""Kernel class -> the table in which a chooser came to it."""


@contextlib.contextmanager
def record_offers(offers: Offers) -> Iterator[None]:
    """Record the tables that vLLM's choosers go through."""

    class Table(list[type]):
        def __iter__(self) -> Iterator[type]:
            for kernel in super().__iter__():
                offers[kernel] = self
                yield kernel

    with contextlib.ExitStack() as stack:
        for name, tables in vars(importlib.import_module(CHOOSERS)).items():
            if name.startswith("_POSSIBLE_"):
                recording = {platform: Table(table) for platform, table in tables.items()}
                stack.enter_context(mock.patch.dict(tables, recording))
        yield


def explain_kernels(used: Iterable[Any], offers: Mapping[type, Iterable[type]]) -> Iterator[tuple[str, str]]:
    """Yield (kernel class, why it does not take a layer) for the other classes in the tables of used kernels.

    The reason is empty for a kernel that takes the layer.
    """
    for kernel in {type(each): each for each in used}.values():
        for other in offers.get(type(kernel), ()):
            if other is not type(kernel):
                yield other.__name__, _find_reason(other, kernel.config)


def _find_reason(kernel: Any, config: Any) -> str:
    """Return why a kernel class cannot be used for a layer, as vLLM's choosers ask; empty if it can be."""
    envs: Any = importlib.import_module("vllm.envs")
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    capability = platform.get_device_capability().to_int()
    if kernel.__name__ in envs.VLLM_DISABLED_KERNELS:
        return "disabled by environment variable"
    try:
        if hasattr(kernel, "is_supported"):
            fits, reason = kernel.is_supported(capability)
        else:
            least = kernel.get_min_capability()
            fits, reason = (
                least <= capability,
                f"requires capability {least}, current compute capability is {capability}",
            )
        if fits and hasattr(kernel, "_supports_quant_scheme"):  # MXFP4 since 0.33.0
            keys = importlib.import_module(_KEYS).kMxfp4Static, config.activation_quant_key
            fits, reason = kernel._supports_quant_scheme(*keys), f"quantization scheme {keys} not supported"
        if fits:
            fits, reason = kernel.can_implement(config)
    except Exception as error:
        return f"cannot be asked here: {' '.join(str(error).split())}"
    return "" if fits else str(reason or "no reason is given")
