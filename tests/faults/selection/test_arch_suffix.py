"""MD004: the control shows every symptom, our resolver none, wrong resolvers are noticed, and claims."""

from collections.abc import Mapping
from typing import Any

import pytest
from fault_cases import by_figures, claim_of, judge

from moedoctor.diagnose.cuda.instructions import find_compilers
from moedoctor.faults.selection import arch_suffix_lab as lab
from moedoctor.faults.selection.arch_suffix import ArchSuffix, ArchSuffixParameters
from moedoctor.fixes.arch.flashinfer import ArchReading
from moedoctor.results import CaseVerdict, ClaimVerdict, UnavailableError
from moedoctor.scenario.targets import load_targets

FAULT = ArchSuffix()
LIMITS: Mapping[str, Mapping[str, float]] = {
    "a_lacks_instructions": {"min_lacking": 1},
    "f_needs_cuda": {"claimed_major": 13, "claimed_minor": 2},
    "list_is_workaround": {"min_share": 1.0},
}


LACKS = "lacks tensormap_replace, setmaxnreg"


def answers(*targets: str, error: str | None = None) -> lab.Resolver:
    """A resolver that always gives the same answer."""
    return lambda capability, cuda, arch_list: ArchReading(targets, error)


def judged(resolve: lab.Resolver, **parameters: Any) -> tuple[CaseVerdict, str]:
    judgement = judge(FAULT, lab.observe(ArchSuffixParameters(**parameters), resolve), **parameters)
    return judgement.verdict, judgement.figure


@pytest.fixture(params=["compilers", "facts"])
def decided_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with the compilers of this machine, and again without compilers."""
    if request.param == "facts":
        monkeypatch.setattr(lab, "find_compilers", lambda: ())
    elif not find_compilers():
        pytest.skip("needs ptxas: pip install triton, or CUDA on PATH")


def test_the_verdict_does_not_depend_on_who_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if a compiler disagrees with the recorded table."""
    compilers = find_compilers()
    (scenario,) = load_targets(["MD004"])
    for point in scenario.points:
        monkeypatch.setattr(lab, "find_compilers", lambda: compilers)
        by_compiler = judged(lab.faulty, **point)
        monkeypatch.setattr(lab, "find_compilers", lambda: ())
        by_facts = judged(lab.faulty, **point)
        assert by_compiler == by_facts


@pytest.mark.parametrize(
    ("answer", "parameters", "figure"),
    [
        (answers("120"), {}, f"120 {LACKS}, mma_mxf4nvf4, cvt_e2m1x2"),
        (answers("100"), {"capability": "10.0"}, f"100 {LACKS}, tcgen05, cvt_e2m1x2"),
        (answers("120f"), {"cuda": "12.8"}, "120f is unknown to CUDA 12.8"),
        (answers("120f", "130"), {}, "130 is unknown to CUDA 13.0"),
        (answers("120+PTX"), {}, "120+PTX is unknown to CUDA 13.0"),
        (answers("120a"), {"capability": "12.1"}, "120a does not load on 12.1"),
        (answers("90a", "100a"), {}, "90a 100a does not load on 12.0"),
        (answers(error="ValueError: no"), {}, "no target, although 120a or 120f would do"),
        (answers(error="RuntimeError: no"), {"cuda": "12.8"}, "no target, although 120a would do"),
        (answers("120a"), {}, None),
        (answers("120f"), {}, None),
        (answers("120f"), {"capability": "12.1"}, None),
        (answers("90a", "120f", "121a"), {}, None),
        (answers("120", "120a"), {}, None),
        (answers("100f"), {"capability": "10.3"}, None),
        (answers("120a"), {"cuda": "12.8"}, None),
        (answers(error="too old"), {"cuda": "12.6"}, None),
        (answers(error="too old"), {"cuda": "12.8", "capability": "12.1"}, None),
    ],
)
@pytest.mark.usefixtures("decided_by")
def test_each_symptom_and_no_other(answer, parameters, figure):
    verdict, shown = judged(answer, **parameters)
    if figure is None:
        assert verdict is CaseVerdict.CLEAN
    else:
        assert (verdict, shown) == (CaseVerdict.REPRODUCED, figure)


def decide(key: str, evidence: Mapping[str, Any], **limits: float) -> tuple[ClaimVerdict, str]:
    judgement = by_figures(claim_of(FAULT, key), {**LIMITS[key], **limits}, evidence)
    return judgement.verdict, str(judgement.reason)


@pytest.mark.skipif(len(find_compilers()) < 2, reason="needs several compilers: pip install triton")
@pytest.mark.parametrize(
    ("key", "verdict", "words"),
    [
        ("a_lacks_instructions", ClaimVerdict.REFUTED, "120a takes all 6 instructions"),
        ("f_needs_cuda", ClaimVerdict.REFUTED, "accepted by ptxas 12.9"),
        ("list_is_workaround", ClaimVerdict.CONFIRMED, "42 of 42 releases build for 120f with it"),
    ],
)
def test_the_claims_on_this_machine(key: str, verdict: ClaimVerdict, words: str) -> None:
    measure = claim_of(FAULT, key).measure
    evidence = measure("", "cpu", {}).evidence
    judged, reason = decide(key, evidence)
    assert judged is verdict
    assert words in reason
    if key == "a_lacks_instructions":
        refused = evidence["refused"].values()
        assert all(by["120a"] == [] for by in refused if "120a" in by)
        assert any("tensormap_replace" in by["120"] for by in refused if "120" in by)


def test_without_a_compiler_every_claim_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "find_compilers", lambda: ())
    for test in FAULT.claims:
        with pytest.raises(UnavailableError, match="needs ptxas or nvcc"):
            test.measure("", "cpu", {})


def lacking(**by: list[str]) -> dict[str, Any]:
    refused = {"ptxas 13": {name.strip("_"): names for name, names in by.items()}}
    return {"needed": ["wgmma", "cvt"], "compilers": {}, "refused": refused}


def accepting(*rows: tuple[int, int, bool]) -> dict[str, Any]:
    names = "compiler", "cuda", "accepted", "said"
    cells = [(f"ptxas {major}.{minor}", [major, minor], taken, "no") for major, minor, taken in rows]
    return {"rows": [dict(zip(names, row, strict=True)) for row in cells]}


def readings(last: str = "120f", installed: str | None = None) -> dict[str, Any]:
    own = installed and {"release": "9.9", "targets": [installed]}
    found = {"120a -> 120f": ["0.6.6"], f"120f -> {last}": ["0.6.7"]}
    return {"readings": found, "installed": own, "refusing": {}}


C129 = {"claimed_major": 12, "claimed_minor": 9}


@pytest.mark.parametrize(
    ("key", "evidence", "limits", "verdict", "words"),
    [
        ("a_lacks_instructions", lacking(_120a=[], _120f=[]), {}, "refuted", "120f takes the same"),
        ("a_lacks_instructions", lacking(_120a=["cvt"], _120f=[]), {}, "confirmed", "1 of 2 or more"),
        ("a_lacks_instructions", lacking(_120a=["cvt"], _120f=[]), {}, "confirmed", "others in ptxas 13"),
        ("a_lacks_instructions", lacking(), {}, "untested", "no compiler here knows sm_120a"),
        ("f_needs_cuda", accepting((12, 8, False), (12, 9, True)), {}, "refuted", "refused by ptxas 12.8"),
        ("f_needs_cuda", accepting((12, 8, False), (13, 1, False), (13, 2, True)), {}, "confirmed", "(no)"),
        ("f_needs_cuda", accepting((13, 2, True)), {}, "untested", "older than CUDA 13.2"),
        ("f_needs_cuda", accepting((12, 8, False), (12, 9, True)), C129, "confirmed", "refused by"),
        ("list_is_workaround", readings(), {}, "confirmed", "2 of 2 releases"),
        ("list_is_workaround", readings(), {}, "confirmed", "changes something up to 0.6.6"),
        ("list_is_workaround", readings(installed="120"), {}, "refuted", "the installed 9.9 for 120"),
        ("list_is_workaround", readings(last="120"), {}, "refuted", "1 of 2 releases"),
    ],
)
def test_what_decides_a_claim(key, evidence, limits, verdict, words):
    judged, reason = decide(key, evidence, **limits)
    assert judged.value == verdict
    assert words in reason


def test_the_workaround_is_untested_where_no_compiler_knows_the_target(monkeypatch):
    row = {"compiler": "ptxas 12.8", "cuda": [12, 8], "accepted": False, "said": "no"}
    monkeypatch.setattr(lab, "measure_family_target", lambda: [row])
    with pytest.raises(UnavailableError, match="knows sm_120f"):
        lab.measure_workaround()
