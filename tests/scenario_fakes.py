"""A known failure, subjects and scenario files for tests; imports neither pytest nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Fault
from moedoctor.results import Case, ClaimVerdict, Observation, Tier
from moedoctor.scenario.file import Scenario, load


class FakeParameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int = Field(ge=0)
    experts: int = Field(default=8, ge=1)
    top_k: int = 2
    router: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    note: str | None = None

    @field_validator("note")
    @classmethod
    def _quiet(cls, note: str | None) -> str | None:
        if note == "loud":
            raise ValueError("must not be loud")
        return note

    @model_validator(mode="after")
    def _fits(self) -> FakeParameters:
        if self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} is more than experts {self.experts}")
        if self.tokens == 13_000:
            raise PydanticCustomError("unlucky", "these values bring bad luck")
        return self


def judge_claim(*_: object) -> ClaimJudgement:
    return ClaimJudgement(ClaimVerdict.UNTESTED)


class FakeFault(Fault):
    id = "MD001"
    name = "nan_routing"
    title = "A fake"
    parameters = FakeParameters
    tiers = {  # noqa: RUF012
        "faulty": (Tier.MODEL,),
        "fixed": (Tier.MODEL,),
        "installed": (Tier.KERNEL, Tier.MODEL),
        "emulator": (Tier.MODEL,),
    }
    claims = (
        ClaimTest("same_expert", judge_claim, thresholds=("min_share", "max_rows")),
        ClaimTest("plain", judge_claim),
    )

    def faulty(self, case: Case) -> Any:
        raise NotImplementedError

    fixed = faulty

    def observe(self, case: Case, implementation: Any) -> Observation:
        raise NotImplementedError

    judge = observe  # type: ignore[assignment]


class OtherFault(FakeFault):
    id = "MD002"
    name = "unpinned_copy"


FAULTS: Mapping[str, Fault] = {"MD001": FakeFault(), "MD002": OtherFault()}
KINDS = ("faulty", "fixed", "installed", "emulator")

HEAD = "id: MD001\nname: nan_routing\ntitle: A title\n"
"""Three lines; with `parameters` a whole scenario."""
BASE = HEAD + "parameters: {tokens: 4}\n"
CLAIM = "claims:\n  - key: same_expert\n    text: said\n    source: vllm#1\n"

FULL = """\
# yaml-language-server: $schema=schema.json

id: MD001
name: nan_routing
title: NaN router logits
subjects: [faulty, fixed, vllm@0.19.1]
tiers: [kernel, model]
timeout: 90
parameters:
  tokens: 96
  router: [softmax, sigmoid]
matrix:
  - {experts: [8], top_k: 2}
  - {experts: [64, 128], top_k: [6, 8], router: softmax}
expect: {faulty: reproduced, vllm@0.19.1: reproduced}
claims:
  - key: plain
    text: plain text
    source: somewhere
  - key: same_expert
    text: top-k picks the same expert K times on NaN
    source: vllm-project/vllm#39593
    thresholds: {min_share: 0.99, max_rows: 3}
"""


def subject_kind(name: str) -> str | None:
    return name if name in KINDS else "vllm" if name.startswith("vllm@0.") else None


def load_text(folder: Path, text: str | bytes) -> Scenario:
    """Write this text to ``a.yaml`` in `folder` and return its scenario."""
    file = folder / "a.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(file, faults=FAULTS, subject_kind=subject_kind)
