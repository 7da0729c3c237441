"""What is wrong with the quantisation of a checkpoint, by its headers, its JSON files and its scales."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moedoctor.diagnose.checkpoint.checkpoint import Checkpoint, read_checkpoint
from moedoctor.diagnose.checkpoint.lint_config import check_agreement, check_algo, check_excluded, check_kv
from moedoctor.diagnose.checkpoint.lint_experts import check_experts, check_index, check_parts
from moedoctor.diagnose.checkpoint.lint_layers import check_group_size
from moedoctor.diagnose.checkpoint.lint_records import CHECKS, Findings, LintFinding
from moedoctor.diagnose.checkpoint.lint_scales import check_input_scales, check_pairs, check_values
from moedoctor.diagnose.checkpoint.lint_shapes import check_shapes
from moedoctor.diagnose.checkpoint.lint_spread import check_spread
from moedoctor.diagnose.checkpoint.modules import group
from moedoctor.diagnose.checkpoint.quantization import from_config, from_hf_quant
from moedoctor.diagnose.checkpoint.values import Reader


@dataclass(frozen=True)
class Lint:
    """The result: what was found, and how much was looked at."""

    checkpoint: Checkpoint
    findings: tuple[LintFinding, ...]
    shards: int
    tensors: int
    scheme: str
    """What the JSON files declare, in a few words."""
    block_scales_seen: float
    """Share of the block scales that was read, 0 to 1."""
    not_read: tuple[str, ...]
    """Patterns of modules that were not understood, so that nothing was checked by them."""

    @property
    def damage(self) -> tuple[LintFinding, ...]:
        """The findings that are no mere remarks."""
        return tuple(one for one in self.findings if not CHECKS[one.check].remark)


def lint(folder: Path) -> Lint:
    """Look at the checkpoint in `folder`. Raises CheckpointError, one line, where it cannot be read."""
    checkpoint = read_checkpoint(folder)
    modules = group(checkpoint)
    config, hf_quant = from_config(checkpoint), from_hf_quant(checkpoint)
    declared = tuple(one for one in (config, hf_quant) if one is not None)
    found = Findings()
    check_index(checkpoint, found)
    check_algo(checkpoint, modules, declared, found)
    check_group_size(modules, declared, found)
    check_agreement(config, hf_quant, found)
    # Where both say it, config.json is what an engine reads first.
    first = declared[0] if declared else None
    not_read = check_excluded(modules, first, found) if first is not None else ()
    not_read = tuple(dict.fromkeys((*not_read, *(one for said in declared for one in said.rules.not_read))))
    check_experts(checkpoint, modules, found)
    check_parts(modules, first, found)
    check_shapes(checkpoint, modules, first, found)
    check_kv(modules, declared, found)
    check_input_scales(modules, declared, found)
    with Reader(folder) as reader:
        values = check_values(reader, modules, found)
    check_pairs(values.singles, found)
    check_spread(values, modules, found)
    said = " and ".join(dict.fromkeys(f"{one.method} {one.algo}" for one in declared)) or "no quantisation"
    shards = len({one.shard for one in checkpoint.tensors.values()})
    return Lint(checkpoint, found.sorted(), shards, len(checkpoint.tensors), said, values.seen, not_read)
