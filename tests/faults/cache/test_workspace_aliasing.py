"""MD019: sums through shared memory are wrong, ours are right, and the figures count shared memory."""

import pytest
from fault_cases import by_rows

from moedoctor.faults.cache.workspace_aliasing import RESULTS, judge_modular_kernel
from moedoctor.results import ClaimVerdict


@pytest.mark.parametrize(("wrong", "verdict"), [(0, ClaimVerdict.REFUTED), (64, ClaimVerdict.CONFIRMED)])
def test_the_claim_is_judged_by_the_returned_output(wrong: int, verdict: ClaimVerdict) -> None:
    returned, before = RESULTS
    rows = [
        {"what": returned, "groups": 2, "wrong_rows": wrong, "rows": 64},
        {"what": before, "groups": 2, "wrong_rows": 64, "rows": 64},
    ]
    judgement = by_rows(judge_modular_kernel, {"min_share": 0.5}, *rows)
    assert judgement.verdict is verdict
    assert f"{wrong} of 64" in (judgement.reason or "")
    assert judge_modular_kernel.units(["faulty", "fixed"]) == []
