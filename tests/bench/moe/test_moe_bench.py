from dataclasses import replace
from typing import Any

import pytest
import torch

from moedoctor.bench.moe import backends, parity
from moedoctor.bench.moe.bench import make_routes, measure
from moedoctor.bench.moe.task import LayerTask, Routing
from moedoctor.bench.roofline import Roofline, measure_roofline
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_backend import Backend, Prepared, Variant
from moedoctor.reference.moe_layer import Layer
from moedoctor.results import UnavailableError
from tests.bench.moe.fake_backend import LAX, FakeBackend

ROOFLINE = Roofline(1e9, {"bf16": 1e12, "fp8": 2e12})
TASK = LayerTask(Variant("OURS", "nvfp4"), "tiny", LayerShape(64, 32, 4, 2), (1, 5))
WIDE = replace(TASK, shape=LayerShape(64, 32, 32, 4), tokens=(1,))
WRONG_FOR_5 = FakeBackend(lambda output, calls, layer: output * 0 if len(output) == 5 else output)


def measured(task: LayerTask, roofline: Roofline = ROOFLINE) -> list[dict[str, Any]]:
    return [event for event in measure(task, "cpu", roofline) if event["event"] == "row"]


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def rows(backend: Backend, task: LayerTask = TASK) -> list[dict[str, Any]]:
        monkeypatch.setattr(backends, "create", lambda variant: backend)
        return measured(task)

    return rows


def has_no_time(row: dict[str, Any]) -> bool:
    return not {name for name in row if name.endswith("_us") or name == "tflops"}


def test_a_wrong_result_is_not_timed(rows_of: Any) -> None:
    right, wrong = rows_of(WRONG_FOR_5)
    assert (right["right"], right["wrong"]) == (True, None)
    assert right["time_us"] > 0
    assert wrong["right"] is False
    assert wrong["wrong"].startswith("5 of 5 tokens: cosine 0")
    assert has_no_time(wrong)


def test_a_backend_that_is_wrong_while_timed_gets_no_time(rows_of: Any) -> None:
    # Before the timing come three calls that are compared and two with other routes.
    row, _ = rows_of(FakeBackend(lambda output, calls, layer: output if calls <= 5 else output * 0))
    assert row["right"] is False
    assert row["wrong"].startswith("once it was timed (wall time): 1 of 1 tokens: cosine 0")
    assert has_no_time(row)


def test_a_late_error_of_a_backend_is_its_reason(rows_of: Any) -> None:
    class Absent(FakeBackend):
        def prepare(self, layer: Layer) -> Prepared:
            raise UnavailableError("not built for this")

    (row,) = rows_of(Absent())
    assert row["unavailable"] == "not built for this"


def test_faults_are_planted_in_every_run_whatever_the_size() -> None:
    rows = measured(replace(WIDE, tokens=(1, 5)))  # 32 experts; weights are changed with 8
    assert [row["controls_noticed"] for row in rows] == ["11 of 11"] * 2
    assert all(row["controls_missed"] == [] for row in rows)


def test_weights_are_changed_in_a_layer_of_few_experts(rows_of: Any) -> None:
    backend = FakeBackend()
    rows_of(backend, replace(WIDE, tokens=(1, 2, 3)))
    shapes = [layer.shape for layer in backend.prepared]
    assert [(shape.hidden, shape.intermediate) for shape in shapes] == [(64, 32)] * 7
    assert [shape.experts for shape in shapes] == [8] * 6 + [32]


def test_a_backend_that_cannot_compute_few_experts_has_its_own_layer_changed(rows_of: Any) -> None:
    class Many(FakeBackend):
        def unavailable(self, shape: LayerShape, device: str) -> str | None:
            return None if shape.experts >= 32 else "needs 32 experts"

    backend = Many()
    (row,) = rows_of(backend, WIDE)
    assert {layer.shape.experts for layer in backend.prepared} == {32}
    assert row["controls_noticed"] == "11 of 11"


def test_a_backend_that_is_wrong_only_with_few_experts_is_wrong(rows_of: Any) -> None:
    few = FakeBackend(lambda output, calls, layer: output * (layer.shape.experts != 8))
    (row,) = rows_of(few, WIDE)
    assert row["wrong"].startswith("in the layer that faults are planted in: 17 of 17 tokens")
    assert has_no_time(row)


@pytest.mark.parametrize("where", ["weights of few experts", "routes and outputs"])
def test_a_backend_is_not_blamed_if_the_comparison_misses_a_fault(rows_of, monkeypatch, where):
    first = LAX if where == "weights of few experts" else parity.choose_bounds("none")
    calls = iter([first, *[LAX] * 9])
    monkeypatch.setattr(parity, "choose_bounds", lambda activations: next(calls))
    for row in rows_of(WRONG_FOR_5):
        assert row["right"] is False
        assert row["wrong"] is None, "not the backend's"
        assert row["failed"].startswith("the comparison did not notice ")
        assert ("swapped_gate_up" in row["controls_missed"]) is (where == "weights of few experts")
        assert "half_output" in row["controls_missed"]
        assert has_no_time(row)


def test_one_expert_has_no_control_that_changes_nothing() -> None:
    (row,) = measured(replace(TASK, shape=LayerShape(64, 32, 1, 1), tokens=(3,)))
    assert row["controls_noticed"] == "10 of 10"
    assert row["right"] is True


def test_the_roofline_is_the_larger_of_two_times() -> None:
    assert ROOFLINE.compute_least_seconds(10**9, 1, "bf16") == 1.0
    assert ROOFLINE.compute_least_seconds(1, 2 * 10**12, "bf16") == 2.0
    assert ROOFLINE.compute_least_seconds(1, 2 * 10**12, "fp8") == 1.0
    assert ROOFLINE.compute_least_seconds(1, 2 * 10**12, "int8") == 2.0, "unknown types are bfloat16"
    cpu = Roofline(1e9, {"bf16": 1e9, "fp32": 1e12})
    assert cpu.compute_least_seconds(1, 2 * 10**12, "bf16") == 2.0, "a CPU may take the faster type"
    assert Roofline(1e9, {"bf16": 1e12, "fp32": 1e9}).compute_least_seconds(1, 2 * 10**12, "bf16") == 2.0


@pytest.mark.slow
@pytest.mark.alone
def test_the_reference_is_not_faster_than_the_cpu_that_it_runs_on() -> None:
    """It computes in float32, so its roofline must not assume products in bfloat16."""
    shape = LayerShape(512, 512, 4, 2)
    task = LayerTask(Variant("REFERENCE", "bf16"), "wide", shape, (256,))
    (row,) = measured(task, measure_roofline("cpu"))
    assert row["right"] is True
    assert 0 < row["roofline_share"] <= 1.5, "what else runs here may slow either measurement"


ROUTED = LayerShape(64, 32, 16, 4)


@pytest.mark.parametrize("routing", [Routing(), Routing("zipf", 1.2)])
def test_routes_are_distinct_and_weights_add_up(routing: Routing) -> None:
    weights, ids = make_routes(ROUTED, 100, routing)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.allclose(weights.sum(1), torch.ones(100))


@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 100])
def test_balanced_routes_differ_by_one_at_most(tokens: int) -> None:
    _, ids = make_routes(ROUTED, tokens, Routing())
    counts = torch.bincount(ids.flatten(), minlength=16)
    assert int(counts.max() - counts.min()) <= 1


def test_a_trace_is_repeated_from_its_start() -> None:
    rows = [[0, 1, 2, 3], [4, 5, 6, 7], [1, 3, 5, 7]]
    _, ids = make_routes(ROUTED, 5, Routing("trace", rows=rows))
    assert ids.tolist() == [*rows, *rows[:2]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "no tokens"), ([[0, 1]], "2 experts a token, not 4"), ([[0, 1, 2, 16]], "outside 0 to 15")],
)
def test_a_trace_of_another_model_is_refused(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_routes(ROUTED, 5, Routing("trace", rows=rows))
