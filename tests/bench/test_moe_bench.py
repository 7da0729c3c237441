from typing import Any

import pytest
import torch

from moedoctor.bench.backends import registry
from moedoctor.bench.backends.base import Backend, Prepared, Variant
from moedoctor.bench.backends.reference import Reference
from moedoctor.bench.expert_load import Routing
from moedoctor.bench.moe_bench import Task, measure
from moedoctor.bench.moe_layer import Layer
from moedoctor.bench.roofline import Roofline, measure_roofline
from moedoctor.models.layer_shape import LayerShape
from moedoctor.subjects.base import UnavailableError

ROOFLINE = Roofline(1e9, {"bf16": 1e12, "fp8": 2e12})
TASK = Task(Variant("OURS", "nvfp4"), "tiny", LayerShape(64, 32, 4, 2), (1, 5), Routing(), "cpu")


class Wrong(Backend):
    """The reference with an output that is wrong from five tokens on."""

    variant = TASK.variant

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        return None

    def prepare(self, layer: Layer) -> Prepared:
        right = Reference("nvfp4").prepare(layer)

        class Call(Prepared):
            def __call__(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                output = right(x, w, ids)
                return output * 0 if len(x) == 5 else output

        return Call()


class Absent(Wrong):
    def prepare(self, layer: Layer) -> Prepared:
        raise UnavailableError("not built for this")


def rows_of(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> list[dict[str, Any]]:
    monkeypatch.setattr(registry, "create", lambda variant: backend)
    return list(measure(TASK, ROOFLINE))


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = rows_of(monkeypatch, Wrong())
    assert right["right"] is True
    assert right["wrong"] is None
    assert right["time_us"] > 0
    assert wrong["right"] is False
    assert wrong["wrong"].startswith("5 of 5 tokens: cosine 0")
    assert not {name for name in wrong if name.endswith("_us") or name == "tflops"}


def test_what_a_backend_finds_out_late_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = rows_of(monkeypatch, Absent())
    assert row["unavailable"] == "not built for this"


def test_faults_are_planted_in_weights_once_and_in_outputs_always() -> None:
    first, second = measure(TASK, ROOFLINE)
    assert (first["controls_noticed"], second["controls_noticed"]) == ("10 of 10", "4 of 4")


def test_the_roofline_is_the_larger_of_two_times() -> None:
    assert ROOFLINE.least_seconds(10**9, 1, "bf16") == 1.0
    assert ROOFLINE.least_seconds(1, 2 * 10**12, "bf16") == 2.0
    assert ROOFLINE.least_seconds(1, 2 * 10**12, "fp8") == 1.0
    assert ROOFLINE.least_seconds(1, 2 * 10**12, "int8") == 2.0, "an unknown type counts as bfloat16"


def test_a_cpu_has_a_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    import moedoctor.bench.roofline as module

    monkeypatch.setattr(module, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(module, "_CPU_SIDE", 64)
    found = measure_roofline("cpu")
    assert found.bytes_per_second > 0
    assert found.flops["bf16"] > 0
