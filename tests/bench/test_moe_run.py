from pathlib import Path

import pytest

from moedoctor.bench import moe_run
from moedoctor.bench.backends.base import Variant
from moedoctor.bench.moe_run import LayerTask, MachineError, measure_machine, measure_tasks
from moedoctor.models.layer_shape import LayerShape

SHAPE = LayerShape(64, 32, 4, 2)
ROOFLINE = {"bytes_per_second": 1e9, "flops": {"bf16": 1e12}}


@pytest.fixture
def fake_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_run, "_CHILD", "moe_child_fake")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def task(model: str, backend: str = "OURS") -> LayerTask:
    return LayerTask(Variant(backend, "bf16"), model, SHAPE, (1,))


def outcomes(rows: list[dict[str, object]]) -> list[tuple[object, ...]]:
    return [(row["backend"], row["model"], "failed" in row) for row in rows]


@pytest.mark.usefixtures("fake_child")
def test_a_child_that_dies_costs_only_its_own_task() -> None:
    rows = measure_tasks(
        [task("first"), task("dies"), task("last"), task("other", "TRITON")], "cpu", ROOFLINE, seconds=30
    )
    assert outcomes(rows) == [
        ("OURS", "first", False),
        ("OURS", "dies", False),  # what it had measured before it died
        ("OURS", "dies", True),
        ("OURS", "last", False),
        ("TRITON", "other", False),
    ]
    assert "-6" in rows[2]["failed"]


@pytest.mark.usefixtures("fake_child")
def test_a_task_that_raises_is_told_from_the_others() -> None:
    rows = measure_tasks([task("raises"), task("last")], "cpu", ROOFLINE, seconds=30)
    assert outcomes(rows) == [("OURS", "raises", True), ("OURS", "last", False)]
    assert rows[0]["failed"] == "ValueError: no"


@pytest.mark.usefixtures("fake_child")
def test_a_child_that_hangs_is_ended_and_the_other_package_goes_on() -> None:
    tasks = [task("first"), task("hangs"), task("last"), task("other", "TRITON")]
    rows = measure_tasks(tasks, "cpu", ROOFLINE, seconds=2)
    assert outcomes(rows) == [
        ("OURS", "first", False),
        ("OURS", "hangs", True),
        ("OURS", "last", True),
        ("TRITON", "other", False),
    ]
    assert "no answer within" in rows[1]["failed"]
    assert rows[2]["failed"] == "not measured within 2 s"


@pytest.mark.usefixtures("fake_child")
def test_a_machine_that_cannot_be_measured() -> None:
    assert measure_machine("cpu")[0] == ROOFLINE
    with pytest.raises(MachineError, match=r"broken: its bandwidth could not be measured.*no such device"):
        measure_machine("broken")


def test_a_real_child_on_the_cpu() -> None:
    tasks = [
        LayerTask(Variant("REFERENCE", "nvfp4"), "tiny", SHAPE, (1, 5)),
        LayerTask(Variant("MARLIN", "nvfp4"), "tiny", SHAPE, (1,)),
    ]
    rows = measure_tasks(tasks, "cpu", ROOFLINE, seconds=120)
    by_backend = {row["backend"]: row for row in rows}
    assert by_backend["MARLIN"]["unavailable"] == "needs an NVIDIA GPU that torch can use"
    one = by_backend["REFERENCE"]
    assert one["tokens"] == 5
    assert one["right"] is True
    assert one["controls_noticed"] == "4 of 4"
    assert one["time_us_p20"] <= one["time_us"] <= one["time_us_p80"]
    # 5 tokens of 2 experts each reach all 4; 4.5 bits a weight; 5 rows in and out; ids and weights.
    assert one["active_experts"] == 4
    assert one["bytes"] == 4 * 3 * 64 * 32 * 4.5 / 8 + 2 * 5 * 64 * 2 + 5 * 2 * 8
    assert one["flops"] == 2 * 10 * 3 * 64 * 32
    seconds = one["time_us"] * 1e-6
    assert one["gigabytes_per_second"] == pytest.approx(one["bytes"] / seconds / 1e9, rel=0.01, abs=1e-3)
    assert one["roofline_share"] == pytest.approx(one["bytes"] / 1e9 / seconds, rel=0.01, abs=1e-4)
