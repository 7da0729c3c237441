"""`flashinfer@X.Y.Z`: functions compiled out of that release's own headers, without installing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moedoctor.environment import no_gpu
from moedoctor.interfaces import Fault, Sources, SubjectProvider
from moedoctor.results import Case, Tier

PREFIX = "flashinfer@"
_NAME = re.compile(r"flashinfer@\d+\.\d+\.\d+[A-Za-z0-9.+-]*")


class FlashInferReleaseSubject(SubjectProvider):
    """A named release; ``--flashinfer X.Y.Z=PATH`` says where its wheel or unpacked folder is."""

    kind = "flashinfer"
    rank = 4

    def owns(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def unavailable(
        self, fault: Fault, name: str, tier: Tier, sources: Sources, environment: Mapping[str, Any]
    ) -> str | None:
        if name not in sources:
            release = name.removeprefix(PREFIX)
            return f"give its sources: --flashinfer {release}=PATH (a wheel or an unpacked folder)"
        return no_gpu(environment)

    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        from pathlib import Path

        from moedoctor.upstream.flashinfer.probe import FlashInferProbe

        release = case.subject.removeprefix(PREFIX)
        return FlashInferProbe.named(release, Path(sources[case.subject]), case.device)
