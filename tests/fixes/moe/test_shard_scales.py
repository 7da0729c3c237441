"""Each weight of a shard has the scale of its block in the whole matrix, wherever the shard lies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.fixes.moe.shard_scales import expand_scales, take_shard_scales


@given(
    st.integers(1, 40), st.integers(1, 40), st.sampled_from([8, 16, 128]), st.sampled_from([8, 32]), st.data()
)
def test_a_shard_has_the_scales_of_its_blocks(
    rows: int, columns: int, block_n: int, block_k: int, data: st.DataObject
) -> None:
    rows, columns = 4 * rows, 4 * columns
    scales = torch.arange(1.0, 1 + -(-rows // block_n) * -(-columns // block_k))
    scales = scales.reshape(-(-rows // block_n), -(-columns // block_k))
    parts = [
        range(start, data.draw(st.integers(start + 1, size)))
        for size in (rows, columns)
        for start in [data.draw(st.integers(0, size - 1))]
    ]
    taken, unit = take_shard_scales(scales, (block_n, block_k), *parts)
    whole = expand_scales(scales, (block_n, block_k))
    assert torch.equal(
        expand_scales(taken, unit),
        whole[parts[0].start : parts[0].stop, parts[1].start : parts[1].stop],
    )


@pytest.mark.parametrize(("size", "ranks", "unit"), [(768, 4, 64), (320, 1, 64), (320, 8, 8), (512, 4, 128)])
def test_all_ranks_have_the_same_blocks(size: int, ranks: int, unit: int) -> None:
    scales = torch.ones(-(-size // 128), 2)
    shard = size // ranks
    parts = [range(rank * shard, (rank + 1) * shard) for rank in range(ranks)]
    units = {take_shard_scales(scales, (128, 128), part, range(256))[1] for part in parts}
    assert units == {(unit, 128)}
