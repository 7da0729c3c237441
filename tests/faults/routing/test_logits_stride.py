"""MD024: padded logits, the offsets of packed rows, and the judge of its claim."""

import pytest
import torch
from fault_cases import by_cases, claim_of, run

from moedoctor.faults.routing.logits_stride import LogitsStride, LogitsStrideParameters
from moedoctor.faults.routing.logits_stride_lab import PackedRows, make_padded_logits, read_as_packed
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Tier

FAULT = LogitsStride()
LIMITS = {"max_share": 0.2}


def test_padded_logits_have_the_strides_that_inductor_gives_them() -> None:
    logits = make_padded_logits(LogitsStrideParameters(tokens=5, experts=60, width=64), "cpu")
    assert (logits.shape, logits.stride()) == ((5, 60), (64, 1))


def test_packed_offsets_read_the_first_row_right_and_the_padding_in_the_second() -> None:
    memory = torch.arange(12.0).view(3, 4)
    assert read_as_packed(memory[:, :3]).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    routed = PackedRows().topk_softmax(memory[:, :3].contiguous(), 1)
    assert routed.ids.flatten().tolist() == [2, 2, 2]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_only_the_first_row_is_sure_to_be_right(router: str) -> None:
    judgement, evidence = run(FAULT, router=router)
    assert judgement.verdict is CaseVerdict.REPRODUCED
    assert (evidence["rows_wrong"], evidence["first_row_wrong"]) == (47, False)
    assert run(FAULT, "fixed", router=router)[1]["rows_wrong"] == 0


def result(wrong: int, tier: Tier = Tier.KERNEL) -> CaseResult:
    parameters = LogitsStrideParameters(tokens=11).model_dump()
    evidence = {"rows": 11, "rows_wrong": wrong}
    return CaseResult("vllm@0.33.0", tier, parameters, CaseVerdict.REPRODUCED, evidence=evidence)


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        ([result(10)], ClaimVerdict.CONFIRMED),
        ([result(10), result(0)], ClaimVerdict.REFUTED),
        ([result(10, Tier.MODEL)], ClaimVerdict.UNTESTED),
    ],
)
def test_kernels_of_releases_decide_the_claim(cases: list[CaseResult], verdict: ClaimVerdict) -> None:
    assert by_cases(claim_of(FAULT, "ignores_stride"), LIMITS, cases).verdict is verdict
