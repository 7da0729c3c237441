"""vLLM's routing kernels of any release behind one signature, the one of `moedoctor.fixes.routing`.

The operators are registered by the shared object itself, so vLLM is not imported. Their schemas
differ by release (``bias``, ``is_padding``, ``routed_scaling_factor`` come and go), so arguments are
filled by name from the schema that was loaded. One release a process: all register the same names.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moedoctor.fixes.routing import TopK
from moedoctor.results import UnavailableError
from moedoctor.upstream.releases.wheel import KernelError, cuda_runtimes, installed_library, shared_object

__all__ = ["KernelError", "MoeKernels", "fill", "installed_library", "load_library"]

_SCORING = {"softmax": 0, "sigmoid": 1}
"""`scoring_func` of grouped_topk: 0 takes scores, 1 takes logits (vllm/_custom_ops.py, 0.18.0 to 0.33.0)."""


@dataclass(frozen=True)
class MoeKernels:
    """The routing operators of one loaded release."""

    path: Path
    ops: Any
    """The operator namespace, ``torch.ops._moe_C``."""

    @classmethod
    def load(cls, path: Path) -> MoeKernels:
        """Load a wheel's or a shared object's kernels into this process; raises KernelError."""
        library = shared_object(path)
        try:
            load_library(library)
        except OSError as error:
            text = chain(error)
            missing = re.search(r"libcudart\.so\.(\d+)", text)
            hint = (
                f"; put {missing[0]} beside it or install nvidia-cuda-runtime-cu{missing[1]}"
                if missing
                else ""
            )
            raise KernelError(
                f"{library.name} does not load under torch {torch.__version__}: {text}{hint}"
            ) from error
        return cls(library, torch.ops._moe_C)

    @classmethod
    def installed(cls) -> MoeKernels:
        """The kernels of the vLLM of this environment, which is not imported; raises UnavailableError."""
        try:
            return cls.load(installed_library())
        except KernelError as error:
            raise UnavailableError(str(error)) from error

    def schema(self, name: str) -> Any:
        """The schema of operator `name` as this release registers it."""
        if not hasattr(self.ops, name):
            raise UnavailableError(f"{self.path.name} has no operator {name}")
        return getattr(self.ops, name).default._schema

    def topk_softmax(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool = False, bias: torch.Tensor | None = None
    ) -> TopK:
        """vLLM's ``topk_softmax``; same shapes as `moedoctor.fixes.routing.topk_softmax`."""
        return self._topk("topk_softmax", logits, top_k, renormalize, bias)

    def topk_sigmoid(
        self, logits: torch.Tensor, top_k: int, *, renormalize: bool = False, bias: torch.Tensor | None = None
    ) -> TopK:
        """vLLM's ``topk_sigmoid``."""
        return self._topk("topk_sigmoid", logits, top_k, renormalize, bias)

    def grouped_topk(
        self,
        logits: torch.Tensor,
        top_k: int,
        *,
        num_groups: int,
        topk_groups: int,
        scoring: str = "sigmoid",
        bias: torch.Tensor | None = None,
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
    ) -> TopK:
        """vLLM's fused ``grouped_topk``, which always adds a bias."""
        weights, ids = self.bound_grouped(
            logits,
            top_k,
            num_groups=num_groups,
            topk_groups=topk_groups,
            scoring=scoring,
            bias=bias,
            renormalize=renormalize,
            routed_scaling_factor=routed_scaling_factor,
        )()  # [T, K] each
        return TopK(weights.float(), ids.int())

    def bound_grouped(
        self,
        logits: torch.Tensor,
        top_k: int,
        *,
        num_groups: int,
        topk_groups: int,
        scoring: str = "sigmoid",
        bias: torch.Tensor | None = None,
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
    ) -> Any:
        """A call of `grouped_topk` with nothing else in it, for timing; it returns weights and ids [T, K]."""
        if bias is None:
            raise UnavailableError("vLLM's grouped_topk kernel has no form without a correction bias")
        scores = logits if scoring == "sigmoid" else torch.softmax(logits, dim=-1)  # [T, E]
        values = {
            "scores": scores,
            "n_group": num_groups,
            "topk_group": topk_groups,
            "topk": top_k,
            "renormalize": renormalize,
            "routed_scaling_factor": routed_scaling_factor,
            "bias": bias,
            "scoring_func": _SCORING[scoring],
        }
        arguments = fill(self.schema("grouped_topk"), values)
        operator = self.ops.grouped_topk
        return lambda: operator(**arguments)

    def _topk(
        self, name: str, logits: torch.Tensor, top_k: int, renormalize: bool, bias: torch.Tensor | None
    ) -> TopK:
        tokens = logits.shape[0]
        weights = torch.full((tokens, top_k), -7.0, dtype=torch.float32, device=logits.device)  # [T, K]
        ids = torch.full((tokens, top_k), -7, dtype=torch.int32, device=logits.device)  # [T, K]
        call = self.bound(name, weights, ids, logits, renormalize=renormalize, bias=bias)
        call()
        return TopK(weights, ids)

    def bound(
        self,
        name: str,
        weights: torch.Tensor,
        ids: torch.Tensor,
        logits: torch.Tensor,
        *,
        renormalize: bool = False,
        bias: torch.Tensor | None = None,
    ) -> Any:
        """A call of `topk_softmax` or `topk_sigmoid` into given outputs and nothing else: for timing."""
        operator = getattr(self.ops, name)
        arguments = fill(
            self.schema(name),
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
    """The arguments that `schema` takes, by name; raises UnavailableError for one that we do not know.

    A value that is not at its neutral setting must not be dropped silently: `bias` is refused where
    the release takes none.
    """
    names = [argument.name for argument in schema.arguments]
    unknown = [one.name for one in schema.arguments if one.name not in values and not one.has_default_value()]
    if unknown:
        raise UnavailableError(
            f"{schema.name} takes {', '.join(unknown)}, which this version of moedoctor does not know"
        )
    if values.get("bias") is not None and "bias" not in names:
        raise UnavailableError(f"{schema.name} of this release takes no correction bias")
    return {name: values[name] for name in names if name in values}


def load_library(library: Path) -> None:
    """Load a shared object that registers torch operators, with the CUDA runtime that it was built for."""
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        # Releases up to 0.19.1 are built for CUDA 12; the loader finds its runtime only where it is loaded.
        missing = re.search(r"libcudart\.so\.(\d+)", chain(error))
        runtimes = cuda_runtimes(library, missing[1]) if missing else []
        if not runtimes:
            raise
        ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(library))


def chain(error: BaseException) -> str:
    """The first lines of an error and of what caused it: torch names the file, the loader the reason."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts += [line for line in str(cause).splitlines()[:1] if line not in texts]
        cause = cause.__cause__ or cause.__context__
    return ": ".join(texts)
