"""Backends beside the reference: every planted fault is noticed, and no right result is refused."""

from dataclasses import replace

import pytest
import torch

from moedoctor.bench.moe import parity
from moedoctor.bench.moe.controls import list_controls, list_wrong_problems
from moedoctor.bench.moe.own_backends import Ours, Reference
from moedoctor.bench.moe.parity import check_parity, make_unusual_ids
from moedoctor.fixes.moe.weight_layout import flatten_scales, put_up_first, tile_scales
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_backend import Prepared
from moedoctor.reference.moe_layer import Layer, make_layer, make_problem
from moedoctor.reference.nvfp4 import Nvfp4
from tests.bench.moe.fake_backend import LAX, FakeBackend

SCHEMES = [(scheme, "none") for scheme in ("nvfp4", "fp8", "fp8-block", "bf16")]
SCHEMES += [("nvfp4", "nvfp4"), ("fp8", "fp8"), ("fp8-block", "fp8_block")]
GATED = {"swapped_gate_up", "mismatched_global_scale"}
SCALED = {"inverted_global_scale", "mismatched_global_scale"}
NAMES = {control.name for control in list_controls()}


def problem(quantization: str, activations: str, activation: str = "silu", tokens: int = 9):
    shape = LayerShape(256, 128, 8, 2, activation)
    return make_problem(make_layer(shape, quantization), tokens, activations)


def applicable(quantization: str, activation: str) -> set[str]:
    names = set(NAMES)
    if activation == "relu2":
        names -= GATED
    if quantization != "nvfp4":
        names -= {"linear_for_swizzled", "swizzled_for_linear"}
    if quantization != "fp8-block":
        names -= {"shifted_block_scales"}
    return names - SCALED if quantization == "bf16" else names


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize(("quantization", "activations"), SCHEMES)
@pytest.mark.parametrize("kind", [Reference, Ours])
def test_every_planted_fault_is_noticed_at_every_scheme_and_no_right_result_is_refused(
    kind: type[Reference] | type[Ours], quantization: str, activations: str, activation: str
) -> None:
    result = check_parity(kind(quantization, activations), problem(quantization, activations, activation))
    assert result.agreement.reason is None
    assert result.missed == ()
    assert set(result.controls) == applicable(quantization, activation)
    assert result.deterministic
    assert result.right


@pytest.mark.parametrize("seed", range(2))
def test_a_dropped_expert_of_22_is_noticed_with_fp4_activations(seed: int) -> None:
    """FP4 activations have wide bounds, and an expert may add an eighth of what another adds."""
    shape = LayerShape(256, 128, 64, 22, "relu2")
    given = make_problem(make_layer(shape, "nvfp4", seed=seed), 2, "nvfp4", seed=seed)
    assert check_parity(Reference("nvfp4", "nvfp4"), given, weights=False).missed == ()


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_controls_work_on_one_token(tokens: int) -> None:
    assert check_parity(Reference("nvfp4"), problem("nvfp4", "none", tokens=tokens)).missed == ()


def test_the_workspace_holds_nan_before_each_call() -> None:
    workspace = torch.zeros(64)
    poisoned: list[bool] = []

    class WithWorkspace(Prepared):
        def __init__(self, layer: Layer) -> None:
            self.right = Reference("nvfp4").prepare(layer)

        def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
            poisoned.append(bool(workspace.isnan().all()))
            workspace.zero_()
            return self.right(*inputs)

        def list_workspaces(self) -> list[torch.Tensor]:
            return [workspace]

    backend = FakeBackend()
    backend.prepare = WithWorkspace
    assert check_parity(backend, problem("nvfp4", "none")).right
    assert poisoned
    assert all(poisoned)


def test_a_backend_that_is_wrong_once_in_three_calls_is_wrong() -> None:
    third = FakeBackend(lambda output, calls, layer: output * 2 if calls == 3 else output)
    result = check_parity(third, problem("nvfp4", "none"))
    assert not result.right
    assert not result.deterministic
    assert "norm ratio 2" in (result.agreement.reason or "")


def test_a_last_bit_that_changes_is_right_but_not_deterministic() -> None:
    def harm(output: torch.Tensor, calls: int, layer: Layer) -> torch.Tensor:
        return torch.nextafter(output, torch.full_like(output, 9)) if calls == 2 else output

    result = check_parity(FakeBackend(harm), problem("nvfp4", "none"))
    assert result.right
    assert not result.deterministic


def test_a_too_lax_harness_reports_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "choose_bounds", lambda activations: LAX)
    result = check_parity(Reference("nvfp4"), problem("nvfp4", "none"))
    assert set(result.missed) == applicable("nvfp4", "silu") - {"nan_row"}
    assert not result.right
    assert result.to_evidence()["controls_missed"] == list(result.missed)


class Swaps(FakeBackend):
    def prepare(self, layer: Layer) -> Prepared:
        return super().prepare(replace(layer, w13=put_up_first(layer.w13)))


@pytest.mark.parametrize(
    "backend",
    [Swaps(), FakeBackend(lambda output, calls, layer: output * 2)],
    ids=["swaps gate and up, as a control does once more", "doubles, what a control halves"],
)
def test_a_backend_with_the_fault_of_a_control_is_wrong(backend: FakeBackend) -> None:
    result = check_parity(backend, problem("nvfp4", "none"))
    assert not result.agreement.right
    assert result.missed == ()
    assert set(result.controls) == applicable("nvfp4", "silu")


def test_without_weights_no_copy_of_the_layer_is_made() -> None:
    backend, given = FakeBackend(), problem("nvfp4", "none")
    prepared = backend.prepare(given.layer)
    names = set(check_parity(backend, given, prepared, weights=False).controls)
    assert len(backend.prepared) == 1
    assert names == {control.name for control in list_controls() if control.on_weights is None}


IDS = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 2, 4], [1, 3, 5]])  # [5, 3]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("duplicates", [[0, 0, 2], [3, 4, 5], [6, 6, 8], [0, 2, 4], [1, 1, 5]]),
        ("empty", [[0, 1, 2], [-1, -1, -1], [6, 7, -1], [0, 2, 4], [1, 3, 5]]),
        ("fewer", [[0, 1, 2], [3, 4, -1], [6, 7, -1], [0, 2, 4], [1, 3, 5]]),
        ("distinct", IDS.tolist()),
    ],
)
def test_unusual_ids_are_a_changed_copy(kind: str, expected: list[list[int]]) -> None:
    """Empty ids leave the first and the last token alone."""
    got = make_unusual_ids(IDS, kind)
    assert got.tolist() == expected
    assert got.data_ptr() != IDS.data_ptr()


@pytest.mark.parametrize(("ids", "kind"), [(IDS, "negative"), (IDS[:, :1], "duplicates")])
def test_an_unknown_kind_of_ids_and_duplicates_of_one_expert_are_refused(ids, kind):
    with pytest.raises(ValueError, match="ids"):
        make_unusual_ids(ids, kind)


WHOLE_TILES = LayerShape(512, 128, 4, 2)  # w13 has scales [256, 32]


def scales(layer: Layer) -> torch.Tensor:
    assert isinstance(layer.w13, Nvfp4)
    return layer.w13.block_scales.view(torch.uint8)


def planted(name: str, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of the layer, and the scales with the fault `name`."""
    problem = make_problem(make_layer(shape, "nvfp4"), 3, "none")
    return scales(problem.layer), scales(dict(list_wrong_problems(problem))[name].layer)


def test_each_layout_goes_to_the_kernel_that_reads_the_other() -> None:
    linear, given = planted("swizzled_for_linear", WHOLE_TILES)
    assert torch.equal(given, tile_scales(linear)), "a linear reader sees the bytes of the tiles"
    linear, given = planted("linear_for_swizzled", WHOLE_TILES)
    assert torch.equal(tile_scales(given), linear), "what a backend swizzles becomes the bytes of the rows"
    assert torch.equal(given, flatten_scales(linear, 256, 32))
    assert not torch.equal(given, planted("swizzled_for_linear", WHOLE_TILES)[1])


@pytest.mark.parametrize("name", ["swizzled_for_linear", "linear_for_swizzled"])
def test_scales_that_fill_no_tile_keep_their_shape_and_hold_no_padding(name: str) -> None:
    linear, given = planted(name, LayerShape(32, 48, 4, 2))  # [96, 2]
    assert given.shape == linear.shape
    assert bool((given != 0).all())
    assert not torch.equal(given, linear)
