"""`vllm@X.Y.Z`: kernels or Python code out of that release's wheel or shared object, without installing
it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moedoctor.environment import no_gpu
from moedoctor.interfaces import Fault, Sources, SubjectProvider
from moedoctor.results import Case, Tier, UnavailableError

PREFIX = "vllm@"
_NAME = re.compile(r"vllm@\d+\.\d+\.\d+[A-Za-z0-9.+-]*")


class VllmReleaseSubject(SubjectProvider):
    """A named release; ``--vllm-kernels X.Y.Z=PATH`` says where its kernels are, and in a wheel its Python
    code."""

    kind = "vllm"
    rank = 3

    def owns(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def unavailable(
        self, fault: Fault, name: str, tier: Tier, sources: Sources, environment: Mapping[str, Any]
    ) -> str | None:
        if name not in sources:
            release = name.removeprefix(PREFIX)
            return f"give its kernels: --vllm-kernels {release}=PATH (a wheel or a shared object)"
        if tier is Tier.LIBRARY:
            return (
                None
                if sources[name].endswith(".whl")
                else "its Python code is in a wheel, not in a shared object"
            )
        return no_gpu(environment)

    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        from pathlib import Path

        if case.tier is Tier.LIBRARY:
            from moedoctor.upstream.releases.release_source import ReleaseSource

            return ReleaseSource(Path(sources[case.subject]))
        from moedoctor.upstream.releases.moe_kernels import MoeKernels
        from moedoctor.upstream.releases.wheel import KernelError

        try:
            return MoeKernels.load(Path(sources[case.subject]))
        except KernelError as error:
            raise UnavailableError(str(error)) from error
