"""Shared by the labs of loading failures: the installed vLLM's own loader, asked without a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

from moedoctor.diagnose.preflight.ask import Question, ask_release, find_installed
from moedoctor.diagnose.preflight.command import ServeCommand
from moedoctor.diagnose.preflight.model import read_headers
from moedoctor.diagnose.preflight.records import Verdict
from moedoctor.reference.checkpoints import Change, Scheme, write_qwen3_moe
from moedoctor.results import Evidence, UnavailableError

_QUESTION = Question((9, 0), 80 << 30, 8)
"""An H200 or H100; memory decides nothing while weights are loaded."""


def ask_installed(scheme: Scheme, change: Change | None, *words: str, **sizes: int) -> Evidence:
    """Write a checkpoint and ask the installed vLLM to load it with these flags.

    Raises UnavailableError without vLLM, and if it cannot say.
    """
    release = find_installed()
    if release is None:
        raise UnavailableError("vllm is not installed here")
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = write_qwen3_moe(Path(name) / "checkpoint", scheme=scheme, change=change, **sizes)
        command = ServeCommand((str(folder), *words), {})
        (answer,) = ask_release(release, [command], _QUESTION, read_headers(folder))
        reason = answer.reason.replace(str(folder), "CHECKPOINT")
    if answer.verdict is Verdict.CANNOT_SAY:
        raise UnavailableError(reason)
    return {
        "vllm": answer.release,
        "stopped": reason if answer.verdict is Verdict.REFUSED else None,
        "wrong": reason if answer.verdict is Verdict.WRONG else None,
        "right": reason,
    }
