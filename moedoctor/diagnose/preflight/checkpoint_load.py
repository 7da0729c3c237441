"""Asks a vLLM release to load a checkpoint: for the findings of `lint`, and for the sizes of `plan`."""

from __future__ import annotations

import json
from pathlib import Path

from moedoctor import environment
from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.diagnose.preflight.ask import Question, Release, ask_release
from moedoctor.diagnose.preflight.command import ServeCommand
from moedoctor.diagnose.preflight.model import Model, ModelError, read_headers
from moedoctor.text import TextFileError, read_text

_CHECKS = {
    "refused": "load_refused",
    "not-written": "not_written",
    "cut": "tensor_cut",
    "converted": "weights_converted",
    "adapter-unused": "adapter_unused",
    "adapter-shape": "adapter_unused",
}
"""Rule of preflight -> check of lint."""
_MEMORY, _GPUS = 80 << 30, 8
"""Memory decides nothing while a checkpoint is loaded."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that ``--max-lora-rank`` takes in every release."""


def find_capability() -> tuple[int, int]:
    """Return the compute capability of this machine's GPU, or 9.0 without one."""
    major, minor = (environment.collect()["capability"] or "9.0").split(".")
    return int(major), int(minor)


def make_adapter_flags(adapter: Path) -> tuple[str, ...]:
    """Return the flags with which vLLM serves the adapter in a folder. Raises ModelError."""
    try:
        rank = json.loads(read_text(adapter / "adapter_config.json", 1 << 20))["r"]
        largest = next(size for size in _RANKS if size >= rank)
    except (TextFileError, OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        raise ModelError(
            f"{adapter}: is not an adapter, expected a folder with adapter_config.json and its rank 'r', at "
            f"most {_RANKS[-1]}"
        ) from error
    place = f"adapter={adapter.resolve()}"
    return "--enable-lora", "--max-lora-rank", str(largest), "--lora-modules", place


def ask_load(
    checked: Lint, release: Release, capability: tuple[int, int], *, flags: tuple[str, ...] = ()
) -> None:
    """Add what the release does with the checkpoint while it builds and loads the model, with more flags.

    Raises ModelError for headers that cannot be read, and Interrupted inside `interrupts.hold_signals`.
    """
    checkpoint = checked.checkpoint
    if checkpoint.truncated:
        checked.not_asked = "a file is truncated"
        return
    folder = checkpoint.folder.resolve()
    question = Question(capability, _MEMORY, _GPUS)
    (answer,) = ask_release(
        release, [ServeCommand((str(folder), *flags), {})], question, read_headers(folder)
    )
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
        checked.drop("name_skipped")
    for finding in answer.findings:
        if finding.rule in _CHECKS:
            info = checkpoint.tensors.get(finding.tensor)
            shard = info.shard if info is not None else "config.json"
            refuses = finding.rule == "refused" and outcomes.get("adapters") == "stopped"
            check = "adapter_refused" if refuses else _CHECKS[finding.rule]
            checked.add(check, finding.tensor or "config.json", shard, finding.message)


def measure_weights(model: Model, tensor_parallel: int, release: Release, capability: tuple[int, int]) -> int:
    """Return the bytes of the parameters that the fullest rank of a release builds.

    Raises ModelError if it does not build the model, and Interrupted inside `interrupts.hold_signals`.
    """
    words = (str(model.folder), "--tensor-parallel-size", str(tensor_parallel))
    question = Question(capability, _MEMORY, max(_GPUS, tensor_parallel), names=False)
    (answer,) = ask_release(release, [ServeCommand(words, {})], question, model.headers)
    if not answer.weight_bytes:
        raise ModelError(answer.reason)
    return max(answer.weight_bytes)
