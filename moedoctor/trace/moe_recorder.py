"""Records the call of a MoE layer that shows a failure, as a capsule.

`CallKeeper` watches the calls of all layers of one model on one device. It keeps rows of one call on the
device (`moedoctor.kernels.keep`) and asks the host only between steps, so it also works inside CUDA graphs.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from moedoctor.kernels import kept_rows as places
from moedoctor.kernels.device_guard import interprets
from moedoctor.kernels.kept_rows import KeptRows
from moedoctor.reference.agreement import Bounds, agree
from moedoctor.reference.moe_layer import expected_output
from moedoctor.trace.capsule import Capsule, Record, fitted

When = Literal["nan", "call", "first", "mismatch"]
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
    """Called when a call was kept."""


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
    max_bytes: int = 256 * 10**6

    @classmethod
    def parse(cls, text: str, max_bytes: int = 256 * 10**6) -> Wish:
        """Read ``nan``, ``first``, ``call=LAYER:N`` or ``mismatch=RATE``. Raises ValueError with one line."""
        kind, _, value = text.strip().partition("=")
        if kind in ("nan", "") and not value:
            return cls("nan", max_bytes=max_bytes)
        if kind == "first" and not value:
            return cls("first", max_bytes=max_bytes)
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
        raise ValueError(f"'{text[:60]}': expected nan, first, call=LAYER:N or mismatch=RATE (0 to 1)")


@dataclass
class CallKeeper:
    """Watches MoE layers until the wish is fulfilled."""

    wish: Wish
    keep: Callable[[Capsule], None]
    """Takes the capsule; called between steps, once."""
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    """``mismatch``: how far a right output may be from the reference, by quantization of activations."""
    layers: list[WatchedLayer] = field(default_factory=list)
    done: bool = False
    _rows: KeptRows | None = None
    _launches: bool = False
    _wanted: int = -1
    _steps: int = 0
    _seen: torch.Tensor | None = None
    """int32 [HEADER] in host memory: the header as it was when the last step ended, once that is copied."""
    _copied: Any = None

    def add(self, layer: WatchedLayer) -> int:
        """Return the number of a layer that is watched from now on."""
        self.layers.append(layer)
        return len(self.layers) - 1

    def watch(
        self, layer: int, x: torch.Tensor, output: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Look at one call: `x`, `output` [T, H], `ids` [T, K], `weights` [T, K]. Waits for nothing."""
        if self.done or not len(x):
            return
        rows = self._memory(x, ids)
        if not self._launches:
            rows.keep_on_host(layer, x, output, ids, weights)
            return
        from moedoctor.kernels.keep import launch_keep

        x, output = x.contiguous(), output.contiguous()  # [T, H]
        launch_keep(rows, layer, x, output, ids.contiguous(), weights.contiguous())

    def begin(self, real: int) -> None:
        """Begin a step whose first `real` rows are no padding; what the last step kept is saved first."""
        if self.done or self._rows is None:
            return
        self.collect(wait=False)
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
        if self._seen is None:
            self._seen = torch.zeros(places.HEADER, dtype=torch.int32, pin_memory=header.is_cuda)
        self._seen.copy_(header, non_blocking=True)
        if header.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def collect(self, *, wait: bool = True) -> None:
        """Save the call that was kept, if there is one; without `wait`, only if its header has arrived."""
        if self.done or self._seen is None:
            return
        if self._copied is not None:
            if not wait and not self._copied.query():
                return
            self._copied.synchronize()
        if int(self._seen[places.OWNER]):
            self._save()

    # --- Inside -------------------------------------------------------------------------------------------

    def _memory(self, x: torch.Tensor, ids: torch.Tensor) -> KeptRows:
        if self._rows is None:
            self._launches = interprets() or (x.is_cuda and importlib.util.find_spec("triton") is not None)
            self._rows = KeptRows.make(ROWS, x.shape[1], ids.shape[1], x.dtype, x.device)
            self._want(0 if self.wish.when == "nan" else -1, 0)
        return self._rows

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
            self._want(1 + self._named(), self.wish.call)
        elif self.wish.when == "mismatch":
            chosen = random.random() < self.wish.rate
            self._want(random.randint(1, len(self.layers)) if chosen else -1, self._steps)

    def _named(self) -> int:
        names = [layer.record.layer for layer in self.layers]
        wanted = self.wish.layer or ""
        for number, name in enumerate(names):
            if name == wanted or name.endswith(f".{wanted}") or f".{wanted}." in f".{name}.":
                return number
        raise ValueError(f"no MoE layer is called {wanted}; expected one such as {names[0]}")

    def _save(self) -> None:
        """Make the capsule of what was kept, unless the reference finds it right."""
        assert self._rows is not None
        capsule = self._made(self._rows)
        if self.wish.when == "mismatch" and self._is_right(capsule):
            self._rows.header[places.OWNER] = self._rows.header[places.COUNT] = 0
            assert self._seen is not None
            self._seen[places.OWNER] = 0
            return
        self.done = True
        self.keep(fitted(capsule, range(len(capsule.tensors["x"])), self.wish.max_bytes))

    def _is_right(self, capsule: Capsule) -> bool:
        if capsule.record.weights == "none":
            return True  # it cannot be compared
        problem, output = capsule.problem(), capsule.tensors["output"]
        expected = expected_output(problem, capsule.record.activations)  # [T, H]
        return agree(output.float(), expected, self.bounds[capsule.record.activations]).right

    def _made(self, rows: KeptRows) -> Capsule:
        header = rows.header.tolist()  # waits for the device
        count = min(header[places.COUNT], len(rows.row))
        layer = self.layers[header[places.OWNER] - 1]
        order = rows.row[:count].argsort()  # [R'], programs come in any order
        ids = rows.ids[:count][order].cpu()  # [R', K]
        experts = layer.record.experts
        used = sorted({int(expert) for expert in ids.unique().tolist() if 0 <= expert < experts})
        spare = (expert for expert in range(experts) if expert not in used)
        used = sorted([*used, *(next(spare) for _ in range(len(used), layer.record.top_k))])
        weights = layer.weights(used)
        tensors = {
            "x": rows.x[:count][order].cpu(),
            "output": rows.output[:count][order].cpu(),
            "topk_ids": ids,
            "topk_weights": rows.weights[:count][order].cpu(),
            "expert_ids": torch.tensor(used, dtype=torch.int32),
            **weights,
        }
        record = layer.record.model_copy(
            update={
                "weights": "recorded" if "w13" in weights else "none",
                "reason": _REASONS.get(self.wish.when, "it was asked for"),
                "call": header[places.OWNED_STEP],
                "tokens": tuple(rows.row[:count][order].tolist()),
                "call_tokens": header[places.ROWS],
            }
        )
        return Capsule(record, tensors)
