"""MD010: a backend setting that changes nothing, and no message names one that would.

The installed vLLM's own code decides the claims. Without it nothing is confirmed or refuted. What all
releases answered and read when the tables were made is added to the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pydantic import Field

from moedoctor.diagnose.settings.tables import load_vllm_variables
from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    ClaimTest,
    Fault,
    Judgement,
    Parameters,
    claim,
    decide,
    list_tiers,
    untested,
)
from moedoctor.fixes import backends
from moedoctor.fixes.backends.release_tables import CAPABILITIES, load_releases, load_tables
from moedoctor.fixes.backends.requests import NVFP4_VARIABLE
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Tier


class BackendOverrideParameters(Parameters):
    """One point of the matrix: somebody wants a backend, and sets something for it."""

    release: str = Field(description="a vLLM release of the tables")
    setting: str = Field(max_length=200, description="NAME=VALUE, or a flag such as '--moe-backend marlin'")
    wants: str = Field(
        max_length=80, description="the backend that whoever sets it wants, as vLLM's log names it"
    )
    scheme: Literal["nvfp4", "nvfp4-w4a16", "mxfp4", "fp8", "fp8-block", "bf16"] = "nvfp4"
    capability: str = Field("12.0", description="the GPU's compute capability")
    activation: str = "silu"

    def problems(self) -> Iterator[str]:
        known = load_releases()
        if self.release not in known:
            oldest, *_, newest = known
            yield f"release: must be a release of the tables, {oldest} to {newest}, not '{self.release}'"
            return
        if self.capability not in CAPABILITIES:
            yield f"capability: must be one of {', '.join(CAPABILITIES)}, quoted, not '{self.capability}'"
        if not self.setting.startswith("--") and "=" not in self.setting:
            yield f"setting: must be NAME=VALUE or a flag that begins with --, not '{self.setting}'"
        activations = known[self.release].activations
        if self.activation not in activations:
            yield (f"activation: vLLM {self.release} knows {', '.join(activations)}, not '{self.activation}'")
        names = {kernel.backend for kernel in load_tables(self.scheme, self.release).kernels}
        if self.wants not in names:
            listed = ", ".join(sorted(names))
            yield f"wants: vLLM {self.release} has {listed} for {self.scheme}, not '{self.wants}'"


# --- Claims ---------------------------------------------------------------------------------------------

SM120 = "12.0"
NEMOTRON = "relu2_no_mul"
"""The activation of the model that vllm#38971 measured, Nemotron 3 Super: no gate."""
FILED_FOR = "0.17.1"
GEMM_VARIABLE = "VLLM_NVFP4_GEMM_BACKEND"


def _make_claim(
    key: str, record: Callable[[], str], *prefixes: str
) -> Callable[[Callable[[Evidence], tuple[bool | None, str]]], ClaimTest]:
    """Make a claim of a function: what the installed vLLM answers -> (whether it holds or None, why).

    `record` sums up the tables. The evidence is every answer that begins with one of `prefixes`.
    """

    def decorate(holds: Callable[[Evidence], tuple[bool | None, str]]) -> ClaimTest:
        @claim(key, measure="moedoctor.faults.selection.backend_override_lab:ask_installed")
        def judge(given: ClaimCases) -> ClaimJudgement:
            (answers,) = given.evidence()
            recorded = f"recorded from the releases' own code: {record()}"
            if "not_asked" in answers:
                return untested(f"{answers['not_asked']}; {recorded}")
            verdict, why = holds(answers)
            reason = f"vLLM {answers['vllm']}: {why}; {recorded}"
            evidence = {name: answers[name] for name in answers if name.startswith(("vllm", *prefixes))}
            return untested(reason, evidence) if verdict is None else decide(verdict, evidence, reason)

        return judge

    return decorate


def _count_marlin_by_flag() -> str:
    ways = [
        release
        for release in load_releases()
        if backends.select(SM120, "nvfp4", release=release, activation=NEMOTRON, moe_backend="marlin").chosen
        == "MARLIN"
    ]
    return f"--moe-backend marlin selects MARLIN in {len(ways)} of {len(load_releases())} releases"


@_make_claim("no_override", _count_marlin_by_flag, "with_flag")
def judge_no_override(answers: Evidence) -> tuple[bool | None, str]:
    """The claim holds if a flag does not select what it names."""
    selected = {flag: answers[f"with_flag_{flag}"] for flag in ("marlin", "cutlass")}
    shown = ", ".join(f"--moe-backend {flag} selects {backend}" for flag, backend in selected.items())
    return selected != {"marlin": "MARLIN", "cutlass": "VLLM_CUTLASS"}, shown


def _count_readers() -> str:
    known = load_vllm_variables()
    readers = [release for release in known.releases if NVFP4_VARIABLE in known.list_at(release)]
    return f"{len(readers)} of {len(known.releases)} releases read it"


@_make_claim("no_variable", _count_readers, "automatic", "variable", "with_var")
def judge_no_variable(answers: Evidence) -> tuple[bool | None, str]:
    """The claim holds if the variable is not declared and changes nothing."""
    same = {answers[f"with_variable_{name}"] for name in ("MARLIN", "VLLM_CUTLASS")} == {answers["automatic"]}
    declared = "declares it" if answers["variable_declared"] else "does not declare it"
    effect = "changes nothing" if same else "changes the selection"
    return not answers["variable_declared"] and same, f"{declared}; {NVFP4_VARIABLE} {effect}"


def _count_refusals_of_capitals() -> str:
    known = load_vllm_variables()
    rows = {
        release: known.list_at(release)[GEMM_VARIABLE]
        for release in known.releases
        if GEMM_VARIABLE in known.list_at(release)
    }
    refusing = [row for row in rows.values() if "MARLIN" not in row.choices and row.case_sensitive]
    small = [row for row in rows.values() if "marlin" in row.choices]
    return (
        f"{len(refusing)} of the {len(rows)} releases that read it (to {list(rows)[-1]}) refuse MARLIN, for "
        f"the choices are case sensitive; {len(small)} take marlin"
    )


@_make_claim("gemm_crashes", _count_refusals_of_capitals, "gemm")
def judge_gemm_crashes(answers: Evidence) -> tuple[bool | None, str]:
    """The claim holds if reading the variable fails. It is open for a release that does not read it."""
    if not answers["gemm_declared"]:
        return None, "does not read it any more"
    error = answers["gemm_capitals"]
    return bool(error), f"MARLIN: {error or 'taken'}; marlin: {answers['gemm_small'] or 'taken'}"


def _describe_default_of_0171() -> str:
    chosen = [
        backends.select(
            SM120, "nvfp4", release=FILED_FOR, activation=NEMOTRON, libraries={"flashinfer": there}
        ).chosen
        for there in (True, False)
    ]
    return (
        f"{FILED_FOR} selects {chosen[0]} on SM120 if FlashInfer is usable, and {chosen[1]} if it counts as "
        "missing, as it does without nvcc and flashinfer-cubin"
    )


@_make_claim("marlin_by_default", _describe_default_of_0171, "automatic", "flashinfer")
def judge_marlin_by_default(answers: Evidence) -> tuple[bool | None, str]:
    """The claim holds if 0.17.1 selects MARLIN with FlashInfer. It is open for other releases."""
    shown = f"selects {answers['automatic']} on SM120"
    if answers["vllm"] != FILED_FOR or not answers["flashinfer_usable"]:
        return None, f"{shown}; the claim is about {FILED_FOR} with FlashInfer"
    return answers["automatic"] == "MARLIN", shown


class BackendOverride(Fault):
    """A setting that is given and changes nothing, while nothing names what would."""

    id = "MD010"
    parameters = BackendOverrideParameters
    tiers = list_tiers(Tier.MODEL, installed=Tier.LIBRARY)
    lab = "moedoctor.faults.selection.backend_override_lab"
    restated_on_cpu = True
    summary = "{release} {scheme} {capability} {setting}"
    claims = (judge_no_override, judge_no_variable, judge_gemm_crashes, judge_marlin_by_default)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        wants, selected = str(case.parameters["wants"]), evidence["selected"]
        if evidence["refused"]:
            return Judgement(CaseVerdict.CLEAN, f"refused: {evidence['refused']}")
        if selected == wants:
            return Judgement(CaseVerdict.CLEAN, f"{wants} selected, as asked for")
        if evidence["advice"]:
            return Judgement(CaseVerdict.CLEAN, f"no effect, and a message: use {evidence['advice']}")
        warning = "one warning in the log names it" if evidence["warned"] else "no warning"
        same = selected == evidence["without"]
        figure = f"{selected} all the same" if same else f"{selected}, not {wants}"
        return Judgement(CaseVerdict.REPRODUCED, f"{figure}, {warning}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Count the settings that the control loses without a warning, and those that the fix honors."""
        lost = [
            case for case in results if case.subject == "faulty" and case.verdict is CaseVerdict.REPRODUCED
        ]
        silent = [case for case in lost if not case.evidence.get("warned")]
        fixed = [case for case in results if case.subject == "fixed"]
        honored = [case for case in fixed if case.evidence.get("selected") == case.parameters["wants"]]
        return {
            "settings_without_a_word": len(silent),
            "settings_honoured_by_the_fix": len(honored),
            "releases": len({case.parameters["release"] for case in fixed}),
        }
