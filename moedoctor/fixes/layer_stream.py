"""Long prompts: whole layers of experts pass through two buffers on the device, one behind the other.

A prompt needs nearly every expert of every layer. In slots they would take turns, in groups that wait for
their copies. Here the next layer's experts are copied while a layer computes, and each layer is one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from moedoctor.fixes.expert_cache import ExpertCache

BUFFERS = 2


class LayerStream:
    """Two buffers for the layers of a model, whose experts are alike and which compute in order.

    A layer's number decides which buffer it uses, and the copies ahead are joined before a layer's call ends,
    so that calls can be captured in CUDA graphs, together or one by one.
    """

    def __init__(self, caches: Sequence[ExpertCache]) -> None:
        """Make the buffers. Raises ValueError if there is no layer, or if experts or devices differ."""
        if not caches:
            raise ValueError("caches is empty: expected the cache of each layer")
        self._caches = tuple(caches)
        first = caches[0]
        for number, cache in enumerate(caches):
            if (cache.layout, cache.device) != (first.layout, first.device):
                raise ValueError(f"layer {number} has experts of other shapes, type or device than layer 0")
        self.device = first.device
        self._buffers = [first.allocate_all() for _ in range(BUFFERS)]
        self._sources = [
            cache.make_copier(self._buffers[number % BUFFERS]) for number, cache in enumerate(caches)
        ]
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self._copies is not None:
            for tensor in (tensor for buffers in self._buffers for tensor in buffers.values()):
                tensor.record_stream(self._copies)
        self._ahead: int | None = None
        """The layer whose experts the last call copied ahead."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(tensor.nbytes for buffers in self._buffers for tensor in buffers.values())

    @contextmanager
    def fetch(self, number: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """Give the tensors [E, ...] of layer `number` to compute with, and copy those of the next meanwhile.

        Layers are called in order; any other order gives the right tensors too, but waits for them.
        """
        ready, self._ahead = self._ahead == number, None
        if not ready:
            self._sources[number]()
        following = number + 1 if number + 1 < len(self._caches) else None
        try:
            if following is not None:
                self._start(following)
            yield self._buffers[number % BUFFERS]
        finally:
            # The last layer copies nothing ahead; to wait for copies of an earlier capture would be an error.
            if self._copies is not None and following is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._copies)
        self._ahead = following

    def _start(self, number: int) -> None:
        """Copy the experts of a layer while the current stream goes on."""
        if self._copies is None:
            self._sources[number]()
            return
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            self._sources[number]()
