"""The kernels of MD020: the first reads any address, the second lets Triton check its argument."""

import pytest
import torch

from moedoctor.kernels.unchecked import read_address, read_tensor


@pytest.mark.parametrize("count", [0, 1000, 1025])
def test_a_count_that_would_read_beyond_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count must be a positive multiple of 1024, got {count}"):
        read_address(0, count, "cuda:0")
    with pytest.raises(ValueError, match=f"got {count}"):
        read_tensor(torch.empty(count), "cuda:0")


@pytest.mark.gpu
def test_device_memory_reads_the_same_both_ways_and_host_memory_is_refused_by_triton() -> None:
    source = torch.randn(4096, device="cuda")
    assert torch.equal(read_address(source.data_ptr(), 4096, "cuda:0"), source)
    assert torch.equal(read_tensor(source, "cuda:0"), source)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        read_tensor(torch.randn(4096), "cuda:0")
