"""The machine that rules are matched against, and vLLM's offload path on it.

A fact that is not known is None, and a rule that needs it does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from moedoctor.diagnose.check.build import Build
from moedoctor.diagnose.cuda.jit_cache import JitCache
from moedoctor.entries.entry import Condition
from moedoctor.environment import Sources
from moedoctor.redaction import Redactor

DISABLE_UVA = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"
DISABLE_PIN = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"
WSL_PIN = "VLLM_WSL2_ENABLE_PIN_MEMORY"
WSL_PIN_SINCE = Version("0.24.0")
WSL_KERNEL = (4, 19, 121)
"""The first WSL 2 kernel on which vLLM pins memory."""

_FACTS = {
    "torch": "torch",
    "vllm": "vllm",
    "flashinfer-python": "flashinfer",
    "flashinfer-cubin": "flashinfer_cubin",
    "flashinfer-jit-cache": "flashinfer_jit_cache",
}
"""Distribution -> the name of its version among the facts of `moedoctor.environment`."""


@dataclass(frozen=True)
class Answer:
    value: bool | None
    reason: str


@dataclass(frozen=True)
class OffloadPath:
    """The treatment of the weights that vLLM's offloader keeps on the host."""

    uva: Answer
    """Yes if it maps them into the GPU's address space; otherwise it copies them in every forward."""
    pins: Answer
    """Yes if it keeps them in pinned memory."""


@dataclass(frozen=True)
class Machine:
    """This machine, or a test's."""

    facts: Mapping[str, Any]
    """The result of `moedoctor.environment.collect`."""
    sources: Sources
    cuda: str | None
    """The release of the CUDA toolkit, or of the CUDA that torch was built for if there is no toolkit."""
    offload: OffloadPath
    redactor: Redactor
    jit_cache: JitCache
    metadata_requires: Callable[[str], Iterable[str] | None]
    build: Build = field(default_factory=Build)
    versions: dict[str, str | None] = field(default_factory=dict)
    """Versions that were looked up, by distribution."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables; nothing is hidden in them."""
        return self.sources.environ

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Compute capabilities of the GPUs that CUDA programs may use here, each once."""
        gpus = [gpu for gpu in self.facts.get("gpus") or () if gpu.get("visible")]
        return tuple(dict.fromkeys(str(gpu["capability"]) for gpu in gpus if gpu.get("capability")))

    def find_version(self, distribution: str) -> str | None:
        """Return the version of an installed distribution, or None if it is absent or unknown."""
        if distribution in _FACTS:
            version = self.facts.get(_FACTS[distribution])
            return version if isinstance(version, str) and version else None
        if distribution not in self.versions:
            self.versions[distribution] = _try(lambda: self.sources.package_version(distribution))
        return self.versions[distribution]

    def show_setting(self, name: str) -> str:
        """Return the value of a variable that is set, fit to be shown."""
        return self.redactor.mask_setting(name, self.variables[name])

    def has_file(self, path: str) -> bool:
        """Return True if an installed package has this file, ``vllm/envs.py``. Imports nothing."""
        package, _, rest = path.partition("/")
        folder = _try(lambda: self.sources.package_folder(package))
        return folder is not None and bool(_try(lambda: self.sources.exists(str(folder / rest))))

    def list_requirements(self, distribution: str) -> Iterable[str]:
        return _try(lambda: self.metadata_requires(distribution)) or ()


def match_condition(condition: Condition, machine: Machine) -> dict[str, Any] | None:
    """Return the facts that make all of `condition` hold on `machine`, or None if a part does not hold."""
    facts = {}
    for holds, name, fact in _match_parts(condition, machine):
        if not holds:
            return None
        facts[name] = fact
    variables = machine.variables
    if any(variables.get(name) != value for name, value in condition.variables.items()):
        return None
    if any(variables.get(name) == value for name, value in condition.variables_not.items()):
        return None
    declared = {name for names in machine.build.variables.values() for name in names or ()}
    present = [name for name in condition.any_set if name in variables and name not in declared]
    if condition.any_set and not present:
        return None
    shown = {**condition.variables, **{name: machine.show_setting(name) for name in present}}
    return {**facts, "variables": shown} if shown else facts


def is_within(range_: str, version: str | None) -> bool:
    """Return True if `version` is in the range. Development builds count; an unreadable version does not."""
    try:
        return version is not None and SpecifierSet(range_).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _match_parts(condition: Condition, machine: Machine) -> Iterator[tuple[bool, str, Any]]:
    """Yield (whether a part of `condition` holds, its name, the fact behind it)."""
    for name, range_ in condition.packages.items():
        version = machine.find_version(name)
        yield is_within(range_, version), name, version
    if condition.file is not None:
        yield machine.has_file(condition.file), "file", condition.file
    if condition.capability is not None:
        meant = [gpu for gpu in machine.capabilities if is_within(condition.capability, gpu)]
        yield bool(meant), "capability", ", ".join(meant)
    if condition.cuda is not None:
        yield is_within(condition.cuda, machine.cuda), "cuda", machine.cuda
    if condition.wsl is not None:
        yield machine.facts.get("wsl") is condition.wsl, "wsl", condition.wsl
    for name, required in (("uva", condition.uva), ("pins", condition.pins)):
        if required is not None:
            answer = getattr(machine.offload, name)
            yield answer.value is required, name, f"{'yes' if required else 'no'}: {answer.reason}"


def offload_path(
    vllm: str | None, *, wsl: bool | None, kernel: str | None, variables: Mapping[str, str]
) -> OffloadPath:
    """Return what vLLM release `vllm` does with offloaded weights: map them (UVA) or copy them.

    Restated from `offloader/uva.py`, `platforms/interface.py` and `platforms/cuda.py` of vLLM 0.17.1 to
    0.33.0. vLLM does not try whether pinning works; `moedoctor.diagnose.check.pinning` does.
    """
    if vllm is None:
        unknown = Answer(None, "vLLM is not installed")
        return OffloadPath(unknown, unknown)
    platform = _judge_platform(vllm, wsl, kernel, variables)
    return OffloadPath(
        _apply_switch(platform, DISABLE_UVA, variables), _apply_switch(platform, DISABLE_PIN, variables)
    )


def _apply_switch(platform: Answer, switch: str, variables: Mapping[str, str]) -> Answer:
    if _is_on(variables.get(switch)):
        return Answer(False, f"{switch}={variables[switch]} is set")
    return platform


def _judge_platform(vllm: str, wsl: bool | None, kernel: str | None, variables: Mapping[str, str]) -> Answer:
    if wsl is None:
        return Answer(None, "whether this is WSL is not known")
    if not wsl:
        return Answer(True, "Linux without WSL")
    try:
        may_pin = Version(vllm) >= WSL_PIN_SINCE
    except InvalidVersion:
        return Answer(None, f"vLLM's version {vllm!r} cannot be read")
    if not may_pin:
        return Answer(False, f"vLLM {vllm} never pins memory on WSL")
    if not _is_on(variables.get(WSL_PIN)):
        return Answer(False, f"on WSL vLLM {vllm} pins memory only with {WSL_PIN}=1")
    if tuple(int(part) for part in re.findall(r"\d+", kernel or "")[:3]) < WSL_KERNEL:
        return Answer(False, f"the WSL kernel {kernel or 'of unknown release'} is older than 4.19.121")
    return Answer(True, f"{WSL_PIN}={variables[WSL_PIN]} is set")


def _is_on(value: str | None) -> bool:
    """Return True if vLLM reads a switch as on. A value that is not a number stops vLLM itself."""
    try:
        return bool(int(value or "0"))
    except ValueError:
        return False


def _try(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:
        return None
