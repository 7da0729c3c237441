"""vLLM's kernels of any release: routing behind the signatures of `moedoctor.fixes.routing`, and FP8.

The shared object itself registers the operators, so vLLM is not imported. Their schemas differ by release
(``bias``, ``is_padding``, ``routed_scaling_factor`` come and go), so arguments are filled by name from the
schema that was loaded. A process can load one release: all register the same names.
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moedoctor.fixes.routing import TopK
from moedoctor.results import UnavailableError
from moedoctor.upstream.releases.wheel import (
    KernelError,
    find_core_libraries,
    find_cuda_runtimes,
    find_installed_library,
    find_shared_object,
)

_RUNTIME = re.compile(r"libcudart\.so\.(\d+)")
_TAKES_LOGITS = 1
"""`scoring_func` of grouped_topk: 0 takes scores, 1 takes logits (vllm/_custom_ops.py, 0.18.0 to 0.33.0)."""


@dataclass(frozen=True)
class MoeKernels:
    """The routing operators of one loaded release."""

    path: Path
    ops: Any
    """The operator namespace, ``torch.ops._moe_C``."""

    @classmethod
    def load(cls, path: Path) -> MoeKernels:
        """Load the kernels of a wheel or a shared object into this process. Raises KernelError."""
        library = find_shared_object(path)
        try:
            load_library(library)
        except OSError as error:
            text = describe_causes(error).replace(str(library), library.name)  # reports go to others
            missing = _RUNTIME.search(text)
            hint = ""
            if missing:
                hint = f"; put {missing[0]} beside it or install nvidia-cuda-runtime-cu{missing[1]}"
            raise KernelError(
                f"{library.name} does not load under torch {torch.__version__}: {text}{hint}"
            ) from error
        return cls(library, torch.ops._moe_C)

    @classmethod
    def installed(cls) -> MoeKernels:
        """Load the kernels of the installed vLLM, which is not imported. Raises KernelError."""
        return cls.load(find_installed_library())

    def find_schema(self, name: str) -> Any:
        """Return the schema of operator `name` in this release. Raises UnavailableError."""
        if not hasattr(self.ops, name):
            raise UnavailableError(f"{self.path.name} has no operator {name}")
        return getattr(self.ops, name).default._schema

    def grouped_topk(
        self,
        logits: torch.Tensor,
        top_k: int,
        *,
        num_groups: int,
        topk_groups: int,
        bias: torch.Tensor | None = None,
        renormalize: bool = False,
    ) -> TopK:
        """Call vLLM's fused ``grouped_topk``, which scores `logits` [T, E] by sigmoid.

        Raises UnavailableError without a `bias`, which the operator always adds.
        """
        if bias is None:
            raise UnavailableError("vLLM's grouped_topk kernel has no form without a correction bias")
        values = {
            "scores": logits,
            "n_group": num_groups,
            "topk_group": topk_groups,
            "topk": top_k,
            "renormalize": renormalize,
            "routed_scaling_factor": 1.0,
            "bias": bias,
            "scoring_func": _TAKES_LOGITS,
        }
        arguments = fill(self.find_schema("grouped_topk"), values)
        weights, ids = self.ops.grouped_topk(**arguments)  # [T, K] each
        return TopK(weights.float(), ids.int())

    def _call_topk(
        self,
        name: str,
        logits: torch.Tensor,
        top_k: int,
        *,
        renormalize: bool = False,
        bias: torch.Tensor | None = None,
    ) -> TopK:
        """Call an operator with the shapes of the function of that name in `moedoctor.fixes.routing`."""
        tokens = logits.shape[0]
        weights = torch.full((tokens, top_k), -7.0, dtype=torch.float32, device=logits.device)  # [T, K]
        ids = torch.full((tokens, top_k), -7, dtype=torch.int32, device=logits.device)  # [T, K]
        self.bind(name, weights, ids, logits, renormalize=renormalize, bias=bias)()
        return TopK(weights, ids)

    topk_softmax = functools.partialmethod(_call_topk, "topk_softmax")
    topk_sigmoid = functools.partialmethod(_call_topk, "topk_sigmoid")

    def bind(
        self,
        name: str,
        weights: torch.Tensor,
        ids: torch.Tensor,
        logits: torch.Tensor,
        *,
        renormalize: bool = False,
        bias: torch.Tensor | None = None,
    ) -> Any:
        """Return a function that only calls the operator `name`, into given outputs, for timing."""
        operator = getattr(self.ops, name)
        arguments = fill(
            self.find_schema(name),
            {
                "topk_weights": weights,
                "topk_indices": ids,
                "token_expert_indices": torch.empty_like(ids),
                "gating_output": logits,
                "renormalize": renormalize,
                "bias": bias,
                "routed_scaling_factor": 1.0,
                "is_padding": None,
            },
        )
        return lambda: operator(**arguments)


def fill(schema: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that `schema` takes, by name. Raises UnavailableError for an unknown argument.

    A `bias` is never dropped silently: it is refused if the release takes none.
    """
    names = [argument.name for argument in schema.arguments]
    unknown = [
        argument.name
        for argument in schema.arguments
        if argument.name not in values and not argument.has_default_value()
    ]
    if unknown:
        raise UnavailableError(
            f"{schema.name} takes {', '.join(unknown)}, which this version of moedoctor does not know"
        )
    if values.get("bias") is not None and "bias" not in names:
        raise UnavailableError(f"{schema.name} of this release takes no correction bias")
    return {name: values[name] for name in names if name in values}


def quantize_to_fp8(source: Path, values: torch.Tensor) -> torch.Tensor:
    """Quantize `values` [T, N] to float8_e4m3fn [T, N] by the release's own kernel, with a scale of 1.

    Raises UnavailableError if the release's core kernels are not there or do not load.
    """
    reason = "no vllm/_C*.abi3.so goes with it"
    for library in find_core_libraries(source):
        try:
            load_library(library)
        except OSError as error:
            reason = describe_causes(error)
        if hasattr(torch.ops._C, "static_scaled_fp8_quant"):
            break
    else:
        raise UnavailableError(
            f"{source.name}: the FP8 quantization kernel of this release cannot be loaded: {reason}"
        )
    operator = torch.ops._C.static_scaled_fp8_quant
    result = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)  # [T, N]
    scale = torch.ones(1, dtype=torch.float32, device=values.device)  # [1]
    operator(**fill(operator.default._schema, {"result": result, "input": values, "scale": scale}))
    return result


def load_library(library: Path) -> None:
    """Load a shared object that registers torch operators, with the CUDA runtime that it was built for."""
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        # Releases up to 0.19.1 are built for CUDA 12; the loader finds its runtime only if it is loaded.
        missing = _RUNTIME.search(describe_causes(error))
        runtimes = find_cuda_runtimes(library, missing[1]) if missing else []
        if not runtimes:
            raise
    else:
        return
    ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))  # what fails now is not that the runtime is missing


def describe_causes(error: BaseException) -> str:
    """Return the first lines of an error and its causes: torch names the file, the loader the reason."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts += [line for line in str(cause).splitlines()[:1] if line not in texts]
        cause = cause.__cause__ or cause.__context__
    return ": ".join(texts)
