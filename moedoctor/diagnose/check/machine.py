"""What rules are held against: this machine and its packages. A fact that cannot be had is None."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moedoctor.diagnose.check.offload_path import OffloadPath
from moedoctor.environment import Sources

_FACTS = {
    "torch": "torch",
    "vllm": "vllm",
    "flashinfer-python": "flashinfer",
    "flashinfer-cubin": "flashinfer_cubin",
    "flashinfer-jit-cache": "flashinfer_jit_cache",
}
"""Distribution -> the name of its version among the facts of `moedoctor.environment`."""


@dataclass(frozen=True)
class Machine:
    """This machine, or one that a test makes up."""

    facts: Mapping[str, Any]
    """As `moedoctor.environment.collect` gives them."""
    sources: Sources
    cuda: str | None
    """The CUDA toolkit's release, else the one that torch was built for."""
    offload: OffloadPath
    metadata_requires: Callable[[str], Iterable[str] | None] = importlib.metadata.requires
    versions: dict[str, str | None] = field(default_factory=dict)
    """Versions that were looked up, by distribution."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables, as they are: nothing is hidden in them."""
        return self.sources.environ

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Compute capabilities of the GPUs that CUDA programs may use here, each once."""
        gpus = [gpu for gpu in self.facts.get("gpus") or () if gpu.get("visible")]
        return tuple(dict.fromkeys(str(gpu["capability"]) for gpu in gpus if gpu.get("capability")))

    def version(self, distribution: str) -> str | None:
        """The version of an installed distribution; None where it is not installed or cannot be told."""
        if distribution in _FACTS:
            return _text(self.facts.get(_FACTS[distribution]))
        if distribution not in self.versions:
            self.versions[distribution] = _quietly(lambda: self.sources.package_version(distribution))
        return self.versions[distribution]

    def has_file(self, path: str) -> bool:
        """Whether an installed package holds this file, ``vllm/envs.py``; nothing is imported."""
        package, _, rest = path.partition("/")
        folder = _quietly(lambda: self.sources.package_folder(package))
        return folder is not None and bool(_quietly(lambda: self.sources.exists(str(folder / rest))))

    def requires(self, distribution: str) -> Iterable[str]:
        """The requirements of an installed distribution, as its metadata writes them."""
        return _quietly(lambda: self.metadata_requires(distribution)) or ()


def _quietly(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
