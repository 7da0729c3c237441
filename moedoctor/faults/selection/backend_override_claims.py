"""What was said about MD010 upstream, and how each is decided.

Each is put to the installed vLLM's own code; where there is none, nothing is confirmed or refuted. What all
releases answered and read when the tables were made stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moedoctor.diagnose.settings.tables import vllm_variables
from moedoctor.fixes import backends
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.fixes.backends import requests as backend_requests
from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

SM120 = "12.0"
NEMOTRON = "relu2_no_mul"
"""The activation of the model that vllm#38971 measured, Nemotron 3 Super: no gate."""
FILED_FOR = "0.17.1"
GEMM_VARIABLE = "VLLM_NVFP4_GEMM_BACKEND"

_Judge = Callable[[Sequence[CaseResult], Sequence[Measurement], Mapping[str, float]], ClaimJudgement]


def asked(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """What the installed vLLM does on SM120 with flags and variables; why it was not asked, where there is
    none."""
    from moedoctor.results import UnavailableError
    from moedoctor.upstream.selection.installed import InstalledSelection, installed_release

    try:
        selection = InstalledSelection.of_this_environment(installed_release())
    except UnavailableError as error:
        return Observation({"not_asked": str(error)})
    return Observation(selection.overrides((12, 0), NEMOTRON))


def recorded_ways() -> str:
    """In how many releases --moe-backend marlin selects MARLIN for NVFP4 on SM120."""
    ways = [
        release
        for release in backend_tables.releases()
        if backends.select(SM120, "nvfp4", release=release, activation=NEMOTRON, moe_backend="marlin").chosen
        == "MARLIN"
    ]
    return f"--moe-backend marlin selects MARLIN in {len(ways)} of {len(backend_tables.releases())} releases"


def recorded_readers() -> str:
    """In how many releases VLLM_NVFP4_MOE_BACKEND is read."""
    known = vllm_variables()
    readers = [one for one in known.releases if backend_requests.NVFP4_VARIABLE in known.at(one)]
    return f"{len(readers)} of {len(known.releases)} releases read it"


def recorded_say() -> str:
    """In how many releases VLLM_NVFP4_GEMM_BACKEND has a say in the MoE backend."""
    known = vllm_variables().releases
    says = [one for one in known if GEMM_VARIABLE in backend_requests.governing_variables("nvfp4", one)]
    return f"it decides MoE layers in {len(says)} of {len(known)} releases"


def recorded_capitals() -> str:
    """How many releases declare VLLM_NVFP4_GEMM_BACKEND, and how many of them refuse MARLIN in capitals."""
    known = vllm_variables()
    declared = [one for one in known.releases if GEMM_VARIABLE in known.at(one)]
    rows = [known.at(one)[GEMM_VARIABLE] for one in declared]
    refuse = [one for one in rows if "MARLIN" not in one.choices and one.case_sensitive]
    small = [one for one in rows if "marlin" in one.choices]
    return (
        f"{len(refuse)} of the {len(declared)} releases that read it (to {declared[-1]}) refuse MARLIN, for "
        f"the choices are case sensitive; {len(small)} take marlin"
    )


def recorded_default() -> str:
    """What 0.17.1 selects on SM120, with FlashInfer and where it counts as missing."""
    chosen = [
        backends.select(
            SM120, "nvfp4", release=FILED_FOR, activation=NEMOTRON, libraries={"flashinfer": there}
        ).chosen
        for there in (True, False)
    ]
    return (
        f"{FILED_FOR} selects {chosen[0]} on SM120 where FlashInfer is usable, and {chosen[1]} where it "
        "counts as missing, as it does without nvcc and flashinfer-cubin"
    )


def no_override(seen: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Holds where a flag does not get what it names."""
    got = {flag: seen[f"with_flag_{flag}"] for flag in ("marlin", "cutlass")}
    said = ", ".join(f"--moe-backend {flag} selects {backend}" for flag, backend in got.items())
    return got != {"marlin": "MARLIN", "cutlass": "VLLM_CUTLASS"}, said


def no_variable(seen: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Holds where the variable is not declared and changes nothing."""
    name = backend_requests.NVFP4_VARIABLE
    same = {seen[f"with_variable_{value}"] for value in ("MARLIN", "VLLM_CUTLASS")} == {seen["automatic"]}
    declared = "declares it" if seen["variable_declared"] else "does not declare it"
    effect = "changes nothing" if same else "changes the selection"
    return not seen["variable_declared"] and same, f"{declared}; {name} {effect}"


def gemm_selects(seen: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Holds where the variable changes the MoE backend."""
    with_it, without = seen["with_gemm_variable"], seen["automatic"]
    return with_it != without, f"{with_it} with it, {without} without"


def gemm_crashes(seen: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Holds where reading the variable fails; undecided where it is gone."""
    if not seen["gemm_declared"]:
        return None, "does not read it any more"
    error = seen["gemm_capitals"]
    return bool(error), f"MARLIN: {error or 'taken'}; marlin: {seen['gemm_small'] or 'taken'}"


def marlin_by_default(seen: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Holds where 0.17.1 selects MARLIN although FlashInfer is there; undecided for other releases."""
    said = f"selects {seen['automatic']} on SM120"
    if seen["vllm"] != FILED_FOR or not seen["flashinfer_usable"]:
        return None, f"{said}; the claim is about {FILED_FOR} with FlashInfer"
    return seen["automatic"] == "MARLIN", said


def _judge(
    decide: Callable[[Mapping[str, Any]], tuple[bool | None, str]], record: Callable[[], str], *about: str
) -> _Judge:
    """The judge of one claim; its evidence is what begins with one of `about`."""

    def judge(
        cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
    ) -> ClaimJudgement:
        seen = next(one.outcome.evidence for one in units if isinstance(one.outcome, Observation))
        recorded = f"recorded from the releases' own code: {record()}"
        if "not_asked" in seen:
            return ClaimJudgement(ClaimVerdict.UNTESTED, {}, f"{seen['not_asked']}; {recorded}")
        holds, said = decide(seen)
        verdict = ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED
        if holds is None:
            verdict = ClaimVerdict.UNTESTED
        evidence = {name: one for name, one in seen.items() if name == "vllm" or name.startswith(about)}
        return ClaimJudgement(verdict, evidence, f"vLLM {seen['vllm']}: {said}; {recorded}")

    return judge


CLAIMS = (
    ClaimTest("no_override", _judge(no_override, recorded_ways, "with_flag"), asked),
    ClaimTest(
        "no_variable", _judge(no_variable, recorded_readers, "automatic", "variable", "with_var"), asked
    ),
    ClaimTest("gemm_selects", _judge(gemm_selects, recorded_say, "automatic", "with_gemm"), asked),
    ClaimTest("gemm_crashes", _judge(gemm_crashes, recorded_capitals, "gemm"), asked),
    ClaimTest(
        "marlin_by_default", _judge(marlin_by_default, recorded_default, "automatic", "flashinfer"), asked
    ),
)
