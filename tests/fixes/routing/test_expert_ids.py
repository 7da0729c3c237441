"""Validation and deduplication of expert ids against loops over the rows."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from moedoctor.fixes import expert_ids
from moedoctor.fixes.expert_ids import ExpertIdCounts, ExpertIdFlags, find_local_ids, replace_sentinels
from moedoctor.fixes.routing import deduplicate, validate_expert_ids

EXPERTS = 6
WIDE = ((1 << 32) + 1, 1 - (1 << 32))
"""Ids that int32 cannot hold, and that become expert 1 if they are cut to 32 bits."""


@st.composite
def id_rows(draw: st.DrawFn, lowest: int = -3, highest: int = EXPERTS + 2) -> torch.Tensor:
    lanes = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    ids = st.integers(lowest, highest)
    if dtype is torch.int64:
        ids |= st.sampled_from(WIDE)
    rows = draw(st.lists(st.lists(ids, min_size=lanes, max_size=lanes), max_size=6))
    return torch.tensor(rows, dtype=dtype).reshape(len(rows), lanes)


def counted(rows: list[list[int]]) -> ExpertIdCounts:
    repeated = outside = sentinel = 0
    for row in rows:
        known = Counter(expert for expert in row if 0 <= expert < EXPERTS)
        repeated += any(count > 1 for count in known.values())
        outside += any(expert < -1 or expert >= EXPERTS for expert in row)
        sentinel += -1 in row
    return ExpertIdCounts(repeated, outside, sentinel)


@given(id_rows(), st.none() | st.integers(0, 6))
def test_every_row_is_counted_once_under_each_kind_apart_from_padding(ids, real):
    rows = None if real is None else torch.tensor([real], dtype=torch.int32)
    flags = validate_expert_ids(ids, EXPERTS, real_rows=rows)
    assert flags.count_real() == counted(ids.tolist()[:real])
    assert flags.count_padding() == counted([] if real is None else ids.tolist()[real:])


def test_flags_of_the_caller_add_up_until_they_are_reset() -> None:
    flags = ExpertIdFlags("cpu")
    for _ in range(2):
        assert validate_expert_ids(torch.tensor([[1, 1], [0, 2]]), EXPERTS, flags=flags) is flags
    assert flags.count_real() == ExpertIdCounts(repeated=2)
    flags.reset()
    assert flags.count_real() == ExpertIdCounts()


def test_counts_can_be_raised() -> None:
    flags = validate_expert_ids(torch.tensor([[-1, 2], [3, 9]]), EXPERTS)
    with pytest.raises(expert_ids.InvalidExpertIdsError, match=r"1 out of range$"):
        flags.raise_if_found()
    with pytest.raises(expert_ids.InvalidExpertIdsError, match="1 out of range, 1 sentinel"):
        flags.raise_if_found(allow_sentinel=False)
    validate_expert_ids(torch.tensor([[-1, 2], [3, 0]]), EXPERTS).raise_if_found()


@given(id_rows(highest=EXPERTS - 1), st.booleans(), st.data())
def test_deduplicated_ids_are_distinct_and_keep_each_expert_s_sum(ids, spare, data):
    eighths = data.draw(st.lists(st.integers(0, 16), min_size=ids.numel(), max_size=ids.numel()))
    weights = torch.tensor(eighths, dtype=torch.float32).reshape(ids.shape) / 8
    distinct = deduplicate(ids, weights, num_experts=EXPERTS if spare else None)
    assert (distinct.ids.dtype, distinct.weights.dtype) == (torch.int32, torch.float32)
    for before, mine, given_weights, made in zip(
        ids.tolist(), distinct.ids.tolist(), weights.tolist(), distinct.weights.tolist(), strict=True
    ):
        unused = (expert for expert in range(EXPERTS) if expert not in before)
        for lane, (old, new) in enumerate(zip(before, mine, strict=True)):
            if old < 0 or old in WIDE:
                assert (new, made[lane]) == (-1 if old in WIDE else old, given_weights[lane])
            elif before.index(old) == lane:
                mates = [w for o, w in zip(before, given_weights, strict=True) if o == old]
                assert (new, made[lane]) == (old, sum(mates))
            else:
                assert (new, made[lane]) == (next(unused) if spare else -1, 0)


def test_no_id_becomes_another_expert_if_pairs_are_sent_to_a_spare_one() -> None:
    ids, weights = torch.tensor([[(1 << 32) + 1, 1, -1]]), torch.tensor([[0.25, 0.5, 0.75]])
    usable, left = replace_sentinels(ids, weights, spare=2)
    assert usable.tolist() == [[2, 1, 2]]
    assert left.tolist() == [[0.0, 0.5, 0.0]]
    usable, left = replace_sentinels(torch.tensor([[3, 4, -1]]), weights, num_experts=4)
    assert usable.tolist() == [[3, 0, 0]]
    assert left.tolist() == [[0.25, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_added_in_float32(dtype: torch.dtype) -> None:
    weights = torch.tensor([[1.0, 0.0007, 0.0007]]).to(dtype)
    distinct = deduplicate(torch.tensor([[1, 1, 1]]), weights)
    assert distinct.weights[0, 0].item() == weights.double().sum().item()


def test_a_weight_that_is_nan_stays_with_its_own_expert() -> None:
    distinct = deduplicate(torch.tensor([[4, 1, 4]]), torch.tensor([[float("nan"), 0.5, 0.25]]))
    assert distinct.ids.tolist() == [[4, 1, -1]]
    assert distinct.weights.isnan().tolist() == [[True, False, False]]


IDS, SHARES = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "error"),
    [
        (validate_expert_ids, (torch.zeros(2, dtype=torch.int32), 6), {}, "two dimensions"),
        (validate_expert_ids, (IDS, 0), {}, "at least 1"),
        (validate_expert_ids, (IDS, 6), {"real_rows": torch.tensor([1])}, r"int32 \[1\]"),
        (validate_expert_ids, (IDS, 6), {"real_rows": 1}, "real_rows must be a torch.Tensor"),
        (validate_expert_ids, (IDS, 6), {"flags": torch.zeros(2, 3)}, "flags must be ExpertIdFlags"),
        (deduplicate, (IDS, SHARES.int()), {}, "floating"),
        (deduplicate, (IDS, torch.ones(1, 3)), {}, r"\[1, 2\]"),
        (deduplicate, (IDS, SHARES), {"num_experts": 1}, "at least top_k 2"),
        (replace_sentinels, (IDS, SHARES), {"spare": -5}, "spare must be an expert"),
        (replace_sentinels, (IDS, SHARES), {"spare": 1 << 31}, "spare must be an expert"),
        (replace_sentinels, (IDS, SHARES), {"spare": 8, "num_experts": 8}, "0 or more and below 8, got 8"),
        (replace_sentinels, (IDS, SHARES), {"num_experts": 0}, "num_experts must be at least 1"),
        (replace_sentinels, (IDS, torch.ones(1)), {}, r"\[1, 2\]"),
        (replace_sentinels, (IDS, [[1.0, 1.0]]), {}, "floating"),
        (find_local_ids, (IDS, torch.zeros(0, dtype=torch.int32)), {}, "expert_map must be"),
        (find_local_ids, (IDS, torch.zeros(2, 2)), {}, "expert_map must be"),
    ],
)
def test_wrong_arguments_are_refused(function: Any, arguments: Any, options: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        function(*arguments, **options)
