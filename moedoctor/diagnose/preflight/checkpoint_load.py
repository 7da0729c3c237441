"""Asks a vLLM release to load a checkpoint that `lint` checks, and adds what it does to the findings."""

from __future__ import annotations

from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.diagnose.preflight.ask import Question, Release, ask_release
from moedoctor.diagnose.preflight.command import ServeCommand
from moedoctor.diagnose.preflight.model import read_headers

_CHECKS = {
    "refused": "load_refused",
    "not-written": "not_written",
    "cut": "tensor_cut",
    "converted": "weights_converted",
}
"""Rule of preflight -> check of lint."""
_MEMORY, _GPUS = 80 << 30, 8
"""Memory decides nothing while a checkpoint is loaded."""


def ask_load(checked: Lint, release: Release, capability: tuple[int, int], seconds: float = 600.0) -> None:
    """Add what the release does with the checkpoint while it builds and loads the model.

    Raises ModelError for headers that cannot be read, and Interrupted inside `interrupts.hold_signals`.
    """
    checkpoint = checked.checkpoint
    if checkpoint.truncated:
        checked.not_asked = "a file is truncated"
        return
    folder = checkpoint.folder.resolve()
    question = Question(capability, _MEMORY, _GPUS, seconds=seconds)
    (answer,) = ask_release(release, [ServeCommand((str(folder),), {})], question, read_headers(folder))
    outcomes = {stage.stage: stage.outcome for stage in answer.stages}
    loads = outcomes.get("load") == "passed"
    if not loads and "stopped" not in (outcomes.get("build"), outcomes.get("load")):
        checked.not_asked = answer.reason
        return
    where = (
        f"vLLM {answer.release}, --tensor-parallel-size 1, compute capability {capability[0]}.{capability[1]}"
    )
    checked.loaded_by = f"{where}: {'loads without an error' if loads else 'stops'}"
    if loads:  # the loader's own answer about names
        checked.drop("expert_names_unknown")
    for finding in answer.findings:
        if finding.rule in _CHECKS:
            info = checkpoint.tensors.get(finding.tensor)
            shard = info.shard if info is not None else "config.json"
            checked.add(_CHECKS[finding.rule], finding.tensor or "config.json", shard, finding.message)
