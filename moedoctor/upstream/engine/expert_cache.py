"""Real engines with the fix `expert_cache`: their tokens, and what they refuse.

Tiny checkpoints of 8 experts, top-2, side by side on one GPU. With 6 slots a decode step of three sequences
fits and is one call of the kernel; with 2 slots even that goes in groups, and so does every prefill.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.upstream.engine.compare import logprob_distance, short_error
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, run_engines
from moedoctor.upstream.engine.offload_cells import LOGPROBS, MAX_TOKENS, PROMPTS
from moedoctor.upstream.engine.offload_engine import need_engine
from moedoctor.upstream.plugin.expert_cache_fix import NAME, VARIABLE

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme

EAGER, GRAPHS = "eager", "CUDA graphs"
BACKENDS: Mapping[str, tuple[Scheme, str, str]] = {
    "BF16 TRITON": ("bf16", "triton", "BF16 TRITON"),
    "FP8 TRITON": ("fp8", "triton", "FP8 TRITON"),
    "FP8 MARLIN": ("fp8", "marlin", "FP8 TRITON"),
    "NVFP4 MARLIN": ("nvfp4", "marlin", "NVFP4 MARLIN"),
}
"""What a report calls it -> (scheme of the checkpoint, ``moe_backend``, whose prompts)."""
SLOTS = (None, 2, 6)
"""Of 8 experts; None is the control without a cache."""
PROBES = "moedoctor.upstream.engine.expert_cache_probes:"
_PARALLEL = 16
SECONDS = 200.0


@dataclass(frozen=True)
class Cell:
    """One engine of the table."""

    backend: str
    mode: str
    slots: int | None
    planted: bool = False
    """Whether its last layer computes with wrong experts: tokens that stay the same then prove nothing."""

    @property
    def label(self) -> str:
        held = "no cache" if self.slots is None else f"{self.slots} slots"
        return f"{self.backend}, {self.mode}, {held}{', wrong experts' if self.planted else ''}"

    @property
    def control(self) -> Cell:
        """The same engine without a cache."""
        return Cell(self.backend, self.mode, None)


def cells() -> list[Cell]:
    """All engines of the table, the slower ones first; for each backend one with a planted fault."""
    planted = [Cell(one, GRAPHS, max(filter(None, SLOTS)), planted=True) for one in BACKENDS]
    return [
        *planted,
        *(Cell(one, mode, slots) for mode in (GRAPHS, EAGER) for one in BACKENDS for slots in SLOTS),
    ]


def cached(slots: int | None) -> dict[str, str]:
    """The environment of an engine with a cache of so many slots, or with none."""
    return {"MOEDOCTOR_FIXES": "" if slots is None else NAME, VARIABLE: "" if slots is None else str(slots)}


def request(cell: Cell, folder: str, **arguments: Any) -> EngineRequest:
    """The engine of a cell, for the checkpoint in `folder`."""
    _, backend, prompts = BACKENDS[cell.backend]
    own: dict[str, Any] = {
        "moe_backend": backend,
        "enforce_eager": cell.mode == EAGER,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
    if cell.mode == GRAPHS:
        # The default: full graphs for decode, piecewise ones for the rest; 3 sequences fill a graph.
        own["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 3, 4, 8, 16, 32]}
    return EngineRequest(
        folder,
        PROMPTS[prompts],
        {**own, **arguments},
        cached(cell.slots),
        max_tokens=MAX_TOKENS,
        logprobs=LOGPROBS,
        probe=f"{PROBES}{'caches_with_a_fault' if cell.planted else 'caches'}",
        probe_when="before" if cell.planted else "after",
        seconds=SECONDS,
        label=cell.label,
    )


def tokens(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each engine with a cache, against the same engine without one.

    Those that are `planted` must give other tokens. Raises UnavailableError.
    """
    need_engine()
    chosen = cells()
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folders = _checkpoints(Path(name))
        results = run_engines(
            [request(one, folders[BACKENDS[one.backend][0]]) for one in chosen], parallel=_PARALLEL
        )
    return table(dict(zip(chosen, results, strict=True)))


def table(results: Mapping[Cell, EngineResult]) -> list[dict[str, Any]]:
    """What became of each engine with a cache."""
    rows = []
    for cell, result in results.items():
        if cell.slots is None:
            continue
        seen = result.probe or {}
        outcome, detail = compare(result, results[cell.control])
        rows.append(
            {
                "backend": cell.backend,
                "asked": BACKENDS[cell.backend][1].upper(),
                "chosen": result.log.moe_backend or "not logged",
                "mode": cell.mode,
                "slots": cell.slots,
                "planted": cell.planted,
                "outcome": outcome,
                "detail": detail,
                **{key: seen.get(key) for key in ("engine", "layers", "hits", "misses")},
                "seconds": result.seconds.get("total"),
            }
        )
    return rows


def compare(result: EngineResult, control: EngineResult) -> tuple[str, str]:
    """(``same tokens``, ``other tokens``, ``crash`` or ``no control``, the detail)."""
    if control.error is not None:
        return "no control", short_error(control)
    if result.error is not None:
        return "crash", short_error(result)
    for prompt, (mine, wanted) in enumerate(zip(result.tokens, control.tokens, strict=True)):
        if mine != wanted:
            at = next(i for i, (a, b) in enumerate(zip(mine, wanted, strict=True)) if a != b)
            return "other tokens", f"prompt {prompt + 1}, token {at + 1}: {mine[at]}, not {wanted[at]}"
    distance = logprob_distance(result, control)
    return "same tokens", "same logprobs" if distance == 0 else f"logprobs differ by up to {distance:.2g}"


def refusals(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Engines that must not start, each with what its error has to say. Raises UnavailableError."""
    need_engine()
    import torch

    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folders = _checkpoints(Path(name))
        wanted = [
            (
                "fewer slots than top-k",
                "1 slots hold fewer experts than one token needs (top_k 2)",
                request(Cell("BF16 TRITON", GRAPHS, 1), folders["bf16"]),
            ),
            (
                "a backend without support",
                "expected --moe-backend triton or marlin",
                request(Cell("NVFP4 MARLIN", EAGER, 4), folders["nvfp4"], moe_backend="emulation"),
            ),
            (
                "weight offload at the same time",
                "weights are offloaded by --cpu-offload-gb",
                request(Cell("BF16 TRITON", EAGER, 4), folders["bf16"], cpu_offload_gb=1.0),
            ),
        ]
        if torch.cuda.device_count() > 1:
            parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
            wanted.append(
                (
                    "expert parallel",
                    "experts are spread over several GPUs",
                    request(Cell("BF16 TRITON", EAGER, 4), folders["bf16"], **parallel),
                )
            )
        results = run_engines([one for _, _, one in wanted], parallel=_PARALLEL)
    rows = [_refused(what, reason, result) for (what, reason, _), result in zip(wanted, results, strict=True)]
    if torch.cuda.device_count() < 2:
        rows.append({"setting": "expert parallel", "refused": None, "said": "not run: needs two GPUs"})
    return rows


def _refused(setting: str, reason: str, result: EngineResult) -> dict[str, Any]:
    message = "" if result.error is None else result.error.message
    shown = (*result.log.refused, *message.splitlines())  # a worker process leaves its reason in the log
    line = next((one for one in shown if VARIABLE in one), message.partition("\n")[0])
    return {
        "setting": setting,
        "refused": result.error is not None and any(reason in one for one in shown),
        "stage": None if result.error is None else result.error.stage,
        "said": line[:300] if result.error else f"started, {len(result.tokens)} prompts answered",
    }


def _checkpoints(folder: Path) -> dict[str, str]:
    schemes = dict.fromkeys(scheme for scheme, _, _ in BACKENDS.values())
    return {scheme: str(write_qwen3_moe(folder / scheme, scheme=scheme)) for scheme in schemes}
