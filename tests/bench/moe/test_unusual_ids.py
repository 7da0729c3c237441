import pytest
import torch

from moedoctor.bench.moe.parity import unusual_ids

IDS = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 2, 4], [1, 3, 5]])  # [5, 3]


def test_duplicates() -> None:
    got = unusual_ids(IDS, "duplicates")
    assert got.tolist() == [[0, 0, 2], [3, 4, 5], [6, 6, 8], [0, 2, 4], [1, 1, 5]]


def test_empty_slots_leave_the_first_and_the_last_token_alone() -> None:
    got = unusual_ids(IDS, "empty")
    assert got.tolist() == [[0, 1, 2], [-1, -1, -1], [6, 7, -1], [0, 2, 4], [1, 3, 5]]


def test_distinct_is_a_copy() -> None:
    got = unusual_ids(IDS, "distinct")
    assert torch.equal(got, IDS)
    assert got.data_ptr() != IDS.data_ptr()


@pytest.mark.parametrize(("ids", "kind"), [(IDS, "negative"), (IDS[:, :1], "duplicates")])
def test_what_cannot_be_is_refused(ids: torch.Tensor, kind: str) -> None:
    with pytest.raises(ValueError, match="ids"):
        unusual_ids(ids, kind)
