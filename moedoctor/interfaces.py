"""The three interfaces that other projects can implement: `Fault`, `SubjectProvider` and `Reporter`.

A fault judges. It neither collects facts about the machine nor prints. Its module must import without torch;
what needs torch is in its lab, which only the child process loads.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from moedoctor.entries import load_entries
from moedoctor.results import (
    Case,
    CaseResult,
    CaseVerdict,
    ClaimVerdict,
    Crash,
    Evidence,
    Observation,
    Outcome,
    Report,
    Scalar,
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
    """The fix, and where it landed."""
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
    """The answer of one child of a claim test."""

    unit: str
    """The unit that was measured, as `ClaimTest.units` named it."""
    outcome: Outcome
    seconds: float = 0.0


@dataclass(frozen=True)
class ClaimTest:
    """The test of a statement. Each unit runs in a child of its own; `judge` runs in the parent."""

    key: str
    """The name that a scenario's `claims` entry uses."""
    judge: Callable[[Sequence[CaseResult], Sequence[Measurement], Mapping[str, float]], ClaimJudgement]
    """(results of all cases, what the units measured, thresholds from the scenario file) -> judgement."""
    measure: Callable[[str, str, Mapping[str, str]], Observation] | None = None
    """(unit, device, subject name -> path of its kernels) -> figures; None if the cases decide. Claims of a
    scenario that have the same function and device share what it measured for a unit."""
    units: Callable[[Sequence[str]], Sequence[str]] = lambda subjects: ("",)
    """Names of the subjects that can run -> the units to measure, in order; none means nothing is measured.
    Two releases cannot be loaded into one process, so a comparison of releases is several units."""
    needs_gpu: bool = False
    needs: str = "a subject that it is about"
    """The thing that is missing if there are no units, for the reason that is then reported."""
    thresholds: tuple[str, ...] = ()
    """The threshold names that `judge` reads; the scenario file must give exactly these."""


class _FromEntry:
    """A class attribute that our own failures read from their file in `moedoctor/entries/`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, fault: object, owner: type[Fault]) -> str:
        entry = load_entries().get(getattr(owner, "id", ""))
        if entry is None:
            raise AttributeError(
                f"{owner.__name__}: set `{self._name}`, because the id is not in the catalogue"
            )
        return str(getattr(entry, self._name))


class Fault(ABC):
    """One known failure."""

    id: str
    """``MD001`` …"""
    name: str = cast(str, _FromEntry())
    """The catalogue name, also the scenario's file name. For failures of our catalogue the entry has it."""
    title: str = cast(str, _FromEntry())
    """The failure in one line. For failures of our catalogue the entry has it."""
    explanation: Explanation | None = None
    """None for the entries of moedoctor's own catalogue, which have a file each in `moedoctor/entries/`."""
    parameters: type[BaseModel]
    """The typed parameters of a case; unknown keys and impossible combinations are refused."""
    tiers: Mapping[str, tuple[Tier, ...]] = MappingProxyType(
        {"faulty": (Tier.MODEL,), "fixed": (Tier.MODEL,)}
    )
    """Subject kind (``faulty``, ``fixed``, ``installed``, ``vllm``) -> the tiers it has here.

    By default there is a restated algorithm and its fix, on any machine.
    """
    lab: str | None = None
    """The dotted name of the module that measures; only the child imports it.

    It has one function for each tier of the fault, called ``model``, ``library``, ``kernel`` or ``engine``:
    (case, parameters, release) -> Observation or its evidence. `case.subject` says what to measure; `release`
    is the code of a named release, else None.
    """
    claims: tuple[ClaimTest, ...] = ()
    together: int = 1
    """The number of its cases of tier kernel that may use one GPU at a time. More than 1 is for cases that
    measure no time and need little memory."""
    restated_on_cpu: bool = False
    """True if its restated algorithm uses no device: cases of tier model run on the CPU of any machine."""
    installed_package: str = "vllm"
    """The package that the subject `installed` is about, by its key in the environment."""
    summary: str = ""
    """A format string of the parameters, for `describe`: ``E={experts} K={top_k}``."""

    def __init_subclass__(cls) -> None:
        # The lab of a failure of our own is beside it.
        if "id" in vars(cls) and "lab" not in vars(cls) and cls.__module__.startswith("moedoctor.faults."):
            cls.lab = f"{cls.__module__}_lab"

    def faulty(self, case: Case) -> Any:
        """Return the failing algorithm, for `observe`. Runs in the child; not needed with a lab."""
        return None

    def fixed(self, case: Case) -> Any:
        """Return our implementation, for `observe`. Runs in the child; not needed with a lab."""
        return None

    def installed(self, case: Case) -> Any:
        """Return the installed package's implementation, for `observe`. Runs in the child.

        May raise `moedoctor.results.UnavailableError`, which skips the case.
        """
        return None

    def observe(self, case: Case, implementation: Any) -> Observation:
        """Run the case and measure. Runs in the child; gives no opinion. By default the lab does it."""
        if self.lab is None:
            raise NotImplementedError(f"{self.name}: define `observe` or name a `lab`")
        experiment = getattr(importlib.import_module(self.lab), case.tier.value)
        measured = experiment(case, self.parameters.model_validate(case.parameters), implementation)
        return measured if isinstance(measured, Observation) else Observation(measured)

    @abstractmethod
    def judge(self, case: Case, observation: Observation) -> Judgement:
        """Return what the figures mean. Pure."""

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """Return True if a point of the matrix is run at this tier; by default every point is."""
        return True

    def judge_crash(self, case: Case, crash: Crash) -> Judgement:
        """Return what a dead child means; a fault whose symptom is the crash itself overrides this."""
        return Judgement(CaseVerdict.ERROR, crash.death.value.replace("_", " "), crash.message)

    def absent(self, results: Sequence[CaseResult]) -> str | None:
        """Return why the control cannot reproduce here, from the cases that ran; None if it should have."""
        return None

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return what several cases show together, e.g. the first fixed release."""
        return {}

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        """Return the parameters of a case in a few words, for tables and test names."""
        summary = self.summary or " ".join(f"{key}={{{key}}}" for key in parameters)
        return summary.format(**parameters)


Sources = Mapping[str, str]
"""Subject name -> path of its code, from options such as ``--vllm-kernels 0.19.1=PATH``."""


class SubjectProvider(ABC):
    """One kind of subject: which names it owns, whether it can run here, and its implementation."""

    kind: str
    """``faulty``, ``fixed``, ``installed``, ``vllm`` …; what `Fault.tiers` is keyed by."""
    rank: int = 100
    """Order in reports; the control comes first."""

    def owns(self, name: str) -> bool:
        """Return True if a subject of this name is of this kind."""
        return name == self.kind

    def unavailable(
        self, fault: Fault, name: str, tier: Tier, sources: Sources, environment: Mapping[str, Any]
    ) -> str | None:
        """Return why this subject cannot run here at this tier; None if it can. Imports nothing heavy."""
        return None

    @abstractmethod
    def implementation(self, fault: Fault, case: Case, sources: Sources) -> Any:
        """Return what `fault.observe` gets. Runs in the child; may raise `UnavailableError`."""


class Reporter(ABC):
    """One format. Made without arguments; imports no torch and nothing heavy at module level."""

    name: str
    """The name for `--format`."""

    @abstractmethod
    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        """Return the report as text that ends with a line end; the same text for the same report.

        `colour` asks for ANSI colors and `width`, in columns, for lines that fit; formats for
        machines ignore both. Text of the report is data: nothing in it may act as markup.
        """
