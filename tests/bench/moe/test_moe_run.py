from dataclasses import asdict
from pathlib import Path

import pytest

from moedoctor.bench.moe import run as moe_run
from moedoctor.bench.moe.run import MachineError, measure_machine, measure_tasks
from moedoctor.bench.moe.task import LayerTask
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_backend import Variant

SHAPE = LayerShape(64, 32, 4, 2)
ROOFLINE = {"bytes_per_second": 1e9, "flops": {"bf16": 1e12}}


@pytest.fixture
def fake_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_run, "_CHILD", "moe_child_fake")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def task(model: str, backend: str = "OURS", tokens: tuple[int, ...] = (1,)) -> LayerTask:
    return LayerTask(Variant(backend, "bf16"), model, SHAPE, tokens)


@pytest.mark.usefixtures("fake_child")
def test_a_child_that_dies_costs_only_its_own_task() -> None:
    """Its earlier measurements stay; a death while the layer is prepared costs all of the task."""
    tasks = [task("first"), task("dies"), task("dies first", tokens=(1, 8)), task("other", "TRITON")]
    rows = measure_tasks(tasks, "cpu", ROOFLINE, seconds=30)
    assert [(row["backend"], row["model"], "failed" in row) for row in rows] == [
        ("OURS", "first", False),
        ("OURS", "dies", False),
        ("OURS", "dies", True),
        ("OURS", "dies first", True),
        ("TRITON", "other", False),
    ]
    assert "killed by SIGABRT" in rows[2]["failed"]
    assert "tokens" not in rows[3]


@pytest.mark.usefixtures("fake_child")
@pytest.mark.parametrize("model", ["dies at 8", "raises at 8", "raises CUDA at 8"])
def test_a_death_or_an_error_costs_the_number_of_tokens_that_it_was_at(model: str) -> None:
    tasks = [task(model, tokens=(1, 8, 64, 512)), task("last", tokens=(1, 8))]
    rows = measure_tasks(tasks, "cpu", ROOFLINE, seconds=30)
    right = [(model, tokens, tokens == 8) for tokens in (1, 8, 64, 512)]
    right += [("last", tokens, False) for tokens in (1, 8)]
    assert [(row["model"], row["tokens"], "failed" in row) for row in rows] == right


@pytest.mark.usefixtures("fake_child")
def test_a_hang_uses_up_the_time_of_its_package_and_the_other_goes_on() -> None:
    tasks = [task("hangs at 8", tokens=(1, 8, 64)), task("last"), task("other", "TRITON")]
    rows = measure_tasks(tasks, "cpu", ROOFLINE, seconds=2)
    assert [(row["model"], row.get("tokens"), row.get("failed", "")[:18]) for row in rows] == [
        ("hangs at 8", 1, ""),
        ("hangs at 8", 8, "no answer within 2"),
        ("hangs at 8", None, "not measured withi"),
        ("last", None, "not measured withi"),
        ("other", 1, ""),
    ]


def test_the_child_goes_on_after_a_number_of_tokens_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from moedoctor.bench.moe import bench as moe_bench

    make_routes = moe_bench.make_routes

    def raises_at_2(shape: object, tokens: int, *rest: object, **options: object) -> object:
        if tokens == 2:
            raise MemoryError("not that many")
        return make_routes(shape, tokens, *rest, **options)

    monkeypatch.setattr(moe_bench, "make_routes", raises_at_2)
    task = LayerTask(Variant("REFERENCE", "bf16"), "tiny", SHAPE, (1, 2, 3))
    tasks = [asdict(task), asdict(LayerTask(Variant("MARLIN", "nvfp4"), "tiny", SHAPE, (1,)))]
    events = list(moe_run.measure_requested({"device": "cpu", "roofline": ROOFLINE, "tasks": tasks}))
    kinds = [f"{event['event']} {event.get('tokens', '')}".rstrip() for event in events]
    assert ", ".join(kinds) == "task, point 1, row 1, point 2, failed 2, point 3, row 3, task, row, end"
    assert events[-2]["unavailable"] == "needs an NVIDIA GPU that torch can use"


@pytest.mark.usefixtures("fake_child")
def test_a_machine_that_cannot_be_measured() -> None:
    assert measure_machine("cpu")[0] == ROOFLINE
    with pytest.raises(MachineError, match=r"broken: its bandwidth could not be measured.*no such device"):
        measure_machine("broken")


@pytest.mark.slow
def test_a_real_child_on_the_cpu() -> None:
    task = LayerTask(Variant("REFERENCE", "nvfp4"), "tiny", SHAPE, (1, 5))
    _, row = measure_tasks([task], "cpu", ROOFLINE, seconds=120)
    assert row["tokens"] == 5
    assert row["right"] is True
    assert row["controls_noticed"] == "11 of 11"
    assert row["time_us_p20"] <= row["time_us"] <= row["time_us_p80"]
    # 5 tokens of 2 experts each reach all 4; 4.5 bits a weight; 5 rows in and out; ids and weights.
    assert row["active_experts"] == 4
    assert row["bytes"] == 4 * 3 * 64 * 32 * 4.5 / 8 + 2 * 5 * 64 * 2 + 5 * 2 * 8
    assert row["flops"] == 2 * 10 * 3 * 64 * 32
    seconds = row["time_us"] * 1e-6
    assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / seconds / 1e9, rel=0.01, abs=1e-3)
    assert row["roofline_share"] == pytest.approx(row["bytes"] / 1e9 / seconds, rel=0.01, abs=1e-4)
