"""The checks of a lint by name, and what they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moedoctor.diagnose.checkpoint.checkpoint import Checkpoint, JsonFile
from moedoctor.diagnose.checkpoint.modules import Module, group
from moedoctor.diagnose.checkpoint.quantization import Declared, Rule, from_config, from_hf_quant
from moedoctor.text import load_yaml

SHOWN = 5
"""Places that a finding lists; the rest are counted."""


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong with a checkpoint."""

    id: str | None
    """The id of a known failure in the catalogue."""
    what: str
    effect: str
    """The effect of the damage on the answers of the model."""
    confidence: float
    next_step: str
    level: str = "error"
    """``error``, ``warning``, or ``note`` for a remark, which healthy checkpoints have, too."""

    asked: bool = False
    """True if a vLLM release answers it, not the headers alone."""

    @property
    def remark(self) -> bool:
        return self.level == "note"


def _load_checks() -> Mapping[str, Check]:
    table = load_yaml("moedoctor.diagnose.checkpoint", "checks.yaml")
    steps = table["next_steps"]
    return {
        name: Check(**{"id": None, **row, "next_step": steps.get(row["next_step"], row["next_step"])})
        for name, row in table["checks"].items()
    }


CHECKS: Mapping[str, Check] = _load_checks()
"""The checks by name."""


@dataclass(frozen=True)
class Place:
    tensor: str
    shard: str
    """The file that holds it."""
    value: str


@dataclass
class LintFinding:
    """One kind of damage, with its first places."""

    check: str
    line: int | None
    """The line of the wrong JSON file, from 1; None if tensors are wrong."""
    count: int = 0
    places: list[Place] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The catalogue's id, or the check's own name."""
        return CHECKS[self.check].id or self.check


@dataclass
class Lint:
    """A checkpoint: what the checks read of it, and what they find."""

    checkpoint: Checkpoint
    block_scales_seen: float = 1.0
    """The share of the block scales that was read, 0 to 1."""
    loaded_by: str = ""
    """The answer of the vLLM release whose loader was asked, in words; empty if none was."""
    not_asked: str = "no vLLM was asked"
    """The reason why no release answered."""
    names_of: tuple[str, ...] = ()
    """The releases whose table of names has this architecture and quantization, the newest last."""
    _findings: dict[str, LintFinding] = field(default_factory=dict)

    def add(
        self, check: str, tensor: str, shard: str, value: object, file: JsonFile | None = None, key: str = ""
    ) -> None:
        """Note one place of damage, and for the first place the line of `key` in `file`.

        Raises KeyError for a check that is not in `CHECKS`.
        """
        CHECKS[check]
        if check not in self._findings:  # a search for every place would take too long
            self._findings[check] = LintFinding(check, file.find_line(key) if file else None)
        finding = self._findings[check]
        finding.count += 1
        if len(finding.places) < SHOWN:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            finding.places.append(Place(tensor, shard, text))

    def drop(self, check: str) -> None:
        """Leave out a finding that a better source refutes."""
        self._findings.pop(check, None)

    @property
    def not_run(self) -> Mapping[str, str]:
        """Each check that nothing was looked at for, with the reason."""
        if self.checkpoint.truncated:
            return {name: "a file is truncated" for name in CHECKS if name != "file_truncated"}
        return {} if self.loaded_by else {name: self.not_asked for name, row in CHECKS.items() if row.asked}

    @property
    def findings(self) -> tuple[LintFinding, ...]:
        """The findings, the surest first and remarks last."""

        def rank(finding: LintFinding) -> tuple[bool, float, str, str]:
            check = CHECKS[finding.check]
            return check.remark, -check.confidence, finding.id, finding.check

        return tuple(sorted(self._findings.values(), key=rank))

    @property
    def damage(self) -> tuple[LintFinding, ...]:
        return tuple(finding for finding in self.findings if not CHECKS[finding.check].remark)

    @property
    def shards(self) -> int:
        """The number of files that were read."""
        return len({info.shard for info in self.checkpoint.tensors.values()})

    @property
    def tensors(self) -> int:
        """The number of tensors in them."""
        return len(self.checkpoint.tensors)

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        return group(self.checkpoint)

    @cached_property
    def config(self) -> Declared | None:
        """The quantization by config.json."""
        return from_config(self.checkpoint.config)

    @cached_property
    def hf_quant(self) -> Declared | None:
        """The quantization by hf_quant_config.json."""
        return from_hf_quant(self.checkpoint.hf_quant)

    @cached_property
    def declared(self) -> tuple[Declared, ...]:
        """The quantization by each file that has one. An engine reads the first file first."""
        return tuple(file for file in (self.config, self.hf_quant) if file is not None)

    @property
    def scheme(self) -> str:
        """The quantization that the JSON files declare, in a few words."""
        schemes = dict.fromkeys(f"{declared.method} {declared.algo}" for declared in self.declared)
        return " and ".join(schemes) or "no quantization"

    @property
    def not_read(self) -> tuple[str, ...]:
        """Patterns of modules that were not understood; nothing was checked by them."""
        patterns = list(self.declared[0].excluded_patterns.not_read) if self.declared else []
        for declared in self.declared:
            patterns += declared.rules.not_read
        return tuple(dict.fromkeys(patterns))

    def find_rule(self, module: Module) -> Rule | None:
        """Return the rule of the first file for `module`, if there is one."""
        return self.declared[0].rules.find(module.name) if self.declared else None
