"""Records the MoE call of any torch model that shows a failure.

    with MoeRecorder(model, "capsules") as recorder:
        model(tokens)
    print(recorder.files)  # then: moedoctor replay FILE

Works on blocks with `experts` beside a `gate` or `router`, as in Hugging Face's transformers: experts stacked
in one module (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]), or a list of modules with `gate_proj`,
`up_proj` and `down_proj`, or `w1`, `w3` and `w2`. What it cannot record is in `left_out`.

The hooks call operators that `torch.compile` does not look into, so they neither break a graph nor get lost
in one, if the recorder is entered before the model is compiled. A CUDA graph repeats what was watched when it
was captured: `nan` works in it; `first`, `call` and `mismatch` count the steps that Python sees.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moedoctor.kernels.kept_rows import MoeCall, MoeInput, Sizes
from moedoctor.processes.files import make_folder
from moedoctor.reference.moe import activate
from moedoctor.trace.call_keeper import CallKeeper, WatchedLayer, Wish
from moedoctor.trace.capsule import MAX_BYTES, Capsule, Record, name_file, save
from moedoctor.trace.crash_ring import CrashRing
from moedoctor.trace.expert_weights import PROJECTIONS
from moedoctor.trace.format import TraceError
from moedoctor.trace.recorder import ROUTERS, WIDTHS, find_beyond_logits, find_ids, find_number

_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_ALL = 2**30
"""Rows of a step that are no padding: it is not known which are."""
_recorders: dict[int, MoeRecorder] = {}
_numbers = itertools.count()


@torch.library.custom_op("moedoctor::watch_moe_call", mutates_args={"state"})
def _watch_call(
    state: torch.Tensor,
    recorder: int,
    layer: int,
    x: torch.Tensor,
    output: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    logits: torch.Tensor | None,
) -> None:
    """Watch a call; without its `output`, save what goes into it."""
    call, ring = MoeInput(x, ids, weights, logits), _recorders[recorder].ring
    if output is not None:
        _recorders[recorder].keeper.watch(layer, MoeCall(call, output))
    elif ring is not None:
        ring.save(layer, call)


@torch.library.custom_op("moedoctor::watch_step", mutates_args={"state"})
def _watch_step(state: torch.Tensor, recorder: int, begins: bool) -> None:
    _recorders[recorder].step(begins=begins)


class MoeRecorder:
    """A context: inside it, the MoE calls of `model` are watched."""

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        when: str = "nan",
        max_bytes: int = MAX_BYTES,
        checkpoint: str | Path | None = None,
    ) -> None:
        """`when` is ``nan``, ``first``, ``call=LAYER:N``, ``mismatch=RATE`` or ``crash``.

        `folder` gets the capsule, of at most `max_bytes`. After a crash the weights of the last call are read
        from the safetensors files in `checkpoint`. Raises ValueError if `when` is something else.
        """
        self.folder = Path(folder)
        self.files: list[Path] = []
        """The capsules that were written; what a crash leaves is written when the process has ended."""
        self.left_out: list[str] = []
        """Reasons why MoE layers are not watched, or a call was lost."""
        wish = Wish.parse(when, max_bytes)
        self.ring: CrashRing | None = None
        if wish.when == "crash":
            self.ring = CrashRing(self.folder, max_bytes, self.left_out.append, whole=True)
        self.keeper = CallKeeper(wish, self._keep, self.left_out.append)
        self._model = model
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._number = next(_numbers)
        self._undo = ExitStack()
        self._logits: dict[int, torch.Tensor] = {}
        """Layer -> what its router gave last."""
        self._state = torch.zeros(1, dtype=torch.int32)

    def __enter__(self) -> MoeRecorder:
        """Start watching. Raises TraceError if the model has no MoE layer that can be recorded."""
        parameter = next(self._model.parameters(), self._state)
        self._state = torch.zeros(1, dtype=torch.int32, device=parameter.device)
        number, state = self._number, self._state
        with self._undo:  # an error leaves no hooks
            self._undo.callback(self._logits.clear)
            self._undo.callback(_recorders.pop, number, None)
            _recorders[number] = self
            watched = False
            for name, block in self._model.named_modules():
                try:
                    watched |= self._watch(name, block)
                except TraceError as error:
                    self.left_out.append(f"{name or 'model'}: {error}")
            if not watched:
                raise TraceError(
                    "; ".join(self.left_out) or "the model has no module with experts beside a router"
                )
            begin = self._model.register_forward_pre_hook(lambda *_: _watch_step(state, number, True))
            self._undo.callback(begin.remove)
            end = self._model.register_forward_hook(lambda *_: _watch_step(state, number, False))
            self._undo.callback(end.remove)
            self._undo = self._undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._undo.close()
        if self.ring is not None:
            self.ring.finish(None if error is None else f"{type(error).__name__}: {error}"[:300])
        else:
            self.keeper.collect()

    def step(self, *, begins: bool) -> None:
        """Begin or end a forward pass."""
        if self.ring is not None:
            if begins:
                self.ring.begin()
        elif begins:
            self.keeper.begin(_ALL)
        else:
            self.keeper.end()

    # --- Inside -------------------------------------------------------------------------------------------

    def _keep(self, capsule: Capsule) -> None:
        file = self.folder / name_file(capsule.record, os.getpid())
        try:
            make_folder(self.folder)
            save(capsule, file)
        except OSError as error:
            self.left_out.append(f"{file} cannot be written: {error}")
        else:
            self.files.append(file)

    def _watch(self, name: str, block: nn.Module) -> bool:
        """Hook `block` and return True if it is a MoE layer. Raises TraceError if it cannot be recorded."""
        children = dict(block.named_children())
        experts = children.get("experts")
        router = next((children[key] for key in ROUTERS if key in children), None)
        if experts is None or router is None:
            return False
        separate = isinstance(experts, nn.ModuleList)
        weights = _read_list(experts) if isinstance(experts, nn.ModuleList) else _read_stack(experts)
        if separate and (shared := next((key for key in _SHARED if key in children), None)):
            raise TraceError(f"its output includes {shared}'s, and a capsule holds routed experts only")
        modules = (router, block) if separate else (router, experts, block)
        width = find_number(modules, WIDTHS)
        if not width:
            raise TraceError(f"cannot tell how many experts a token gets; expected {' or '.join(WIDTHS)}")
        record = weights.record(f"{name}.experts" if name else "experts", width)
        layer = self._add(WatchedLayer(record, weights.select), weights.down[0])
        if separate:
            self._hook_list(layer, block, router, width)
        else:
            self._hook_stack(layer, experts, router, record.experts)
        return True

    def _add(self, layer: WatchedLayer, weight: torch.Tensor) -> int:
        """Return the number of a layer. Raises TraceError if it is on another device."""
        if weight.device != self._state.device:
            raise TraceError(f"it is on {weight.device}, and the first layer is on {self._state.device}")
        if self.ring is not None:
            return self.ring.add(layer.record, self._checkpoint)
        hidden, dtype = layer.record.hidden, weight.dtype
        sizes = Sizes(hidden, dtype, hidden, dtype, layer.record.top_k, layer.record.experts)
        self.keeper.prepare(weight.device, sizes)
        return self.keeper.add(layer)

    def _hook_stack(self, layer: int, experts: nn.Module, router: nn.Module, total: int) -> None:
        """Watch a module of experts that is called with tokens, ids and weights."""
        number, state, saves = self._number, self._state, self.ring is not None

        def keep_logits(module: nn.Module, arguments: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            if logits.shape[-1] == total:
                self._logits[layer] = _flatten(logits)  # [T, E]

        def read_call(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
            values = (*arguments, *options.values())
            ids, x = find_ids(values), _find_first_tensor(arguments, options)
            others = (value for value in values if isinstance(value, torch.Tensor) and value is not x)
            alike = [value for value in others if ids is not None and value.shape == ids.shape]
            weights = next((value for value in alike if value is not ids), None)
            if ids is not None and weights is not None:
                return _flatten(x), _flatten(ids), _flatten(weights)
            line = "experts are called without ids and weights [T, K], so what they got is not known"
            if line not in self.left_out:
                self.left_out.append(line)
            return None

        def watch_call(module: nn.Module, arguments: Any, options: Any, output: Any = None) -> None:
            call = read_call(arguments, options)
            if call is not None and (saves or isinstance(output, torch.Tensor)):
                x, *routed = call
                result = None if saves else _flatten(output)
                _watch_call(state, number, layer, x, result, *routed, self._logits.get(layer))

        register = experts.register_forward_pre_hook if saves else experts.register_forward_hook
        self._undo.callback(router.register_forward_hook(keep_logits).remove)
        self._undo.callback(register(watch_call, with_kwargs=True).remove)

    def _hook_list(self, layer: int, block: nn.Module, router: nn.Module, width: int) -> None:
        """Watch a block that routes to a list of experts by itself: top-k of the softmax of logits."""
        if beyond := find_beyond_logits(router, block):
            raise TraceError(f"its choice depends on more than logits ({beyond})")
        number, state, saves = self._number, self._state, self.ring is not None
        sums_to_one = bool(getattr(block, "norm_topk_prob", True))

        def route(x: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = logits.float().softmax(-1).topk(width, dim=-1)  # [T, K] each
            if sums_to_one:
                weights = weights / weights.sum(-1, keepdim=True)
            return weights.to(x.dtype), ids

        def keep_logits(module: nn.Module, arguments: Any, output: Any) -> None:
            logits = _flatten(output[0] if isinstance(output, tuple) else output)  # [T, E]
            self._logits[layer] = logits
            if saves:
                x = _flatten(arguments[0])  # [T, H]
                weights, ids = route(x, logits)
                _watch_call(state, number, layer, x, None, ids, weights, logits)

        def watch_call(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            x = _flatten(_find_first_tensor(arguments, options))  # [T, H]
            logits = self._logits[layer]
            weights, ids = route(x, logits)
            result = output[0] if isinstance(output, tuple) else output
            _watch_call(state, number, layer, x, _flatten(result), ids, weights, logits)

        self._undo.callback(router.register_forward_hook(keep_logits).remove)
        if not saves:
            self._undo.callback(block.register_forward_hook(watch_call, with_kwargs=True).remove)


class _Rows:
    """The matrices of each expert, joined when they are asked for."""

    def __init__(self, experts: nn.ModuleList, names: Sequence[str]) -> None:
        self._experts, self._names = experts, names

    def __len__(self) -> int:
        return len(self._experts)

    def __getitem__(self, expert: int) -> torch.Tensor:
        parts = [getattr(self._experts[expert], name).weight.detach() for name in self._names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)  # [N, K]


_Matrices = _Rows | torch.Tensor


@dataclass(frozen=True)
class _Weights:
    """The weights of one layer's experts."""

    up: _Matrices
    """[2I, H] of each expert, the gate half first; [I, H] without a gate"""
    down: _Matrices
    """[H, I] of each expert"""
    gated: bool
    act: Any
    """The activation."""

    def record(self, layer: str, top_k: int) -> Record:
        """Return what a capsule says of it. Raises TraceError if a capsule cannot hold such weights."""
        up, down = self.up[0], self.down[0]
        if down.dim() != 2 or {up.dtype, down.dtype} - {torch.bfloat16, torch.float16, torch.float32}:
            raise TraceError(
                f"its weights are {down.dtype} {list(down.shape)}, expected BF16, F16 or F32 [H, I]"
            )
        hidden, size = down.shape
        rows = (2 if self.gated else 1) * size
        if tuple(up.shape) != (rows, hidden):
            raise TraceError(f"its first weights are {list(up.shape)}, expected {[rows, hidden]}")
        return Record(
            layer=layer,
            hidden=hidden,
            intermediate=size,
            experts=len(self.down),
            top_k=top_k,
            activation=_name_activation(self.act, self.gated),
            quantization="bf16",
            backend="torch",
            packages={"torch": str(torch.__version__)},
        )

    def select(self, experts: list[int]) -> Mapping[str, torch.Tensor]:
        """Return the capsule's tensors of these experts."""

        def stack(matrices: _Matrices) -> torch.Tensor:
            return torch.stack([matrices[expert].detach().cpu() for expert in experts])

        return {"w13": stack(self.up), "w2": stack(self.down)}


def _read_stack(experts: nn.Module) -> _Weights:
    """Return the weights of experts in one module."""
    parameters = dict(experts.named_parameters(recurse=False))
    up, down = parameters.get("gate_up_proj", parameters.get("up_proj")), parameters.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3:
        raise TraceError("its experts have no gate_up_proj [E, 2I, H] and down_proj [E, H, I]")
    if any("bias" in name for name in parameters) or getattr(experts, "is_transposed", False):
        raise TraceError("its experts have biases or transposed weights, which a capsule does not hold")
    return _Weights(up, down, "gate_up_proj" in parameters, getattr(experts, "act_fn", None))


def _read_list(experts: nn.ModuleList) -> _Weights:
    """Return the weights of a list of experts."""
    first = dict(experts[0].named_children())
    names = next((names for names in PROJECTIONS if all(name in first for name in names if name)), None)
    if names is None:
        has = ", ".join(first) or "nothing"
        raise TraceError(f"an expert has {has}; expected gate_proj, up_proj and down_proj")
    if any(getattr(module, "bias", None) is not None for module in first.values()):
        raise TraceError("its experts have biases, which a capsule does not hold")
    gate, up, down = names
    rows = _Rows(experts, [name for name in (gate, up) if name is not None])
    act = getattr(experts[0], "act_fn", None)
    return _Weights(rows, _Rows(experts, [str(down)]), gate is not None, act)


def _name_activation(act: Any, gated: bool) -> Any:
    """Return the name of an activation, by what it does. Raises TraceError if capsules do not know it."""
    x = torch.linspace(-3, 3, 25)  # [25]
    if callable(act):
        found = act(x)
        for name in ("silu", "gelu_tanh") if gated else ("relu2",):
            given = torch.cat((x, torch.ones_like(x)))[None] if gated else x[None]
            if torch.allclose(found, activate(given, name)[0], atol=1e-5):
                return name
    raise TraceError(f"its activation {type(act).__name__} is not SiLU or GELU (tanh) with a gate, or ReLU²")


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return [T, *] of [..., *]."""
    return tensor.detach().flatten(0, -2)


def _find_first_tensor(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> torch.Tensor:
    values = (*arguments, *options.values())
    return next(x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point())
