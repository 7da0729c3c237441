"""One engine on one checkpoint: ``python preflight_engines.py FOLDER WORDS...`` prints a line of JSON.

`write_values` fills a checkpoint with values that depend on the names of its tensors: an engine that loads
all of them has the same tokens as one that loads the sound checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from checkpoint_headers import Built
from safetensors.torch import save_file

PROMPTS = [[7, 19, 23, 5], [101, 3, 88, 42, 17, 9], [250, 11], [33, 34, 35, 36, 37, 38, 39, 40]]
TOKENS = 12
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
    """Return a tensor of `shape` with values that depend on the name `seed` alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    part = seed.rpartition(".")[2]
    if "scale" in part:
        if dtype == "U8":  # an exponent of two
            return torch.full(shape, 120, dtype=torch.uint8)
        return (0.01 + 0.02 * torch.rand(shape, generator=generator)).to(_TYPES[dtype])
    if part in ("g_idx", "weight_shape"):
        return torch.arange(math.prod(shape), dtype=_TYPES[dtype]).div(128, rounding_mode="floor")
    if dtype in ("U8", "I32"):
        return torch.randint(0, 127, shape, generator=generator).to(_TYPES[dtype])
    values = torch.randn(shape, generator=generator)
    if "norm" in seed and len(shape) == 1:
        return (1 + 0.1 * values).to(_TYPES[dtype])
    return (values * (0.5 if dtype == "F8_E4M3" else 0.08)).to(_TYPES[dtype])


def run_engine(folder: str, words: list[str]) -> dict[str, Any]:
    """Start the engine of a command line, and return its greedy tokens, or the error that stopped it."""
    from moedoctor.upstream.preflight import stages

    try:
        module = stages._import_parser()
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = module.make_arg_parser(FlexibleArgumentParser()).parse_args([folder, *words])
        arguments.model = folder
        given = AsyncEngineArgs.from_cli_args(arguments)
        own = {each.name: getattr(given, each.name) for each in dataclasses.fields(EngineArgs)}
        engine = LLMEngine.from_engine_args(EngineArgs(**own))
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        return {"started": True, "tokens": [tokens[str(number)] for number in range(len(PROMPTS))]}
    except (Exception, SystemExit) as error:
        return {"started": False, "error": stages.describe_error("engine", error)}


if __name__ == "__main__":
    print("ANSWER " + json.dumps(run_engine(sys.argv[1], sys.argv[2:])), flush=True)
