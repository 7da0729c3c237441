"""The JSON schemas of what the commands write, made from the types here and of the records that they hold.

They ship as files in `schema_files/`, so that printing one loads nothing. New keys may be added within
schema_version 1, so no object is closed. ``python -m moedoctor.reporters.schemas [--check]`` writes the files
or compares them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from moedoctor.diagnose.check.records import Finding as CheckFinding
from moedoctor.diagnose.check.records import Problem
from moedoctor.diagnose.plan.plan import Plan
from moedoctor.diagnose.settings.tables import SettingFinding
from moedoctor.diagnose.triage.triage import Finding as TriageFinding
from moedoctor.diagnose.triage.triage import NearMiss
from moedoctor.entries.entry import Link
from moedoctor.fixes.backends import Candidate, Selection
from moedoctor.fixes.backends.requests import Request
from moedoctor.fleet.groups import Difference, NumberSpread
from moedoctor.fleet.parity import Judgement
from moedoctor.origin import Origin
from moedoctor.reporters.json import report_schema
from moedoctor.reporters.pages.explain import Claim

DRAFT = "https://json-schema.org/draft/2020-12/schema"
FOLDER = "schema_files"
REPORTS = ("run", "bench", "show")
"""Commands whose output is a report of `report.schema.json`."""


class Summary(TypedDict):
    """What the command ends with."""

    exit_code: NotRequired[int]
    reasons: NotRequired[list[str]]
    """Why the exit code is not 0."""


class Head(TypedDict):
    """What begins every JSON output."""

    schema_version: Literal[1]
    moedoctor: str
    """The version that wrote it."""
    origin: NotRequired[Origin]
    """Absent in what older releases wrote."""


class Answered(Head):
    """An output with a summary of nothing but the exit code, if there is one."""

    summary: NotRequired[Summary]


class CheckSummary(TypedDict):
    """Findings by severity."""

    exit_code: int
    reasons: list[str]
    error: int
    warning: int
    problems: int
    conditional: int


class Check(Head):
    """`moedoctor check`."""

    command: Literal["check"]
    findings: list[CheckFinding]
    conditional: list[CheckFinding]
    problems: list[Problem]
    target: str
    described: NotRequired[bool]
    """Whether that environment is only described, and nothing of it is on this machine."""
    not_looked_at: list[str]
    environment: dict[str, Any]
    summary: CheckSummary


class LookedAt(TypedDict):
    """What was read of one input."""

    file: NotRequired[str]
    bytes: int
    releases: str
    gpus: list[str]
    moe_backends: list[str]


@dataclass(frozen=True)
class FoundInFile(TriageFinding):
    """A known failure that one of several inputs shows."""

    file: str | None = None
    """Absent with one input."""


@dataclass(frozen=True)
class NearMissInFile(NearMiss):
    """A part of a known failure in one of several inputs."""

    file: str | None = None


class Triage(Answered):
    """`moedoctor triage`."""

    command: Literal["triage"]
    findings: list[FoundInFile]
    possible: list[FoundInFile]
    near_misses: list[NearMissInFile]
    looked_at: list[LookedAt]


class Place(TypedDict):
    """One place of damage."""

    tensor: str
    shard: str
    value: str


class LintEvidence(TypedDict):
    """What is wrong, what that does, and where."""

    what: str
    effect: str
    remark: bool
    count: int
    places: list[Place]


class LintRow(TypedDict):
    """One kind of damage."""

    id: str
    check: str
    line: int | None
    evidence: LintEvidence
    confidence: float
    next_step: str


class LintSummary(TypedDict):
    """How much was read."""

    exit_code: int
    reasons: list[str]
    shards: int
    tensors: int
    block_scales_seen: float
    patterns_not_read: list[str]


class Lint(Head):
    """`moedoctor lint`."""

    command: Literal["lint"]
    checkpoint: str
    quantization: str
    findings: list[LintRow]
    summary: LintSummary


class Image(TypedDict):
    """Device code of one target."""

    kind: str
    target: str
    count: int
    verdict: str | None


class AuditItem(TypedDict):
    """One file, or the cubins of one folder."""

    path: str
    source: str
    module: str | None
    verdict: str | None
    lacks: list[str]
    note: str | None
    skipped: str | None
    images: list[Image]


class AuditFinding(TypedDict):
    """A file that the GPU cannot use."""

    id: str
    line: int | None
    evidence: str
    confidence: float
    next_step: str


class AuditSummary(TypedDict):
    """Files by what the GPU does with them."""

    exit_code: int
    reasons: list[str]
    loads: int
    compiled: int
    missing: int
    not_needed: int
    for_some: int
    lacking: int
    skipped: int


class Audit(Head):
    """`moedoctor audit`."""

    command: Literal["audit"]
    capability: str | None
    tool: str | None
    items: list[AuditItem]
    findings: list[AuditFinding]
    summary: AuditSummary


class PlanDocument(Head):
    """`moedoctor plan`."""

    command: Literal["plan"]
    inputs: dict[str, Any]
    plan: Plan
    summary: Summary


class Backends(Answered):
    """`moedoctor backends`. An answer for several schemes has `schemes`, else it has `candidates`."""

    command: Literal["backends"]
    release: str
    capability: str
    scheme: str | None
    schemes: NotRequired[list[Selection]]
    parallel: NotRequired[str]
    activation: NotRequired[str]
    candidates: NotRequired[list[Candidate]]
    chosen: NotRequired[str | None]
    decided_by: NotRequired[str]
    error: NotRequired[str | None]
    source: NotRequired[str]
    request: Request | list[str] | None
    settings: list[SettingFinding]
    disagreements: NotRequired[list[str]]
    notes: list[str]
    exit_code: int


class CatalogueRow(TypedDict):
    """One known failure."""

    id: str
    name: str
    scenario: bool
    title: str
    affects: str
    fixed_in: str


class List(Answered):
    """`moedoctor list`."""

    command: Literal["list"]
    catalogue: list[CatalogueRow]


class Explain(Answered):
    """`moedoctor explain`."""

    command: Literal["explain"]
    id: str
    name: str
    title: str
    runs: bool
    where: str
    next: str
    fixed: str
    releases: list[tuple[str, str]]
    mechanism: str
    affected: str
    detection: str
    fix: str
    record: str
    claims: list[Claim]
    links: list[Link]


class Compare(Head):
    """`moedoctor compare`."""

    command: Literal["compare"]
    baseline: str
    """The name of the report that was compared with."""
    current: str
    regressions: list[str]
    improvements: list[str]
    notes: list[str]
    next_steps: list[str]
    summary: Summary


class Tensor(TypedDict):
    """One tensor of a capsule."""

    name: str
    type: str
    shape: list[int]
    bytes: int


class CapsuleFacts(TypedDict):
    """What a capsule holds."""

    record: dict[str, Any]
    bytes: int
    tensors: list[Tensor]


class Capsule(Answered, CapsuleFacts):
    """`moedoctor capsule show`."""

    command: Literal["capsule"]
    file: str


class BackendReplay(TypedDict):
    """One backend on the recorded call."""

    backend: str
    quantization: str
    activations: str
    right: bool | None
    against_reference: dict[str, Any] | None
    against_recorded: dict[str, Any] | None
    repeats: bool | None
    deterministic: bool | None
    unavailable: str | None
    failed: str | None


class Replay(Head):
    """`moedoctor replay`."""

    command: Literal["replay"]
    file: str
    capsule: CapsuleFacts
    judged: bool
    right: bool | None
    recorded: dict[str, Any]
    diagnosis: dict[str, Any]
    backend_tensors: list[dict[str, Any]]
    backends: list[BackendReplay]
    environment: NotRequired[dict[str, Any]]
    """The machine that replayed; reports of older releases do not have it."""
    summary: Summary


class Bench(Head):
    """What `moedoctor show` needs of a benchmark; each kind reads the rest."""

    command: Literal["bench"]
    environment: dict[str, Any]
    bench: dict[str, Any]
    summary: dict[str, Any]


class FleetNode(TypedDict):
    """A node, or a GPU of one."""

    name: str
    status: Literal[
        "answered",
        "refused",
        "other version",
        "no moedoctor",
        "busy",
        "no answer in time",
        "died",
        "unreadable answer",
        "cancelled",
    ]
    reason: str | None
    """Why it gave no report that can be compared."""
    group: int | None
    seconds: float | None
    """What the command took there."""
    start_seconds: NotRequired[float | None]
    """What starting a Ray worker took there; 0 if one was there."""
    file: str | None
    """The node's own report, in the folder `reports`."""


class FleetGroup(TypedDict):
    """Nodes with the same facts. The first group is the largest."""

    group: int
    kind: str
    """The models of the GPUs."""
    nodes: list[str]
    compared_with: int | None
    differences: list[Difference]
    findings: dict[str, str]
    facts: NotRequired[dict[str, str]]
    """Of the first group only; each other group has `differences`."""


class FleetOutlier(TypedDict):
    """A number that is far from that of equal nodes."""

    name: str
    number: str
    value: float
    median: float
    distance: float | Literal["inf", "-inf"]
    """In robust standard deviations; infinite beside numbers that are all 0."""
    worse: bool
    of: int
    """How many nodes the median is of."""


class FleetFinding(TypedDict):
    """What nodes call wrong, and how many."""

    id: str
    nodes: int


class FleetSummary(TypedDict):
    """Nodes by what became of them, and the releases of moedoctor that answered."""

    exit_code: int
    reasons: list[str]
    statuses: dict[str, int]
    moedoctor_versions: dict[str, int]
    interrupted: bool


class Fleet(Head):
    """`moedoctor fleet`."""

    command: Literal["fleet"]
    question: list[str]
    per: Literal["node", "gpu"]
    reports: str | None
    nodes: list[FleetNode]
    groups: list[FleetGroup]
    individual: dict[str, int]
    not_read: dict[str, int]
    outliers: list[FleetOutlier]
    numbers: NotRequired[list[NumberSpread]]
    """Absent in what older releases wrote."""
    bits: Judgement | None
    findings: list[FleetFinding]
    summary: FleetSummary


DOCUMENTS: Mapping[str, type] = {
    "check": Check,
    "triage": Triage,
    "explain": Explain,
    "list": List,
    "backends": Backends,
    "lint": Lint,
    "audit": Audit,
    "plan": PlanDocument,
    "compare": Compare,
    "replay": Replay,
    "capsule": Capsule,
    "fleet": Fleet,
}
"""Command -> the type of its output."""


def make_schema(command: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of what `command` writes."""
    from pydantic import TypeAdapter

    if command in REPORTS:
        made = report_schema()
        origin = TypeAdapter(Origin).json_schema(ref_template="#/$defs/{model}", mode="serialization")
        made["$defs"] |= {**origin.pop("$defs"), "Origin": origin}
        made["properties"]["origin"] = {"$ref": "#/$defs/Origin"}
        if command == "bench":
            made["properties"]["bench"] = {"type": "object", "minProperties": 1, "maxProperties": 1}
            made["required"].append("bench")
    else:
        made = TypeAdapter(DOCUMENTS[command]).json_schema(mode="serialization")
        made = {"$schema": DRAFT, **made}
    title = f"moedoctor {command}"
    return made | {"$id": f"urn:moedoctor:{command}:1", "title": title}


def main(arguments: Sequence[str]) -> int:
    """Write the files, or with ``--check`` compare them: 0 the same, 1 different."""
    from moedoctor.processes.files import write

    different = []
    for command in (*REPORTS, *DOCUMENTS):
        file = Path(__file__).parent / FOLDER / f"{command}.json"
        text = json.dumps(make_schema(command), indent=2, ensure_ascii=False) + "\n"
        if "--check" not in arguments:
            write(file, text)
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            different.append(file.name)
    if different:
        names = ", ".join(different)
        print(f"{names}: differ from the types; run: python -m moedoctor.reporters.schemas", file=sys.stderr)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
