"""Finds damage in the quantization of a checkpoint, by its headers, its JSON files and its scales."""

from __future__ import annotations

from pathlib import Path

from moedoctor.diagnose.checkpoint.checkpoint import read_checkpoint
from moedoctor.diagnose.checkpoint.checks import config, experts, names, scales, tensors
from moedoctor.diagnose.checkpoint.findings import Lint

_CHECKS = (
    experts.check_index,
    config.check_algo,
    config.check_group_size,
    config.check_agreement,
    config.check_excluded,
    experts.check_experts,
    experts.check_names,
    names.check_read,
    experts.check_config_shapes,
    tensors.check_parts,
    tensors.check_shapes,
    config.check_kv,
    scales.check_input_scales,
    scales.check_values,
)


def lint(folder: Path) -> Lint:
    """Check the checkpoint in `folder`. Raises CheckpointError, one line, if it cannot be read."""
    checked = Lint(read_checkpoint(folder))
    for name, problem in checked.checkpoint.truncated.items():
        checked.add("file_truncated", "all of its tensors" if name.endswith("tensors") else "", name, problem)
    # A file that was cut would show as many other kinds of damage, which a whole one does not have.
    for check in () if checked.checkpoint.truncated else _CHECKS:
        check(checked)
    return checked
