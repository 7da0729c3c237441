from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moedoctor.bench.moe import parity
from moedoctor.bench.moe.controls import controls
from moedoctor.bench.moe.own_backends import Ours, Reference
from moedoctor.bench.moe.parity import check_parity, unusual_ids
from moedoctor.fixes.moe.weight_layout import up_first
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.agreement import Bounds
from moedoctor.reference.moe_backend import Backend, Prepared, Variant
from moedoctor.reference.moe_layer import Layer, make_layer, make_problem
from moedoctor.reference.nvfp4 import Nvfp4

SCHEMES = [("nvfp4", "none"), ("nvfp4", "nvfp4"), ("fp8", "fp8"), ("fp8", "none"), ("bf16", "none")]
GATED = {"swapped_gate_up", "mismatched_global_scale"}
SCALED = {"inverted_global_scale", "mismatched_global_scale"}
NAMES = {control.name for control in controls()}


def problem(quantization: str, activations: str, activation: str = "silu", tokens: int = 9):
    shape = LayerShape(256, 128, 8, 2, activation)
    return make_problem(make_layer(shape, quantization), tokens, activations)


def applicable(quantization: str, activation: str) -> set[str]:
    names = set(NAMES)
    if activation == "relu2":
        names -= GATED
    if quantization != "nvfp4":
        names -= {"linear_for_swizzled", "swizzled_for_linear"}
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


@pytest.mark.parametrize("seed", range(4))
def test_a_dropped_expert_of_22_is_noticed_with_fp4_activations(seed: int) -> None:
    """FP4 activations have wide bounds, and an expert may add an eighth of what another adds."""
    shape = LayerShape(256, 128, 64, 22, "relu2")
    given = make_problem(make_layer(shape, "nvfp4", seed=seed), 2, "nvfp4", seed=seed)
    assert check_parity(Reference("nvfp4", "nvfp4"), given, weights=False).missed == ()


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_controls_work_on_one_token(tokens: int) -> None:
    assert check_parity(Reference("nvfp4"), problem("nvfp4", "none", tokens=tokens)).missed == ()


class Broken(Backend):
    """The reference, with a change to its output."""

    def __init__(self, harm: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        self.variant = Variant("BROKEN", "nvfp4")
        self.harm = harm
        self.workspace = torch.zeros(64)
        self.workspaces: list[torch.Tensor] = []

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        return None

    def prepare(self, layer: Layer) -> Prepared:
        right, outer = Reference("nvfp4").prepare(layer), self

        class Call(Prepared):
            calls = 0

            def __call__(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                outer.workspaces.append(outer.workspace.clone())
                self.calls += 1
                return outer.harm(right(x, w, ids), self.calls)

            def workspaces(self) -> list[torch.Tensor]:
                return [outer.workspace]

        return Call()


def test_the_workspace_holds_nan_before_each_call() -> None:
    backend = Broken(lambda output, calls: output)
    result = check_parity(backend, problem("nvfp4", "none"))
    assert result.right
    assert all(bool(workspace.isnan().all()) for workspace in backend.workspaces)


def test_a_backend_that_is_wrong_once_in_three_calls_is_wrong() -> None:
    result = check_parity(
        Broken(lambda output, calls: output * 2 if calls == 3 else output), problem("nvfp4", "none")
    )
    assert not result.right
    assert not result.deterministic
    assert "norm ratio 2" in (result.agreement.reason or "")


def test_a_last_bit_that_changes_is_right_but_not_deterministic() -> None:
    def harm(output: torch.Tensor, calls: int) -> torch.Tensor:
        return torch.nextafter(output, torch.full_like(output, 9)) if calls == 2 else output

    result = check_parity(Broken(harm), problem("nvfp4", "none"))
    assert result.right
    assert not result.deterministic


def test_a_too_lax_harness_reports_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    lax = Bounds(cosine=-1, norm=1e9, element=1e9, matched=0, worst=1e9)
    monkeypatch.setattr(parity, "bounds_of", lambda activations: lax)
    result = check_parity(Reference("nvfp4"), problem("nvfp4", "none"))
    assert set(result.missed) == NAMES - {"nan_row"}
    assert not result.right
    assert result.evidence()["controls_missed"] == list(result.missed)


def test_zeros_pass_an_absolute_tolerance_but_not_ours() -> None:
    """Some upstream harnesses use 0.05 absolute: zeros pass for an output of small values."""
    given = problem("nvfp4", "none")
    result = check_parity(Broken(lambda output, calls: output * 0), given, weights=False)
    assert result.agreement.wrong_tokens == 9


class Planted(Broken):
    """A backend with the same fault as one of the controls."""

    def __init__(self, harm: Callable[[torch.Tensor, int], torch.Tensor], on_weights: bool) -> None:
        super().__init__(harm)
        self.on_weights = on_weights

    def prepare(self, layer: Layer) -> Prepared:
        if self.on_weights:
            assert isinstance(layer.w13, Nvfp4)
            layer = replace(layer, w13=up_first(layer.w13))
        return super().prepare(layer)


@pytest.mark.parametrize(
    "backend",
    [Planted(lambda output, calls: output, True), Planted(lambda output, calls: output * 2, False)],
    ids=["swaps gate and up, as a control does once more", "doubles, what a control halves"],
)
def test_a_backend_with_the_fault_of_a_control_is_wrong(
    backend: Planted,
) -> None:
    result = check_parity(backend, problem("nvfp4", "none"))
    assert not result.agreement.right
    assert result.missed == ()
    assert set(result.controls) == applicable("nvfp4", "silu")


def test_without_weights_no_copy_of_the_layer_is_made() -> None:
    backend = Broken(lambda output, calls: output)
    given = problem("nvfp4", "none")
    prepared = backend.prepare(given.layer)
    backend.prepare = lambda layer: pytest.fail("was asked to take over another layer")
    names = set(check_parity(backend, given, prepared, weights=False).controls)
    routes = {"dropped_expert", "off_by_one_expert"}
    assert names == routes | {"stale_row", "half_output", "zero_output", "nan_row"}


IDS = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 2, 4], [1, 3, 5]])  # [5, 3]


def test_duplicate_ids() -> None:
    got = unusual_ids(IDS, "duplicates")
    assert got.tolist() == [[0, 0, 2], [3, 4, 5], [6, 6, 8], [0, 2, 4], [1, 1, 5]]


def test_empty_ids_leave_the_first_and_the_last_token_alone() -> None:
    got = unusual_ids(IDS, "empty")
    assert got.tolist() == [[0, 1, 2], [-1, -1, -1], [6, 7, -1], [0, 2, 4], [1, 3, 5]]


def test_distinct_ids_are_a_copy() -> None:
    got = unusual_ids(IDS, "distinct")
    assert torch.equal(got, IDS)
    assert got.data_ptr() != IDS.data_ptr()


@pytest.mark.parametrize(("ids", "kind"), [(IDS, "negative"), (IDS[:, :1], "duplicates")])
def test_an_unknown_kind_of_ids_and_duplicates_of_one_expert_are_refused(
    ids: torch.Tensor, kind: str
) -> None:
    with pytest.raises(ValueError, match="ids"):
        unusual_ids(ids, kind)
