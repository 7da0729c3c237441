import pytest
import torch

from moedoctor.bench.moe.bench import Routing, make_routes
from moedoctor.models.layer_shape import LayerShape

SHAPE = LayerShape(64, 32, 16, 4)


@pytest.mark.parametrize("routing", [Routing(), Routing("zipf", 1.2)])
def test_routes_are_distinct_and_weights_add_up(routing: Routing) -> None:
    weights, ids = make_routes(SHAPE, 100, routing)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.allclose(weights.sum(1), torch.ones(100))


@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 100])
def test_balanced_routes_differ_by_one_at_most(tokens: int) -> None:
    _, ids = make_routes(SHAPE, tokens, Routing())
    counts = torch.bincount(ids.flatten(), minlength=16)
    assert int(counts.max() - counts.min()) <= 1


def test_zipf_prefers_few_experts_and_more_so_with_more_skew() -> None:
    def share_of_first(skew: float) -> float:
        counts = torch.bincount(make_routes(SHAPE, 2000, Routing("zipf", skew))[1].flatten(), minlength=16)
        return float(counts.max() / counts.sum())

    assert share_of_first(0.0) < 0.08 < share_of_first(1.0) < share_of_first(3.0) <= 0.25


def test_a_trace_is_repeated_from_its_start() -> None:
    rows = [[0, 1, 2, 3], [4, 5, 6, 7], [1, 3, 5, 7]]
    _, ids = make_routes(SHAPE, 5, Routing("trace", rows=rows))
    assert ids.tolist() == [*rows, *rows[:2]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "no tokens"), ([[0, 1]], "2 experts a token, not 4"), ([[0, 1, 2, 16]], "outside 0 to 15")],
)
def test_a_trace_of_another_model_is_refused(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_routes(SHAPE, 5, Routing("trace", rows=rows))
