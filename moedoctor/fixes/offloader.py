"""Weight offload for any torch module: host memory within a budget, two device buffers, prefetch.

    handle = offload(model, 8 << 30, patterns=("experts",))
    model(x)                    # as before, also under torch.compile(fullgraph=True)
    print(handle.report())
    handle.restore()            # everything back on the device

Parameters stay the same objects. Their data points for good into one of two device buffers, so a quantization
config that holds a parameter sees device memory, and nothing is swapped in `forward`. Around each layer's
`forward` run two operators (`moedoctor.fixes.offload.hooks`): one waits for the layer's copy, the other lets
the copy of a later layer begin in the buffer that is now free. A compiler keeps these operators in order. For
that it must store tensors between layers that it might else have kept in registers, so it rounds bfloat16 in
other places. If an operator of one's own reads the weights, `reader` leaves the compiled code as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from moedoctor.fixes.offload import storage
from moedoctor.fixes.offload.hooks import MARK, Hooks, Reader
from moedoctor.fixes.offload.pinned import Pin, PinError, register, view_on_device
from moedoctor.fixes.offload.plan import find_held_tensors, is_number, make_plan
from moedoctor.fixes.offload.prefetch import CopyEngine, CudaEngine, Pipeline
from moedoctor.fixes.offload.report import OffloadReport, write_report
from moedoctor.fixes.offload.storage import StoredLayer, settle_in


@dataclass(eq=False, repr=False)
class Offload:
    """A module whose weights are offloaded. Made by `offload`."""

    _module: nn.Module
    _layers: list[StoredLayer]
    _device: torch.device
    _report: OffloadReport
    _trained: list[nn.Parameter]
    """The parameters that asked for gradients."""
    _hooks: Hooks | None
    _pipeline: Pipeline | None

    def report(self) -> OffloadReport:
        """Return each parameter, its bytes, where it lives and why, pinned or not, view or copy, and sums.

        The notes say so if the first pass could not be watched.
        """
        note = self._pipeline.unwatched if self._pipeline is not None else None
        return self._report if note is None else replace(self._report, notes=(*self._report.notes, note))

    def get_host_weight(self, name: str) -> torch.Tensor:
        """Return the offloaded parameter `name` in host memory: not a copy, so do not write to it.

        Raises KeyError for a parameter that is not offloaded.
        """
        for layer in self._layers:
            for weight, region in layer.items:
                if name in weight.names:
                    return region.view(layer.block.bytes)
        raise KeyError(f"{name} is not offloaded")

    def list_device_tensors(self) -> list[torch.Tensor]:
        """Return every tensor in device memory: what stayed, and the buffers."""
        stored = {id(weight.parameter) for layer in self._layers for weight, _ in layer.items}
        stayed = [parameter for parameter in self._module.parameters() if id(parameter) not in stored]
        buffers = list(self._pipeline.buffers) if self._pipeline is not None else []
        return [*stayed, *self._module.buffers(), *buffers]

    def join(self) -> None:
        """Make the current stream wait for every copy in flight.

        Callers that capture graphs of single layers call it before a capture begins.
        """
        if self._pipeline is not None:
            self._pipeline.join()

    def restore(self) -> None:
        """Bring every weight back to the device, free host memory and buffers, unwrap all forwards.

        Parameters that lay in one storage get one each. A second call does nothing. If the device has no
        room, torch's error is raised and the module stays offloaded. One warning names parameters that were
        written since the offload; they have their values from before the write.
        """
        if self._pipeline is not None:
            self._pipeline.settle()
        with torch.inference_mode(False), torch.no_grad():
            fresh = storage.bring_back(self._layers, self._device)
            changed = self._hooks.list_changed() if self._hooks is not None else []
            if self._hooks is not None:
                self._hooks.remove()
            for parameter, data in fresh:
                parameter.data = data
        for layer in self._layers:
            layer.block.close()
        for parameter in self._trained:
            parameter.requires_grad_(True)
        self._hooks, self._pipeline, self._layers, self._trained = None, None, [], []
        if changed:
            message = "what was written to offloaded weights is not kept; as before the write: "
            warnings.warn(message + storage.name_some(changed), RuntimeWarning, stacklevel=2)


@torch.no_grad()
def offload(
    module: nn.Module,
    budget_bytes: int,
    *,
    device: torch.device | str | None = None,
    patterns: Sequence[str] = (),
    layers: Iterable[nn.Module] | None = None,
    access: Literal["copy", "view"] = "copy",
    pin: bool | Pin = True,
    keep_below: int = 65_536,
    engine: CopyEngine | None = None,
    reader: Reader | None = None,
) -> Offload:
    """Move up to `budget_bytes` of `module`'s weights to host memory; its outputs stay the same bit for bit.

    A buffer holds a layer's weights only while the layer's `forward` runs. Only that forward, `state_dict`
    and `get_host_weight` may read them: no parent (`layers` can name it as the layer), other layer or hook.
    The first eager pass of a module with a `forward` is watched, and a read between layers raises
    RuntimeError. Compiled code, a ModuleList and what runs inside layers are not watched; after a compiled
    first pass a warning and the report's notes say so. A layer that returns its weights returns a copy.

    Load weights with `load_state_dict`. Other writes would be lost: in place, to ``data``, another parameter
    in the same place, `torch.func.functional_call`, a layer that writes its own weights. An eager pass and
    `state_dict` raise RuntimeError for them. They miss writes past torch's count (``weight.data.copy_(new)``)
    and writes by or after compiled code. A second thread's pass and a copy of the module (`copy.deepcopy`,
    pickle) raise RuntimeError too. The module runs forward only: its parameters ask for no gradients until
    `restore`, and bits are compared with those of the module after `requires_grad_(False)`.

    `module`: may be an `nn.ModuleList` of layers that something else calls.
    `device`: where it runs; by default where its parameters are. If it is given, parameters may also be on
    the CPU; what stays is moved, with tensors that objects of the module hold over the same memory.
    `patterns`: dotted parts of parameter names, matched whole as `--cpu-offload-params` does (``experts``,
    ``w13_weight``); none means every parameter.
    `layers`: what is fetched together, in running order; they must not run inside each other. By default the
    elements of the outermost ModuleList or Sequential of three or more, else the outermost modules that own
    parameters (torch's attention and transformer layers always as a whole).
    `access`: ``copy`` prefetches into two device buffers (one for two layers); ``view`` lets kernels read
    pinned memory over the bus (CUDA only) and never copies; on WSL the driver may refuse it.
    `pin`: False leaves host memory pageable; a function pins in its own way. If pinning fails, copies block,
    and one warning says so.
    `keep_below`: tensors of fewer bytes stay on the device.
    `engine`: what copies; by default a CUDA stream or, without CUDA, plain copies.
    `reader`: for a layer, the object and the name of its only function that reads the layer's weights, if
    that runs inside a custom operator, which compilers do not look into. The weights are then fetched in
    there, and compiled code rounds as without offload; otherwise it may round differently.

    `moedoctor.fixes.offload.plan.RULES` decides what stays on the device. Raises ValueError, with the module
    unchanged, for a budget that is not positive, a pattern that matches nothing (with the closest names),
    meta tensors, a module on two devices or already offloaded; PinError if ``view`` cannot pin or map.
    """
    if isinstance(patterns, str):
        raise ValueError(
            f"patterns: must be a sequence of names, got the text {patterns!r}; write ({patterns!r},)"
        )
    if not is_number(keep_below):
        raise ValueError(f"keep_below: must be a number of bytes, got {keep_below!r}")
    target = _check(module, budget_bytes, device, access)
    given = None if layers is None else list(layers)
    with torch.inference_mode(False):  # memory made in inference mode could not be written to outside of it
        plan = make_plan(module, budget_bytes, patterns, given, keep_below, by_forward=reader is None)
        pinning = (
            pin
            if callable(pin)
            else (partial(register, device=target) if pin and target.type == "cuda" else None)
        )
        stored, failure = storage.store(plan, pinning)
        if failure is not None:
            if access == "view":
                raise PinError(f"a view needs pinned memory: {failure}")
            failure = f"host memory is not pinned, so copies to the device block: {failure}"
            warnings.warn(failure, RuntimeWarning, stacklevel=3)
        originals = storage.watch(stored, target)
        hooks, pipeline = None, None
        moves = any(tensor.device != target for tensor in [*module.parameters(), *module.buffers()])
        held = find_held_tensors(module) if moves else []  # before pipelines hang on it
        before = storage.free(stored, target)
        try:
            if access == "view":
                for layer in stored:
                    layer.bind(view_on_device(layer.block.bytes, target))
            elif stored:
                pipeline = _make_pipeline(stored, target, engine)
                hooks = Hooks(module, stored, pipeline, reader)
            settle_in(module, target, held, before)
        except BaseException:
            if hooks is not None:
                hooks.remove()
            storage.undo(stored, target, before)
            raise
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        buffers = pipeline.buffers if pipeline is not None else ()
        report = write_report(plan, stored, budget_bytes, access, originals, buffers, failure)
        return Offload(module, stored, target, report, trained, hooks, pipeline)


def _check(module: nn.Module, budget: int, device: torch.device | str | None, access: str) -> torch.device:
    """Return where the module is to run. Raises ValueError for what cannot be offloaded."""
    if not is_number(budget):
        raise ValueError(f"budget_bytes: must be a number of bytes, got {budget!r}")
    if budget <= 0:
        raise ValueError(
            f"budget_bytes: must be positive, got {budget}; to offload nothing, do not call offload"
        )
    if access not in ("copy", "view"):
        raise ValueError(f"access: must be 'copy' or 'view', got {access!r}")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if next(module.parameters(), None) is None:
        raise ValueError(f"module: {type(module).__name__} has no parameters, so there is nothing to offload")
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ValueError(f"module: {name} is a meta tensor without data; load the weights first")
    for name, child in module.named_modules():
        if MARK in vars(child):
            raise ValueError(
                f"module: {name or type(child).__name__} is offloaded already; call restore() first"
            )
    devices = {tensor.device: name for name, tensor in tensors}
    target = _resolve_device(device) if device is not None else next(iter(devices))
    allowed = {target} | ({torch.device("cpu")} if device is not None else set())
    for other, name in devices.items():
        if other not in allowed:
            raise ValueError(
                f"module: {name} is on {other}, expected everything on {target};"
                " move the module to one device" + ("" if device is not None else ", or name it with device=")
            )
    if access == "view" and target.type != "cuda":
        raise ValueError(f"access: a view needs a CUDA device, the module is on {target}")
    return target


def _resolve_device(device: torch.device | str) -> torch.device:
    """Return `device` as tensors on it name it. Raises ValueError if no data can be on it."""
    try:
        usable = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # an assertion: torch without CUDA
        reason = str(error).split("\n")[0]
        raise ValueError(f"device: {device!r} cannot be used here: {reason}") from error
    if usable.type == "meta":
        raise ValueError("device: meta tensors hold no data; name the device that the module runs on")
    return torch.device("cpu") if usable.type == "cpu" else usable


def _make_pipeline(
    stored: Sequence[StoredLayer], device: torch.device, engine: CopyEngine | None
) -> Pipeline:
    buffers = storage.make_buffers(stored, device)
    units = [layer.make_unit(index % len(buffers)) for index, layer in enumerate(stored)]
    for layer, unit in zip(stored, units, strict=True):
        layer.bind(buffers[unit.slot])
    if engine is None:
        engine = CudaEngine(device) if device.type == "cuda" else CopyEngine()
    return Pipeline(units, buffers, engine)
