"""Weight offload on a GPU: streams, page-locked memory, compiled code, CUDA graphs."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from moedoctor.fixes.offload.pinned import _WAITING, PAGE, allocate, register
from moedoctor.fixes.offloader import offload

pytestmark = pytest.mark.gpu

WIDTH = 2048


class Block(nn.Module):
    """Work on the weight alone comes first, so that a compiler may start it too early."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH, device="cuda", dtype=dtype) * 0.02)
        self.down = nn.Parameter((torch.randn(WIDTH, WIDTH, device="cuda", dtype=dtype) * 0.02).t())
        self.up_scale = nn.Parameter(torch.rand(WIDTH, 1, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = (self.up.float() * self.up_scale).to(x.dtype)  # [W, W]
        return x + torch.relu(x @ up) @ self.down


@pytest.fixture
def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(7))).requires_grad_(False)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(256, WIDTH, device="cuda", dtype=torch.bfloat16)


def capture(model: nn.Module, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out: torch.Tensor = model(x)
    return graph, out


def test_many_passes_give_the_same_bits_and_everything_is_pinned(stack, x):
    inputs = [x * (1 + 0.01 * number) for number in range(20)]
    expected = [stack(batch) for batch in inputs]
    handle = offload(stack, 1 << 40)
    assert handle.report().pinned_bytes == handle.report().host_bytes > 0
    # No synchronization in between: the host runs far ahead of the copies.
    outputs = [stack(batch) for batch in inputs]
    assert all(map(torch.equal, outputs, expected))
    handle.restore()
    assert torch.equal(stack(x), expected[0])


def test_the_freed_memory_is_that_of_the_report(stack: nn.Sequential) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    handle = offload(stack, 1 << 40)
    gained = before - torch.cuda.memory_allocated()
    report = handle.report()
    assert report.freed_bytes == 14 * WIDTH * WIDTH * 2
    assert abs(gained - report.net_bytes) <= 4096
    handle.restore()
    assert abs(torch.cuda.memory_allocated() - before) <= 4096


def test_access_by_view_gives_the_same_bits_and_needs_no_buffer(stack, x):
    expected = stack(x)
    report = offload(stack, 1 << 40, access="view").report()
    assert report.buffer_bytes == 0
    assert report.freed_bytes == 14 * WIDTH * WIDTH * 2
    assert torch.equal(stack(x), expected)


def test_compiled_code_stays_one_graph_and_gives_the_same_bits(stack: nn.Sequential, x: torch.Tensor) -> None:
    expected = torch.compile(stack, fullgraph=True)(x)
    torch._dynamo.reset()
    offload(stack, 1 << 40)
    compiled = torch.compile(stack, fullgraph=True)
    assert all(torch.equal(compiled(x), expected) for _ in range(5))
    assert stack._moedoctor_offload.plain is None  # type: ignore[union-attr]


def test_a_graph_of_the_whole_module_replays_to_the_same_bits(stack: nn.Sequential, x: torch.Tensor) -> None:
    expected = stack(x)
    offload(stack, 1 << 40)
    assert torch.equal(stack(x), expected)
    graph, out = capture(stack, x)
    assert stack._moedoctor_offload.plain is None  # type: ignore[union-attr]
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(stack(x), expected), "an eager pass used a buffer that the replay overwrote"


def test_a_graph_of_one_layer_falls_back_to_copies_in_order(stack: nn.Sequential, x: torch.Tensor) -> None:
    expected = stack(x)
    offload(stack, 1 << 40)
    stack(x)
    first = stack[0](x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.warns(RuntimeWarning, match="part of the module alone"):
        out = stack[0](x)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, first)
        assert torch.equal(stack(x), expected)


def test_a_graph_over_unpinned_weights_is_refused(stack: nn.Sequential, x: torch.Tensor) -> None:
    offload(stack, 1 << 40, pin=False)
    stack(x)
    with pytest.raises(RuntimeError, match="not pinned"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        stack(x)


def test_a_module_loaded_on_the_cpu_runs_on_the_gpu(x: torch.Tensor) -> None:
    torch.manual_seed(0)
    stack = nn.Sequential(*(Block() for _ in range(5))).requires_grad_(False)
    expected = stack(x)
    stack.cpu()
    offload(stack, 1 << 40, device="cuda")
    assert torch.equal(stack(x), expected)


class Broken(Exception):  # noqa: N818  not an error of ours
    """Raised by a layer."""


class Fragile(Block):
    """Raises half-way through its forward if it is told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails:
            raise Broken
        return y


def fragile() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Fragile() for _ in range(5))).requires_grad_(False)


def test_a_capture_that_fails_half_way_leaves_nothing_behind(x: torch.Tensor) -> None:
    model: Any = fragile()
    expected = model(x)
    handle = offload(model, 1 << 40)
    assert torch.equal(model(x), expected)
    for at in (0, 2, 4):
        model[at].fails = True
        # Ending a capture raises torch's error instead of ours if the stream of copies was not joined.
        with pytest.raises(Broken), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)
        model[at].fails = False
        if at == 2:  # also right after the failure
            handle.restore()
            assert torch.equal(model(x), expected)
            handle = offload(model, 1 << 40)
        assert all(torch.equal(model(x), expected) for _ in range(2))
    graph, out = capture(model, x)
    graph.replay()
    assert torch.equal(out, expected)
    assert model._moedoctor_offload.plain is None
    handle.restore()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("by_another_thread", [False, True])
def test_a_block_that_is_dropped_in_a_capture_keeps_its_lock_until_the_end(by_another_thread: bool) -> None:
    """To unlock it, the host must wait for the device, which would void the capture."""
    gc.collect()  # graphs of other tests that are freed in the capture would void it
    block, failure = allocate(1 << 20, register)  # unlocks what other tests dropped
    assert failure is None
    block.bytes.fill_(7)
    blocks, target = [block], torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    address = block.bytes.data_ptr()

    def drop() -> None:
        blocks.clear()
        gc.collect()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(block.bytes, non_blocking=True)
        del block
        if by_another_thread:
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
        else:
            drop()
        assert [0 <= address - memory.data_ptr() < PAGE for _, memory in _WAITING] == [True]
    graph.replay()
    assert bool((target == 7).all()), "the memory is still there"
    allocate(1, None)
    assert not _WAITING


def test_a_replay_that_is_queued_reads_the_weights_from_before_a_load(stack, x):
    """A load must wait for the device: no event of the offload shows that a replay has read the host."""
    expected = stack(x)
    offload(stack, 1 << 40)
    stack(x)
    graph, out = capture(stack, x)
    zeros = {name: torch.zeros_like(weight) for name, weight in stack.state_dict().items()}
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 29)  # some 0.3 s, so that the replay is still queued
    graph.replay()
    stack.load_state_dict(zeros)
    assert torch.equal(out, expected)
    graph.replay()
    assert torch.equal(out, x), "the next replay reads the new weights"
