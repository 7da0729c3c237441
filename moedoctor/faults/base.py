"""The interface of a known failure.

A fault judges; it neither collects facts about the machine nor prints. Its module must import
without torch: what needs torch imports it inside the method that runs in the child process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moedoctor.results import (
    Case,
    CaseResult,
    CaseVerdict,
    ClaimVerdict,
    Crash,
    Evidence,
    Observation,
    Scalar,
    Skip,
    Tier,
)

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True)
class Explanation:
    """A known failure of another project in words, for `moedoctor explain`. Every sentence has its source.

    Ours are explained by their file in `moedoctor/entries/`.
    """

    mechanism: str
    affected: str
    """Releases, GPUs and settings."""
    detection: str
    fix: str
    """What the fix is and where it landed."""
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """The verdict of one case, with the figure that decides it."""

    verdict: CaseVerdict
    figure: str
    """Short, for a table cell: ``13 of 128 rows hold a duplicate``."""
    reason: str | None = None


@dataclass(frozen=True)
class ClaimJudgement:
    """The verdict of one claim, with its figures."""

    verdict: ClaimVerdict
    evidence: Evidence = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class Measurement:
    """What one child of a claim test came back with."""

    unit: str
    """The unit that was measured, as `ClaimTest.units` named it."""
    outcome: Observation | Crash | Skip
    seconds: float = 0.0


@dataclass(frozen=True)
class ClaimTest:
    """How one statement is tested. Each unit of it runs in a child of its own; `judge` runs in the parent."""

    key: str
    """The name that a scenario's `claims` entry uses."""
    judge: Callable[[Sequence[CaseResult], Sequence[Measurement], Mapping[str, float]], ClaimJudgement]
    """(results of all cases, what the units measured, thresholds from the scenario file) -> judgement."""
    measure: Callable[[str, str, Mapping[str, str]], Observation] | None = None
    """(unit, device, subject name -> path of its kernels) -> figures; None where the cases decide."""
    units: Callable[[Sequence[str]], Sequence[str]] = lambda subjects: ("",)
    """Names of the subjects at hand -> the units to measure, in order; an empty one measures nothing.
    Two releases cannot be loaded into one process, so a comparison of releases is several units."""
    needs_gpu: bool = False
    needs: str = "a subject that it is about"
    """What is missing where `units` is empty, for the reason that is then reported."""
    thresholds: tuple[str, ...] = ()
    """The threshold names that `judge` reads; the scenario file must give exactly these."""


class Fault(ABC):
    """One known failure."""

    id: str
    """``MD001`` …"""
    name: str
    """The catalogue name, also the scenario's file name."""
    title: str
    """The failure in one line."""
    explanation: Explanation | None = None
    """None for the entries of moedoctor's own catalogue, which have a file each in `moedoctor/entries/`."""
    parameters: type[BaseModel]
    """The typed parameters of one case: unknown keys refused, values that cannot be together refused."""
    tiers: Mapping[str, tuple[Tier, ...]]
    """Subject kind (``faulty``, ``fixed``, ``installed``, ``vllm``) -> the tiers it has here."""
    claims: tuple[ClaimTest, ...] = ()
    installed_package: str = "vllm"
    """The package that the subject `installed` is about, by its key in the environment."""

    @abstractmethod
    def faulty(self, case: Case) -> Any:
        """The failing algorithm restated: the positive control. Runs in the child."""

    @abstractmethod
    def fixed(self, case: Case) -> Any:
        """Our implementation, from `moedoctor.fixes`. Runs in the child."""

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """Whether a point of the matrix is run at this tier; by default every point is run at all of them."""
        return True

    def installed(self, case: Case) -> Any:
        """The installed package's own implementation, loaded through `moedoctor.upstream`. Runs in the child.

        May raise `moedoctor.subjects.base.UnavailableError`, which skips the case.
        """
        raise NotImplementedError(f"{self.name} has no subject `installed`")

    @abstractmethod
    def observe(self, case: Case, implementation: Any) -> Observation:
        """Run the case on `implementation` and measure. Runs in the child; gives no opinion."""

    @abstractmethod
    def judge(self, case: Case, observation: Observation) -> Judgement:
        """What the figures mean. Pure."""

    def judge_crash(self, case: Case, crash: Crash) -> Judgement:
        """What a dead child means; a fault whose symptom is the crash itself overrides this."""
        return Judgement(CaseVerdict.ERROR, crash.death.value.replace("_", " "), crash.message)

    def absent(self, results: Sequence[CaseResult]) -> str | None:
        """Why the control cannot reproduce here, read off what it observed; None where it should have."""
        return None

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """What several cases say together, e.g. the first fixed release."""
        return {}

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        """The parameters of a case in a few words, for tables and test names."""
        return " ".join(f"{key}={value}" for key, value in parameters.items())
