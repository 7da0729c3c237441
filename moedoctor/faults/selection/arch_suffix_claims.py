"""What was said about MD004 upstream, and how the compilers of this machine decide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

_GPU = (12, 0)
_WORKAROUND = "12.0f"


def _compilers() -> Sequence[Any]:
    """The compilers of this machine; raises UnavailableError where there is none."""
    from moedoctor.diagnose.cuda.toolchain import find_compilers
    from moedoctor.results import UnavailableError

    found = find_compilers()
    if not found:
        raise UnavailableError("needs ptxas or nvcc: install triton or the CUDA toolkit")
    return found


def measure_acceptance(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Every deciding instruction for 120, 120a, 120f, 121a and 90a, in each compiler at hand."""
    from moedoctor.diagnose.cuda.instructions import needed
    from moedoctor.diagnose.cuda.toolchain import acceptance, summarise

    names = [one.name for one in needed(_GPU)]
    refused, tables = {}, {}
    for compiler in _compilers():
        table = acceptance(compiler)
        tables[str(compiler)] = summarise(table)
        refused[str(compiler)] = {
            target: [name for name in names if not table[target][name].accepted]
            for target in ("120", "120a", "120f")
            if all(one.knows_target for one in table[target].values())
        }
    return Observation({"needed": names, "refused": refused, "compilers": tables})


def measure_family_target(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Whether each compiler at hand compiles an empty kernel for 120f."""
    from moedoctor.diagnose.cuda.toolchain import attempt
    from moedoctor.fixes.arch.targets import Target

    rows = []
    for compiler in _compilers():
        tried = attempt(compiler, Target(12, 0, "f"), None)
        shown = {"compiler": str(compiler), "cuda": list(compiler.cuda)}
        rows.append({**shown, "accepted": tried.accepted, "said": tried.line})
    return Observation({"rows": rows})


def measure_workaround(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """What each FlashInfer release, and the installed one itself, make of the list ``12.0f`` and of none."""
    from moedoctor.fixes.arch.releases import RELEASES, moe_targets
    from moedoctor.results import UnavailableError
    from moedoctor.upstream.flashinfer.context import FlashInferContext

    rows = measure_family_target(unit, device, sources).evidence["rows"]
    accepting = [row["compiler"] for row in rows if row["accepted"]]
    if not accepting:
        raise UnavailableError("needs a compiler that knows sm_120f (CUDA 12.9 or later)")
    readings: dict[str, list[str]] = {}
    for release in RELEASES:
        without, with_list = (
            moe_targets(release, capability=_GPU, cuda=(13, 0), arch_list=one).targets
            for one in (None, _WORKAROUND)
        )
        readings.setdefault(f"{' '.join(without)} -> {' '.join(with_list)}", []).append(release)
    installed = None
    try:
        context = FlashInferContext.installed()
        targets = context.resolve(_GPU, (13, 0), _WORKAROUND).targets
        installed = {"release": context.release, "targets": list(targets)}
    except UnavailableError:
        pass  # the table stands alone then, and the evidence says so
    return Observation(
        {
            "readings": readings,
            "installed": installed,
            "accepting": accepting,
            "refusing": {row["compiler"]: row["said"] for row in rows if not row["accepted"]},
        }
    )


def _seen(units: Sequence[Measurement]) -> Mapping[str, Any]:
    return next(one.outcome.evidence for one in units if isinstance(one.outcome, Observation))


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def judge_a_lacks(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Which of the grouped GEMM's instructions each compiler refuses for 120a."""
    seen = _seen(units)
    refused = {compiler: by["120a"] for compiler, by in seen["refused"].items() if "120a" in by}
    if not refused:
        reason = "no compiler here knows sm_120a (CUDA 12.8 or later)"
        return ClaimJudgement(ClaimVerdict.UNTESTED, seen, reason)
    most = max(map(len, refused.values()))
    both = [compiler for compiler in refused if "120f" in seen["refused"][compiler]]
    differing = [one for one in both if seen["refused"][one]["120f"] != refused[one]]
    count = len(seen["needed"])
    takes = f"all {count}" if most == 0 else f"{count - most} of {count} or more"
    reason = f"120a takes {takes} instructions of a grouped FP4 GEMM on 12.0 in {', '.join(refused)}"
    if both:
        reason += f"; 120f takes {'others in ' + ', '.join(differing) if differing else 'the same'}"
    reason += ". Whether either crashes on a GPU was not tried"
    return ClaimJudgement(_verdict(most >= limits["min_lacking"]), seen, reason)


def judge_f_needs(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Whether a compiler older than the claimed release takes 120f."""
    rows = _seen(units)["rows"]
    claimed = [int(limits["claimed_major"]), int(limits["claimed_minor"])]
    older = [row for row in rows if row["cuda"] < claimed]
    if not older:
        reason = f"no compiler older than CUDA {claimed[0]}.{claimed[1]} is at hand"
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": rows}, reason)
    takes = [row["compiler"] for row in older if row["accepted"]]
    refuses = [f"{row['compiler']} ({row['said']})" for row in older if not row["accepted"]]
    said = [f"accepted by {', '.join(takes)}"] if takes else []
    said += [f"refused by {', '.join(refuses)}"] if refuses else []
    return ClaimJudgement(_verdict(not takes), {"rows": rows}, "sm_120f is " + "; ".join(said))


def judge_workaround(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """The share of releases that build for 120f with the list."""
    seen = _seen(units)
    readings, installed = seen["readings"], seen["installed"]
    total = sum(map(len, readings.values()))
    hit = sum(len(releases) for change, releases in readings.items() if change.endswith("-> 120f"))
    changed = readings.get("120a -> 120f", [])
    reason = f"{hit} of {total} releases build for 120f with it"
    if installed:
        reason += (
            f", and the installed {installed['release']} for {' '.join(installed['targets']) or 'nothing'}"
        )
    if changed:
        reason += f"; it changes something up to {changed[-1]}, 120a before"
    if seen["refusing"]:
        reason += f"; {', '.join(seen['refusing'])} cannot compile for it"
    reason += ". Whether that ends a crash was not tried"
    holds = hit / total >= limits["min_share"] and (installed is None or installed["targets"] == ["120f"])
    return ClaimJudgement(_verdict(holds), seen, reason)


CLAIMS = (
    ClaimTest("a_lacks_instructions", judge_a_lacks, measure_acceptance, thresholds=("min_lacking",)),
    ClaimTest(
        "f_needs_cuda", judge_f_needs, measure_family_target, thresholds=("claimed_major", "claimed_minor")
    ),
    ClaimTest("list_is_workaround", judge_workaround, measure_workaround, thresholds=("min_share",)),
)
