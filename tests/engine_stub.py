"""Stand-ins for engines: a package `vllm` whose `LLM` does what its arguments say, and results of engines."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moedoctor.results import Death
from moedoctor.upstream.engine.engine import EngineError, EngineResult, LogFacts

SOURCE = """
import os
import sys
import time
import types

__version__ = "0.21.0"


class SamplingParams:
    def __init__(self, **options):
        self.options = options


class LLM:
    def __init__(self, **arguments):
        self.arguments = arguments
        print("INFO Using 'MARLIN' NvFp4 MoE backend out of potential backends: ['MARLIN'].")
        print("INFO Offloader set to UVAOffloader")
        print("INFO Total CPU offloaded parameters: 0.25 GiB")
        does = os.path.basename(arguments["model"])
        self.finite = does.startswith("tiny")
        if does == "fixed" or (self.finite and os.environ.get("MOEDOCTOR_FIXES") == "offload"):
            with open(os.environ["MOEDOCTOR_STATUS"], "w") as file:
                file.write('["offload (copies)", "nan (watched)"]')
        if does == "records" and os.environ.get("MOEDOCTOR_RECORD"):
            from moedoctor.plugin import process_end, record

            with open(os.environ["MOEDOCTOR_STATUS"], "w") as file:
                file.write('["record (MoE calls are watched)"]')
            record._active = None, process_end.ProcessEnd(self.record)
        if does == "raise":
            try:
                raise KeyError("origin")
            except KeyError:
                raise RuntimeError("b_scales is not on GPU")
        if does == "abort":
            os.abort()
        if does == "exit":
            os._exit(7)
        if does == "illegal":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if does == "sleep":
            print("INFO Model loading took 1.5 GiB memory and 12.300000 seconds")
            print("INFO torch.compile took 80.40 s in total", flush=True)
            time.sleep(60)

    def record(self):
        os.makedirs(os.environ["MOEDOCTOR_RECORD"], exist_ok=True)
        when = os.environ.get("MOEDOCTOR_RECORD_WHEN", "")
        open(os.path.join(os.environ["MOEDOCTOR_RECORD"], when + ".moecapsule"), "w").close()

    def apply_model(self, function):
        return [function(types.SimpleNamespace(modules=list, named_parameters=list))]

    def generate(self, prompts, sampling, use_tqdm=True):
        shift = {"close": 2, "wrong": 7}.get(self.arguments.get("moe_backend"), 1)
        outputs = []
        for prompt in prompts:
            text = isinstance(prompt, str)
            ids = [len(prompt)] if text else [token + shift for token in prompt["prompt_token_ids"]]
            ids = ids[: sampling.options["max_tokens"]]
            time.sleep(0.002 * len(ids))
            first = types.SimpleNamespace(logprob=-0.5)
            other = types.SimpleNamespace(logprob=-1.25 if self.finite else float("nan"))
            steps = [{i: first, i + 1: other} for i in ids]
            said = "out" if text and not self.finite else ""
            output = types.SimpleNamespace(token_ids=ids, text=said, logprobs=steps)
            outputs.append(types.SimpleNamespace(outputs=[output]))
        return outputs


def measure(llm, then=""):
    # A probe.
    yield [{"row": 1}]
    yield [{"row": 1}, {"row": 2}]
    if then == "sleep":
        time.sleep(60)
    if then == "raise":
        raise RuntimeError("no memory is left")
    if then == "exit":
        os._exit(7)


probes = sys.modules["moedoctor.stub_probes"] = types.ModuleType("moedoctor.stub_probes")
probes.measure = measure
"""
MEASURE = "moedoctor.stub_probes:measure"
"""A probe of the stand-in, with the option ``then``."""


def write(folder: Path) -> Path:
    """Write the package into `folder`, which then goes onto PYTHONPATH."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE, encoding="utf-8")
    return folder


def layer_outputs(*norms: float, later: Sequence[float] = (), pieces: int = 1) -> dict[str, Any]:
    """Return outputs of layers for a prompt of 4 tokens, then of the first layer for the next tokens.

    `pieces` are the calls that the prompt takes.
    """
    rows = [(index, 1, 4, norm) for index, norm in enumerate(norms)]
    rows += [(0, 2 + index, 4 if 2 + index <= pieces else 1, norm) for index, norm in enumerate(later)]
    outputs = [
        {
            "layer": f"layers.{index}",
            "call": call,
            "tokens": tokens,
            "digest": str(norm),
            "finite": math.isfinite(norm),
            "projection": [[norm, 1.0]] * tokens,
        }
        for index, call, tokens, norm in rows
    ]
    return {"layers": len(norms), "outputs": outputs, "host_bytes": 8, "parameter_bytes": 8}


def answered(
    tokens: Sequence[int] = (1, 2, 3), text: str = "", logprob: float = -0.5, **options: Any
) -> EngineResult:
    """An engine that answered one prompt, with 8 of its 16 bytes of weights on the host."""
    steps = tuple({str(token): logprob} for token in tokens)
    values: dict[str, Any] = {
        "logprobs": (steps,),
        "version": "0.21.0",
        "log": LogFacts(moe_backend="MARLIN", offloader="UVAOffloader"),
        "probe": {"host_bytes": 8, "parameter_bytes": 16},
        **options,
    }
    return EngineResult("x", (tuple(tokens),), (text,), **values)


def died(
    message: str,
    *,
    kind: str = "RuntimeError",
    stage: str = "load",
    death: Death = Death.EXCEPTION,
    log: LogFacts | None = None,
) -> EngineResult:
    """An engine that stopped with an error."""
    return EngineResult("x", error=EngineError(kind, message, stage, death), log=log or LogFacts())
