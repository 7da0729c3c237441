"""The cells of vllm#37883's table: a checkpoint with its MoE backend, eager or compiled, and where the
experts are: on the GPU (the control), on the host and mapped (UVA), or on the host and copied without pinned
memory, which is the branch that WSL takes.

With the fix, CUDA graphs are left out. The control has one for each number of prompts, so that none pads its
batches and both compute the same ones. Compiled cells of the fix get a second control: the very same engine,
with its weights on the GPU instead of on the host (`SAME_GRAPH`). Where a cell parts from the first control
and not from the second, it is not for its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme
    from moedoctor.upstream.engine.engine import EngineRequest

BACKENDS: Mapping[str, tuple[Scheme, str]] = {
    "BF16 TRITON": ("bf16", "triton"),
    "NVFP4 MARLIN": ("nvfp4", "marlin"),
    "NVFP4 EMULATION": ("nvfp4", "emulation"),
    "FP8 TRITON": ("fp8", "triton"),
}
"""What a report calls it -> (scheme of the checkpoint, ``moe_backend``)."""
TABLE = ("BF16 TRITON", "NVFP4 MARLIN", "NVFP4 EMULATION")
ON_GPU, UVA, COPIES = "on the GPU", "UVA", "no UVA, unpinned"
PLACES = (ON_GPU, UVA, COPIES)
SAME_GRAPH = "on the GPU, in the graph of the copies"
CONTROLS = (ON_GPU, SAME_GRAPH)
WEIGHTS = "no UVA, unpinned, scales on the GPU"
"""As `COPIES`, with ``--cpu-offload-params w13_weight w2_weight``: what can be done without a fix."""
PROMPTS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "BF16 TRITON": (
        (257, 351, 473, 458, 169, 430, 259, 259),
        (424, 16, 207, 246, 475, 271),
        (41, 17, 67, 329, 100, 314, 429, 298, 65),
    ),
    "NVFP4 MARLIN": ((265, 511, 43, 73, 395), (290, 346, 157, 185, 327), (364, 101, 424, 166, 406, 153, 200)),
    "NVFP4 EMULATION": (
        (271, 26, 101, 192),
        (23, 327, 303, 94, 332),
        (305, 211, 175, 123, 263, 451, 237, 24, 249),
    ),
    "FP8 TRITON": (
        (492, 203, 91, 5, 260, 74, 322),
        (167, 226, 58, 289, 464, 150),
        (213, 199, 8, 213, 460, 139, 277, 276, 415),
    ),
}
"""Of 400 random prompts those whose tokens are decided most clearly: in an eager H200 engine without
offload the best token leads by at least 0.75 at every step."""
MAX_TOKENS = 6
LOGPROBS = 5
EAGER, COMPILED = "eager", "compiled"
UNPINNED = {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1"}
"""The branch that WSL takes."""
_VARIABLES = {COPIES: UNPINNED, WEIGHTS: UNPINNED, SAME_GRAPH: UNPINNED}


@dataclass(frozen=True)
class Cell:
    """One engine of the table."""

    backend: str
    """A key of `BACKENDS`."""
    mode: str
    """`EAGER` or `COMPILED`."""
    place: str
    """One of `PLACES`, `WEIGHTS` or `SAME_GRAPH`."""
    fixes: str = ""
    """The value of ``MOEDOCTOR_FIXES``."""

    @property
    def label(self) -> str:
        return f"{self.backend}, {self.mode}, {self.place}"


def cells(backends: Sequence[str], mode: str, places: Sequence[str], fixes: str) -> list[Cell]:
    """All cells, the controls among them; with the fix, compiled copies have two."""
    second = (SAME_GRAPH,) if mode == COMPILED and fixes and COPIES in places else ()
    return [Cell(backend, mode, place, fixes) for backend in backends for place in (*places, *second)]


def request(cell: Cell, folder: str) -> EngineRequest:
    """The engine of a cell, for the checkpoint in `folder`."""
    from moedoctor.upstream.engine.engine import EngineRequest

    arguments: dict[str, Any] = {
        "moe_backend": BACKENDS[cell.backend][1],
        "enforce_eager": cell.mode == EAGER,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
    if cell.mode == COMPILED:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 3, 4]}
    if cell.place != ON_GPU:
        chosen = ["w13_weight", "w2_weight"] if cell.place == WEIGHTS else ["experts"]
        arguments |= {"cpu_offload_gb": 1.0, "cpu_offload_params": chosen}
    environ = {"MOEDOCTOR_FIXES": cell.fixes, **_VARIABLES.get(cell.place, {})}
    probe = None if cell.place == ON_GPU else "layers_and_places"
    if cell.place == SAME_GRAPH:
        probe = "serve_from_gpu"
    return EngineRequest(
        folder,
        PROMPTS[cell.backend],
        arguments,
        environ,
        max_tokens=MAX_TOKENS,
        logprobs=LOGPROBS,
        probe=f"moedoctor.upstream.engine.probes:{probe}" if probe else None,
        probe_when="before",
        probe_options={"names": "experts"} if probe == "layers_and_places" else {},
        seconds=280.0,
        label=cell.label,
    )
