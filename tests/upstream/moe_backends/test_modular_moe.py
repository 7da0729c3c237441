"""vLLM's kernel once per group, on a fake of its shape, with and without copied results."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedoctor.faults.cache.workspace_aliasing import RESULTS, WorkspaceAliasing, WorkspaceAliasingParameters
from moedoctor.faults.cache.workspace_aliasing_lab import kernel, measure_modular_kernel
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.reference.moe_backend import Variant
from moedoctor.results import Case, CaseVerdict, Observation, Tier, UnavailableError
from moedoctor.upstream.moe_backends import backends, modular_moe


class Implementation:
    """Like `FusedMoEKernelModularImpl`: computes in a shared workspace and copies the result out."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = {name: tensor.float() for name, tensor in weights.items()}
        self._workspace = torch.empty(1 << 16, dtype=torch.bfloat16)

    def apply(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        fused_out = self._workspace[: x.numel()].view_as(x)
        fused_out.copy_(forward(x.float(), MoeWeights.from_tensors(self._weights), weights, ids))
        return self._finalize(output, fused_out, x)

    def _finalize(self, output: torch.Tensor, fused_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return output.copy_(fused_out)


class Prepared:
    def __init__(self, layer: Any) -> None:
        self.kernel = SimpleNamespace(impl=Implementation({"w13": layer.w13, "w2": layer.w2}))

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.kernel.impl.apply(x, weights, ids)


class Backend:
    def __init__(self, variant: Variant) -> None:
        assert variant == Variant("TRITON", "bf16")

    def unavailable(self, shape: Any, device: str) -> str | None:
        return None

    def prepare(self, layer: Any) -> Prepared:
        assert layer.shape.intermediate * 2 == layer.w13.shape[1]
        return Prepared(layer)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modular_moe, "VllmBackend", Backend)


def verdict(alias: str) -> CaseVerdict:
    parameters = WorkspaceAliasingParameters(alias=alias, groups=4, experts=16, top_k=4, tokens=8)
    case = Case("MD019", "installed", Tier.KERNEL, parameters.model_dump())
    return WorkspaceAliasing().judge(case, Observation(kernel(case, parameters, None))).verdict


@pytest.mark.parametrize("alias", ["sum", "results"])
def test_results_that_are_copied_add_up(alias: str) -> None:
    assert verdict(alias) is CaseVerdict.CLEAN


def test_the_claim_measures_the_result_before_and_after_the_copy() -> None:
    rows = measure_modular_kernel("cpu")
    wrong = {(row["what"], row["groups"]): row["wrong_rows"] for row in rows}
    returned, before = RESULTS
    assert wrong[returned, 2] == wrong[returned, 4] == 0
    assert wrong[before, 2] == wrong[before, 4] == 64


def test_writing_into_the_input_is_not_tried_with_this_torch() -> None:
    with pytest.raises(UnavailableError, match=r"torch before 2\.9"):
        verdict("input")


def test_an_unsupported_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "unavailable", lambda self, shape, device: "vLLM is not installed")
    with pytest.raises(UnavailableError, match="not installed"):
        verdict("sum")


def test_fused_experts_of_a_missing_vllm_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "FUSED_MOE", "no_such_vllm.fused_moe")
    x = torch.zeros(1, 2)
    with pytest.raises(UnavailableError, match="does not load"):
        modular_moe.call_fused_experts(x, x, x, x, x, None)
