"""Provokes known failures, and failures of other kinds, in real engines, and stores their masked logs.

    python scripts/provoke_failures.py OUT --seconds 180

Each case is one engine in a process of its own with a time limit. The processes are forked from one that has
imported vLLM, which takes longer than a tiny engine. `OUT/<release>/<case>.log` is what the engine
printed, and `<case>.json` says what was provoked: that is the truth for the tests of `triage`. Cases whose
log is there, or among the tests, are not run again. It needs a GPU, vLLM and moedoctor on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
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
    "stale_cutlass": Case(
        ("MD020",),
        "experts of an FP8 model with one scale a tensor on the host without UVA, --moe-backend cutlass",
        "fp8",
        {"moe_backend": "cutlass", **OFFLOAD, **EAGER},
        NO_UVA,
        change="scale_of_tensor",
    ),
    "stale_compiled": Case(
        ("MD005",),
        "experts of an NVFP4 model on the host without UVA, compiled",
        "nvfp4",
        {"moe_backend": "marlin", **OFFLOAD},
        NO_UVA,
    ),
    "offload_nvfp4_default": Case(
        ("MD003",),
        "experts of an NVFP4 model on the host without UVA, compiled by hand only, in graphs",
        "nvfp4",
        {"moe_backend": "marlin", **OFFLOAD, "compilation_config": {"mode": 0}},
        NO_UVA,
    ),
    "offload_everything": Case(
        ("MD003",),
        "all weights of an NVFP4 model on the host without UVA",
        "nvfp4",
        {"moe_backend": "marlin", "cpu_offload_gb": 1, **EAGER},
        NO_UVA,
    ),
    "input_scales_zero": Case(
        ("MD015",),
        "input scales of 0",
        "nvfp4",
        {"moe_backend": "emulation", **EAGER},
        change="zero_input_scales",
    ),
    "input_scales_absent": Case(
        ("MD015",),
        "no input scales",
        "nvfp4",
        {"moe_backend": "emulation", **EAGER},
        change="without_input_scales",
    ),
    "kv_scales_fp8": Case(
        ("MD012",),
        "an FP8 KV cache that the checkpoint of FP8 weights asks for, without scales",
        "fp8",
        {**TRITON, "kv_cache_dtype": "fp8_e4m3"},
    ),
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
    "no_memory": Case((), "less memory than the model needs", "bf16", {**TRITON, "_after": "no_memory"}),
    "assertion_other": Case(
        (), "an assertion of a kernel outside of MoE", "bf16", {**TRITON, "_after": "assertion"}
    ),
    "host_tensor_other": Case(
        (), "a kernel outside of MoE gets a tensor on the host", "bf16", {**TRITON, "_after": "host_tensor"}
    ),
    "graph_break_other": Case(
        (), "Dynamo refuses code outside of vLLM", "bf16", {**TRITON, "_after": "graph_break"}
    ),
    "little_memory": Case(
        (),
        "too little memory for the cache",
        "bf16",
        {**TRITON, "gpu_memory_utilization": 0.001, "kv_cache_memory_bytes": None},
    ),
    "wrong_dtype": Case((), "a type that vLLM does not know", "bf16", {**TRITON, "dtype": "float7"}),
    "half_fp8": Case((), "a healthy FP8 engine", "fp8", TRITON),
    "lora": Case((), "LoRA for a model of tiny size", "bf16", {**TRITON, "enable_lora": True}),
    "speculative": Case(
        (),
        "a draft model that is not there",
        "bf16",
        {**TRITON, "speculative_config": {"model": "/nowhere/draft", "num_speculative_tokens": 2}},
    ),
    "truncated": Case((), "a truncated checkpoint", "bf16", {**TRITON, "_after": "truncated"}),
    "pipeline": Case((), "more pipeline stages than GPUs", "bf16", {**TRITON, "pipeline_parallel_size": 9}),
    "block_size": Case((), "a block size that no backend has", "bf16", {**TRITON, "block_size": 7}),
    "bad_config": Case((), "heads that do not divide", "bf16", TRITON, change="odd_heads"),
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


def scale_of_tensor(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Give each FP8 weight one scale in place of one a block."""
    import torch

    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        blocks = tensors.pop(name)  # [N/128, K/128]
        weight = name.removesuffix("_scale_inv")
        scales = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)  # [N, K]
        values = tensors[weight].float() * scales  # [N, K]
        scale = values.abs().amax() / 448.0
        tensors[weight] = (values / scale).to(torch.float8_e4m3fn)
        tensors[weight + "_scale"] = scale.reshape(1)
    del config["quantization_config"]["weight_block_size"]


def zero_input_scales(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith(".input_scale"):
            tensors[name] = tensors[name] * 0


def without_input_scales(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith(".input_scale")]:
        del tensors[name]


def without_weight(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["model.layers.1.self_attn.o_proj.weight"]


def without_scale(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith("3.down_proj.weight_scale")]:
        del tensors[name]


def other_shape(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors["model.layers.0.mlp.experts.0.gate_proj.weight"] = tensors["lm_head.weight"].clone()


def odd_heads(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["num_attention_heads"] = 3


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
    if after == "truncated":
        os.truncate(model / "model.safetensors", 4096)
    if "cpu_offload_params" in arguments:
        arguments["cpu_offload_params"] = set(arguments["cpu_offload_params"])
    llm = LLM(**arguments)
    if after in AFTER:
        AFTER[after]()
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


def no_memory() -> None:
    """Ask for more memory than any GPU has."""
    import torch

    torch.empty(1 << 42, device="cuda")


def assertion() -> None:
    """Index out of range in a kernel of torch."""
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()


def host_tensor() -> None:
    """Multiply a tensor on the GPU with one on the host."""
    import torch

    torch.mm(torch.zeros(4, 4, device="cuda"), torch.zeros(4, 4))


def graph_break() -> None:
    """Trace code that Dynamo does not know."""
    import torch

    def code(x: Any) -> Any:
        print(x)
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(code, fullgraph=True)(torch.zeros(4, device="cuda"))


AFTER: Mapping[str, Callable[[], None]] = {
    "illegal": illegal_access,
    "no_memory": no_memory,
    "assertion": assertion,
    "host_tensor": host_tensor,
    "graph_break": graph_break,
}
"""What breaks after the engine has started."""


@dataclass
class Engine:
    """A case that runs."""

    name: str
    process: int
    folder: Path
    """Holds the checkpoint and the log, and is removed at the end."""
    started: float

    def text(self) -> str:
        """Return what the engine printed, with the paths of this machine replaced."""
        text = (self.folder / "log").read_bytes().decode("utf-8", "replace")
        own = str(Path(__file__).resolve().parents[1])
        for path, shown in (
            (str(self.folder), "/models"),
            (_packages(), "/site-packages"),
            (own, "/repository"),
        ):
            text = text.replace(path, shown)
        return text


def import_engine() -> None:
    """Import what engines need, so that each forked process has it. CUDA must not be used before a fork."""
    for name in (
        "vllm",
        "vllm.v1.engine.core",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.gpu_worker",
        "vllm.model_executor.models.qwen3_moe",
        "moedoctor.reference.checkpoints",
    ):
        try:
            import_module(name)
        except Exception as error:  # the release may not have it
            print(f"{name}: {type(error).__name__}: {error}"[:200], flush=True)
    import torch
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    # Otherwise vLLM inspects the class in another process, which imports vLLM once more.
    ModelRegistry.register_model("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM)
    if torch.cuda.is_initialized():
        raise SystemExit("the imports of vLLM used CUDA: processes cannot be forked from this one")


def start(name: str) -> Engine:
    """Fork a process for a case."""
    folder = Path(tempfile.mkdtemp(prefix="moedoctor-"))
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return Engine(name, process, folder, time.monotonic())
    code = 1
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # Half of the engines run in one process, which starts faster and logs without vLLM's own prefix.
        in_one = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(zlib.crc32(name.encode()) % 2)}
        os.environ.update({**ENVIRON, **in_one, **CASES[name].environ})
        run_engine(name, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def store(engine: Engine, code: int, out: Path) -> str:
    """Store the log of a case, masked, and what was provoked. Return a line about it."""
    from moedoctor.processes import files
    from moedoctor.redaction import Redactor

    case, hide = CASES[engine.name], Redactor.of_this_process().text
    lines = [hide(line) for line in engine.text().splitlines()]
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
        "seconds": round(time.monotonic() - engine.started, 1),
    }
    files.write(target / f"{engine.name}.json", json.dumps(truth, indent=1) + "\n")
    files.write(target / f"{engine.name}.log", "\n".join(lines) + "\n")
    errors = [line for line in lines if re.search(r"Error\b", line)]
    last = errors[-1][-150:] if errors else "no error"
    return f"{engine.name}: exit code {code}, {truth['seconds']} s, {last}"


def run_cases(names: list[str], out: Path, *, end: float, each: float, parallel: int) -> None:
    """Run cases side by side until the time is up. The first runs alone, because it fills vLLM's cache."""
    waiting, running, together = list(names), list[Engine](), 1
    while waiting or running:
        while waiting and len(running) < together and end - time.monotonic() > 15:
            running.append(start(waiting.pop(0)))
        if not running:
            break
        time.sleep(0.2)
        for engine in list(running):
            process, status = os.waitpid(engine.process, os.WNOHANG)
            now = time.monotonic()
            late = not process and now > min(engine.started + each, end)
            if not process and not late:
                continue
            # What the engine started may still hold the GPU.
            with suppress(ProcessLookupError):
                os.killpg(engine.process, signal.SIGKILL)
            if late:
                os.waitpid(engine.process, 0)
                print(f"{engine.name}: no answer in {now - engine.started:.0f} s", flush=True)
                for line in engine.text().splitlines()[-3:]:
                    print("   ", line[:200], flush=True)
            else:
                print(store(engine, os.waitstatus_to_exitcode(status), out), flush=True)
            shutil.rmtree(engine.folder, ignore_errors=True)
            running.remove(engine)
            together = parallel
    for name in waiting:
        print(f"{name}: no time left", flush=True)


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
    parser.add_argument("--first", nargs="*", default=[], metavar="CASE", help="cases to run before others")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    release = version("vllm").partition("+")[0]
    names = [
        name
        for name in dict.fromkeys([*options.first, *CASES])
        if (not CASES[name].releases or release in CASES[name].releases)
        and not any((folder / release / f"{name}.log").exists() for folder in (options.out, STORED))
    ]
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as cache:
        for key in ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"):
            os.environ[key] = str(Path(cache) / key)
        os.environ.update(ENVIRON)
        import_engine()
        print(f"vLLM {release} imported, {end - time.monotonic():.0f} s left", flush=True)
        run_cases(names, options.out, end=end, each=options.each, parallel=options.parallel)


if __name__ == "__main__":
    main()
