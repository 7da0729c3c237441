"""What is wrong with the quantisation of a checkpoint, by its headers, its JSON files and its scales."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moedoctor.diagnose.checkpoint.checkpoint import Checkpoint, read_checkpoint
from moedoctor.diagnose.checkpoint.checks import config, experts, scales, tensors
from moedoctor.diagnose.checkpoint.findings import CHECKS, Inspection, LintFinding
from moedoctor.diagnose.checkpoint.values import Reader

_BY_HEADERS = (
    experts.check_index,
    config.check_algo,
    config.check_group_size,
    config.check_agreement,
    config.check_excluded,
    experts.check_experts,
    tensors.check_parts,
    tensors.check_shapes,
    config.check_kv,
    scales.check_input_scales,
)
"""The checks that read no values of tensors."""


@dataclass(frozen=True)
class Lint:
    """The findings, and how much was read."""

    checkpoint: Checkpoint
    findings: tuple[LintFinding, ...]
    shards: int
    tensors: int
    scheme: str
    """The quantisation that the JSON files declare, in a few words."""
    block_scales_seen: float
    """The share of the block scales that was read, 0 to 1."""
    not_read: tuple[str, ...]
    """Patterns of modules that were not understood; nothing was checked by them."""

    @property
    def damage(self) -> tuple[LintFinding, ...]:
        """The findings without mere remarks."""
        return tuple(finding for finding in self.findings if not CHECKS[finding.check].remark)


def lint(folder: Path) -> Lint:
    """Check the checkpoint in `folder`. Raises CheckpointError, one line, if it cannot be read."""
    checkpoint = read_checkpoint(folder)
    checked = Inspection(checkpoint)
    for check in _BY_HEADERS:
        check(checked)
    with Reader(folder) as reader:
        values = scales.check_values(checked, reader)
    scales.check_pairs(checked, values.singles)
    scales.check_spread(checked, values)
    schemes = dict.fromkeys(f"{declared.method} {declared.algo}" for declared in checked.declared)
    return Lint(
        checkpoint,
        checked.findings.sorted(),
        shards=len({info.shard for info in checkpoint.tensors.values()}),
        tensors=len(checkpoint.tensors),
        scheme=" and ".join(schemes) or "no quantisation",
        block_scales_seen=values.share_read,
        not_read=config.patterns_not_read(checked),
    )
