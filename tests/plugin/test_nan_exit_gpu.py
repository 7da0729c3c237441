"""The report at the exit of a real engine in a forked process, vLLM's default. About a minute."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreted import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]


def test_an_engine_in_a_process_of_its_own_prints_its_report(tmp_path: Path) -> None:
    # The checkpoint is written here: a process that used OpenMP before it forks makes its engine hang.
    from moedoctor.reference.checkpoints import write_qwen3_moe

    folder = write_qwen3_moe(tmp_path / "model", scheme="bf16", layers=2)
    environ = os.environ | {
        "MOEDOCTOR_TRACE": "nan",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path),
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"):
        environ.pop(name, None)
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-5000:]
    started = re.search(r"started by (\d+)", text)
    printed = re.findall(r"NaN trace of process (\d+)", text)
    assert len(printed) == 1, text[-5000:]
    assert started is not None
    assert printed[0] != started[1]  # the engine's own process
    assert "Steps with padding   NaN in padding    Inf in padding   Mean pad tokens" in text
    assert "never looked at" not in text  # what the graphs hold was looked at at capture


def generate(folder: str) -> None:
    """Generate a few tokens with a default engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        attention_backend="TRITON_ATTN",
        moe_backend="triton",
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 26,
        max_model_len=256,
        max_num_seqs=16,
        compilation_config={"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    )
    prompts = [{"prompt_token_ids": list(range(5, 8 + prompt))} for prompt in range(3)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False)
    print(f"started by {os.getpid()}", flush=True)


if __name__ == "__main__":
    generate(sys.argv[1])
