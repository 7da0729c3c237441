"""Wrong calls of a run are kept as capsules that replay can judge; right ones are not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moedoctor.bench.moe.own_backends import Reference
from moedoctor.bench.moe.parity import check_parity
from moedoctor.diagnose.capsule.replay import judge
from moedoctor.fixes.moe.weight_layout import put_up_first
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_backend import Computed, Prepared
from moedoctor.reference.moe_layer import Layer, Problem, compute_expected, make_layer, make_problem
from moedoctor.trace import wrong_calls
from moedoctor.trace.capsule import load


class Swapping(Reference):
    """A backend that reads the up half of w13 first."""

    def prepare(self, layer: Layer) -> Prepared:
        swapped = Layer(layer.shape, layer.quantization, put_up_first(layer.w13), layer.w2)

        def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return compute_expected(Problem(swapped, x, weights, ids), "none").bfloat16()

        return Computed(compute)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    wrong_calls.keep_in(tmp_path, "backend_parity-installed", "the case")
    yield tmp_path
    wrong_calls._folder = None


def _problem(quantization: str) -> Problem:
    layer = make_layer(LayerShape(256, 128, 8, 2), quantization)
    return make_problem(layer, 6, "none")


@pytest.mark.parametrize("quantization", ["nvfp4", "fp8", "bf16"])
def test_a_wrong_backend_leaves_a_capsule_that_names_its_mistake(quantization: str, folder: Path) -> None:
    assert not check_parity(Swapping(quantization), _problem(quantization), weights=False).right
    (name,) = wrong_calls.list_kept_files()
    found = judge(load(folder / name))
    assert found["right"] is False
    assert found["diagnosis"]["explanation"]["mistakes"] == ["gate_up_swapped"]
    assert found["facts"]["record"]["backend"] == f"REFERENCE {quantization}"


def test_a_right_backend_leaves_nothing(folder: Path) -> None:
    assert check_parity(Reference("nvfp4"), _problem("nvfp4")).right
    assert wrong_calls.list_kept_files() == []
    assert list(folder.iterdir()) == []


def test_a_call_that_cannot_be_kept_is_said_so(tmp_path: Path) -> None:
    wrong_calls.keep_in(tmp_path / "gone", "parity", "the case")
    check_parity(Swapping("bf16"), _problem("bf16"), weights=False)
    (line,) = wrong_calls.list_kept_files()
    assert line.startswith("not kept: ")
    assert "\n" not in line
