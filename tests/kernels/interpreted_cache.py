"""Compares the engines of the expert cache in Triton's interpreter; a script for `test_cache`.

Triton decides at import whether it interprets, so this needs a process of its own.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run

from moedoctor.fixes.eviction import ONLINE_POLICIES, SlotTable
from moedoctor.fixes.expert_cache import CachedExperts, ExpertCache, ExpertStore
from moedoctor.fixes.moe.forward import GroupedForward, moe_forward
from moedoctor.kernels.cache import EVERY_ROW, HALVED_EVERY, transfer
from moedoctor.reference.moe import MoeWeights
from moedoctor.reference.moe import forward as reference

EXPERTS = 11
WEIGHTS = {
    "w13": torch.randn(EXPERTS, 6, 8, generator=torch.Generator().manual_seed(0)),  # wide copies
    "w2": torch.randn(EXPERTS, 4, 3, generator=torch.Generator().manual_seed(1)).bfloat16(),  # narrow ones
    "w2_scale": torch.rand(EXPERTS, generator=torch.Generator().manual_seed(2)),
}
calls = st.lists(st.lists(st.integers(-1, EXPERTS - 1), min_size=2, max_size=2), min_size=1, max_size=3)


def assert_holds(
    ids: torch.Tensor, held: CachedExperts, weights: dict[str, torch.Tensor] = WEIGHTS
) -> torch.Tensor:
    """Check that slots have their experts' bytes; return which ids have a slot."""
    named = held.slot_ids >= 0  # [T, K]
    for name, tensor in weights.items():
        got = held.weights[name][held.slot_ids[named].long()].contiguous()
        assert torch.equal(got.view(torch.uint8), tensor[ids[named].long()].view(torch.uint8)), name
    return named


def assert_lists(named: torch.Tensor, held: CachedExperts) -> None:
    """Check that a group lists the expert of each slot, as `GroupedForward` expects."""
    if held.experts is not None:
        listed = held.experts[held.experts >= 0]
        assert sorted(listed.tolist()) == sorted(set(named.tolist()))
        for name, tensor in WEIGHTS.items():
            assert torch.equal(held.weights[name][held.experts >= 0], tensor[listed.long()]), name


class Engines(RuleBasedStateMachine):
    """Both engines against one table: the same slots after any sequence, and the host's bytes in them."""

    @initialize(policy=st.sampled_from(ONLINE_POLICIES), capacity=st.integers(1, EXPERTS + 2))
    def start(self, policy: str, capacity: int) -> None:
        self.caches = [
            ExpertCache(WEIGHTS, capacity, policy=policy, engine=engine, device="cpu")
            for engine in ("device", "host")
        ]
        self.table = SlotTable(EXPERTS, capacity, policy)
        self.calls = self.misses = 0

    @rule(rows=calls)
    def call(self, rows: list[list[int]]) -> None:
        ids = torch.tensor(rows, dtype=torch.int32)  # [T, K]
        parts = self.table.split([expert for row in rows for expert in row])
        self.calls += 1
        self.misses += sum(self.table.step(part) for part in parts)
        for cache in self.caches:
            computed = torch.zeros_like(ids)
            for part in cache.groups(ids):
                named = assert_holds(ids, part)
                computed += named
                assert_lists(ids[named], part)
            assert torch.equal(computed, (ids >= 0).int())

    @rule(expert=st.integers(0, EXPERTS - 1))
    def prefetch(self, expert: int) -> None:
        self.table.step([expert])
        for cache in self.caches:
            cache.prefetch(torch.tensor([expert], dtype=torch.int32))

    @rule(rows=calls)
    def seed(self, rows: list[list[int]]) -> None:
        self.table = SlotTable(EXPERTS, self.table.capacity, self.table.policy)
        for row in rows:
            for part in self.table.split(row):
                self.table.step(part)
        for cache in self.caches:
            cache.seed(torch.tensor(rows))

    @invariant()
    def agree(self) -> None:
        for cache in getattr(self, "caches", ()):
            assert cache.resident() == self.table.expert_of, cache.engine
            assert cache.mapping.tolist() == self.table.slot_of, cache.engine
            assert cache._engine.read_table().clock == self.table.clock, cache.engine
            stats = cache.stats
            assert (stats.calls, stats.misses) == (self.calls, self.misses), cache.engine
            for slot, expert in enumerate(self.table.expert_of):
                for name, tensor in WEIGHTS.items():
                    assert expert < 0 or torch.equal(cache.weights[name][slot], tensor[expert])


def stateful() -> None:
    run(
        Engines,
        settings=settings(
            max_examples=int(os.environ.get("EXAMPLES", "12")),
            stateful_step_count=int(os.environ.get("STEPS", "10")),
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def many_ids() -> None:
    """More ids than are compared in registers, more experts than are ranked at once, ids out of range."""
    weights = {"w": torch.randn(200, 8)}
    device, host = (
        ExpertCache(weights, 60, engine=engine, device="cpu", policy="lfru") for engine in ("device", "host")
    )
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(-1, 200, (40, 4), generator=draw)  # [T, K]
        for ours, theirs in zip(device.groups(ids), host.groups(ids), strict=False):
            assert_holds(ids, ours, weights)
            assert torch.equal(ours.slot_ids, theirs.slot_ids)
        assert device.resident() == host.resident()
    ids = torch.tensor([[3, 200, -7, 1 << 30]])
    assert (device.acquire(ids).slot_ids >= 0).tolist() == [[True, False, False, False]]


def packed() -> None:
    """The kernel unpacks packed weights to the same bits."""
    draw = torch.Generator().manual_seed(0)
    weights = {
        "w13": torch.randn(6, 112, 128, generator=draw).bfloat16(),  # a block and three quarters
        "w2": (torch.randn(6, 128, 64, generator=draw) * 0.02).bfloat16(),
        "bias": torch.randn(6, 112, generator=draw),
    }
    weights["w2"].view(-1)[::4001] = 300.0
    weights["w2"].view(-1)[7::4001] = 0.0
    weights["w2"].view(-1)[9] = -torch.inf
    weights["w2"].view(-1)[8191] = torch.nan
    cache = ExpertCache(weights, 4, engine="device", device="cpu", packed=True)
    assert set(cache._store.packed) == {"w13", "w2"}
    for start in (0, 2, 3, 0):
        ids = torch.arange(start, start + 3)[None]
        assert_holds(ids, cache.acquire(ids), weights)


def packed_exponents() -> None:
    """Any exponents that fit come out as they went in: few or many of them, the lowest and the highest."""
    draw = torch.Generator().manual_seed(1)
    chosen = [
        torch.full((8192,), 127),
        torch.arange(8192) % 11 + 120,
        torch.arange(8192) // 4097 * 7 + 120,  # the second half has three bits more, all in a row
        torch.where(torch.arange(8192) < 4096, 0, torch.arange(8192) % 3 + 3),
        torch.where(torch.arange(8192) % 2 == 0, 255, 247),
        torch.randint(0, 8, (8192,), generator=draw),
        torch.randint(248, 256, (8192,), generator=draw),
        127 - torch.empty(8192).geometric_(0.5, generator=draw).long().clamp(max=126),
        127 - torch.empty(8192).geometric_(0.7, generator=draw).long().clamp(max=126),
        # The tail ends with the codes and has room for no other word.
        torch.where(torch.arange(8192) < 2700, torch.arange(8192) % 8 + 123, torch.arange(8192) % 3 + 120),
    ]
    words = torch.stack(chosen) << 7
    words |= torch.randint(0, 128, words.shape, generator=draw)  # mantissas
    words |= torch.randint(0, 2, words.shape, generator=draw) << 15  # signs
    bits = torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
    for name, row in zip("abcdefghij", bits, strict=True):
        weights = {name: torch.stack([row, row.flip(0), row]).view(torch.bfloat16).view(3, 64, 128)}
        cache = ExpertCache(weights, 2, engine="device", device="cpu", packed=True)
        assert set(cache._store.packed) == {name}, name
        ids = torch.tensor([[1, 0]])
        assert_holds(ids, cache.acquire(ids), weights)


def mapped() -> None:
    """Kernels read the host's memory at the address that the driver gives, packed or not."""
    draw = torch.Generator().manual_seed(0)
    right = {
        "w": torch.randn(6, 128, 64, generator=draw).bfloat16(),
        "bias": torch.randn(6, 40, generator=draw),
        "odd": torch.randn(6, 3, generator=draw).bfloat16(),
    }
    for is_packed in (False, True):
        store = ExpertStore({name: tensor.clone() for name, tensor in right.items()}, packed=is_packed)
        held = [*store.tensors.values(), *(part.blocks for part in store.packed.values())]
        mirrors = {tensor.data_ptr(): tensor.clone() for tensor in held}
        for tensor in held:
            tensor.zero_()
        original = transfer.find_device_address
        transfer.find_device_address = lambda memory, device, mirrors=mirrors: mirrors[
            memory.data_ptr()
        ].data_ptr()
        try:
            cache = ExpertCache(store, 4, engine="device", device="cpu")
        finally:
            transfer.find_device_address = original
        ids = torch.tensor([[1, 5, 0]])
        assert_holds(ids, cache.acquire(ids), right)


def random_weights(
    draw: torch.Generator, slots: int, dtype: torch.dtype, activation: str = "silu", *, bias: bool
) -> dict[str, torch.Tensor]:
    """Weights of hidden size 40 and intermediate size 24, with scales if they are FP8."""
    shapes = {"w13": (slots, 48 if activation == "silu" else 24, 40), "w2": (slots, 40, 24)}
    weights = {name: (torch.randn(shape, generator=draw) / 6).to(dtype) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if dtype is torch.float8_e4m3fn:
            weights[f"{name}_scale"] = torch.rand(slots, generator=draw) + 0.5
        if bias:
            weights[f"{name}_bias"] = torch.randn(shape[:2], generator=draw)
    return weights


def forward() -> None:
    """Both forwards match the reference, with and without the optional parts of a model."""
    draw = torch.Generator().manual_seed(0)
    for tokens, activation, dtype, bias in (
        (2, "silu", torch.bfloat16, False),
        (2, "relu2", torch.float32, True),
        (1, "silu", torch.float8_e4m3fn, True),
        (90, "silu", torch.bfloat16, True),
        (90, "relu2", torch.float8_e4m3fn, False),
        (170, "silu", torch.bfloat16, False),  # two programs share the rows of an expert
    ):
        hidden, slots = 40, 5
        weights = random_weights(draw, slots, dtype, activation, bias=bias)
        x = torch.randn(tokens, hidden, generator=draw)  # [T, H]
        x = x if dtype is torch.float32 else x.bfloat16()
        ids = torch.randint(-1, slots, (tokens, 3), generator=draw, dtype=torch.int32)  # [T, K]
        ids[: tokens // 4] = 0  # more rows than a tile has
        ids[tokens // 4 : 2 * tokens // 3] = 1  # more than a tall one has
        topk_weights = torch.rand(tokens, 3, generator=draw)  # [T, K]
        right = reference(x, MoeWeights.from_tensors(weights, activation), topk_weights, ids)  # [T, H]
        tolerance = 1e-5 if tokens < 10 else 1e-2  # bfloat16 intermediates
        for out in (None, torch.ones(tokens, hidden)) if tokens < 10 else (torch.ones(tokens, hidden),):
            before = 0.0 if out is None else 1.0
            total = moe_forward(x, weights, ids, topk_weights, activation=activation, out=out)
            error = float((total - before - right).norm() / right.norm())
            assert error < tolerance, (tokens, activation, dtype, error)


def wrong_ids() -> None:
    """An id below 0 or from E on is ignored; around the weights is NaN, which no kernel may read."""
    draw = torch.Generator().manual_seed(0)
    experts, hidden = 4, 40
    wrong = (-7, experts, experts + 1, 1 << 30, (1 << 32) + 1, -(1 << 32) + 2, (1 << 63) - 1)
    for tokens, activation, dtype, bias in (
        (3, "silu", torch.bfloat16, True),
        (3, "relu2", torch.float8_e4m3fn, False),
        (90, "silu", torch.bfloat16, True),
    ):
        inside = random_weights(draw, experts, dtype, activation, bias=bias)
        weights = {}
        for name, tensor in inside.items():
            padded = tensor.new_full((experts + 4, *tensor.shape[1:]), float("nan"), dtype=torch.float32)
            padded[2:-2] = tensor.float()
            weights[name] = padded.to(tensor.dtype)[2:-2]
        x = torch.randn(tokens, hidden, generator=draw).bfloat16()  # [T, H]
        right_ids = torch.randint(-1, experts, (tokens, 3), generator=draw)  # [T, K]
        right_ids[0] = -1
        topk_weights = torch.rand(tokens, 3, generator=draw)  # [T, K]
        for id_type in (torch.int32, torch.int64):
            limit = torch.iinfo(id_type).max
            ids = right_ids.clone()
            empty = (ids < 0).nonzero()
            for place, (token, lane) in enumerate(empty.tolist()):
                ids[token, lane] = [id_ for id_ in wrong if abs(id_) <= limit][
                    place % 4 if limit < 1 << 40 else place % 7
                ]
            ids, right = ids.to(id_type), right_ids.to(id_type)
            arguments = {"topk_weights": topk_weights, "activation": activation}
            for start in (None, 1.0):
                outs = [
                    moe_forward(
                        x,
                        weights,
                        some,
                        out=None if start is None else torch.full((tokens, hidden), start),
                        **arguments,
                    )
                    for some in (ids, right)
                ]
                assert torch.equal(*outs), (tokens, activation, id_type)
            call = GroupedForward(x, ids, topk_weights, experts, activation=activation)
            # The last two slots are of experts that there are not: not of this call, and of none.
            spare = {name: torch.cat([tensor, tensor[:2]]) for name, tensor in weights.items()}
            call.add(spare, torch.tensor([0, 1, 2, 3, experts, 1 << 30], dtype=torch.int32))
            total = call.sum()
            assert bool(total.isfinite().all())
            assert torch.allclose(total, outs[1] - 1, atol=1e-4), (tokens, id_type)
    cache = ExpertCache(WEIGHTS, 8, engine="device", device="cpu")
    for ids in (torch.tensor([[3, (1 << 32) + 5, EXPERTS]]), torch.tensor([[3] + [(1 << 32) + 5] * 70])):
        assert next(iter(cache.groups(ids))).slot_ids[0, 0] == 0
        assert cache.resident() == [3] + [-1] * 7, "2**32 + 5 is not expert 5"


def grouped() -> None:
    """Groups that are resident one after another give the bits of one call."""
    draw = torch.Generator().manual_seed(0)
    experts, hidden = 9, 40
    for tokens, dtype, bias in (
        (90, torch.bfloat16, True),
        (90, torch.float8_e4m3fn, False),
        (4, torch.float32, False),
    ):
        weights = random_weights(draw, experts, dtype, bias=bias)
        x = torch.randn(tokens, hidden, generator=draw)  # [T, H]
        ids = torch.randint(-1, experts, (tokens, 3), generator=draw, dtype=torch.int32)  # [T, K]
        topk_weights = torch.rand(tokens, 3, generator=draw)  # [T, K]
        whole = moe_forward(x, weights, ids, topk_weights)  # [T, H]
        for engine in ("device", "host"):
            cache = ExpertCache(weights, 4, engine=engine, device="cpu")
            for _ in range(2 if engine == "device" and tokens < 10 else 1):
                call = GroupedForward(x, ids, topk_weights, experts)
                for part in cache.groups(ids):
                    call.add(part.weights, part.experts)
                total = call.sum()
                assert torch.equal(total, whole) or (tokens < 10 and torch.allclose(total, whole, rtol=1e-5))


def overlapping() -> None:
    """Hits and misses of one call, computed as two groups, give what one call with all experts gives."""
    draw = torch.Generator().manual_seed(0)
    for tokens, capacity in ((2, 6), (90, 9)):  # pair by pair, and in tiles
        weights = random_weights(draw, 9, torch.bfloat16, bias=True)
        cache = ExpertCache(weights, capacity, engine="device", device="cpu")
        for _ in range(3 if tokens < 10 else 2):
            x = torch.randn(tokens, 40, generator=draw)  # [T, H]
            ids = torch.randint(-1, 9, (tokens, 3), generator=draw, dtype=torch.int32)  # [T, K]
            topk_weights = torch.rand(tokens, 3, generator=draw)  # [T, K]
            call = GroupedForward(x, ids, topk_weights, 9)
            for part in cache.groups(ids, overlap=True):
                call.add(part.weights, part.experts)
            total, whole = call.sum(), moe_forward(x, weights, ids, topk_weights)
            assert torch.equal(total, whole) or (tokens < 10 and torch.allclose(total, whole, rtol=1e-5))


def one_expert_or_slot() -> None:
    """A model of one expert and a cache of one slot work with every engine, policy and way to compute."""
    draw = torch.Generator().manual_seed(0)
    for experts, capacity in ((1, 1), (3, 1), (1, 3)):
        weights = random_weights(draw, experts, torch.bfloat16, bias=True)
        ids = torch.randint(-1, experts, (3, 2), generator=draw)  # [T, K]
        engines = [("device", policy) for policy in ONLINE_POLICIES] + [("host", "lfru"), ("resident", "lru")]
        for engine, policy in engines[: None if capacity >= experts else -1]:
            cache = ExpertCache(weights, capacity, engine=engine, policy=policy, device="cpu")
            for overlap in (False, True):
                computed = sum(
                    assert_holds(ids, part, weights).int() for part in cache.groups(ids, overlap=overlap)
                )
                assert torch.equal(computed, (ids >= 0).int())
            cache.prefetch(ids[:1, :1])
            cache.seed(ids)
            assert_holds(ids[:1, :1], cache.acquire(ids[:1, :1]), weights)
        for tokens in (1, 130) if experts == 1 else (2,):
            x = torch.randn(tokens, 40, generator=draw)  # [T, H]
            ids = torch.randint(-1, experts, (tokens, 2), generator=draw)  # [T, K]
            topk_weights = torch.rand(tokens, 2, generator=draw)  # [T, K]
            cache = ExpertCache(weights, capacity, engine="device", device="cpu")
            call = GroupedForward(x, ids, topk_weights, experts)
            for part in cache.groups(ids, overlap=True):
                call.add(part.weights, part.experts)
            right = reference(x, MoeWeights.from_tensors(weights), topk_weights, ids)  # [T, H]
            assert torch.allclose(call.sum(), right, rtol=1e-2, atol=1e-2)
            assert torch.allclose(moe_forward(x, weights, ids, topk_weights), right, rtol=1e-2, atol=1e-2)


def early() -> None:
    """With `overlap` the hits come first, then what had to be loaded; decisions are the table's, also after
    `aging` has halved its counts."""
    draw = torch.Generator().manual_seed(0)
    for policy in ONLINE_POLICIES:
        cache = ExpertCache(WEIGHTS, 6, engine="device", device="cpu", policy=policy)
        table = SlotTable(EXPERTS, 6, policy)
        for _ in range(HALVED_EVERY + 12 if policy == "aging" else 12):
            ids = torch.randint(-1, EXPERTS, (2, 3), generator=draw)  # [T, K]
            table.step(sorted(set(ids.flatten().tolist()) - {-1}))
            resident = cache.mapping[ids.clamp_min(0)] >= 0  # [T, K]
            named = []
            for part in cache.groups(ids, overlap=True):
                named.append(assert_holds(ids, part))
                assert part.experts is not None
                assert_lists(ids[named[-1]], part)
            hits, misses = named
            assert torch.equal(hits, resident & (ids >= 0))
            assert torch.equal(misses, ~resident & (ids >= 0))
            assert cache.resident() == table.expert_of
    cache = ExpertCache(WEIGHTS, 6, engine="device", device="cpu")
    for expert in (5, 0):
        cache.acquire(torch.tensor([[expert]]))
    cache.seed(torch.tensor([[0, 1]]))  # one call: the next is the second again, as that which loaded 0 was
    for nothing in (torch.full((1, 2), -1), torch.empty((0, 2), dtype=torch.int64)):
        assert all(bool((part.slot_ids == -1).all()) for part in cache.groups(nothing, overlap=True))
    hits, misses = (part.slot_ids >= 0 for part in cache.groups(torch.tensor([[0, 5]]), overlap=True))
    assert hits.tolist() == [[True, False]]
    assert misses.tolist() == [[False, True]]


def padding() -> None:
    """Rows that are padding count as the first row, few ids or many, in one group, in several and in two;
    `rows` is read at each call. Both engines agree."""
    draw = torch.Generator().manual_seed(0)
    everything = torch.tensor([EVERY_ROW], dtype=torch.int32)
    for tokens, capacity, overlap in ((4, 12, False), (4, 3, False), (4, 12, True), (40, 5, False)):
        rows = everything.clone()
        padded, plain = (
            ExpertCache(WEIGHTS, capacity, engine="device", device="cpu", policy="aging") for _ in range(2)
        )
        on_host = ExpertCache(WEIGHTS, capacity, engine="host", device="cpu", policy="aging")
        for cache in (padded, on_host):
            cache.skip_padding(rows)
        for real in (tokens, 1, tokens - 1, EVERY_ROW, 2, 0):
            rows.fill_(real)
            ids = torch.randint(-1, EXPERTS, (tokens, 3), generator=draw)  # [T, K]
            meant = ids.clone()
            meant[max(real, 1) :] = ids[0]
            given = [part.slot_ids for part in padded.groups(ids, overlap=overlap)]
            expected = [part.slot_ids for part in plain.groups(meant, overlap=overlap)]
            assert len(given) == len(expected)
            assert all(map(torch.equal, given, expected)), (tokens, capacity, real)
            for part in on_host.groups(ids):
                assert_holds(meant, part)
            assert padded.resident() == plain.resident() == on_host.resident(), (tokens, capacity, real)
            assert padded.stats == plain.stats
            assert padded.stats.misses == on_host.stats.misses


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
