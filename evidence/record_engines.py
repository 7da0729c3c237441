"""Records a call of a real engine that got a fault, and replays it there, on the GPU and on the CPU.

    python evidence/record_engines.py OUT nan_graphs

The engine starts and answers, then the fault is planted in layer 1, and the engine answers until a call is
recorded. `OUT/recorded_CASE.json` is what `moedoctor replay` says of it with backends on the GPU,
`recorded_CASE_cpu.json` what it says without a GPU, and `recorded_CASE.log` what the engine printed. The call
stays in `OUT/recorded_CASE`. It needs a GPU, and vLLM and moedoctor in one environment.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from moedoctor.reference.checkpoints import write_qwen3_moe

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engines import ENVIRON, generate, list_arguments

_ENGINE_SECONDS = 280
_REPLAY_SECONDS = 200
_PROMPTS = ((5, 9, 17, 40, 41), (7, 8))
_TINY = {"layers": 3}
_WIDE = {"layers": 2, "hidden": 1024, "intermediate": 512, "experts": 32, "top_k": 4}
"""Experts of a size that the allocator gives back to the GPU."""


@dataclass(frozen=True)
class Case:
    """An engine, the fault that it gets, and the call to record."""

    plant: Callable[[Any], object] | None
    graphs: bool
    scheme: str
    when: str
    sizes: dict[str, int]
    change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None

    @property
    def backends(self) -> str:
        """Return the backends that replay the call on the GPU."""
        return "OURS,MARLIN" if self.scheme == "nvfp4" else "OURS,TRITON"


def _parameter(model: Any, wanted: str) -> tuple[str, Any]:
    """Return a parameter of the experts of layer 1, and the name of its module."""
    return next(
        (name, weight)
        for name, module in model.named_modules()
        for key, weight in module.named_parameters(recurse=False)
        if key == wanted and ".1." in name + "."
    )


def multiply_scale(factor: float, model: Any) -> object:
    """Multiply the global scale of expert 3."""
    name, scales = _parameter(model, "w13_weight_scale_2")
    scales.data[3] *= factor
    return name


def swap_halves(model: Any) -> object:
    """Swap gate and up of experts 2 and 3."""
    import torch

    name, weight = _parameter(model, "w13_weight")
    half = weight.shape[1] // 2
    for expert in (2, 3):
        weight.data[expert] = torch.cat((weight.data[expert][half:], weight.data[expert][:half]))
    return name


def free_weights(model: Any) -> object:
    """Give the memory of w13 back to the GPU, while kernels and graphs still have its address."""
    import torch

    name, weight = _parameter(model, "w13_weight")
    size = weight.untyped_storage().nbytes()
    weight.data.untyped_storage().resize_(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return name, size


def read_host_address(model: Any) -> object:
    """Let the experts read scales through the address of a host parameter, as MD020 does."""
    import torch

    from moedoctor.kernels.unchecked import read_address

    name, _ = _parameter(model, "w13_weight")
    experts = dict(model.named_modules())[name]
    scales, original = torch.nn.Parameter(torch.ones(1024)), experts.forward_modular

    def forward_modular(*arguments: Any, **options: Any) -> Any:
        read_address(scales.data_ptr(), 1024, "cuda")
        return original(*arguments, **options)

    object.__setattr__(experts, "forward_modular", forward_modular)
    return name


def halve_up_scale(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Write the checkpoint of MD014: up has half of gate's global scale, and the same block scales."""
    for name in tensors:
        if name.endswith("up_proj.weight_scale_2"):
            tensors[name] = tensors[name] * 0.5


spoil_scale, enlarge_scale = partial(multiply_scale, math.nan), partial(multiply_scale, 64.0)
CASES = {
    "nan_graphs": Case(spoil_scale, True, "nvfp4", "nan", _TINY),
    "nan_eager": Case(spoil_scale, False, "nvfp4", "nan", _TINY),
    "call_graphs": Case(None, True, "bf16", "call=model.layers.1.mlp.experts:3", _TINY),
    "crash_graphs": Case(free_weights, True, "bf16", "crash", _WIDE),
    "crash_eager": Case(read_host_address, False, "bf16", "crash", _TINY),
    "scale_graphs": Case(enlarge_scale, True, "nvfp4", "mismatch=1", _TINY),
    "swap_eager": Case(swap_halves, False, "bf16", "mismatch=1", _TINY),
    "halves_graphs": Case(None, True, "nvfp4", "mismatch=1", _TINY, halve_up_scale),
}


def run_engine(case: Case, model: Path, calls: Path) -> None:
    """Start the engine in this process, plant the fault, and generate until a call is recorded."""
    import vllm

    started = time.monotonic()
    llm = vllm.LLM(
        **list_arguments(
            model,
            moe_backend="marlin" if case.scheme == "nvfp4" else "triton",
            enforce_eager=not case.graphs,
            **({"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}} if case.graphs else {}),
        )
    )
    print(f"record_engines: up after {time.monotonic() - started:.0f} s", flush=True)
    print("record_engines: sound", generate(llm, _PROMPTS, 24), flush=True)
    if case.plant is not None:
        print("record_engines: planted", llm.apply_model(case.plant), flush=True)
    for _ in range(60):
        print("record_engines: after", generate(llm, _PROMPTS, 24), flush=True)
        time.sleep(0.15)  # the rows are on their way to the host
        if any(_capsules(calls)):
            return


def _capsules(folder: Path) -> Iterator[Path]:
    return folder.glob("*.moecapsule")


def record(name: str, out: Path) -> Path | None:
    """Return the recorded call of a case with its experts, or None if there is none."""
    case, calls = CASES[name], out / f"recorded_{name}"
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        model = write_qwen3_moe(Path(folder) / "model", scheme=case.scheme, change=case.change, **case.sizes)  # type: ignore[arg-type]
        engine = [sys.executable, __file__, str(calls), name, "--model", str(model)]
        command = ["record", "--when", case.when, "-o", str(calls), "--", *engine]
        with (out / f"recorded_{name}.log").open("wb") as log:
            code = _moedoctor(command, _ENGINE_SECONDS, log=log)
    print(f"{name}: the engine ended with {code}", flush=True)
    return max(_capsules(calls), key=lambda file: file.stat().st_size, default=None)


def replay(name: str, capsule: Path, out: Path) -> None:
    """Write what replay says of a call on the GPU and without it."""
    on_gpu, on_cpu = ["--backend", CASES[name].backends], {"CUDA_VISIBLE_DEVICES": ""}
    for stem, backends, environ in ((name, on_gpu, {}), (f"{name}_cpu", [], on_cpu)):
        report = out / f"recorded_{stem}.json"
        command = ["replay", str(capsule), *backends, "--format", "json", "-o", str(report)]
        code = _moedoctor(command, _REPLAY_SECONDS, environ=environ)
        print(f"{stem}: replay ended with {code}", flush=True)
        if report.exists():
            page = str(report.with_suffix(".md"))
            _moedoctor(["show", str(report), "--format", "markdown", "--full", "-o", page], _REPLAY_SECONDS)


def _moedoctor(
    arguments: list[str], seconds: int, *, log: BinaryIO | None = None, environ: Mapping[str, str] = {}
) -> int:
    """Call moedoctor and return its exit code, 124 if it took too long."""
    # `timeout` ends what a command started, too.
    limit = ["timeout", "--signal", "INT", "--kill-after", "20", str(seconds)]
    command = [*limit, sys.executable, "-m", "moedoctor", *arguments]
    variables = {**os.environ, **ENVIRON, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **environ}
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    return subprocess.run(command, env=variables, check=False, **streams).returncode


def main() -> int:
    """Record and replay the cases; 1 if one of them left no call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # this process is the engine
    options = parser.parse_args()
    if options.model:
        run_engine(CASES[options.cases[0]], options.model, options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    left_none = 0
    for name in options.cases:
        capsule = record(name, options.out)
        if capsule is None:
            print(f"{name}: no call was recorded, see recorded_{name}.log", flush=True)
            left_none = 1
        else:
            replay(name, capsule, options.out)
    return left_none


if __name__ == "__main__":
    sys.exit(main())
