"""The checks of a lint by name, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

import yaml

from moedoctor.diagnose.checkpoint.checkpoint import Checkpoint
from moedoctor.diagnose.checkpoint.modules import Module, group
from moedoctor.diagnose.checkpoint.quantization import Declared, Rule, from_config, from_hf_quant

SHOWN = 5
"""Places that a finding lists; the rest are counted."""


@dataclass(frozen=True)
class Check:
    """One thing that can be wrong with a checkpoint."""

    id: str | None
    """The id of a known failure in the catalogue."""
    what: str
    confidence: float
    next_step: str
    remark: bool = False
    """Whether healthy checkpoints have it too: it is reported, but does not cause exit code 1."""


def _checks() -> Mapping[str, Check]:
    text = (files("moedoctor.diagnose.checkpoint") / "checks.yaml").read_text(encoding="utf-8")
    table = yaml.safe_load(text)
    steps = table["next_steps"]
    return {
        name: Check(**{"id": None, **row, "next_step": steps.get(row["next_step"], row["next_step"])})
        for name, row in table["checks"].items()
    }


CHECKS: Mapping[str, Check] = _checks()
"""The checks by name."""


@dataclass(frozen=True)
class Place:
    """One place of a finding."""

    tensor: str
    shard: str
    """The file that holds it."""
    value: str


@dataclass(frozen=True)
class LintFinding:
    """One kind of damage, with its first places."""

    check: str
    line: int | None
    """The line of the wrong JSON file, from 1; None if tensors are wrong."""
    count: int
    places: tuple[Place, ...]

    @property
    def id(self) -> str:
        """The catalogue's id, or the check's own name."""
        return CHECKS[self.check].id or self.check

    def record(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        check = CHECKS[self.check]
        return {
            "id": self.id,
            "check": self.check,
            "line": self.line,
            "evidence": {
                "what": check.what,
                "remark": check.remark,
                "count": self.count,
                "places": [vars(place) for place in self.places],
            },
            "confidence": check.confidence,
            "next_step": check.next_step,
        }


Line = int | Callable[[], int | None] | None
"""A line of a JSON file, or a function that searches for it; only the first place's line is searched for."""


@dataclass
class Findings:
    """Collects findings by check."""

    _places: dict[str, list[Place]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _lines: dict[str, int | None] = field(default_factory=dict)

    def add(self, check: str, tensor: str, shard: str, value: object, line: Line = None) -> None:
        """Note one place. Raises KeyError for a check that is not in `CHECKS`."""
        CHECKS[check]
        self._counts[check] = self._counts.get(check, 0) + 1
        if check not in self._lines:
            self._lines[check] = line() if callable(line) else line
        places = self._places.setdefault(check, [])
        if len(places) < SHOWN:
            places.append(Place(tensor, shard, f"{value:g}" if isinstance(value, float) else str(value)))

    def sorted(self) -> tuple[LintFinding, ...]:
        """Return the findings, the surest first and remarks last."""

        def rank(finding: LintFinding) -> tuple[bool, float, str, str]:
            check = CHECKS[finding.check]
            return check.remark, -check.confidence, finding.id, finding.check

        findings = (
            LintFinding(check, self._lines[check], self._counts[check], tuple(places))
            for check, places in self._places.items()
        )
        return tuple(sorted(findings, key=rank))


@dataclass(frozen=True)
class Inspection:
    """A checkpoint that is being linted: what the checks read, and where they add their findings."""

    checkpoint: Checkpoint
    findings: Findings = field(default_factory=Findings)

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        """The modules by name."""
        return group(self.checkpoint)

    @cached_property
    def config(self) -> Declared | None:
        """The quantisation by config.json."""
        return from_config(self.checkpoint.config)

    @cached_property
    def hf_quant(self) -> Declared | None:
        """The quantisation by hf_quant_config.json."""
        return from_hf_quant(self.checkpoint.hf_quant)

    @property
    def declared(self) -> tuple[Declared, ...]:
        """The quantisation by each file that has one. An engine reads the first file first."""
        return tuple(file for file in (self.config, self.hf_quant) if file is not None)

    def rule(self, module: Module) -> Rule | None:
        """Return the rule of the first file for `module`, if there is one."""
        return self.declared[0].rules.of(module.name) if self.declared else None
