"""What the declared quantisation says of each module, where several schemes share a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moedoctor.diagnose.checkpoint.name_patterns import Patterns

_CLASS = re.compile(r"[A-Z]\w{0,99}", re.ASCII)
_OUTER = ("model.", "language_model.")
"""Prefixes that exporters put before a module's name or leave out."""
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Projection -> the layer that an engine fuses it into, which a list may name instead."""
_MOST_PATTERNS = 1000
"""That are tried on each module."""


@dataclass(frozen=True)
class Rule:
    """How some modules are quantised."""

    name: str | None
    """ModelOpt's `quant_algo` in upper case; None where there is none."""
    scheme: str | None
    """``nvfp4``, ``fp8``, ``int``, ``mixed``; None where it is not known."""
    static_inputs: bool
    """Whether each of these modules needs an input scale."""
    group_size: int | None
    """Weights that share a block scale, as declared."""
    block: tuple[int, int] | None = None
    """Rows and columns of a weight's block, where scales are per block of a matrix."""
    targets: tuple[str, ...] = ()
    """compressed-tensors' targets: module names, ``re:`` patterns, class names; empty for all modules."""


UNCLEAR = Rule(None, None, False, None)
"""Of a module for which the files do not say clearly which rule holds."""


@dataclass
class Rules:
    """Module -> its rule, by a list of modules (`layers`) or by the targets of groups."""

    layers: Mapping[str, Rule] | None
    """ModelOpt's `quantized_layers`; None where there is none."""
    groups: Sequence[Rule] = ()
    _known: dict[str, Rule | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bare = {_bare(name): rule for name, rule in (self.layers or {}).items()}
        # Experts that one tensor holds may be listed one by one.
        self._experts = {
            f"{head}.experts": rule
            for name, rule in self._bare.items()
            for head, found, _ in (name.partition(".experts."),)
            if found
        }
        named = [[one for one in rule.targets if not _CLASS.fullmatch(one)] for rule in self.groups]
        patterns = [one for names in named for one in names if one.startswith("re:") or "*" in one]
        if len(patterns) > _MOST_PATTERNS:
            self.not_read, self._patterns, self._classes = patterns[:1], [], []
            return
        self._patterns = [Patterns(one, substrings=False) for one in named]
        self.not_read = [one for patterns in self._patterns for one in patterns.not_read]
        self._classes = [
            rule
            for rule, names in zip(self.groups, named, strict=True)
            if not rule.targets or len(names) < len(rule.targets)
        ]

    def of(self, module: str) -> Rule | None:
        """The rule for a module; None where it is left as it is; UNCLEAR where that cannot be told."""
        if module not in self._known:
            self._known[module] = self._find(module)
        return self._known[module]

    def _find(self, module: str) -> Rule | None:
        if self.layers is not None:
            parts = _bare(module).split(".")
            tried = [".".join(parts[:size]) for size in range(len(parts), 0, -1)]
            if parts[-1] in _FUSED:
                tried.insert(1, ".".join((*parts[:-1], _FUSED[parts[-1]])))
            found = next((self._bare[one] for one in tried if one in self._bare), None)
            return found if found is not None or parts[-2:-1] != ["experts"] else self._experts.get(tried[1])
        if self.not_read:
            return UNCLEAR
        # A name counts for more than a class. Of which class a module is, the files do not say.
        for rule, patterns in zip(self.groups, self._patterns, strict=True):
            if patterns.match(module):
                return rule
        if len(self._classes) > 1:
            return UNCLEAR
        return self._classes[0] if self._classes else None


def _bare(name: str) -> str:
    while name.startswith(_OUTER):
        name = name.partition(".")[2]
    return name
