"""FlashInfer's own routing maps and finalize, called through the compiled probe.

Only these functions of the release run: no GEMM, no workspace manager, no Python of FlashInfer. The layout of
the buffers is that of the release's runner: pair k of token t is row ``k * tokens + t`` of the maps.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from moedoctor.results import UnavailableError
from moedoctor.upstream.flashinfer.probe_build import build, name_arch, plan_build
from moedoctor.upstream.flashinfer.source import FlashInferSource, find_installed_source, find_source
from moedoctor.upstream.releases.wheel import KernelError

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class Share(NamedTuple):
    """The experts that one expert-parallel rank has."""

    experts: int
    """Their number, the same on every rank."""
    ranks: int = 1
    rank: int = 0

    @property
    def start(self) -> int:
        """The first of them."""
        return self.experts * self.rank


@dataclass(frozen=True)
class RoutingMaps:
    """The output of the release's routing-map builders. Rows are pairs in the order k * tokens + t."""

    fused: bool
    """True if the fused prologue took the call; else the three-step sort did."""
    permuted_of_row: torch.Tensor
    """int32 [K * T]: the place of the row among the rows sorted by expert."""
    row_of_permuted: torch.Tensor
    """int32 [K * T], the inverse, as far as it was written."""
    first_offset: torch.Tensor
    """int64 [E + 1]: the first sorted row of each local expert, and their number."""


@dataclass(frozen=True)
class FlashInferProbe:
    release: str
    path: Path
    library: ctypes.CDLL

    @classmethod
    def _load(cls, find: Callable[[], FlashInferSource], device: str) -> FlashInferProbe:
        """Find the sources, build unless they were built before, and load. Raises UnavailableError."""
        release = ""
        try:
            source = find()
            release = f"FlashInfer {source.release}: "
            path = build(plan_build(source, name_arch(torch.cuda.get_device_capability(device))))
            return cls(source.release, path, _load_library(str(path)))
        except (KernelError, OSError) as error:
            raise UnavailableError(f"{release}{error}") from error

    @classmethod
    def load_release(cls, release: str, path: Path, device: str) -> FlashInferProbe:
        """Return the probe of `release` from its wheel or folder at `path`; raises UnavailableError."""
        return cls._load(lambda: find_source(release, path), device)

    @classmethod
    def installed(cls, device: str) -> FlashInferProbe:
        """Return the probe of the installed FlashInfer; raises UnavailableError."""
        return cls._load(find_installed_source, device)

    device: str = "cuda"
    """The device of the tensors that its functions take."""

    def build_maps(self, ids: torch.Tensor, share: Share, memory: RoutingMaps | int) -> RoutingMaps:
        """Return the maps for `ids` int32 [T, K] and the experts of `share`.

        As the runner does: the fused prologue first, and the three-step sort if it declines. `memory` is what
        the maps' memory holds before: a value for all entries, or the maps of an earlier call, which are
        overwritten.
        """
        tokens, top_k = ids.shape
        experts = share.experts
        if isinstance(memory, RoutingMaps):
            maps = memory
        else:
            places, inverse = (ids.new_full((tokens * top_k,), memory) for _ in range(2))
            maps = RoutingMaps(False, places, inverse, ids.new_zeros(experts + 1, dtype=torch.int64))
        written = (maps.row_of_permuted, maps.permuted_of_row, maps.first_offset)
        common = (tokens, experts, top_k, share.start)
        taken = self._call("fused", ids, *written, *common)
        if not taken:
            block = self.library.moedoctor_probe_tokens_per_block(tokens, experts)
            blocks = -(-tokens // block)
            experts_sorted, *scratch = (
                torch.empty(size, dtype=torch.int32, device=ids.device)
                for size in (tokens * top_k, experts * blocks, experts * blocks, experts * tokens)
            )  # sorted experts; counts, their sums, rows by expert
            self._call("three_step", ids, experts_sorted, *written, *scratch, *common)
            torch.cuda.synchronize(ids.device)  # the scratch memory lives until here
        return replace(maps, fused=bool(taken))

    def finalize(
        self,
        maps: RoutingMaps,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        share: Share,
        all_to_all: bool,
    ) -> None:
        """Write to `out` bf16 [T, H] each token's sum of weight times its sorted row of `rows` bf16 [R, H].

        `ids` int32 and `weights` float32 [T, K]. With more than one rank and `all_to_all` the release takes
        its kernel that fills no rows.
        """
        tokens, top_k = ids.shape
        maps_of_pairs = (maps.permuted_of_row, maps.row_of_permuted)
        sizes = (tokens, rows.shape[1], top_k, *share, int(all_to_all))
        self._call("finalize", rows, out, weights, *maps_of_pairs, ids, maps.first_offset, *sizes)
        torch.cuda.synchronize(ids.device)

    def _call(self, name: str, first: torch.Tensor, *others: torch.Tensor | int) -> int:
        """Call a function of the probe on the current stream; raises RuntimeError with FlashInfer's text."""
        stream = torch.cuda.current_stream(first.device).cuda_stream
        given = (item.data_ptr() if isinstance(item, torch.Tensor) else item for item in (first, *others))
        code: int = getattr(self.library, f"moedoctor_probe_{name}")(*given, stream)
        if code < 0:
            message = self.library.moedoctor_probe_error().decode("utf-8", "replace")
            raise RuntimeError(f"FlashInfer {self.release}: {message}")
        return code


@functools.cache
def _load_library(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.moedoctor_probe_error.restype = ctypes.c_char_p
    library.moedoctor_probe_tokens_per_block.argtypes = [_LONG, _LONG]
    library.moedoctor_probe_tokens_per_block.restype = _LONG
    library.moedoctor_probe_fused.argtypes = [*[_POINTER] * 4, _LONG, _INT, _INT, _INT, _POINTER]
    library.moedoctor_probe_three_step.argtypes = [*[_POINTER] * 8, _LONG, _INT, _INT, _INT, _POINTER]
    library.moedoctor_probe_finalize.argtypes = [*[_POINTER] * 7, *[_LONG] * 4, *[_INT] * 3, _POINTER]
    return library
