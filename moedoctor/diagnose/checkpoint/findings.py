"""The checks of a lint by name, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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


_FIX_JSON = "`--fix DIR` writes corrected JSON files; compare them with what was meant"
_AGAIN = "download or export the file again, and compare its checksum"

CHECKS: Mapping[str, Check] = {
    "kv_scales_missing": Check(
        "MD012",
        "an FP8 KV cache is declared and attention layers have no k and v scales",
        0.9,
        "calibrate the KV cache, or use --kv-cache-dtype bfloat16; `--fix DIR` takes the declaration out",
    ),
    "global_scale_mismatch": Check(
        "MD014",
        "gate and up of an expert have different global scales",
        0.95,
        "rescale the block scales of one half, or export with one scale for both; `moedoctor run MD014`",
    ),
    "input_scale_missing": Check(
        "MD015",
        "quantised modules have no input scale though activations are quantised",
        0.9,
        "calibrate with prompts that reach every expert, or use --moe-backend marlin; `moedoctor run MD015`",
    ),
    "input_scale_zero": Check(
        "MD015",
        "an input scale has no finite reciprocal",
        0.98,
        "calibrate with prompts that reach every expert, or use --moe-backend marlin; `moedoctor run MD015`",
    ),
    "fused_scale_mismatch": Check(
        None,
        "projections that an engine fuses have different global scales",
        0.7,
        "export with one scale for q, k and v and for gate and up",
    ),
    "quant_algo_unknown": Check(None, "the quantisation method is unknown", 0.8, _FIX_JSON),
    "quant_algo_missing": Check(None, "tensors are quantised and no file says how", 0.9, _FIX_JSON),
    "quant_algo_tensors": Check(
        None, "the tensors are not what the declared quantisation says", 0.9, _FIX_JSON
    ),
    "group_size_tensors": Check(
        None, "the declared group size is not the number of weights to a scale", 0.85, _FIX_JSON
    ),
    "config_disagrees": Check(None, "hf_quant_config.json and config.json disagree", 0.85, _FIX_JSON),
    "excluded_quantised": Check(
        None, "modules are excluded from quantisation and quantised", 0.85, _FIX_JSON
    ),
    "unquantised_not_excluded": Check(
        None, "modules are not quantised and not excluded from quantisation", 0.8, _FIX_JSON
    ),
    "experts_mixed": Check(
        None,
        "some experts of a layer are quantised and others are not, or otherwise",
        0.9,
        "export again: an engine keeps all experts of a layer in one tensor",
    ),
    "block_incomplete": Check(
        None, "rows of a weight are no whole blocks of 16, which NVFP4 needs", 0.9, _AGAIN
    ),
    "does_not_tile": Check(
        None,
        "shapes do not divide for every size of tensor parallelism",
        0.85,
        "use one of the sizes that divide",
        remark=True,
    ),
    "shape_mismatch": Check(None, "scales do not fit the shape of their weight", 0.95, _AGAIN),
    "dtype_mismatch": Check(
        None, "a tensor has another dtype than its part of the layout needs", 0.9, _AGAIN
    ),
    "scale_missing": Check(None, "a quantised weight lacks a scale", 0.95, _AGAIN),
    "weight_missing": Check(None, "scales stand without their weight", 0.95, _AGAIN),
    "expert_missing": Check(None, "experts, parts of them or whole layers are missing", 0.95, _AGAIN),
    "expert_extra": Check(None, "there are more experts than config.json says", 0.9, _AGAIN),
    "tensor_duplicated": Check(None, "a tensor is in more than one place", 0.95, _AGAIN),
    "index_disagrees": Check(
        None,
        "the index and the shards disagree",
        0.95,
        "`--fix DIR` writes an index made from the shards",
    ),
    "shard_missing": Check(None, "a shard that the index names is not there", 1.0, _AGAIN),
    "scale_nan": Check(None, "scales are NaN or infinite", 0.98, _AGAIN),
    "scale_zero": Check(None, "scales are zero where weights are not", 0.95, _AGAIN),
    "scale_negative": Check(None, "scales are negative", 0.98, _AGAIN),
    "scale_subnormal": Check(
        None,
        "scales are subnormal and have lost their precision",
        0.7,
        "export with a global scale of amax / (448 · 6), so that block scales use the range of E4M3",
    ),
    "scale_inverted": Check(
        None,
        "global scales look like their reciprocals",
        0.8,
        "ModelOpt stores amax / (448 · 6), compressed-tensors its reciprocal: export for one of them",
    ),
    "scale_spread": Check(
        None,
        "scales of one layer are orders of magnitude apart",
        0.6,
        "look at the experts named: the small ones may never have been calibrated",
    ),
}


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
