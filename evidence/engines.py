"""Shared by the engines of these scripts and of moedoctor: arguments for a tiny model, and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moedoctor.upstream.engine.engine import ARGUMENTS, ENVIRON

__all__ = ["ENVIRON", "generate", "list_arguments"]
PROMPTS = (range(3, 19), (5, 6, 7))


def list_arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a tiny model."""
    return {"model": str(model), "skip_tokenizer_init": True, **ARGUMENTS, **more}


def generate(llm: Any, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 8) -> list[list[int]]:
    """Return the greedy tokens of each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, sampling)]
