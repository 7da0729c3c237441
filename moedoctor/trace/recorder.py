"""Records which experts the routers of a running model choose.

    with RoutingRecorder(model) as recorder:
        model(tokens)
    save(recorder.trace(), Path("routing.safetensors"))

Works on any module whose MoE layers it can see: those of Hugging Face's transformers, and of vLLM (the module
that ``llm.apply_model`` hands out, under ``enforce_eager``). Of each layer it records the first of these:

1. vLLM's own capture function of a router: the ids after routing.
2. The integer tensor [T, K] that the module of the experts is called with.
3. The integer tensor [T, K] that the router returns.
4. The top-k of the router's logits, if they decide the choice: not with a correction bias or groups.

Hooks do not run inside CUDA graphs and compiled regions: run the model eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moedoctor.trace.format import RoutingTrace, TraceError

ROUTERS = ("gate", "router", "gating")
_SIZES = ("global_num_experts", "num_experts", "n_routed_experts", "num_local_experts")
WIDTHS = ("top_k", "num_experts_per_tok", "topk", "num_selected_experts")
_BEYOND_LOGITS = ("e_score_correction_bias", "expert_bias", "moe_statics")
"""Attributes that add to the scores before the choice."""


@dataclass
class _Layer:
    """One MoE layer, and what its sources have given so far, best source first."""

    name: str
    num_experts: int
    records: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Source -> ids int32 [T, K] of each call."""

    def choose_source(self) -> tuple[str, list[torch.Tensor]]:
        """Return the best source that gave any calls, and its calls."""
        return next((record for record in self.records.items() if record[1]), ("", []))


class RoutingRecorder:
    """A context: inside it, every forward pass of `model` is recorded."""

    def __init__(self, model: nn.Module, *, name: str | None = None) -> None:
        """`name` is the model's name in the trace; by default that of its class."""
        self._model = model
        self._name = name or type(model).__name__
        self._layers: list[_Layer] = []
        self._routers: list[Any] = []
        self._undo = ExitStack()
        self._problem: str | None = None

    def __enter__(self) -> RoutingRecorder:
        """Start recording. Raises TraceError if the model has no known MoE layer."""
        self._layers, self._routers = [], []
        with self._undo:  # an error leaves no hooks
            for name, block in self._model.named_modules():
                self._watch(name, block)
            if not self._layers:
                raise TraceError(
                    f"{self._name} has no MoE layer that is known: expected modules with `experts` beside a "
                    f"{' or '.join(ROUTERS)}, or vLLM's routers"
                )
            self._undo = self._undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._undo.close()

    def trace(self, made: Mapping[str, Any] | None = None) -> RoutingTrace:
        """Return what was recorded. A call is a forward pass; its rows are all its tokens, padding included.

        Raises TraceError if nothing was recorded, or not the same calls in every layer.
        """
        if self._problem:
            raise TraceError(self._problem)
        sources, by_layer = zip(*(layer.choose_source() for layer in self._layers), strict=True)
        rows = [len(call) for call in by_layer[0]]
        if not rows:
            raise TraceError("no forward pass was recorded; expected one inside the context, run eagerly")
        for layer, calls in zip(self._layers, by_layer, strict=True):
            if [len(call) for call in calls] != rows:
                raise TraceError(
                    f"{layer.name} was called {len(calls)} times, {self._layers[0].name} {len(rows)}, or "
                    "with other rows; expected every layer once a forward pass"
                )
        widths = {call.shape[1] for calls in by_layer for call in calls}
        sizes = {layer.num_experts for layer in self._layers}
        if len(widths) != 1 or len(sizes) != 1:
            raise TraceError(
                f"layers differ: top-k {sorted(widths)}, experts {sorted(sizes)}; expected the same in all"
            )
        ids = torch.stack(
            [torch.cat([call.cpu() for call in calls]) for calls in by_layer], dim=1
        )  # [rows, layers, K]
        return RoutingTrace(
            topk_ids=ids.flatten().tolist(),
            num_experts=sizes.pop(),
            top_k=widths.pop(),
            layers=tuple(layer.name for layer in self._layers),
            call_rows=tuple(rows),
            model=self._name,
            made={"recorded_from": sorted(set(sources)), **(made or {})},
        )

    def _watch(self, name: str, block: nn.Module) -> None:
        """Hook `block` if it is a MoE layer."""
        capture = _find_capture(block)
        if capture is not None:
            if block.router in self._routers:
                return  # vLLM's layer and its runner share one
            self._routers.append(block.router)
            layer = self._add(name, block)
            keep = self._make_keeper(layer, "router's capture function")
            self._undo.callback(capture, None)
            capture(keep)
            return
        children = dict(block.named_children())
        experts = children.get("experts")
        router = next((children[key] for key in ROUTERS if key in children), None)
        if experts is None or router is None or _find_capture(experts) is not None:
            return
        layer = self._add(name, experts, router, block)
        by_experts = self._make_keeper(layer, "ids that the experts are called with")
        by_router = self._make_keeper(layer, "ids that the router gives")
        by_logits = self._make_keeper(layer, "top-k of the router's logits")

        def keep_given(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            by_experts(find_ids((*arguments, *options.values())))

        def keep_routed(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            ids = find_ids(outputs)
            if ids is not None:
                by_router(ids)
            elif not layer.records["ids that the experts are called with"]:
                by_logits(self._choose_by_logits(layer, outputs, router, block))

        if not isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
            self._undo.callback(experts.register_forward_pre_hook(keep_given, with_kwargs=True).remove)
        self._undo.callback(router.register_forward_hook(keep_routed).remove)

    def _add(self, name: str, *modules: nn.Module) -> _Layer:
        layer = _Layer(name or "model", find_number(modules, _SIZES) or count_weight_rows(modules[1:]))
        if not layer.num_experts:
            raise TraceError(
                f"{layer.name}: cannot tell how many experts it has; expected {' or '.join(_SIZES)}"
            )
        self._layers.append(layer)
        return layer

    def _make_keeper(self, layer: _Layer, source: str) -> Callable[[torch.Tensor | None], None]:
        calls = layer.records.setdefault(source, [])

        def keep(ids: torch.Tensor | None) -> None:
            if ids is None:
                return
            if ids.is_cuda and torch.cuda.is_current_stream_capturing():
                self._problem = "a CUDA graph was captured while recording; expected the model to run eagerly"
                return
            calls.append(ids.detach().flatten(0, -2).to(torch.int32, copy=True))  # [T, K]

        return keep

    def _choose_by_logits(
        self, layer: _Layer, outputs: tuple[Any, ...], router: nn.Module, block: nn.Module
    ) -> torch.Tensor | None:
        logits = next(
            (out for out in outputs if isinstance(out, torch.Tensor) and out.shape[-1] == layer.num_experts),
            None,
        )
        width, beyond = find_number((router, block), WIDTHS), find_beyond_logits(router, block)
        if logits is None or not width or beyond:
            why = beyond or ("no logits" if logits is None else "unknown top-k")
            self._problem = f"{layer.name}: the chosen experts cannot be read from its router ({why})"
            return None
        return logits.topk(width, dim=-1).indices  # [..., K]


def _find_capture(module: nn.Module) -> Callable[[Any], None] | None:
    """Return vLLM's capture function of the router of `module`, or None."""
    capture = getattr(getattr(module, "router", None), "set_capture_fn", None)
    return capture if callable(capture) else None


def find_ids(values: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the expert ids [..., K] among `values`."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return next((x for x in tensors if x.dim() >= 2 and x.dtype in (torch.int32, torch.int64)), None)


def find_beyond_logits(*modules: nn.Module) -> str | None:
    """Return what decides the choice of experts beside the logits, or None."""
    found = (name for name in _BEYOND_LOGITS for x in modules if getattr(x, name, None) is not None)
    groups = find_number(modules, ("n_group", "num_expert_group"))
    return next(found, "groups of experts" if groups > 1 else None)


def find_number(modules: tuple[nn.Module, ...], names: tuple[str, ...]) -> int:
    """Return the first positive integer under one of `names`, in a module or its configuration; else 0."""
    holders = [holder for module in modules for holder in (module, getattr(module, "config", None))]
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def count_weight_rows(modules: tuple[nn.Module, ...]) -> int:
    """Return the rows of a router's weight, which are the experts."""
    for module in modules:
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            return int(weight.shape[0])
    return 0
