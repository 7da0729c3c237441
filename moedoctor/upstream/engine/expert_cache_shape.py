"""Engines with the fix `expert_cache` on made-up weights: the memory they leave, and how fast they decode."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moedoctor.models.presets import preset_document
from moedoctor.results import UnavailableError
from moedoctor.upstream.engine.compare import short_error
from moedoctor.upstream.engine.engine import EngineRequest, run_engine
from moedoctor.upstream.engine.expert_cache import PROBES, SECONDS, cached
from moedoctor.upstream.engine.offload_engine import need_engine

QWEN_SLOTS = (8, 128, 32, 16, 64)
"""In the order of their measurement: should time run out, the last ones are left out."""
_ALL = 128
_BATCHES, _STEPS, _ROUNDS = (1, 8), (24, 8), 2
_QWEN_SECONDS, _MEASURING_SECONDS = 420.0, 240.0


def memory(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """The memory that vLLM's own profile leaves to the KV cache, without a cache and with 8 of 64 experts.

    Four layers with made-up weights, engines one after the other. Raises UnavailableError.
    """
    need_engine()
    shape = {"num_hidden_layers": 4, "num_experts": 64, "hidden_size": 1024, "num_attention_heads": 8}
    rows = []
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = write_shape(Path(name), **shape, vocab_size=512)
        for slots in (None, 8):
            result = run_engine(_profiled(str(folder), slots))
            if result.error is not None:
                rows.append({"slots": slots, "error": short_error(result)})
                continue
            seen = {key: result.probe[key] for key in ("kv_cache_bytes", "saved_bytes", "layers")}
            rows.append({"slots": slots, **seen})
    return rows


def _profiled(folder: str, slots: int | None) -> EngineRequest:
    return EngineRequest(
        folder,
        [[3, 5, 7]],
        {
            "load_format": "dummy",
            "moe_backend": "triton",
            "enforce_eager": True,
            "kv_cache_memory_bytes": None,
            "gpu_memory_utilization": 0.2,
        },
        cached(slots),
        max_tokens=2,
        probe=f"{PROBES}caches",
        seconds=SECONDS,
    )


def write_shape(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration of Qwen3-30B-A3B, fields changed, and no weights; for made-up ones."""
    document = {
        **{key: one for key, one in preset_document("qwen3-30b-a3b").items() if not key.startswith("_")},
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return folder


def qwen(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Decode of Qwen3-30B-A3B's shape with made-up weights at each number of slots. Raises UnavailableError.

    One engine: it loads with the fewest slots and profiles its memory so, then its layers are given other
    caches over the same host memory, and its graphs are captured anew.
    """
    need_engine()
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = write_shape(Path(name))
        vocab = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
        result = run_engine(_qwen_request(str(folder), vocab))
    if result.error is not None:
        raise UnavailableError(f"{result.error.stage}: {short_error(result)}")
    every = {row["batch"]: row["tokens"] for row in result.probe if row["slots"] == _ALL}
    if not every:
        raise UnavailableError("there was no time to measure with all experts on the GPU")
    rows = []
    for row in sorted(result.probe, key=lambda one: (one["slots"], one["batch"])):
        spoken = row.pop("tokens")
        equal = sum(a == b for a, b in zip(spoken, every[row["batch"]], strict=True))
        rows.append({**row, "sequences_as_with_all": equal, "tokens_a_sequence": len(spoken[0])})
    rows[0]["seconds_to_load"] = result.seconds["load"]
    return rows


def _qwen_request(folder: str, vocab: int) -> EngineRequest:
    return EngineRequest(
        folder,
        [[17, 4711]],
        {
            "load_format": "dummy",
            "moe_backend": "triton",
            "enforce_eager": False,
            "compilation_config": {
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": list(_BATCHES),
            },
            "gpu_memory_utilization": 0.9,
            "kv_cache_memory_bytes": 4 << 30,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": max(_BATCHES),
            "enable_prefix_caching": False,
        },
        cached(QWEN_SLOTS[0]),
        max_tokens=2,
        probe=f"{PROBES}decode_speeds",
        probe_options={
            "slots": QWEN_SLOTS,
            "batches": _BATCHES,
            "steps": _STEPS,
            "rounds": _ROUNDS,
            "vocab": vocab,
            "seconds": _MEASURING_SECONDS,
        },
        seconds=_QWEN_SECONDS,
        label="Qwen3-30B-A3B",
    )


def draw_weights(model: Any) -> None:
    """Draw all weights of a model with caches anew, so that its tokens depend on every expert.

    The caches are to be made anew after this.
    """
    # vLLM's made-up weights are all within 0.001, norms too: what a layer adds is rounded away beside the
    # embedding. So: norms of one, an embedding of unit size, and deviations of 1 / sqrt(inputs), as in the
    # tiny checkpoints. Large norms alone would be cheaper, but vLLM draws each layer alike, and an expert of
    # another layer would not be noticed. Experts are drawn on the GPU and cost one copy to the host.
    import torch

    from moedoctor.upstream.plugin.expert_cache_layer import host_experts

    made = host_experts(model)
    slots = {one.data_ptr() for layer in made for one in layer.cache.weights.values()}
    draw = torch.Generator(device=made[0].cache.device).manual_seed(0)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if parameter.data_ptr() in slots:
                continue
            if parameter.dim() == 1:
                parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
            elif parameter.dim() == 2:
                gain = 4.0 if "lm_head" in name else 1.0  # [outputs, inputs]
                deviation = 1.0 if "embed" in name else gain / math.sqrt(parameter.shape[1])
                parameter.data.normal_(0.0, deviation, generator=draw)
        for layer in made:
            layer.draw(draw)
