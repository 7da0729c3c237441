"""Engines on checkpoints: ``python preflight_engines.py STARTS AT_ONCE SECONDS`` writes FOLDER/answer.json.

STARTS is a file with ``{FOLDER: words of its command line}``. An engine that has not begun in time has none.

`write_values` fills a checkpoint with values that depend on the names of its tensors: an engine that loads
all of them has the same tokens as one that loads the sound checkpoint.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any, NoReturn

import torch
from checkpoint_headers import Built
from safetensors.torch import save_file

PROMPTS = [[7, 19, 23, 5], [101, 3, 88, 42, 17, 9], [250, 11], [33, 34, 35, 36, 37, 38, 39, 40]]
TOKENS = 12
GRACE = 20.0
"""Seconds that an engine which has begun still gets."""
_TYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def write_values(folder: Path, built: Built) -> Path:
    """Write config.json and a safetensors file with values."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("config.json").write_text(json.dumps(built.config))
    tensors = {
        name: draw_tensor(built.seeds.get(name, name), dtype, shape)
        for name, (dtype, shape) in built.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draw_tensor(seed: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of `shape` with values that depend on the name `seed` and the shape alone.

    With its scales, a weight has values of about 0.1, in every format.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {shape}".encode()))
    part = seed.rpartition(".")[2]
    if "scale" in part:
        if dtype == "U8":  # an exponent of two
            return torch.full(shape, 122, dtype=torch.uint8)
        size = next((size for name, size in _SCALES.items() if name in part), 0.02)
        size = 1.0 if dtype == "F8_E4M3" else size
        return (size * (0.5 + torch.rand(shape, generator=generator))).to(_TYPES[dtype])
    if part in ("g_idx", "weight_shape"):
        return torch.arange(math.prod(shape), dtype=_TYPES[dtype]).div(128, rounding_mode="floor")
    if dtype in ("U8", "I32"):
        low, high = (0, 256) if dtype == "U8" else (-(2**31), 2**31)
        return torch.randint(low, high, shape, generator=generator).to(_TYPES[dtype])
    values = torch.randn(shape, generator=generator)
    if "norm" in seed and len(shape) == 1:
        return (1 + 0.1 * values).to(_TYPES[dtype])
    return (values * (4 if dtype == "F8_E4M3" else 0.08)).to(_TYPES[dtype])


_SCALES = {"global": 50.0, "input": 0.05}
"""Part of a scale's name -> its size; compressed-tensors stores the inverse of a global scale."""


def run_engine(folder: str, words: list[str]) -> dict[str, Any]:
    """Start the engine of a command line; return its greedy tokens, or the error that stopped it."""
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from moedoctor.upstream.preflight import stages

    answer: dict[str, Any] = {"started": False, "stage": "", "text": ""}
    try:
        config, _ = stages.configure([folder, *words], {})
        engine = LLMEngine.from_vllm_config(config)
        answer["started"] = True
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        answer["tokens"] = [tokens[str(number)] for number in range(len(PROMPTS))]
    except stages.StageError as error:
        answer |= {"stage": error.record["stage"], "text": error.record["message"]}
    except (Exception, SystemExit):
        answer["text"] = traceback.format_exc()
    return answer


def run_engines(starts: dict[str, list[str]], at_once: int, seconds: float) -> None:
    """Fork a process for each start, and write what it answers and prints beside its checkpoint.

    vLLM is imported once, before the forks: no process of it has touched the GPU then.
    """
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    # Each engine would start a Python that imports vLLM, for one question about the model's class.
    registry._run_in_subprocess = lambda ask: ask()
    ends = time.monotonic() + seconds
    waiting, running = list(starts.items()), set()
    while running or (waiting and time.monotonic() < ends):
        if waiting and len(running) < at_once and time.monotonic() < ends:
            folder, words = waiting.pop(0)
            if (process := os.fork()) == 0:
                _answer_and_end(Path(folder), words)
            running.add(process)
            continue
        process, _ = os.waitpid(-1, os.WNOHANG)
        ended = {process} & running if time.monotonic() < ends + GRACE else set(running)
        for each in ended:  # its workers, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each, signal.SIGKILL)
        running -= ended
        time.sleep(0.05)


def _answer_and_end(folder: Path, words: list[str]) -> NoReturn:
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    answer = run_engine(str(folder), words)
    answer["text"] += (folder / "log").read_text(errors="replace")[-200_000:]
    folder.joinpath("answer.json").write_text(json.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    run_engines(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), float(sys.argv[3]))
