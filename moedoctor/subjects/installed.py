"""`installed`: the vLLM or FlashInfer of this environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moedoctor.environment import explain_missing_gpu
from moedoctor.interfaces import Fault, Sources
from moedoctor.results import Tier
from moedoctor.subjects.base import OwnSubject


class InstalledSubject(OwnSubject):
    """The implementation that a fault takes from the package that it is about: `Fault.installed`."""

    kind = "installed"
    rank = 2

    def unavailable(
        self, fault: Fault, name: str, tier: Tier, sources: Sources, environment: Mapping[str, Any]
    ) -> str | None:
        if not environment.get(fault.installed_package):
            return f"{fault.installed_package} is not installed here"
        return explain_missing_gpu(environment) if tier in (Tier.KERNEL, Tier.ENGINE) else None
