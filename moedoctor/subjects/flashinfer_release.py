"""`flashinfer@X.Y.Z`: functions compiled out of that release's own headers, without installing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moedoctor.interfaces import Fault, Sources
from moedoctor.results import Case
from moedoctor.subjects.base import ReleaseSubject


class FlashInferReleaseSubject(ReleaseSubject):
    """A named release; ``--flashinfer X.Y.Z=PATH`` says where its wheel or unpacked folder is."""

    kind = "flashinfer"
    rank = 4
    missing = "give its sources: --flashinfer {release}=PATH (a wheel or an unpacked folder)"

    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        from moedoctor.upstream.flashinfer.probe import FlashInferProbe

        release = case.subject.partition("@")[2]
        return FlashInferProbe.load_release(release, Path(sources[case.subject]), case.device)
