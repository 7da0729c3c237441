"""Finds the first module and step whose output holds NaN or Inf, without waiting for the device.

    with NanLocator(model) as locator:
        model(ids)
    print(locator.report().text())

Every watched output is one small kernel that counts on the device; the host learns of it when it asks for the
report. Hooks that are there when a CUDA graph is captured or the model is compiled stay in it, so enter the
locator before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moedoctor.trace.nan_report import NanReport
from moedoctor.trace.nan_state import ALL_REAL, NanState

Wanted = Callable[[str, torch.nn.Module], bool]
"""(name, module) -> whether its output is watched."""


class NanLocator:
    """Hooks on the modules of a model; a context manager that can be entered again.

    Rows are all dimensions of an output but the last. A step is one call of the model, unless the caller says
    with `begin_step` and `end_step` where steps begin and end.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        wanted: Wanted | None = None,
        device: torch.device | str | None = None,
        capacity: int = 4096,
    ) -> None:
        """Watch the modules of `model` that `wanted` picks, by default all of them.

        Without a model, or for what is no module's output, take points with `point` and call `watch`.
        `device` is by default that of the model's first parameter. Raises ValueError where neither is given
        or there are more modules than `capacity`.
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
        self._points = [
            (self._state.point(name or "model"), module)
            for name, module in (model.named_modules() if model is not None else ())
            if chosen(name, module)
        ]

    def __enter__(self) -> NanLocator:
        if self._model is not None and not self._hooks:
            self._hooks.append(self._model.register_forward_pre_hook(self._before, prepend=True))
            for point, module in self._points:
                self._hooks.append(module.register_forward_hook(self._watcher(point, module)))
            self._hooks.append(self._model.register_forward_hook(self._after))
        return self

    def __exit__(self, *error: object) -> None:
        self._state.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin_step(
        self, real_rows: int | None = None, rows: int | None = None, *, padding: torch.Tensor | None = None
    ) -> None:
        """A step begins, of `rows` rows; those from `real_rows` on are padding, or where `padding` is not 0.

        `padding` has any shape with as many elements as outputs have rows, such as [batch, sequence], and is
        on the model's device. From the first call on, calls of the model begin no steps by themselves.
        """
        self._manual = True
        self._state.padding = None
        if padding is not None:
            self._state.padding = padding.reshape(-1).to(torch.int8).contiguous()  # [rows]
            self._state.begin_masked(self._state.padding)
            return
        real = ALL_REAL if real_rows is None else real_rows
        self._state.begin(real, real if rows is None else rows)

    def end_step(self) -> None:
        """The step is over."""
        self._state.end()

    def point(self, name: str) -> int:
        """A point of the caller's own, for `watch` and `watch_ids`."""
        return self._state.point(name)

    def watch(self, point: int, x: torch.Tensor) -> None:
        """Record what `x` [..., columns] holds at `point`."""
        self._state.watch(point, x)

    def watch_ids(self, point: int, ids: torch.Tensor, num_experts: int) -> None:
        """Record which rows of `ids` [T, K] repeat an expert, are out of range or hold -1."""
        self._state.watch_ids(point, ids, num_experts)

    def report(self) -> NanReport:
        """What was found so far; this waits for the device."""
        return self._state.report()

    def _before(self, module: Any, inputs: Any) -> None:
        if not self._manual:
            if torch.compiler.is_compiling():
                torch.ops.moedoctor.begin_step(self._state.header, ALL_REAL, ALL_REAL)
            else:
                self._state.begin(ALL_REAL, ALL_REAL)

    def _after(self, module: Any, inputs: Any, output: Any) -> None:
        if not self._manual:
            if torch.compiler.is_compiling():
                torch.ops.moedoctor.end_step(self._state.header)
            else:
                self._state.end()

    def _watcher(self, point: int, module: torch.nn.Module) -> Callable[[Any, Any, Any], None]:
        state = self._state

        def hook(_: Any, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            tensors = [one for one in outputs if isinstance(one, torch.Tensor) and one.dim() > 1]
            for one in tensors:
                if one.is_floating_point():
                    state.watch(point, one)
            for ids in tensors:
                if ids.dtype in (torch.int32, torch.int64) and ids.dim() == 2:
                    experts = _experts_of(module, tensors)
                    if experts:
                        state.watch_ids(point, ids, experts)

        return hook


def _experts_of(module: torch.nn.Module, outputs: list[torch.Tensor]) -> int:
    """How many experts a router chooses from; 0 where the module is no router."""
    told = getattr(module, "num_experts", None)
    if isinstance(told, int):
        return told
    weight = getattr(module, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.dim() == 2 else 0
