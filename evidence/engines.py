"""What the engines of the scripts in this folder share: a tiny model, two prompts, and quiet surroundings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENVIRON = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PROMPTS = (range(3, 19), (5, 6, 7))


def list_arguments(model: Path, share: float = 0.05, **more: Any) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a tiny model; `share` is that of the GPU's memory."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "attention_backend": "TRITON_ATTN",
        "gpu_memory_utilization": share,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        **more,
    }


def generate(llm: Any, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 8) -> list[list[int]]:
    """Return the greedy tokens of each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, sampling)]
