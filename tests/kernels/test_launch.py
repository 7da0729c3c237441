"""The shapes that the kernels are launched in."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton")

import hypothesis.strategies as st
from hypothesis import given

from moedoctor.kernels.routing import launch


def _assert_covers(shape: launch.Shape, columns: int, top_k: int) -> None:
    for size in (shape.rows, shape.lanes, shape.width, shape.warps):
        assert size & (size - 1) == 0, f"{shape}: Triton takes powers of two"
    assert shape.lanes * shape.width >= columns
    assert shape.lanes >= top_k


@given(st.integers(0, 200_000), st.integers(1, 512), st.data())
def test_half_softmax_shapes_hold_every_expert_and_pick(
    tokens: int, experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, min(experts, 16)))
    shape = launch.half_softmax_shape(tokens, experts)
    _assert_covers(shape, experts, top_k)
    assert shape.width <= 8, "one vector load a lane"


@given(
    st.sampled_from([1, 3, 8, 33, 64]),
    st.sampled_from([1, 2, 3, 20, 600]),
    st.sampled_from([2, 4, 8]),
    st.data(),
)
def test_topk_shapes_give_each_group_its_own_lanes(
    groups: int, size: int, element_size: int, data: st.DataObject
) -> None:
    experts = groups * size
    top_k = data.draw(st.integers(1, experts))
    shape = launch.topk_shape(data.draw(st.integers(0, 200_000)), experts, top_k, groups, element_size)
    padded = 1 << (groups - 1).bit_length()
    _assert_covers(shape, experts, top_k)
    assert shape.lanes % padded == 0
    assert shape.lanes * shape.width // padded >= size
