import pytest
import torch
from torch.nn import functional

from moedoctor.reference.conventions import encoding_scale, gemm_alpha, swap_gate_up, swap_halves
from moedoctor.reference.nvfp4 import dequantize, quantize


def test_values_and_scales_are_swapped_together() -> None:
    w13 = torch.randn(3, 64, 32)
    w13[:, 32:] *= 100  # other scales in the other half
    q = quantize(w13)
    assert torch.equal(dequantize(swap_gate_up(q)), swap_halves(dequantize(q)))
    assert torch.equal(dequantize(swap_gate_up(swap_gate_up(q))), dequantize(q))


def test_an_up_first_kernel_needs_the_halves_swapped() -> None:
    w13, x = torch.randn(64, 32), torch.randn(5, 32)
    gate, up = (x @ w13.T).chunk(2, dim=-1)
    first, second = (x @ swap_halves(w13).T).chunk(2, dim=-1)  # a kernel that takes the first half as up
    assert torch.allclose(functional.silu(second) * first, functional.silu(gate) * up)


def test_odd_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        swap_halves(torch.zeros(3, 4))


def test_scales_of_the_other_convention() -> None:
    assert float(encoding_scale(torch.tensor(0.25))) == 4.0
    assert float(gemm_alpha(torch.tensor(0.5), torch.tensor(0.25))) == 0.125
