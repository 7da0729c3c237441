"""The NVIDIA GPUs of this machine, as NVML tells them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU. A fact that its driver does not tell is None."""

    name: str | None
    capability: str | None
    """Compute capability, e.g. ``9.0``."""
    memory_bytes: int | None
    """None also where GPU and host share one memory."""
    visible: bool
    """Whether ``CUDA_VISIBLE_DEVICES`` lets CUDA programs see it."""


@dataclass(frozen=True)
class GpuFacts:
    """All GPUs and their driver."""

    gpus: tuple[Gpu, ...] | None = None
    """None where NVML could not be asked."""
    driver: str | None = None
    cuda_driver: str | None = None
    """The newest CUDA release that the driver supports, e.g. ``13.0``."""

    def to_json(self) -> dict[str, Any]:
        """The facts as the flat keys of a report's environment."""
        first = next((gpu for gpu in self.gpus or () if gpu.visible and gpu.name), None)
        return {
            "gpu": first.name if first else None,
            "capability": first.capability if first else None,
            "gpus": None if self.gpus is None else [asdict(gpu) for gpu in self.gpus],
            "driver": self.driver,
            "cuda_driver": self.cuda_driver,
        }


def collect_gpus(nvml: Any, visible_devices: str | None) -> GpuFacts:
    """Ask NVML, given its module (`pynvml`) and the value of ``CUDA_VISIBLE_DEVICES`` (None: unset).

    The GPUs are in PCI order, which is CUDA's order unless the GPUs of one machine differ. A machine
    without the driver's library has no GPUs, and that is no error.

    Raises:
        nvml.NVMLError: the library is there but does not start, e.g. after a driver update without a reboot.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in (
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        ):
            return GpuFacts(gpus=())
        raise
    try:
        count = nvml.nvmlDeviceGetCount()
        handles = [_optional(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        visible = _visible(visible_devices, [_optional(nvml, nvml.nvmlDeviceGetUUID, one) for one in handles])
        return GpuFacts(
            gpus=tuple(_gpu(nvml, handle, index in visible) for index, handle in enumerate(handles)),
            driver=_text(_optional(nvml, nvml.nvmlSystemGetDriverVersion)),
            cuda_driver=_cuda_release(_optional(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)),
        )
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any, visible: bool) -> Gpu:
    capability = _optional(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = _optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        name=_text(_optional(nvml, nvml.nvmlDeviceGetName, handle)),
        capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory_bytes=int(memory.total) if memory else None,
        visible=visible,
    )


def _optional(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """One answer of NVML; None where the GPU is lost or the question is not supported."""
    if None in arguments:
        return None
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    """NVML's older bindings answer with bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _cuda_release(number: int | None) -> str | None:
    """CUDA's own encoding, 1000 × major + 10 × minor: 12080 is ``12.8``."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _visible(setting: str | None, uuids: list[Any]) -> set[int]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` selects; as in CUDA, an entry that names none ends the list.

    A MIG device is a part of a GPU that NVML lists under another UUID: with one, every GPU counts as visible.
    """
    if setting is None or "MIG-" in setting:
        return set(range(len(uuids)))
    selected: set[int] = set()
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            selected.add(int(entry))
            continue
        named = [
            index
            for index, uuid in enumerate(uuids)
            if entry.startswith("GPU-") and (_text(uuid) or "").startswith(entry)
        ]
        if len(named) != 1:
            break
        selected.add(named[0])
    return selected
