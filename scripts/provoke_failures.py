"""Provokes known failures, and failures of other kinds, in real engines, and stores their masked logs.

    python scripts/provoke_failures.py OUT --seconds 180

Each case is one engine in a process of its own with a time limit. `OUT/<release>/<case>.log` is what it
printed, and `<case>.json` says what was provoked: that is the truth for the tests of `triage`. Cases whose
log is there, or among the tests, are not run again. It needs a GPU, vLLM and moedoctor on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STORED = Path(__file__).resolve().parents[1] / "tests" / "diagnose" / "triage" / "logs"
MOST_LINES = 250
"""Of a longer log the first and the last lines are kept."""
NO_UVA = {
    "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1",
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1",
}
"""What makes the offloader work as it does on WSL."""
OFFLOAD = {"cpu_offload_gb": 0.01, "cpu_offload_params": ["experts"]}
EAGER = {"enforce_eager": True}
ENVIRON = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Case:
    """One engine, and the known failures that it shows."""

    ids: tuple[str, ...]
    """Empty for a healthy engine, and for a failure of another kind."""
    what: str
    scheme: str = "bf16"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    change: str = ""
    """A function of this file that damages the checkpoint."""
    releases: tuple[str, ...] = ()
    """The releases that show it; empty for all. In others the case is skipped."""


def _offload(backend: str, ids: tuple[str, ...], scheme: str = "nvfp4") -> Case:
    return Case(
        ids,
        f"experts of an {scheme} model on the host without UVA, --moe-backend {backend}",
        scheme,
        {"moe_backend": backend, **OFFLOAD, **EAGER},
        NO_UVA,
    )


def _backend(name: str, scheme: str, ids: tuple[str, ...] = ("MD010",)) -> Case:
    return Case(ids, f"--moe-backend {name} for an {scheme} model", scheme, {"moe_backend": name, **EAGER})


TRITON = {"moe_backend": "triton", **EAGER}
MARLIN = {"moe_backend": "marlin", **EAGER}
CASES: Mapping[str, Case] = {
    "offload_marlin": _offload("marlin", ("MD003",)),
    "offload_emulation": _offload("emulation", ("MD003",)),
    "offload_fp8_triton": _offload("triton", ("MD003",), "fp8"),
    "offload_compiled": Case(
        ("MD005",),
        "experts of a BF16 model on the host without UVA, compiled",
        "bf16",
        {"moe_backend": "triton", **OFFLOAD},
        NO_UVA,
    ),
    "offload_humming": _offload("auto", ("MD003",)),
    "offload_fp8_cutlass": _offload("cutlass", ("MD010",), "fp8"),
    "offload_fp8_marlin": _offload("marlin", ("MD003",), "fp8"),
    "kv_scales": Case(
        ("MD012",),
        "an FP8 KV cache without scales",
        "nvfp4",
        {**MARLIN, "kv_cache_dtype": "fp8"},
        change="fp8_kv",
    ),
    "global_scales": Case(
        ("MD014",), "w1 and w3 with other global scales", "nvfp4", MARLIN, change="mismatch"
    ),
    "backend_misspelt": _backend("marlinn", "nvfp4"),
    "backend_other_gpu": _backend("flashinfer_trtllm", "nvfp4"),
    "backend_cutedsl": _backend("flashinfer_cutedsl", "nvfp4"),
    "backend_other_format": _backend("flashinfer_trtllm", "fp8"),
    "backend_cutlass": _backend("cutlass", "nvfp4"),
    "backend_flashinfer": _backend("flashinfer_cutlass", "nvfp4"),
    "backend_deep_gemm": _backend("deep_gemm", "bf16"),
    "variable_removed": Case(
        ("MD010",),
        "a variable that was removed",
        "nvfp4",
        EAGER,
        {"VLLM_USE_FLASHINFER_MOE_FP4": "1"},
        releases=("0.27.1", "0.30.0", "0.33.0"),
    ),
    "variable_invented": Case(
        ("MD010",), "a variable that never existed", "nvfp4", EAGER, {"VLLM_NVFP4_MOE_BACKEND": "marlin"}
    ),
    "variable_choice": Case(
        ("MD010",),
        "a choice in capitals",
        "nvfp4",
        EAGER,
        {"VLLM_NVFP4_GEMM_BACKEND": "MARLIN"},
        releases=("0.17.1", "0.19.1", "0.21.0"),
    ),
    "runner_noop": Case(
        ("MD013",),
        "offload under the V2 runner",
        "bf16",
        {**TRITON, **OFFLOAD},
        {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        releases=("0.17.1", "0.19.1", "0.21.0"),
    ),
    "variable_other": Case(
        (), "an unknown variable of another kind", "bf16", TRITON, {"VLLM_MY_OWN_SWITCH": "1"}
    ),
    "healthy_bf16": Case((), "a healthy engine", "bf16", TRITON),
    "healthy_nvfp4": Case((), "a healthy engine", "nvfp4", EAGER),
    "healthy_offload": Case((), "offload with UVA", "nvfp4", {**MARLIN, **OFFLOAD}),
    "no_room": Case((), "no room for the KV cache", "bf16", {**TRITON, "kv_cache_memory_bytes": 4096}),
    "too_long": Case((), "a longer context than the model has", "bf16", {**TRITON, "max_model_len": 999_999}),
    "two_gpus": Case((), "more GPUs than there are", "bf16", {**TRITON, "tensor_parallel_size": 16}),
    "missing_weight": Case((), "a checkpoint without a weight", "bf16", TRITON, change="without_weight"),
    "missing_scale": Case((), "a checkpoint without a block scale", "nvfp4", MARLIN, change="without_scale"),
    "wrong_shape": Case((), "a weight of another shape", "bf16", TRITON, change="other_shape"),
    "unknown_model": Case((), "an unknown architecture", "bf16", TRITON, change="other_model"),
    "other_quantization": Case(
        (), "--quantization awq for ModelOpt", "nvfp4", {**EAGER, "quantization": "awq"}
    ),
    "attention": Case(
        (),
        "an attention backend that is not installed",
        "bf16",
        {**TRITON, "attention_backend": "FLASHINFER"},
    ),
    "no_folder": Case((), "a model that is not there", "bf16", {**TRITON, "model": "/nowhere/model"}),
    "prompt_too_long": Case((), "a prompt that is too long", "bf16", {**TRITON, "max_model_len": 8}),
    "parallel": Case((), "expert parallelism on one GPU", "bf16", {**TRITON, "enable_expert_parallel": True}),
    "compiled_nvfp4": Case((), "a healthy compiled engine", "nvfp4", {}),
    "illegal_other": Case(
        (),
        "an illegal access outside of MoE",
        "bf16",
        {**TRITON, "_after": "illegal"},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    ),
}


def fp8_kv(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["quantization_config"]["kv_cache_quant_algo"] = "FP8"


def mismatch(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith("up_proj.weight_scale_2"):
            tensors[name] = tensors[name] * 2


def without_weight(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["model.layers.1.self_attn.o_proj.weight"]


def without_scale(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith("3.down_proj.weight_scale")]:
        del tensors[name]


def other_shape(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["model.layers.0.mlp.experts.0.gate_proj.weight"] = tensors["lm_head.weight"].clone()


def other_model(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["architectures"] = ["NobodysMoeForCausalLM"]


def run_engine(name: str, folder: Path) -> None:
    """Start the engine of a case in this process, and let it answer two prompts."""
    from vllm import LLM, SamplingParams

    from moedoctor.reference.checkpoints import write_qwen3_moe

    case = CASES[name]
    change = globals()[case.change] if case.change else None
    model = write_qwen3_moe(folder / "model", scheme=case.scheme, change=change)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "attention_backend": "TRITON_ATTN",
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        **case.arguments,
    }
    after = arguments.pop("_after", None)
    if "cpu_offload_params" in arguments:
        arguments["cpu_offload_params"] = set(arguments["cpu_offload_params"])
    llm = LLM(**arguments)
    if after == "illegal":
        illegal_access()
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": list(range(3, 19))}, {"prompt_token_ids": [5, 6, 7]}]
    print("tokens:", [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling)])


def illegal_access() -> None:
    """Read far outside of a tensor, with a kernel that has nothing to do with experts."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def read(address: Any) -> None:
        tl.store(address, tl.load(address + (1 << 42)))

    read[(1,)](torch.zeros(4, device="cuda"))
    torch.cuda.synchronize()


def run_case(name: str, out: Path, seconds: float) -> str:
    """Run a case and store its log and what was provoked. Return a line about it."""
    from moedoctor.processes import files
    from moedoctor.redaction import Redactor

    case, started = CASES[name], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), folder, "--engine", name]
        own = {key: str(Path(folder) / key) for key in ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT")}
        # Half of the engines run in one process, which starts faster and logs without vLLM's own prefix.
        in_one = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(zlib.crc32(name.encode()) % 2)}
        environ = {**os.environ, **ENVIRON, **own, **in_one, **case.environ}
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, 9)
                process.wait()
            log.seek(0)
            text = log.read().decode("utf-8", "replace")
    for path, shown in (
        (folder, "/models"),
        (_packages(), "/site-packages"),
        (str(Path(__file__).resolve().parents[1]), "/repository"),
    ):
        text = text.replace(path, shown)
    if code is None:
        return f"{name}: no answer in {seconds:.0f} s"
    hide = Redactor.of_this_process().text
    lines = [hide(line) for line in text.splitlines()]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES // 2], "...", *lines[-MOST_LINES // 2 :]]
    target = out / version("vllm").partition("+")[0]
    target.mkdir(parents=True, exist_ok=True)
    truth = {
        "ids": list(case.ids),
        "what": case.what,
        "vllm": version("vllm"),
        "environ": dict(case.environ),
        "arguments": {key: value for key, value in case.arguments.items() if not key.startswith("_")},
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
    }
    files.write(target / f"{name}.json", json.dumps(truth, indent=1) + "\n")
    files.write(target / f"{name}.log", "\n".join(lines) + "\n")
    errors = [line for line in lines if re.search(r"Error\b", line)]
    return f"{name}: exit code {code}, {truth['seconds']} s, {errors[-1][-150:] if errors else 'no error'}"


def _packages() -> str:
    """Return the folder that vLLM is in."""
    spec = find_spec("vllm")
    return str(Path(spec.origin).parents[1]) if spec and spec.origin else "/site-packages"


def main() -> None:
    """Run the cases that have no log yet, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0, help="time for all cases together")
    parser.add_argument("--each", type=float, default=90.0, help="time limit of each engine")
    parser.add_argument("--parallel", type=int, default=4, help="engines at once")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(options.engine, options.out)
        return
    end = time.monotonic() + options.seconds
    release = version("vllm").partition("+")[0]
    names = [
        name
        for name, case in CASES.items()
        if (not case.releases or release in case.releases)
        and not any((folder / release / f"{name}.log").exists() for folder in (options.out, STORED))
    ]

    def run(name: str) -> None:
        left = end - time.monotonic()
        if left < 20:
            print(f"{name}: no time left", flush=True)
        else:
            print(run_case(name, options.out, min(options.each, left)), flush=True)

    if names:
        run(names[0])  # fills the caches of the machine
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(run, names[1:]))


if __name__ == "__main__":
    main()
