"""Many tokens, and tensors on a GPU that is not the current one: what only a GPU shows."""

from collections.abc import Callable, Iterator

import pytest
import torch

from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.moe.forward import GroupedForward, moe_forward
from moedoctor.fixes.offload.pinned import allocate, register, view_on_device
from moedoctor.fixes.offloader import offload
from moedoctor.fixes.routing import deduplicate, topk_softmax, validate_expert_ids
from moedoctor.kernels.host_address import find_device_address
from moedoctor.reference import expert_ids as reference_ids
from moedoctor.reference.moe import MoeWeights
from moedoctor.reference.moe import forward as reference

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, INNER = 4, 64, 32
MANY = 70_000
"""More tokens than y and z of CUDA's grid can count."""


def _layer(
    device: str, tokens: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return x [T, H], weights, ids int32 [T, 2] and topk_weights [T, 2]."""
    draw = torch.Generator().manual_seed(tokens)
    weights = {
        "w13": torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw) / 8,
        "w2": torch.randn(EXPERTS, HIDDEN, INNER, generator=draw) / 6,
    }
    x = torch.randn(tokens, HIDDEN, generator=draw)
    ids = torch.randint(-1, EXPERTS, (tokens, 2), generator=draw).int()
    shares = torch.rand(tokens, 2, generator=draw)
    on_gpu = {name: weight.bfloat16().to(device) for name, weight in weights.items()}
    return x.bfloat16().to(device), on_gpu, ids.to(device), shares.to(device)


def _assert_close(mine: torch.Tensor, right: torch.Tensor) -> None:
    assert mine.shape == right.shape
    error = float((mine.float() - right).norm() / right.norm())
    assert error < 1e-2, error


def _right(
    x: torch.Tensor, weights: dict[str, torch.Tensor], ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    host = MoeWeights.from_tensors({name: weight.cpu() for name, weight in weights.items()})
    return reference(x.cpu(), host, shares.cpu(), ids.cpu()).to(x.device)  # [T, H]


def _run(
    launcher: str, x: torch.Tensor, weights: dict[str, torch.Tensor], ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the layer's output [T, H] as `launcher` computes it; `groups` has a slot to leave out, too."""
    from moedoctor.kernels.moe.launch import ExpertWeights, launch_decode, run_experts

    if launcher in ("moe_forward", "adds"):
        out = torch.zeros(x.shape, device=x.device) if launcher == "adds" else None
        return moe_forward(x, weights, ids, shares, out=out)
    if launcher == "run_experts":
        w13, w2 = ExpertWeights(weights["w13"]), ExpertWeights(weights["w2"])
        return run_experts(x, w13, w2, shares, ids, activation="silu")
    if launcher == "decode":
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        launch_decode(x, weights, ids, shares, out, activation="silu", adds=False)
        return out
    call = GroupedForward(x, ids, shares, EXPERTS)
    spare = {name: torch.cat([weight, weight[:1]]) for name, weight in weights.items()}
    call.add(spare, torch.tensor([0, 1, 2, 3, 1 << 30], dtype=torch.int32, device=x.device))
    return call.sum()


LAUNCHERS = ("moe_forward", "adds", "decode", "groups", "run_experts")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_more_tokens_than_a_grid_has_rows(launcher: str) -> None:
    layer = _layer("cuda", MANY)
    _assert_close(_run(launcher, *layer), _right(*layer))


def test_the_address_of_a_part_of_a_pinned_block_is_the_block_s_and_an_offset() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    for block in (allocate(1 << 20, register)[0].bytes, torch.empty(1 << 20, dtype=torch.uint8).pin_memory()):
        block.copy_(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8))
        part = block[4100:8200]
        assert find_device_address(part, gpu) == find_device_address(block, gpu) + 4100
        view = view_on_device(part, gpu)
        assert view.data_ptr() == find_device_address(part, gpu)
        assert torch.equal(view.cpu(), part)


@pytest.fixture
def other() -> Iterator[str]:
    """A GPU that is not the current one, and must not become it."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.zeros(1, device="cuda:0")
    with torch.cuda.device(0):
        before = torch.cuda.memory_allocated(0)
        yield "cuda:1"
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0
        assert torch.cuda.memory_allocated(0) <= before, "something was allocated on the current GPU"


def _route(device: str) -> None:
    logits = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    for kind in (torch.float32, torch.bfloat16):
        mine = topk_softmax(logits.to(kind).to(device), 4)
        right = topk_softmax(logits.to(kind), 4)
        assert mine.ids.device == torch.device(device)
        torch.testing.assert_close(mine.weights.cpu(), right.weights, rtol=1e-4, atol=1e-6)


def _check_ids(device: str) -> None:
    ids = torch.tensor([[1, 1, 2], [9, -1, 0]])
    weights = torch.full((2, 3), 0.25)
    counts = torch.zeros(2, 3, dtype=torch.int32)
    reference_ids.count_rows(ids, 8, counts)
    assert torch.equal(validate_expert_ids(ids.to(device), 8).tensor.cpu(), counts)
    mine, right = deduplicate(ids.to(device), weights.to(device)), deduplicate(ids, weights)
    assert torch.equal(mine.ids.cpu(), right.ids)


def _watch(device: str) -> None:
    from id_and_watch_calls import CHECKS

    for name in ("ids with a step", "watch", "watch three"):
        CHECKS[name](device)


def _forward(device: str) -> None:
    for tokens in (3, 300):
        layer = _layer(device, tokens)
        for launcher in LAUNCHERS:
            _assert_close(_run(launcher, *layer), _right(*layer))


def _cache(device: str) -> None:
    weights = {"w": torch.randn(8, 128, 128).bfloat16(), "odd": torch.randn(8, 3)}
    for engine, packed in (("device", False), ("device", True), ("host", False), ("resident", False)):
        slots = 8 if engine == "resident" else 4
        cache = ExpertCache(weights, slots, engine=engine, device=device, packed=packed)
        assert cache.engine == engine
        assert bool(cache._store.packed) == packed
        for row in ([0, 5, 7], [1, 5, 6]):
            ids = torch.tensor([row], device=device)
            cache.prefetch(ids)
            held = cache.acquire(ids)
            for name, tensor in weights.items():
                got = held.weights[name][held.slot_ids[0].long()].cpu()
                assert torch.equal(got, tensor[row]), (engine, name)
        for part in cache.groups(torch.arange(8, device=device)[None]):
            named = part.slot_ids[0] >= 0
            slots = part.weights["w"][part.slot_ids[0][named].long()]
            assert torch.equal(slots.cpu(), weights["w"][named.cpu()]), engine


def _offload(device: str) -> None:
    torch.manual_seed(0)
    for access in ("copy", "view"):
        stack = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(device)
        stack.requires_grad_(False)
        x = torch.randn(3, 256, device=device)
        right = stack(x)
        torch.cuda.synchronize(1)
        before = torch.cuda.memory_allocated(1)
        held = offload(stack, 1 << 40, access=access, keep_below=1)
        assert held.report().pinned_bytes >= 4 * 256 * 256 * 4
        assert torch.equal(stack(x), right), access
        if access == "view":
            assert torch.cuda.memory_allocated(1) < before, "the weights were copied and not mapped"
        held.restore()


@pytest.mark.parametrize("use", [_route, _check_ids, _watch, _forward, _cache, _offload])
def test_tensors_on_a_gpu_that_is_not_the_current_one(use: Callable[[str], None], other: str) -> None:
    use(other)
