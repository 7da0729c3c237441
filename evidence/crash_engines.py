"""Engines that die in known ways under `moedoctor record --when crash`: is the right kernel named?

    python evidence/crash_engines.py OUT [CASE ...]

All cases run at once. `OUT/crash_engines_CASE.json` is what moedoctor said of a kernel; of a process that
no kernel ended it writes none, and says so. It needs a GPU, and vLLM and moedoctor in one environment.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import failure_cases
from engines import ENVIRON, generate, list_arguments

_FAR = 1 << 22
_BLOCKS_OF_EXPERTS = 7
"""The place of the experts' ids among the arguments of vLLM's launcher."""


@dataclass(frozen=True)
class Case:
    """The way an engine dies, and what must be said of it."""

    kernel: str | None
    """A part of its name; None if no kernel faults."""
    owner: str = ""
    of_experts: bool = False
    after: str = ""
    """The function of `failure_cases` that ends it; without one its MoE kernel gets ids past the end."""
    graphs: bool = False
    server: bool = False
    again: bool = False
    """True if the fault is in the processes, too, that compute the call again."""


_IDS = ("fused_moe_kernel", "vLLM", True)
CASES = {
    "ids_eager": Case(*_IDS),
    "ids_graphs": Case(*_IDS, graphs=True),
    "ids_server": Case(*_IDS, server=True),
    "ids_again": Case(*_IDS, again=True),
    "stale_parameter": Case("cutlass::device_kernel", "vLLM", True),
    "other_kernel": Case("_read_far", "Triton", after="illegal_access"),
    "assertion": Case("at::native::", "PyTorch", after="assertion"),
    "memory": Case(None, after="no_memory"),
    "segfault": Case(None, after="segfault"),
    "killed": Case(None, after="kill_process"),
}
_switches: dict[bool, Any] = {}
"""True for a launch in a CUDA graph -> what is added to its ids."""


def plant_far_ids(module: Any, flag: Path | None) -> None:
    """Let launches in graphs use ids that `_switches` makes wrong, and others if the file `flag` is there."""
    original = module.invoke_fused_moe_triton_kernel

    def invoke(*arguments: Any, **options: Any) -> Any:
        import torch

        given = list(arguments)
        if not _switches:
            with torch.inference_mode(False):  # an inference tensor could not be set later
                for inside in (False, True):
                    _switches[inside] = torch.zeros(1, dtype=torch.int32, device="cuda")
        inside = torch.cuda.is_current_stream_capturing()
        if not inside and (flag is None or flag.exists()):
            _switches[False].fill_(_FAR)
        given[_BLOCKS_OF_EXPERTS] = given[_BLOCKS_OF_EXPERTS] + _switches[inside]
        return original(*given, **options)

    module.invoke_fused_moe_triton_kernel = invoke


def run_engine(name: str, folder: Path) -> None:
    """Start the engine of a case in this process, let it answer, and end it."""
    import torch
    from vllm import LLM, ModelRegistry
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    from moedoctor.reference.checkpoints import write_qwen3_moe

    case, stale = CASES[name], name == "stale_parameter"
    ModelRegistry.register_model("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM)
    model = write_qwen3_moe(
        folder / "model",
        scheme="fp8" if stale else "bf16",
        change=failure_cases.scale_of_channel if stale else None,
    )
    more: dict[str, Any] = {"compilation_config": {"mode": 0}} if case.graphs else {"enforce_eager": True}
    if stale:
        more |= {"cpu_offload_gb": 0.01, "cpu_offload_params": {"experts"}}
    arguments = list_arguments(
        model, gpu_memory_utilization=0.04, moe_backend="cutlass" if stale else "triton", **more
    )
    if stale:
        (folder / "began").touch()  # it dies in the profile run
    llm = LLM(**arguments)
    print("tokens", generate(llm), flush=True)
    (folder / "began").touch()
    if case.after:
        getattr(failure_cases, case.after)()
    else:
        (folder / "flag").touch()
        if case.graphs:
            _switches[True].fill_(_FAR)
        print("tokens", generate(llm), flush=True)
    torch.cuda.synchronize()
    print("no fault", flush=True)


def record(name: str, folder: Path, seconds: float) -> tuple[int, dict[str, float]]:
    """Return the exit code of a case, and the seconds from its end to each answer."""
    folder.mkdir(parents=True)
    here = Path(__file__).resolve()
    environ = {
        **os.environ,
        **ENVIRON,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(CASES[name].server)),
        "OMP_NUM_THREADS": "1",  # OpenMP of a forked engine would wait for its parent
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }
    if name == "stale_parameter":
        environ |= {
            "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1",
            "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1",
        }
    if CASES[name].again:
        environ["PYTHONPATH"] = f"{here.parent / 'planted'}{os.pathsep}{environ['PYTHONPATH']}"
    engine = [sys.executable, str(here), str(folder), name, "--engine"]
    command = ["record", "--when", "crash", "-o", str(folder / "capsules"), "--", *engine]
    seen: dict[str, float] = {}
    marks = {
        " faulted (": "kernel",
        "no kernel is known": "no kernel",
        " again on ": "replay",
        "No backend": "replay",
    }
    with (folder / "out.log").open("wb") as out, (folder / "err.log").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "moedoctor", *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        late = threading.Timer(seconds, _end, [process.pid])
        late.start()
        for line in process.stderr or ():
            print(f"{time.monotonic():.1f} {line}", end="", file=err, flush=True)
            for words, mark in marks.items():
                if words in line:
                    with suppress(OSError):
                        seen.setdefault(mark, round(time.time() - (folder / "began").stat().st_mtime, 1))
        code = process.wait()
        late.cancel()
    return code, seen


def _end(group: int) -> None:
    """End what is late; engines write their stacks first."""
    os.killpg(group, signal.SIGUSR1)
    time.sleep(2)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def judge(case: Case, seen: dict[str, float], report: dict[str, Any] | None) -> Iterator[str]:
    """Give what is wrong with an answer."""
    faults = report["faults"] if report else []
    if case.kernel is None or not faults:
        if faults:
            yield f"{faults[0]['kernel']} is blamed, and no kernel faulted"
        elif case.kernel:
            yield "no kernel is named"
        elif "no kernel" not in seen:
            yield "it does not say that no kernel is known to have faulted"
        return
    fault, owner, replay = faults[0], faults[0]["owner"] or {}, (report or {})["replay"]
    if case.kernel not in fault["kernel"]:
        yield f"{fault['kernel']} is named, expected {case.kernel}"
    if (owner.get("name"), owner.get("moe", False)) != (case.owner, case.of_experts):
        yield f"its owner is {owner}, expected {case.owner}"
    if seen.get("kernel", 61) > 60:
        yield f"the kernel was named after {seen.get('kernel')} s"
    if case.kernel == _IDS[0] and (not replay or not replay["computed"]):
        yield "no backend computed the call again"
    elif case.kernel == _IDS[0] and ("TRITON" in replay["faulted"]) != case.again:
        yield f"faulted again: {replay['faulted']}"


def main() -> int:
    """Run the cases; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--seconds", type=float, default=270.0, help="time for all cases")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)  # this process is the engine
    options = parser.parse_args()
    if options.engine:
        run_engine(options.cases[0], options.out)
        return 0
    wrong = []

    def run(name: str) -> None:
        folder = options.out / f"crash_engines_{name}"
        code, seen = record(name, folder, options.seconds)
        written = next((folder / "capsules").glob("autopsy-*.json"), None)
        report = json.loads(written.read_text()) if written else None
        problems = list(judge(CASES[name], seen, report))
        print(
            f"{name}: exit code {code}, seconds to the answer {seen}: {'; '.join(problems) or 'right'}",
            flush=True,
        )
        if written:
            written.rename(folder.with_suffix(".json"))
        wrong.extend(problems)

    threads = [threading.Thread(target=run, args=(name,)) for name in options.cases or CASES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(bool(wrong))


if __name__ in ("__main__", "__mp_main__") and "--engine" in sys.argv:
    # vLLM's process of the engine imports this file anew.
    _folder, _name = Path(sys.argv[1]), sys.argv[2]
    faulthandler.register(signal.SIGUSR1, (_folder / "stacks.txt").open("a"))
    if _name.startswith("ids"):
        plant_far_ids(
            import_module("vllm.model_executor.layers.fused_moe.experts.triton_moe"), _folder / "flag"
        )

if __name__ == "__main__":
    sys.exit(main())
