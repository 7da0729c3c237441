"""Finds the first module and step whose output holds NaN or Inf, without waiting for the device.

    with NanLocator(model) as locator:
        model(ids)
    print(locator.report().to_text())

On a CUDA device with Triton every watched output is one small kernel that counts there; the host learns the
counts when it asks for the report. Without Triton, and on the CPU, torch looks at each output and the host
waits. Hooks that are there when a CUDA graph is captured or the model is compiled stay in it, so enter the
locator before that: what was compiled before runs no hooks, and the report counts such modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moedoctor.trace.nan_report import NanReport
from moedoctor.trace.nan_state import ALL_REAL, NanState, begin_step, end_step
from moedoctor.trace.recorder import count_weight_rows

Choice = Callable[[str, torch.nn.Module], bool]
"""(name, module) -> whether its output is watched."""


class NanLocator:
    """Hooks on the modules of a model; a context manager that can be entered again.

    An output may be a tensor, or tuples, lists, mappings and dataclasses of them; other objects, such as
    caches, are passed over. So are tensors on another device than the record's, sparse and nested ones; the
    report counts the modules that gave such. Rows are all dimensions of a tensor but the last. A step is one
    call of the model, unless the caller says with `begin_step` and `end_step` where steps begin and end.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        wanted: Choice | None = None,
        device: torch.device | str | None = None,
        capacity: int = 4096,
    ) -> None:
        """Watch the modules of `model` that `wanted` picks, by default all that can be called.

        Without a model, or for tensors that are not outputs of a module, call `add_point` and `watch`.
        `device` is by default that of the model's first parameter. Raises ValueError if there is
        neither, or if there are more modules than `capacity`.
        """
        if device is None:
            parameter = next(model.parameters(), None) if model is not None else None
            if parameter is None:
                raise ValueError("device: none is given, and the model has no parameter that is on one")
            device = parameter.device
        self._state = NanState(device, capacity)
        self._model = model
        self._manual = False
        self._hooks: list[Any] = []
        chosen = wanted or (lambda name, module: True)
        modules = dict(model.named_modules()) if model is not None else {}
        whole = type(model).__name__ if "model" in modules else "model"
        self._points = [
            (self._state.add_point(name or whole), module)
            for name, module in modules.items()
            if _has_forward(module) and chosen(name, module)
        ]

    def __enter__(self) -> NanLocator:
        if self._model is not None and not self._hooks:
            try:
                self._hooks.append(self._model.register_forward_pre_hook(self._begin, prepend=True))
                for point, module in self._points:
                    self._hooks.append(module.register_forward_hook(self._make_hook(point, module)))
                self._hooks.append(self._model.register_forward_hook(self._end))
            except BaseException:
                self._remove_hooks()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._state.end()
        finally:  # a device that failed must not leave the model with hooks
            self._remove_hooks()

    def begin_step(
        self, real_rows: int | None = None, rows: int | None = None, *, padding: torch.Tensor | None = None
    ) -> None:
        """Begin a step of `rows` rows. Padding are the rows from `real_rows` on, or with `padding` not 0.

        `padding` has an element for each row of the step, such as [batch, sequence], is on the model's device
        and copied. Where an output has several rows for each of the step's, such as [batch, sequence, heads,
        columns], they are what that row is; rows of unknown kind are counted as neither real nor
        padding. A CUDA graph that is captured in a step with a mask is for steps whose masks have as many
        elements. From the first call on, calls of the model begin no steps by themselves; a step that still
        runs ends here.
        """
        self._manual = True
        if padding is not None:
            self._state.begin_masked(padding)
            return
        real = ALL_REAL if real_rows is None else real_rows
        self._state.begin(real, real if rows is None else rows)

    def end_step(self) -> None:
        """End the step."""
        self._state.end()

    def add_point(self, name: str) -> int:
        """Return a new point, for `watch` and `watch_ids`."""
        return self._state.add_point(name)

    def watch(self, point: int, x: torch.Tensor) -> None:
        """Record what `x` [..., columns] holds at `add_point`; of [rows] or [] each element is a row."""
        self._state.watch(point, x)

    def watch_ids(self, point: int, ids: torch.Tensor, num_experts: int) -> None:
        """Record which rows of `ids` [T, K] repeat an expert, are out of range or hold -1."""
        self._state.watch_ids(point, ids, num_experts)

    def report(self) -> NanReport:
        """Return what was found so far; waits for the device."""
        return self._state.report()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, module: Any, inputs: Any) -> None:
        if not self._manual:
            begin = torch.ops.moedoctor.begin_step if torch.compiler.is_compiling() else begin_step
            begin(self._state.header, ALL_REAL, ALL_REAL)

    def _end(self, module: Any, inputs: Any, output: Any) -> None:
        if not self._manual:
            end = torch.ops.moedoctor.end_step if torch.compiler.is_compiling() else end_step
            end(self._state.header)

    def _make_hook(self, point: int, module: torch.nn.Module) -> Callable[[Any, Any, Any], None]:
        state = self._state

        def hook(_: Any, inputs: Any, output: Any) -> None:
            tensors = _list_tensors(output)
            floating = [tensor for tensor in tensors if tensor.is_floating_point()]
            for tensor in floating:
                state.watch(point, tensor)
            if not floating:
                state.looked.add(point)  # nothing in it can be NaN
            for ids in tensors:
                if ids.dtype in (torch.int32, torch.int64) and ids.dim() == 2:
                    experts = _count_experts(module)
                    if experts and _are_experts(ids, experts, floating):
                        state.watch_ids(point, ids, experts)

        return hook


def _list_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output, in their order."""
    if isinstance(output, torch.Tensor):
        return [output]
    parts: Any = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, (tuple, list)):
        parts = output
    elif dataclasses.is_dataclass(output):
        parts = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [tensor for part in parts for tensor in _list_tensors(part)]


def _has_forward(module: torch.nn.Module) -> bool:
    """Return True if the module can be called, unlike a list of modules."""
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


def _are_experts(ids: torch.Tensor, num_experts: int, floating: list[torch.Tensor]) -> bool:
    """Return True if integers [T, K] come with weights [T, K] or logits [T, num_experts], as a router's do.

    A whole model may have a number of experts too, and return ids of tokens.
    """
    if ids.is_nested:
        return False
    shapes = (tuple(ids.shape), (ids.shape[0], num_experts))
    return any(tuple(tensor.shape) in shapes for tensor in floating if not tensor.is_nested)


def _count_experts(module: torch.nn.Module) -> int:
    """Return the number of experts that a router chooses from; 0 if the module does not say."""
    count = getattr(module, "num_experts", None)
    return count if isinstance(count, int) else count_weight_rows((module,))
