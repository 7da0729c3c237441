"""The answer of `moedoctor preflight`, as its JSON document has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from moedoctor.text import load_yaml


class Verdict(Enum):
    """The four answers to "will it start, and will it load what the checkpoint holds?"."""

    STARTS = "starts"
    """Every stage that was asked passed."""
    REFUSED = "refused"
    """The release's own code raised in a stage that every start goes through."""
    WRONG = "starts_and_answers_wrongly"
    """It starts without an error, and weights stay empty, are cut or are converted without their scale."""
    CANNOT_SAY = "cannot_say"
    """A library is missing, a substituted answer failed, or moedoctor itself did."""


_TABLES = load_yaml("moedoctor.diagnose.preflight", "rules.yaml")
RULES: Mapping[str, Sequence[str]] = _TABLES["rules"]
"""Rule -> level and title. An error decides the verdict."""
STAGES: Mapping[str, str] = _TABLES["stages"]
"""Stage -> what the server does then."""


@dataclass(frozen=True)
class PreflightFinding:
    """One thing that is wrong with a start."""

    rule: str
    """One of `RULES`."""
    level: str
    message: str
    next_step: str
    rank: int | None = None
    tensor: str = ""
    """The tensor of the checkpoint, or the parameter of the model, as an example."""
    source: str = ""
    """File and line in vLLM."""
    id: str = field(default="", metadata={"sparse": True})
    """The known failure that it is, such as MD021; empty for another one."""


@dataclass(frozen=True)
class StageAnswer:
    """One stage of the start, over all ranks that were asked."""

    stage: str
    outcome: str
    """``passed``, ``warning`` (of memory), ``stopped``, ``cannot say`` or ``not asked``."""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class LayerCount:
    """Layers that take the same quantization method and backend."""

    kind: str
    """``experts``, ``linear``, ``attention`` or ``embedding``; after ``draft ``, of the draft model."""
    method: str
    backend: str
    count: int


@dataclass(frozen=True)
class StartAnswer:
    """The answer to one command line in one release."""

    release: str
    words: tuple[str, ...]
    """After ``vllm serve``."""
    verdict: Verdict
    reason: str
    """The reason, in one line."""
    next_step: str
    stages: tuple[StageAnswer, ...]
    findings: tuple[PreflightFinding, ...]
    layers: tuple[LayerCount, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """Architecture, quantization, dtype and sizes, as the release read them."""
    ranks: tuple[int, ...] = ()
    """The ranks that were asked."""
    weight_bytes: tuple[int, ...] = ()
    """Bytes of the parameters of each rank, the draft's too."""
    memory: tuple[tuple[str, str], ...] = ()
    """The needs of the fullest rank beside its weights, as (what, size or why it is not known)."""
    kv_tokens: int | None = None
    """Tokens of KV cache beside the weights of the fullest rank if activations took nothing."""
    backends: tuple[tuple[str, str, str], ...] = ()
    """With -v: (kind of layers, as in `LayerCount`; MoE backend or linear kernel that is not used; why)."""
    after: tuple[str, ...] = ()
    """With -v: what follows loading: memory for new tensors of a layer, and what could not be done here."""
    notes: tuple[str, ...] = ()
    """Substitutions that a release does not have, and answers that rest on them."""
    versions: Mapping[str, str] = field(default_factory=dict)
    import_seconds: float = 0.0
    """Until vLLM was imported, once for all command lines of a release."""
    seconds: float = 0.0
    """Of all stages, two ranks at the same time."""
    peak_memory: int = 0
    """Bytes of the processes that asked, at most."""


@dataclass(frozen=True)
class PreflightSummary:
    """Answers by their verdict."""

    starts: int
    refused: int
    starts_and_answers_wrongly: int
    cannot_say: int
    exit_code: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreflightDocument:
    """The report of `moedoctor preflight`. The first answer is for the command line as it was given."""

    model: str
    gpu: Mapping[str, Any]
    """``{"capability", "memory_gib", "count"}``."""
    answers: tuple[StartAnswer, ...]
    not_seen: tuple[str, ...]
    """Facts that no answer of this command can know."""
    notes: tuple[str, ...]
    summary: PreflightSummary
    command: ClassVar[str] = "preflight"
