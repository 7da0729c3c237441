"""MD004: kernels built for the wrong CUDA architecture suffix, 120 for 120a or 120f."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    Fault,
    Judgement,
    Parameters,
    claim,
    decide,
    list_tiers,
    untested,
)
from moedoctor.fixes.arch.targets import NEWEST_CUDA_MAJOR, OLDEST_CUDA, parse_cuda
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier

_LAB = "moedoctor.faults.selection.arch_suffix_lab"


class ArchSuffixParameters(Parameters):
    capability: Literal["10.0", "10.3", "11.0", "12.0", "12.1"] = Field(
        "12.0", description="the GPU's; older ones get their MoE targets from no list"
    )
    cuda: str = Field("13.0", description="the toolkit that compiles, MAJOR.MINOR")
    arch_list: str | None = Field(None, max_length=200, description="FLASHINFER_CUDA_ARCH_LIST, if set")

    def problems(self) -> Iterator[str]:
        release = parse_cuda(self.cuda)
        is_known = OLDEST_CUDA <= release < (NEWEST_CUDA_MAJOR + 1, 0)
        if not is_known or self.cuda != f"{release[0]}.{release[1]}":
            span = f"12.0 to {NEWEST_CUDA_MAJOR}.x"
            yield f"cuda: must be a release from {span}, such as '13.0', not '{self.cuda}'"


def _find_symptom(evidence: Evidence, gpu: str = "", cuda: str = "") -> tuple[str, str, str | None] | None:
    """Return (kind, figure, what the compiler or the resolver printed), or None if nothing is wrong."""
    checked, would_do, error = evidence["checked"], evidence["would_do"], evidence["error"]
    if error:
        figure = f"no target, although {' or '.join(would_do)} would do"
        return ("no target", figure, error) if would_do else None
    unknown = [target for target in checked if not target["known"]]
    if unknown:
        return "unknown target", f"{unknown[0]['target']} is unknown to CUDA {cuda}", unknown[0]["said"]
    loading = [target for target in checked if target["loads"]]
    if not loading:
        return "does not load", f"{' '.join(evidence['targets'])} does not load on {gpu}", None
    best = min(loading, key=lambda target: len(target["lacks"]))
    if best["lacks"]:
        return "missing instructions", f"{best['target']} lacks {', '.join(best['lacks'])}", best["said"]
    return None


# --- Claims: the compilers of this machine decide them --------------------------------------------------


@claim("a_lacks_instructions", measure=f"{_LAB}:measure_acceptance", thresholds=("min_lacking",))
def judge_a_lacks_instructions(given: ClaimCases) -> ClaimJudgement:
    """Judge which of the grouped GEMM's instructions each compiler refuses for 120a."""
    (figures,) = given.evidence()
    refused = {compiler: by["120a"] for compiler, by in figures["refused"].items() if "120a" in by}
    if not refused:
        return untested("no compiler here knows sm_120a (CUDA 12.8 or later)", figures)
    most, count = max(map(len, refused.values())), len(figures["needed"])
    with_family = [compiler for compiler in refused if "120f" in figures["refused"][compiler]]
    differing = [each for each in with_family if figures["refused"][each]["120f"] != refused[each]]
    takes = f"all {count}" if most == 0 else f"{count - most} of {count} or more"
    reason = f"120a takes {takes} instructions of a grouped FP4 GEMM on 12.0 in {', '.join(refused)}"
    if with_family:
        reason += f"; 120f takes {'others in ' + ', '.join(differing) if differing else 'the same'}"
    reason += ". Whether either crashes on a GPU was not tried"
    return decide(given.keeps("min_lacking", most), figures, reason)


@claim("f_needs_cuda", measure=f"{_LAB}:measure_family_target", thresholds=("claimed_major", "claimed_minor"))
def judge_f_needs_cuda(given: ClaimCases) -> ClaimJudgement:
    """Judge whether a compiler older than the claimed release takes 120f."""
    (figures,) = given.evidence()
    claimed = [int(given.limits["claimed_major"]), int(given.limits["claimed_minor"])]
    older = [row for row in figures["rows"] if row["cuda"] < claimed]
    if not older:
        return untested(f"no compiler older than CUDA {claimed[0]}.{claimed[1]} is at hand", figures)
    takes = [row["compiler"] for row in older if row["accepted"]]
    refuses = [f"{row['compiler']} ({row['said']})" for row in older if not row["accepted"]]
    parts = [f"accepted by {', '.join(takes)}"] if takes else []
    parts += [f"refused by {', '.join(refuses)}"] if refuses else []
    return decide(not takes, figures, "sm_120f is " + "; ".join(parts))


@claim("list_is_workaround", measure=f"{_LAB}:measure_workaround", thresholds=("min_share",))
def judge_list_is_workaround(given: ClaimCases) -> ClaimJudgement:
    """Judge the share of releases that build for 120f with the list."""
    (figures,) = given.evidence()
    readings, installed = figures["readings"], figures["installed"]
    total = sum(map(len, readings.values()))
    hit = sum(len(releases) for change, releases in readings.items() if change.endswith("-> 120f"))
    changed = readings.get("120a -> 120f", [])
    reason = f"{hit} of {total} releases build for 120f with it"
    if installed:
        targets = " ".join(installed["targets"]) or "nothing"
        reason += f", and the installed {installed['release']} for {targets}"
    if changed:
        reason += f"; it changes something up to {changed[-1]}, 120a before"
    if figures["refusing"]:
        reason += f"; {', '.join(figures['refusing'])} cannot compile for it"
    reason += ". Whether that ends a crash was not tried"
    as_installed = installed is None or installed["targets"] == ["120f"]
    return decide(given.keeps("min_share", hit / total) and as_installed, figures, reason)


class ArchSuffix(Fault):
    """The wrong suffix, or none, for the CUDA target of MoE kernels."""

    id = "MD004"
    parameters = ArchSuffixParameters
    tiers = list_tiers(Tier.MODEL, installed=Tier.LIBRARY)
    lab = _LAB
    restated_on_cpu = True
    claims = (judge_a_lacks_instructions, judge_f_needs_cuda, judge_list_is_workaround)
    installed_package = "flashinfer"

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        symptom = _find_symptom(evidence, str(case.parameters["capability"]), str(case.parameters["cuda"]))
        if symptom is not None:
            return Judgement(CaseVerdict.REPRODUCED, *symptom[1:])
        if evidence["error"]:
            return Judgement(CaseVerdict.CLEAN, "refused, and no target would do", evidence["error"])
        targets = " ".join(evidence["targets"])
        return Judgement(CaseVerdict.CLEAN, f"{targets}: every instruction compiles")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Count each symptom by subject."""
        counts: dict[str, Counter[str]] = {}
        for case in results:
            if case.verdict is CaseVerdict.REPRODUCED:
                kind, *_ = _find_symptom(case.evidence) or ("",)
                counts.setdefault(case.subject, Counter())[kind] += 1
        symptoms = {subject: dict(sorted(kinds.items())) for subject, kinds in counts.items()}
        return {"symptoms": symptoms} if symptoms else {}

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        setting = "no list" if parameters["arch_list"] is None else f"list {parameters['arch_list']!r}"
        return f"GPU {parameters['capability']} CUDA {parameters['cuda']} {setting}"
