"""A call of every command that writes JSON, with a working directory in which all of them answer."""

import copy
import json
import lzma
from pathlib import Path
from typing import Any

from capsules import computation, make_capsule, noisy, with_output
from checkpoints_of_tests import damaged
from cuda_fakes import fake_cubin
from fleet_answers import write_answers
from typer.main import get_command

from moedoctor.cli import app
from moedoctor.trace import capsule as capsules

REPORTS = Path(__file__).parents[1] / "reports"
PLANTED = Path(__file__).parent / "testing" / "planted.py"
TRACE = "zipf:experts=16,top_k=2,layers=2,rows=64,streams=4"
CALLS = {
    "check": ["check", "--release", "0.19.1", "--sm", "12.0"],
    "triage": ["triage", "a.log"],
    "autopsy": ["autopsy", "a.core"],
    "explain": ["explain", "MD001"],
    "list": ["list"],
    "lint": ["lint", "model"],
    "preflight": ["preflight", "--sm", "9.0", "--wheel", "release", "--script", "serve.py"],
    "audit": ["audit", "cache", "--sm", "12.0"],
    "conform": [
        *("conform", f"{PLANTED}:route_one_expert_of_equals", "--kind", "router"),
        *("--question", "ordinary,equal_logits,bias"),
    ],
    "plan": ["plan", "--model", "qwen3-30b-a3b", "--gpu-memory", "32"],
    "compare": ["compare", "old.json", "new.json"],
    "replay": ["replay", "a.capsule", "--device", "cpu", "--backend", "REFERENCE"],
    "capsule": ["capsule", "show", "a.capsule"],
    "run": ["run", "MD010", "--subject", "faulty"],
    "bench": f"bench --cache --trace {TRACE} --capacity 8".split(),
    "fleet": ["fleet", "run", "parity", "--from-reports", "fleet"],
    "backends": ["backends", "--sm", "12.0", "--release", "0.21.0", "--no-ask", "--backend", "MARLIN"],
}
"""Command -> a call of it."""
MORE_CALLS = {
    "triage of three files": ["triage", "a.log", "b.log", "c.log"],
    "backends of each scheme": ["backends", "--sm", "12.0", "--release", "0.21.0", "--no-ask"],
    "plan that does not fit": ["plan", "--model", "qwen3-30b-a3b", "--gpu-memory", "8"],
    "autopsy of a log": ["autopsy", "a.log"],
    "audit without a GPU": ["audit", "cache/empty"],
}
"""Calls whose pages have another shape."""


def prepare(folder: Path) -> None:
    """Write logs, a damaged checkpoint, reports, a wrong capsule and kernels that a GPU of 12.0 lacks."""
    (folder / "a.log").write_text("vLLM 0.19.1\nRuntimeError: b_scales is not on GPU\n")
    (folder / "b.log").write_text("Using 'MARLIN' NvFp4 MoE backend\nthe answer is !!!!!!!!\n")
    (folder / "c.log").write_text("everything is fine\n")
    dump = REPORTS.parent / "tests" / "diagnose" / "autopsy" / "dumps" / "vllm_topk.xz"
    (folder / "a.core").write_bytes(lzma.decompress(dump.read_bytes()))
    damaged().write(folder / "model")
    report = json.loads((REPORTS / "nvidia-h200" / "sentinel_ids.json").read_text())
    (folder / "old.json").write_text(json.dumps(report))
    worse = copy.deepcopy(report)
    worse["scenarios"][0]["verdict"] = "failed"
    (folder / "new.json").write_text(json.dumps(worse))
    capsule = make_capsule()
    swapped = noisy(computation(capsule).compute_contributions((("w13", "gate_up_swapped"),)).sum(1))
    capsules.save(with_output(capsule, swapped), folder / "a.capsule")
    write_answers(folder / "fleet")
    (folder / "cache" / "empty").mkdir(parents=True)
    (folder / "release" / "vllm").mkdir(parents=True)
    (folder / "release" / "vllm" / "__init__.py").touch()
    (folder / "serve.py").write_text("LLM('model')")
    (folder / "cache" / "a.so").write_bytes(b"\x7fELF")
    (folder / "cache" / "ours.cubin").write_bytes(fake_cubin(120))
    (folder / "cache" / "other").mkdir()
    (folder / "cache" / "other" / "theirs.cubin").write_bytes(fake_cubin(90))


def explain_refusal(words: list[str]) -> str | None:
    """Return why the command line does not take `words`, or None. Nothing is run.

    The exceptions are those of click, of which Typer may bring its own copy.
    """
    command: Any = get_command(app)
    if len(words) == 1 and words[0] in command.commands:  # its name in a sentence
        return None
    context, name = None, "moedoctor"
    try:
        while True:
            context = command.make_context(name, words, parent=context)
            if not hasattr(command, "resolve_command"):
                return None
            name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    except Exception as error:
        return f"{name}: {type(error).__name__} {error}"
