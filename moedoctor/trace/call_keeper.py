"""Records the call of a MoE layer that shows a failure, as a capsule.

`CallKeeper` watches the calls of all layers of one model on one device. It keeps rows of one call on the
device (`moedoctor.kernels.keep`) and asks the host only between steps, so it also works inside CUDA graphs.
"""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from moedoctor.kernels import kept_rows as places
from moedoctor.kernels.device_guard import interprets
from moedoctor.kernels.kept_rows import KeptRows, MoeCall
from moedoctor.trace.call_judge import is_right
from moedoctor.trace.capsule import MAX_BYTES, Capsule, CapsuleError, Record, fitted, with_weights

When = Literal["nan", "call", "first", "mismatch", "crash"]
ROWS = 64
"""Rows of a call that are kept at most."""
Weights = Callable[[list[int]], Mapping[str, torch.Tensor]]
"""Expert ids -> the tensors of a capsule that describe these experts; without ``w13`` none are known."""


_REASONS = {
    "nan": "its output holds NaN or Inf, its input does not",
    "mismatch": "its output is past the bound of the reference",
}


@dataclass(frozen=True)
class WatchedLayer:
    """A MoE layer whose calls are watched."""

    record: Record
    """What a capsule of it says; the call is added."""
    weights: Weights
    """Called for each call that is judged or saved."""
    route: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Returns weights and ids [T, K] for `x` [T, H] and logits [T, E], if the backend routes by itself."""
    own: Weights | None = None
    """Returns the backend's own tensors of some experts; called for a call that is saved, because the device
    has no memory to spare for calls that are only judged."""


@dataclass(frozen=True)
class Wish:
    """Which call is to be kept."""

    when: When = "nan"
    layer: str | None = None
    """``call``: the layer's name, or its end."""
    call: int = 1
    """``call``: the number of the layer's call, from 1."""
    rate: float = 0.0
    """``mismatch``: the share of steps in which one layer's call is compared with the reference."""
    max_bytes: int = MAX_BYTES

    @classmethod
    def parse(cls, text: str, max_bytes: int = MAX_BYTES) -> Wish:
        """Read what ``MOEDOCTOR_RECORD_WHEN`` may be. Raises ValueError with one line."""
        text = text.strip() or "nan"
        if text in ("nan", "first", "crash"):
            return cls(text, max_bytes=max_bytes)  # type: ignore[arg-type]
        kind, _, value = text.partition("=")
        if kind == "call":
            layer, _, number = value.rpartition(":")
            if layer and number.isascii() and number.isdigit() and 1 <= int(number) < 10**9:
                return cls("call", layer, int(number), max_bytes=max_bytes)
        if kind == "mismatch":
            try:
                rate = float(value)
            except ValueError:
                rate = 0.0
            if 0 < rate <= 1:
                return cls("mismatch", rate=rate, max_bytes=max_bytes)
        raise ValueError(f"'{text[:60]}': expected nan, first, crash, call=LAYER:N or mismatch=RATE (0 to 1)")


@dataclass
class CallKeeper:
    """Watches MoE layers until the wish is fulfilled."""

    wish: Wish
    keep: Callable[[Capsule], None]
    """Takes the capsule, once."""
    lost: Callable[[str], None] = lambda reason: None
    """Takes one line that says why there will be no capsule."""
    judge: Callable[[Capsule], bool] | None = None
    """``mismatch``: returns whether a call without weights is right, or raises CapsuleError. If None, this
    process compares calls itself."""
    background: bool = False
    """Whether another thread calls `collect`; if not, each step does."""
    layers: list[WatchedLayer] = field(default_factory=list)
    done: bool = False
    compared: int = 0
    """``mismatch``: how many compared calls were right."""
    seconds: float = 0.0
    """What these comparisons took."""
    _rows: KeptRows | None = None
    _launches: bool = False
    _wanted: int = -1
    _steps: int = 0
    _header: torch.Tensor | None = None
    """int32 [HEADER] in host memory: the header as it was when the last step ended, once that is copied."""
    _copied: Any = None
    _free: bool = False
    """Whether the kept call was right, so that the next step may keep another."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, layer: WatchedLayer) -> int:
        """Return the number of a layer that is watched from now on."""
        self.layers.append(layer)
        return len(self.layers) - 1

    def prepare(
        self, layer: int, dtype: torch.dtype, device: torch.device, hidden: int | None = None
    ) -> None:
        """Take memory for calls of a layer, unless there is some; else the first call that is watched does.

        A step that begins before that is not watched.
        """
        if self._rows is not None:
            return
        has_triton = importlib.util.find_spec("triton") is not None
        self._launches = interprets() or (device.type == "cuda" and has_triton)
        record = self.layers[layer].record
        width = hidden or record.hidden
        self._rows = KeptRows.make(ROWS, width, record.top_k, record.experts, dtype, device)
        self._want(0 if self.wish.when == "nan" else -1, 0)

    def watch(self, layer: int, call: MoeCall) -> None:
        """Look at one call. Waits for nothing."""
        if self.done or not len(call.output):
            return
        rows = self._memory(layer, call)
        if not self._launches:
            rows.keep_on_host(layer, call)
            return
        from moedoctor.kernels.keep import launch_keep

        launch_keep(rows, layer, call)

    def begin(self, real: int) -> None:
        """Begin a step whose first `real` rows are no padding."""
        if self.done or self._rows is None:
            return
        if not self.background:
            self.collect(wait=False)
        if self._free:
            self._release()
        if self.done:
            return
        self._steps += 1
        self._choose()
        if not self._launches:
            self._rows.begin_on_host(real)
            return
        from moedoctor.kernels.keep import launch_step

        launch_step(self._rows, real)

    def end(self) -> None:
        """End a step: the header travels to the host while other work goes on."""
        if self.done or self._rows is None:
            return
        header = self._rows.header
        if self._header is None:
            self._header = torch.zeros(places.HEADER, dtype=torch.int32, pin_memory=header.is_cuda)
        self._header.copy_(header, non_blocking=True)
        if header.is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()

    def collect(self, *, wait: bool = True) -> None:
        """Save the call that was kept, if there is one; without `wait`, only if its header has arrived."""
        with self._lock:
            if self.done or self._free or self._header is None:
                return
            if not self._has_arrived(wait):
                return
            if int(self._header[places.OWNER]):
                self._save()

    # --- Inside -------------------------------------------------------------------------------------------

    def _memory(self, layer: int, call: MoeCall) -> KeptRows:
        if self._rows is None:
            self.prepare(layer, call.output.dtype, call.output.device, call.output.shape[1])
        assert self._rows is not None
        return self._rows

    def _has_arrived(self, wait: bool) -> bool:
        """Return whether the header is in host memory; `wait` for it if asked to."""
        if self._copied is None:
            return True
        try:
            if wait:
                self._copied.synchronize()
            return bool(self._copied.query())
        except RuntimeError:
            return True  # the device is dead; what it did before is there

    def _want(self, layer: int, step: int) -> None:
        """Tell the device what to keep from the next step on."""
        if layer == self._wanted and layer <= 0:
            return
        self._wanted = layer
        assert self._rows is not None
        self._rows.header[places.WANTED_STEP].fill_(step)
        self._rows.header[places.WANTED_LAYER].fill_(layer)

    def _choose(self) -> None:
        """Choose the call of this step for the wishes that name one."""
        if self.wish.when == "first":
            self._want(1, 1)
        elif self.wish.when == "call":
            if self._wanted < 0:
                self._want(1 + self._named(), self.wish.call)
        elif self.wish.when == "mismatch":
            chosen = random.random() < self.wish.rate
            self._want(random.randint(1, len(self.layers)) if chosen else -1, self._steps)

    def _named(self) -> int:
        """Return the number of the wanted layer; -2 if there is none, which ends the recording."""
        names = [layer.record.layer for layer in self.layers]
        wanted = self.wish.layer or ""
        for number, name in enumerate(names):
            if name == wanted or name.endswith(f".{wanted}") or f".{wanted}." in f".{name}.":
                return number
        self._give_up(f"no MoE layer is called {wanted!r}; expected one such as {names[0]}")
        return -2

    def _give_up(self, reason: str) -> None:
        self.done = True
        self.lost(reason)

    def _release(self) -> None:
        """Let the next step keep another call."""
        assert self._rows is not None
        assert self._header is not None
        self._rows.header[places.OWNER : places.COUNT + 1] = 0
        self._header[places.OWNER] = 0
        self._free = False

    def _save(self) -> None:
        """Make the capsule of what was kept, unless the reference finds it right."""
        assert self._rows is not None
        assert self._header is not None
        started = time.perf_counter()
        try:
            layer = self.layers[int(self._header[places.OWNER]) - 1]
            capsule = self._made(layer, self._rows)
            if self.wish.when == "mismatch" and self._is_right(layer, capsule):
                self.compared += 1
                self.seconds += time.perf_counter() - started
                self._free = True
                return
            self.done = True
            capsule = with_weights(capsule, layer.weights)
            own = {} if layer.own is None else layer.own(list(capsule.expert_ids))
            capsule = Capsule(capsule.record, {**capsule.tensors, **own})
            self.keep(fitted(capsule, self.wish.max_bytes))
        except CapsuleError as error:
            self._give_up(str(error))

    def _is_right(self, layer: WatchedLayer, capsule: Capsule) -> bool:
        if self.judge is not None:
            return self.judge(capsule)
        return is_right(with_weights(capsule, layer.weights))

    def _made(self, layer: WatchedLayer, rows: KeptRows) -> Capsule:
        assert self._header is not None
        header = self._header.tolist()
        count = min(header[places.COUNT], len(rows.row))
        record, order = layer.record, rows.row[:count].argsort()  # [R'], programs come in any order
        part = {name: tensor[:count][order] for name, tensor in vars(rows).items() if name != "header"}
        if layer.route is not None:
            device = rows.header.device
            logits = part["logits"].to(device, part["x"].dtype)
            part["weights"], part["ids"] = layer.route(part["x"].to(device), logits)
        part = {name: tensor.cpu() for name, tensor in part.items()}
        # Backends may pad the hidden size.
        call = {name: part[name][:, : record.hidden].contiguous() for name in ("x", "output")}
        call |= {"topk_ids": part["ids"].int(), "topk_weights": part["weights"].float()}
        if bool(part["logits"].any()):
            call["router_logits"] = part["logits"]
        more = {
            "reason": _REASONS.get(self.wish.when, "it was asked for"),
            "call": header[places.OWNED_STEP],
            "tokens": tuple(part["row"].tolist()),
            "call_tokens": header[places.ROWS],
        }
        return make_capsule(record, call, more)


def make_capsule(record: Record, call: Mapping[str, torch.Tensor], more: Mapping[str, Any]) -> Capsule:
    """Return the capsule of a call without weights; it names the experts that it uses, `top_k` at least.

    With an id of -1 these are also the last expert, because a kernel may take the one for the other. `call`
    has the tensors of the call by their names in the capsule, `more` fields of its record.
    """
    experts = record.experts
    ids = {int(expert) for expert in call["topk_ids"].unique().tolist()}
    used = sorted({experts - 1 if expert < 0 else expert for expert in ids if expert < experts})
    spare = (expert for expert in range(experts) if expert not in used)
    used = sorted([*used, *(next(spare) for _ in range(len(used), record.top_k))])
    return Capsule(
        record.model_copy(update={"weights": "none", **more}),
        {**call, "expert_ids": torch.tensor(used, dtype=torch.int32)},
    )
