"""Records the call of a MoE layer that shows a failure, as a capsule.

`CallKeeper` watches the calls of all layers of one model on one device. Kernels keep rows of one call
(`moedoctor.kernels.keep`), and a header says on the device of which. The host runs ahead of the device and
waits for nothing, so this also works inside CUDA graphs:

- At the end of each step a copy of the header travels to the host, with an event of its own.
- `collect` reads the copies that have arrived. One that names a call means that its rows are there as well.
- A step may free the record for another call. Copies of older steps that name the old call still arrive
  after that; they are known by the step of the call.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import torch

from moedoctor.kernels import kept_rows as places
from moedoctor.kernels.device_guard import has_kernels, interprets
from moedoctor.kernels.kept_rows import KeptRows, MoeCall, Sizes
from moedoctor.trace.call_judge import is_right
from moedoctor.trace.capsule import MAX_BYTES, Capsule, CapsuleError, Record, add_weights, fit
from moedoctor.trace.protect import format_error, protect

When = Literal["nan", "call", "first", "mismatch", "crash"]
ROWS = 64
"""Rows of a call that are kept at most."""
_COPIES = 8
"""Copies of the header that may be on their way to the host at once."""
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
    """The record for a capsule of it; the call is added."""
    weights: Weights
    """Called for each call that is judged or saved."""
    route: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Returns weights and ids [T, K] for `x` [T, H] and logits [T, E], if the backend routes by itself."""
    own: Weights | None = None
    """Returns the backend's own tensors of some experts; called for a call that is saved, because the device
    has no memory to spare for calls that are only judged."""


@dataclass(frozen=True)
class Wish:
    """The call that is to be kept."""

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


FIRST_IN_GRAPH = (
    "it first ran while a CUDA graph was captured, when no memory can be pinned; run it once before"
)


def is_capturing(x: torch.Tensor) -> bool:
    """Return True while a CUDA graph is captured: then no memory can be pinned."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class HeaderCopy:
    """A copy of the header in host memory, which arrives some time after `begin`."""

    def __init__(self, *, on_gpu: bool) -> None:
        with torch.inference_mode(False), contextlib.suppress(RuntimeError):  # WSL may not pin
            self.header = torch.zeros(places.HEADER, dtype=torch.int32, device="cpu")
            self.header = self.header.pin_memory() if on_gpu else self.header
        self._arrived = torch.cuda.Event() if on_gpu else None

    def begin(self, header: torch.Tensor) -> None:
        """Copy the header as it is when the device gets there."""
        self.header.copy_(header, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def has_arrived(self, *, wait: bool) -> bool:
        """Return True if the header is here; `wait` for it if asked to."""
        if self._arrived is None:
            return True
        try:
            if wait:
                self._arrived.synchronize()
            return bool(self._arrived.query())
        except RuntimeError:
            return True  # the device is dead; what it did before is there


@dataclass
class CallKeeper:
    """Watches MoE layers until the wish is fulfilled."""

    wish: Wish
    keep: Callable[[Capsule], None]
    """Takes the capsule, once."""
    warn: Callable[[str], None] = lambda line: None
    """Takes one line that says what is not recorded, and why."""
    judge: Callable[[Capsule], bool] | None = None
    """``mismatch``: returns whether a call without weights is right, or raises CapsuleError. If None, this
    process compares calls itself."""
    background: bool = False
    """True if another thread calls `collect`; if not, each step does."""
    layers: list[WatchedLayer] = field(default_factory=list)
    stopped: bool = False
    """True if no more calls are watched; what was kept before can still be collected."""
    done: bool = False
    """True if there is nothing more to collect either."""
    compared: int = 0
    """``mismatch``: how many compared calls were right."""
    seconds: float = 0.0
    """The time of these comparisons."""
    _header: torch.Tensor | None = None
    """int32 [HEADER] on the device"""
    _memory: dict[Sizes, KeptRows] = field(default_factory=dict)
    """One for all layers of these sizes. CUDA graphs hold its addresses."""
    _rows: dict[int, KeptRows] = field(default_factory=dict)
    """Layer -> its memory."""
    _refused: set[int] = field(default_factory=set)
    """Layers whose calls do not fit any memory."""
    _launches: bool = False
    _target: int | None = None
    """``call``: the number of the wanted layer, once it is known."""
    _steps: int = 0
    _since: int = 0
    """The step that last freed the record: a header that names a call of an older one is out of date."""
    _free: bool = False
    """True if the kept call was right, so that the next step may keep another."""
    _idle: list[HeaderCopy] = field(default_factory=list)
    _flying: deque[HeaderCopy] = field(default_factory=deque)
    """Copies that were not read yet, the oldest first."""
    _copies: threading.Lock = field(default_factory=threading.Lock)
    """Held while copies are begun or read, so never for long."""
    _collecting: threading.Lock = field(default_factory=threading.Lock)

    def add(self, layer: WatchedLayer) -> int:
        """Return the number of a layer that is watched from now on."""
        self.layers.append(layer)
        return len(self.layers) - 1

    def prepare(self, device: torch.device, sizes: Sizes) -> None:
        """Take memory for calls of some sizes; else the first call that is watched does.

        A step that begins before there is memory for any call is not watched.
        """
        if self._header is None:
            self._launches = interprets() or has_kernels(device)
            self._header = places.make_header(device)
            self._idle = [HeaderCopy(on_gpu=device.type == "cuda") for _ in range(_COPIES)]
        if sizes not in self._memory:
            self._memory[sizes] = KeptRows.make(ROWS, sizes, self._header)

    @protect
    def watch(self, layer: int, call: MoeCall) -> None:
        """Look at one call. Waits for nothing."""
        if layer in self._refused or not len(call.output):
            return
        try:
            rows = self._rows.get(layer) or self._make(layer, call)
            if not self._launches:
                rows.keep_on_host(layer, call)
                return
            from moedoctor.kernels.keep import launch_keep

            launch_keep(rows, layer, call)
        except ValueError as error:
            self._refused.add(layer)
            self.warn(f"{self.layers[layer].record.layer} is no longer watched: {error}")

    @protect
    def begin(self, real: int) -> None:
        """Begin a step whose first `real` rows are no padding."""
        if self._header is None:
            return
        if not self.background:
            self.collect(wait=False)
        self._steps += 1
        layer, step = self._choose()
        if self.stopped:
            return
        frees = self._free
        if frees:
            self._since, self._free = self._steps, False  # in this order: `collect` may run meanwhile
        if not self._launches:
            places.begin_step_on_host(self._header, real, layer, step, frees=frees)
            return
        from moedoctor.kernels.keep import launch_step

        launch_step(self._header, real, layer, step, frees=frees)

    @protect
    def end(self) -> None:
        """End a step: the header travels to the host while other work goes on."""
        if self._header is None:
            return
        with self._copies:
            # A later header replaces an earlier one. But if none has arrived, the latest copy is begun anew:
            # on a device that is far behind, an earlier one would never arrive before it is begun anew.
            if self._idle:
                copy = self._idle.pop()
            elif self._flying[0].has_arrived(wait=False):
                copy = self._flying.popleft()
            else:
                copy = self._flying.pop()
            self._flying.append(copy)
            copy.begin(self._header)

    def stop(self, reason: str) -> None:
        """Watch no more calls."""
        self.stopped = True
        self.warn(f"no more calls are watched: {reason}")

    def collect(self, *, wait: bool = True) -> None:
        """Save the call that was kept, if there is one; without `wait`, only if its header has arrived."""
        with self._collecting:
            if self.done or self._free:
                return
            try:
                header = self._read_newest(wait=wait)
                if header and header[places.OWNER] and header[places.OWNED_STEP] >= self._since:
                    self._save(header)
            except Exception as error:
                self._give_up(str(error) if isinstance(error, CapsuleError) else format_error(error))

    # --- Inside -------------------------------------------------------------------------------------------

    def _make(self, layer: int, call: MoeCall) -> KeptRows:
        """Return memory for calls of a layer that runs for the first time. Raises ValueError if it cannot."""
        x, output, ids, logits = call.input.x, call.output, call.input.ids, call.input.logits
        record = self.layers[layer].record
        top_k = record.top_k if ids is None else ids.shape[-1]
        experts = record.experts if logits is None else logits.shape[-1]
        sizes = Sizes(x.shape[-1], x.dtype, output.shape[-1], output.dtype, top_k, experts)
        if sizes not in self._memory and is_capturing(x):
            raise ValueError(FIRST_IN_GRAPH)
        self.prepare(x.device, sizes)
        self._rows[layer] = self._memory[sizes]
        return self._rows[layer]

    def _read_newest(self, *, wait: bool) -> list[int] | None:
        """Return the header of the newest copy that has arrived since the last time; None if none has."""
        headers = []
        with self._copies:
            while self._flying and self._flying[0].has_arrived(wait=wait):
                copy = self._flying.popleft()
                headers.append(copy.header.tolist())
                self._idle.append(copy)
        # Of a dead device all have arrived, and the last ones hold older headers than those before.
        return max(headers, key=itemgetter(places.STEP), default=None)

    def _choose(self) -> tuple[int, int]:
        """Return the layer and the step that are wanted from now on, as in the header."""
        if self.wish.when == "nan":
            return 0, 0
        watched = [layer for layer in range(len(self.layers)) if layer not in self._refused]
        if self.wish.when == "first" and watched:
            return 1 + min(watched), 1
        if self.wish.when == "call":
            self._target = self._find_named() if self._target is None else self._target
            return 1 + self._target, self.wish.call
        if self.wish.when == "mismatch" and watched and random.random() < self.wish.rate:
            return 1 + random.choice(watched), self._steps
        return -1, 0

    def _find_named(self) -> int:
        """Return the number of the wanted layer; -2 if there is none, which ends the recording."""
        names = [layer.record.layer for layer in self.layers]
        wanted = self.wish.layer or ""
        for number, name in enumerate(names):
            if name == wanted or name.endswith(f".{wanted}") or f".{wanted}." in f".{name}.":
                return number
        self._give_up(f"no MoE layer is called {wanted!r}; expected one such as {names[0]}")
        return -2

    def _give_up(self, reason: str) -> None:
        self.done = self.stopped = True
        self.warn(f"there is no capsule: {reason}")

    def _save(self, header: list[int]) -> None:
        """Make the capsule of the call that a header names, unless the reference finds it right."""
        started = time.perf_counter()
        number = header[places.OWNER] - 1
        layer = self.layers[number]
        capsule = self._read_capsule(layer, self._rows[number], header)
        judge = self.judge or (lambda capsule: is_right(add_weights(capsule, layer.weights)))
        if self.wish.when == "mismatch" and judge(capsule):
            self.compared += 1
            self.seconds += time.perf_counter() - started
            self._free = True
            return
        self.done = self.stopped = True
        capsule = add_weights(capsule, layer.weights)
        own = {} if layer.own is None else layer.own(list(capsule.expert_ids))
        capsule = Capsule(capsule.record, {**capsule.tensors, **own})
        self.keep(fit(capsule, self.wish.max_bytes))

    def _read_capsule(self, layer: WatchedLayer, rows: KeptRows, header: list[int]) -> Capsule:
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
    experts, top_k = record.experts, call["topk_ids"].shape[1]  # backends may add shared experts to top_k
    if "router_logits" in call and call["router_logits"].shape[1] != experts:
        call = {name: tensor for name, tensor in call.items() if name != "router_logits"}
    ids = {int(expert) for expert in call["topk_ids"].unique().tolist()}
    used = sorted({experts - 1 if expert < 0 else expert for expert in ids if expert < experts})
    spare = (expert for expert in range(experts) if expert not in used)
    used = sorted([*used, *(next(spare) for _ in range(len(used), top_k))])
    return Capsule(
        record.model_copy(update={"weights": "none", "top_k": top_k, **more}),
        {**call, "expert_ids": torch.tensor(used, dtype=torch.int32)},
    )
