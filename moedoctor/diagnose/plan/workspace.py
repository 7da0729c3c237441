"""The memory that one call of a MoE backend takes beside weights and cache, computed from its code.

vLLM asks every backend for the shapes of its workspaces (`workspace_shapes`) and keeps them for the largest
batch. Quantized activations, dequantized weights, Marlin's sums and the layer's output come on top. The
figures are the allocations of vLLM 0.33.0 on one GPU, and of our own kernels; the tests compare them with
measurements. The lists of which token goes where, and scales of blocks, are left out: below 1 %.
FlashInfer's backends allocate inside their own library; that has to be measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moedoctor.diagnose.plan.kv_cache import MODEL_BYTES, PlanError
from moedoctor.models.layer_shape import LayerShape
from moedoctor.text import load_yaml, shorten, suggest_expected

SCHEMES_OF: Mapping[str, Sequence[str]] = load_yaml("moedoctor.diagnose.plan", "workspace.yaml")
"""Backend that can be planned for -> the formats of its weights."""
_NOT_MEASURED = ("HUMMING", "B12X", "HPC", "DEEPGEMM")
_DEQUANTIZES = re.compile(r"0\.(?:1\d|2[0-4])\.")
"""Releases whose EMULATION dequantizes all experts of a layer in each call, by their sources."""
_SMS = 132
"""Multiprocessors of an H100 or H200."""
_MARLIN_BLOCKS = (8, 16, 32, 48, 64)
_MARLIN_COLUMNS = 256
"""Columns of Marlin's widest tile."""


@dataclass(frozen=True)
class Workspace:
    bytes: int | None
    """None if it is not known."""
    how: str
    """The parts that were added up, or why it is not known."""


def check_backend(name: str) -> str:
    """Return vLLM's spelling of a backend, given in any case and with ``-`` for ``_``. Raises PlanError."""
    spelled = name.strip().upper().replace("-", "_")
    if spelled not in SCHEMES_OF:
        raise PlanError(f"--backend {shorten(name)!r}: {suggest_expected(name, SCHEMES_OF)}")
    return spelled


def compute_workspace(
    backend: str, scheme: str, layer: LayerShape, batched_tokens: int, release: str = ""
) -> Workspace:
    """Return the workspace of a call with `batched_tokens` tokens and experts stored in `scheme`.

    `release` is the vLLM that will run, by default the newest one that was measured.
    Raises PlanError for an unknown backend.
    """
    name = check_backend(backend)
    reason = _explain_unknown(name, scheme, layer)
    if reason is not None:
        return Workspace(None, f"{reason} give --workspace")
    rows = batched_tokens * layer.top_k
    narrow, wide = max(layer.intermediate, layer.hidden), max(layer.w13_rows, layer.hidden)
    if name == "MARLIN":
        # Twice the intermediate size even without a gate half (ReLU²).
        wide = max(2 * layer.intermediate, layer.hidden)
    if name == "OURS":
        narrow, wide = layer.intermediate, layer.hidden
    parts = {
        f"workspaces [{rows}, {narrow}] and [{rows}, {wide}]": rows * (narrow + wide) * MODEL_BYTES,
        "output": batched_tokens * layer.hidden * MODEL_BYTES,
        **_count_extra_bytes(name, scheme, layer, batched_tokens),
    }
    dequantized = layer.experts * layer.expert_parameters * MODEL_BYTES
    if name == "EMULATION" and _DEQUANTIZES.match(release):
        parts["dequantized weights"] = dequantized
    shown = ", ".join(f"{what} {size / (1 << 20):.1f} MiB" for what, size in parts.items())
    if name == "EMULATION" and not release:
        shown += f"; before vLLM 0.25.0 also dequantized weights {dequantized / (1 << 20):.1f} MiB"
    return Workspace(sum(parts.values()), shown)


def _explain_unknown(name: str, scheme: str, layer: LayerShape) -> str | None:
    """Return why the workspace cannot be computed, or None if it can."""
    if scheme not in SCHEMES_OF[name]:
        return f"{name} has {', '.join(SCHEMES_OF[name])}, not {scheme}: name another --backend, or"
    if name.startswith("FLASHINFER"):
        return f"{name} allocates its workspace inside FlashInfer's own library;"
    if name in _NOT_MEASURED or (name == "VLLM_CUTLASS" and scheme == "nvfp4"):
        return f"{name} for {scheme} was measured on no GPU yet, so nothing is computed for it;"
    if name == "VLLM_CUTLASS" and not layer.gated:
        return f"VLLM_CUTLASS has no {layer.activation};"
    return None


def _count_extra_bytes(name: str, scheme: str, layer: LayerShape, tokens: int) -> dict[str, int]:
    """Return the bytes that are allocated beside the workspaces and the output, by purpose."""
    rows = tokens * layer.top_k
    if name == "MARLIN":
        return {f"float32 sums on {_SMS} multiprocessors": _count_marlin_sums(layer, rows)}
    if name == "TRITON" and scheme == "fp8":
        return {"FP8 activations": tokens * layer.hidden + rows * layer.intermediate}
    if name == "VLLM_CUTLASS":  # its FP8 intermediates are in the workspaces
        return {"FP8 input": tokens * layer.hidden}
    if name == "EMULATION":
        rounded = tokens * layer.hidden + rows * layer.intermediate
        return {"rounded activations": rounded * MODEL_BYTES}
    return {}


def _count_marlin_sums(layer: LayerShape, rows: int) -> int:
    """Return the bytes of ``c_tmp``, in which Marlin's thread blocks add up their parts in float32."""
    block = next(
        (size for size in _MARLIN_BLOCKS if rows / layer.experts / size < 0.9), _MARLIN_BLOCKS[-1]
    )  # tokens of a tile, as fused_marlin_moe chooses them
    padded = rows + layer.experts * (block - 1)
    if rows < layer.experts:
        padded = min(rows * block, padded)
    widest = max(layer.w13_rows, layer.hidden)
    elements = min(widest * padded, _SMS * 4 * block * _MARLIN_COLUMNS)
    return elements * (2 if block == _MARLIN_BLOCKS[0] else 1) * 4
