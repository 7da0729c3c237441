import ml_dtypes
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.reference.fp8 import Fp8, round_trip
from moedoctor.reference.moe import expert_weight


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=64))
def test_rounds_as_ml_dtypes_does(values: list[float]) -> None:
    x = torch.tensor(values)
    peer = x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert torch.equal(round_trip(x, 1.0), torch.from_numpy(peer))


def test_too_large_values_saturate() -> None:
    assert round_trip(torch.tensor([1e4, -1e4]), 2.0).tolist() == [896.0, -896.0]


def test_each_matrix_has_its_scale() -> None:
    weight = Fp8(torch.ones(2, 1, 3).to(torch.float8_e4m3fn), torch.tensor([0.5, 4.0]))
    assert [expert_weight(weight, expert).tolist() for expert in (0, 1)] == [[[0.5] * 3], [[4.0] * 3]]
