"""Provokes known failures, and failures of other kinds, in real engines, and stores their masked logs.

    python evidence/provoke_failures.py OUT --seconds 180

Each case is one engine in a process of its own with a time limit. The processes are forked from one that has
imported vLLM, which takes longer than a tiny engine. `OUT/<release>/<case>.log` is what the engine
printed, and `<case>.json` says what was provoked: that is the truth for the tests of `triage`. Cases whose
log is there, or among the tests, are not run again. It needs a GPU, vLLM and moedoctor on the path.
"""

from __future__ import annotations

import argparse
import functools
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
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import failure_cases
from engines import ENVIRON, generate, list_arguments
from failure_cases import CASES

_ROOT = Path(__file__).resolve().parents[1]
STORED = _ROOT / "tests" / "diagnose" / "triage" / "logs"
MOST_LINES = 250
"""Of a longer log the first and the last lines are kept."""


def run_engine(name: str, folder: Path) -> None:
    """Start the engine of a case in this process, and let it answer two prompts."""
    from vllm import LLM

    from moedoctor.reference.checkpoints import write_qwen3_moe

    case = CASES[name]
    model = write_qwen3_moe(
        folder / "model", scheme=case.scheme, change=functools.partial(failure_cases.damage, case)
    )  # type: ignore[arg-type]
    arguments = list_arguments(model, **case.arguments)
    if case.after == "truncated":
        os.truncate(model / "model.safetensors", 4096)
    if "cpu_offload_params" in arguments:
        arguments["cpu_offload_params"] = set(arguments["cpu_offload_params"])
    llm = LLM(**arguments)
    if case.after not in ("", "truncated"):
        getattr(failure_cases, case.after)()
    print("tokens:", generate(llm))


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
        packages = Path(import_module("vllm").__file__ or "").parents[1]
        names = {self.folder: "/models", packages: "/site-packages", _ROOT: "/repository"}
        for path, shown in names.items():
            text = text.replace(str(path), shown)
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

    case, hide = CASES[engine.name], Redactor.from_this_process().mask
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
        "arguments": dict(case.arguments),
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


def _argument_names() -> frozenset[str]:
    """Return the arguments of vLLM's engines, read from its source: an import could use CUDA."""
    spec = find_spec("vllm")
    if spec is None or not spec.origin:
        return frozenset()
    source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r"(?m)^    (\w+):", source))


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
    known = _argument_names()
    names = [
        name
        for name in dict.fromkeys([*options.first, *CASES])
        if (not CASES[name].releases or release in CASES[name].releases)
        and (not CASES[name].needs or CASES[name].needs in known)
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
