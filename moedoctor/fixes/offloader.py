"""Weight offload for any torch module: host memory within a budget, two device buffers, prefetch.

    handle = offload(model, 8 << 30, patterns=("experts",))
    model(x)                    # as before, also under torch.compile(fullgraph=True)
    print(handle.report())
    handle.restore()            # everything back on the device

Parameters stay the same objects. Their data points for good into one of two device buffers, so a quantisation
config that holds a parameter sees device memory, and nothing is swapped in `forward`. Around each layer's
`forward` run two operators (`offload_ops`): one waits for the layer's copy, the other lets the copy of a
later layer begin in the buffer that is now free. A compiler keeps these operators in order, and for that it
must store tensors between layers that it might else have kept in registers, so it rounds bfloat16 in other
places. Where an operator of one's own reads the weights, `reader` leaves the compiled code as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from moedoctor.fixes.offload import storage
from moedoctor.fixes.offload.hooks import MARK, Hooks, Reader, enrol
from moedoctor.fixes.offload.pinned import Pin, PinError, register
from moedoctor.fixes.offload.plan import held_tensors, is_number, make_plan
from moedoctor.fixes.offload.prefetch import BlockingEngine, CopyEngine, CudaEngine, Pipeline
from moedoctor.fixes.offload.report import OffloadReport, write_report
from moedoctor.fixes.offload.storage import StoredLayer, settle_in


class Offload:
    """A module whose weights are offloaded. Made by `offload`."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[StoredLayer],
        device: torch.device,
        report: OffloadReport,
        asked: Sequence[nn.Parameter],
        hooks: Hooks | None,
        pipeline: Pipeline | None,
    ) -> None:
        self._module = module
        self._layers = list(layers)
        self._device = device
        self._report = report
        self._asked_for_gradients = list(asked)
        self._hooks = hooks
        self._pipeline = pipeline

    def report(self) -> OffloadReport:
        """Each parameter with its bytes, where it lives, pinned or not, view or copy, and why; with sums.

        Once a first pass has run that could not be watched, the notes say so.
        """
        said = self._pipeline.unwatched if self._pipeline is not None else None
        return self._report if said is None else replace(self._report, notes=(*self._report.notes, said))

    def host_weight(self, name: str) -> torch.Tensor:
        """The offloaded parameter `name` as it lies in host memory: not a copy, so do not write to it.

        Raises KeyError for a parameter that is not offloaded.
        """
        for layer in self._layers:
            for one, region in layer.items:
                if name in one.names:
                    return region.of(layer.block.bytes)
        raise KeyError(f"{name} is not offloaded")

    def device_tensors(self) -> list[torch.Tensor]:
        """Every tensor that lies in device memory: what stayed, and the buffers."""
        stored = {id(one.parameter) for layer in self._layers for one, _ in layer.items}
        stayed = [one for one in self._module.parameters() if id(one) not in stored]
        buffers = list(self._pipeline.buffers) if self._pipeline is not None else []
        return [*stayed, *self._module.buffers(), *buffers]

    def join(self) -> None:
        """Make the current stream wait for every copy in flight.

        For callers that capture graphs of single layers: call it before a capture begins.
        """
        if self._pipeline is not None:
            self._pipeline.join()

    def restore(self) -> None:
        """Bring every weight back to the device, give host memory and buffers back, unwrap all forwards.

        Parameters that lay in one storage get one each. A second call does nothing. Where the device has no
        room, torch's error is raised and the module stays offloaded. One warning names parameters that were
        written since the offload, whose values are those of before.
        """
        if self._pipeline is not None:
            self._pipeline.settle()
        with torch.inference_mode(False), torch.no_grad():
            fresh = storage.bring_back(self._layers, self._device)
            changed = self._hooks.changed() if self._hooks is not None else []
            if self._hooks is not None:
                self._hooks.remove()
            for parameter, data in fresh:
                parameter.data = data
        for layer in self._layers:
            layer.block.close()
        for parameter in self._asked_for_gradients:
            parameter.requires_grad_(True)
        self._hooks, self._pipeline, self._layers, self._asked_for_gradients = None, None, [], []
        if changed:
            named = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else "")
            said = f"what was written to offloaded weights is not kept; as before the write: {named}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)


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

    A layer's weights hold only while its `forward` runs; at any other time those of another layer lie there.
    So nothing else may read them: no parent (`layers` can name it as the layer), no other layer, no hook, no
    method but `forward`; `state_dict` and `host_weight` may at any time. The first eager pass of a module
    with a `forward` is watched, and a read between layers raises RuntimeError; compiled code, a ModuleList
    and what runs inside other layers are not watched; where the first pass is compiled, one warning and the
    report's notes say so. A layer that returns its weights returns a copy.

    Weights are loaded with `load_state_dict`. Any other write would be lost: an eager pass, `state_dict` and
    `torch.func.functional_call` raise RuntimeError for a parameter that was written in place, whose `data` is
    another, or in whose place another lies, and for a layer that writes its own weights. Not seen are
    writes past torch's count (``weight.data.copy_(new)``), writes by or after compiled code, and all of this
    inside of it. One pass runs at a time: another thread's raises RuntimeError. A copy (`copy.deepcopy`,
    pickle) raises RuntimeError too.

    `module`: may be an `nn.ModuleList` of layers that something else calls. It runs forward only: its
    parameters ask for no gradients until `restore` (torch's own kernels may round otherwise where they ask,
    so bits are those of the module after `requires_grad_(False)`).
    `device`: where it runs; by default where its parameters are. With it given, parameters may lie on it or
    (those that a loader left there) on the CPU; what is not offloaded is moved to it, with tensors that
    objects of the module hold over the same memory.
    `patterns`: dotted parts of parameter names, matched whole as `--cpu-offload-params` does (``experts``,
    ``w13_weight``); none means every parameter.
    `layers`: what is fetched together, in running order; by default the elements of the outermost ModuleList
    or Sequential of three or more, and elsewhere the outermost modules that own parameters (torch's attention
    and transformer layers always as a whole). Layers must not run inside each other; one with a forward
    pre-hook stays on the device.
    `access`: ``copy`` prefetches into two device buffers (one where only two layers are offloaded);
    ``view`` lets kernels read pinned memory over the bus (CUDA only).
    `pin`: False leaves host memory pageable; a function does the pinning in its own way. Where pinning fails,
    copies block, and one warning says so.
    `keep_below`: tensors of fewer bytes stay on the device.
    `engine`: what copies, by default a CUDA stream or, without CUDA, plain copies.
    `reader`: for a layer, the object and the name of its only function that reads the layer's weights, where
    that runs inside a custom operator, which compilers do not look into. The weights are then fetched in
    there, and compiled code is that of the module without offload. By default the layer's `forward` reads
    them, and compiled code may round otherwise than without offload, though the weights are the same.

    What stays on the device is decided by `moedoctor.fixes.offload.plan.RULES`. Raises ValueError, with the
    module unchanged, for a budget that is not positive, a pattern that matches nothing (with the closest
    names), meta tensors, a module on two devices, one that is offloaded already; PinError where ``view``
    cannot pin.
    """
    if isinstance(patterns, str):
        raise ValueError(
            f"patterns: must be a sequence of names, got the text {patterns!r}; write ({patterns!r},)"
        )
    if not is_number(keep_below):
        raise ValueError(f"keep_below: must be a number of bytes, got {keep_below!r}")
    where = _check(module, budget_bytes, device, access)
    given = None if layers is None else list(layers)
    # Memory made in inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        return _offload(
            module, budget_bytes, where, tuple(patterns), given, access, pin, keep_below, engine, reader
        )


def _offload(
    module: nn.Module,
    budget_bytes: int,
    where: torch.device,
    patterns: Sequence[str],
    layers: Sequence[nn.Module] | None,
    access: str,
    pin: bool | Pin,
    keep_below: int,
    engine: CopyEngine | None,
    reader: Reader | None,
) -> Offload:
    plan = make_plan(module, budget_bytes, patterns, layers, keep_below, by_forward=reader is None)
    pinning = pin if callable(pin) else (register if pin and where.type == "cuda" else None)
    stored, failure = storage.store(plan, pinning)
    if access == "view" and failure is not None:
        raise PinError(f"a view needs pinned memory: {failure}")
    if failure is not None:
        failure = f"host memory is not pinned, so copies to the device block: {failure}"
        warnings.warn(failure, RuntimeWarning, stacklevel=3)
    originals = storage.watch(stored, where)
    hooks, pipeline = None, None
    elsewhere = any(one.device != where for one in [*module.parameters(), *module.buffers()])
    held = held_tensors(module) if elsewhere else []  # before pipelines hang on it
    kept = storage.empty(stored, where)
    try:
        if access == "view":
            for layer in stored:
                storage.map_into(layer, where)
        elif stored:
            pipeline = _pipeline(stored, where, engine)
            hooks = Hooks(module, stored, pipeline, enrol(pipeline), reader)
        settle_in(module, where, held, kept)
    except BaseException:
        if hooks is not None:
            hooks.remove()
        storage.undo(stored, where, kept)
        raise
    asked = [one for one in module.parameters() if one.requires_grad]
    for one in asked:
        one.requires_grad_(False)
    buffers = pipeline.buffers if pipeline is not None else ()
    report = write_report(plan, stored, budget_bytes, access, originals, buffers, failure)
    return Offload(module, stored, where, report, asked, hooks, pipeline)


def _check(module: nn.Module, budget: int, device: torch.device | str | None, access: str) -> torch.device:
    """Where the module is to run. Raises ValueError for what cannot be offloaded."""
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
    for name, one in tensors:
        if one.is_meta:
            raise ValueError(f"module: {name} is a meta tensor without data; load the weights first")
    for name, one in module.named_modules():
        if MARK in vars(one):
            raise ValueError(
                f"module: {name or type(one).__name__} is offloaded already; call restore() first"
            )
    devices = {one.device: name for name, one in tensors}
    where = _usable(device) if device is not None else next(iter(devices))
    allowed = {where} | ({torch.device("cpu")} if device is not None else set())
    for other, name in devices.items():
        if other not in allowed:
            raise ValueError(
                f"module: {name} is on {other}, expected everything on {where}; move the module to one device"
                + ("" if device is not None else ", or name it with device=")
            )
    if access == "view" and where.type != "cuda":
        raise ValueError(f"access: a view needs a CUDA device, the module is on {where}")
    return where


def _usable(device: torch.device | str) -> torch.device:
    """`device` as tensors on it name it. Raises ValueError where no data can lie on it."""
    try:
        where = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # an assertion: torch without CUDA
        said = str(error).split("\n")[0]
        raise ValueError(f"device: {device!r} cannot be used here: {said}") from error
    if where.type == "meta":
        raise ValueError("device: meta tensors hold no data; name the device that the module runs on")
    return torch.device("cpu") if where.type == "cpu" else where


def _pipeline(stored: Sequence[StoredLayer], device: torch.device, engine: CopyEngine | None) -> Pipeline:
    buffers = storage.buffers_for(stored, device)
    units = [layer.unit(index % len(buffers)) for index, layer in enumerate(stored)]
    for layer, unit in zip(stored, units, strict=True):
        storage.point(layer, buffers[unit.slot])
    if engine is None:
        engine = CudaEngine(device) if device.type == "cuda" else BlockingEngine()
    return Pipeline(units, buffers, engine)
