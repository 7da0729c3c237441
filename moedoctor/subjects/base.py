"""The interface of a kind of subject."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from moedoctor.faults.base import Fault
from moedoctor.results import Case, Tier

Sources = Mapping[str, str]
"""Subject name -> where its code lies, from options such as ``--vllm-kernels 0.19.1=PATH``."""


class SubjectProvider(ABC):
    """One kind of subject: which names it owns, whether it can run here, and its implementation."""

    kind: str
    """``faulty``, ``fixed``, ``installed``, ``vllm`` …; what `Fault.tiers` is keyed by."""
    rank: int = 100
    """Order in reports; the control comes first."""

    def owns(self, name: str) -> bool:
        """Whether a subject of this name is of this kind."""
        return name == self.kind

    def unavailable(
        self, fault: Fault, name: str, tier: Tier, sources: Sources, environment: Mapping[str, Any]
    ) -> str | None:
        """Why this subject cannot run here at this tier; None where it can. Imports nothing heavy."""
        return None

    @abstractmethod
    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        """What `fault.observe` is given. Runs in the child; may raise `UnavailableError`."""


class UnavailableError(Exception):
    """Raised in a child where a subject or a case turns out not to be runnable: the case is skipped."""


def no_gpu(environment: Mapping[str, Any]) -> str | None:
    """Why no GPU can be used, for subjects that need one; None where one can be."""
    if not environment.get("gpu"):
        return "needs an NVIDIA GPU, none is visible"
    if not environment.get("torch_cuda"):
        return f"torch {environment.get('torch')} is built without CUDA: no use of the {environment['gpu']}"
    return None
