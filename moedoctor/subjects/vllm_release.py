"""`vllm@X.Y.Z`: kernels or Python code out of that release's wheel or shared object, without installing
it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moedoctor.interfaces import Fault, Sources
from moedoctor.results import Case, Tier
from moedoctor.subjects.base import ReleaseSubject


class VllmReleaseSubject(ReleaseSubject):
    """A named release; ``--vllm-kernels X.Y.Z=PATH`` says where its kernels are, and in a wheel its Python
    code."""

    kind = "vllm"
    rank = 3
    missing = "give its kernels: --vllm-kernels {release}=PATH (a wheel or a shared object)"

    def unavailable(
        self, fault: Fault, name: str, tier: Tier, sources: Sources, environment: Mapping[str, Any]
    ) -> str | None:
        if tier is not Tier.LIBRARY or name not in sources:
            return super().unavailable(fault, name, tier, sources, environment)
        is_wheel = sources[name].endswith(".whl")
        return None if is_wheel else "its Python code is in a wheel, not in a shared object"

    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        if case.tier is Tier.LIBRARY:
            from moedoctor.upstream.releases.release_source import ReleaseSource

            return ReleaseSource(Path(sources[case.subject]))
        from moedoctor.upstream.releases.moe_kernels import MoeKernels

        return MoeKernels.load(Path(sources[case.subject]))
