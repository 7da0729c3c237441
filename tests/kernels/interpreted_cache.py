"""Checks of the expert cache in Triton's interpreter, as a script: engines, copies, forwards, and failures.

Triton decides at import whether it interprets, so this needs a process of its own.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from functools import partial
from itertools import product
from threading import Timer
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run

from moedoctor.fixes.cache import device
from moedoctor.fixes.cache.engine import predict_table
from moedoctor.fixes.eviction import ONLINE_POLICIES, SlotTable
from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore, choose_followed
from moedoctor.fixes.layer_stream import LayerStream
from moedoctor.fixes.moe.forward import GroupedForward, moe_forward
from moedoctor.kernels.cache import EVERY_ROW, HALVED_EVERY, transfer
from moedoctor.kernels.cache.transfer import Transfer
from moedoctor.plugin import cpu_experts
from moedoctor.reference.moe import MoeWeights
from moedoctor.reference.moe import forward as reference
from tests.fixes.cache.checks import EXPERTS, WEIGHTS, assert_consistent, assert_holds
from tests.fixes.cache.test_host_workers_gpu import check_sums

SLOTS = 4
IDS = torch.tensor([[1, 2, 3]])
MANY = torch.tensor([[0, 1, 2, 3, 4, 5]])
CALLS: dict[str, Callable[[ExpertCache], Any]] = {
    "acquire": lambda cache: cache.acquire(IDS),
    "groups": lambda cache: list(cache.groups(MANY)),
    "overlap": lambda cache: list(cache.groups(IDS, overlap=True)),
    "prefetch": lambda cache: cache.prefetch(IDS),
    "seed": lambda cache: cache.seed(IDS),
}


def new(policy: str = "lfru", engine: str = "device") -> ExpertCache:
    cache = ExpertCache(WEIGHTS, SLOTS, policy=policy, engine=engine, device="cpu")
    cache.acquire(torch.tensor([[9, 1]]))
    return cache


def name_padding(ids: torch.Tensor, real: int) -> torch.Tensor:
    """Return the ids [T, K] that a call stands for if only `real` of its rows are no padding."""
    meant = ids.clone()
    meant[max(real, 1) :] = ids[0]
    return meant


calls = st.lists(st.lists(st.integers(-1, EXPERTS - 1), min_size=2, max_size=2), min_size=1, max_size=3)


class Engines(RuleBasedStateMachine):
    """Both engines against one table: the same slots after any sequence, and the host's bytes in them."""

    @initialize(
        policy=st.sampled_from(ONLINE_POLICIES),
        experts=st.sampled_from((1, 3, EXPERTS)),
        capacity=st.integers(1, EXPERTS + 2),
    )
    def start(self, policy: str, experts: int, capacity: int) -> None:
        self.experts, self.weights = experts, {name: tensor[:experts] for name, tensor in WEIGHTS.items()}
        self.rows = torch.tensor([EVERY_ROW], dtype=torch.int32)
        self.caches = [
            ExpertCache(self.weights, capacity, policy=policy, engine=engine, device="cpu")
            for engine in ("device", "host")
        ]
        for cache in self.caches:
            cache.skip_padding(self.rows)
        self.table = SlotTable(experts, capacity, policy)
        self.calls = self.misses = self.prefetched = 0

    def make_ids(self, rows: list[list[int]]) -> torch.Tensor:
        ids = torch.tensor(rows, dtype=torch.int32)  # [T, K]
        return torch.where(ids < 0, ids, ids % self.experts)

    @rule(rows=calls, real=st.sampled_from((EVERY_ROW, 3, 2, 1, 0)), overlap=st.booleans())
    def call(self, rows: list[list[int]], real: int, overlap: bool) -> None:
        """With `overlap` a call that fits is two groups: hits, then misses."""
        ids = self.make_ids(rows)
        self.rows.fill_(real)
        meant = name_padding(ids, real)
        hits = (meant >= 0) & (self.caches[0].mapping[meant.clamp_min(0).long()] >= 0)
        parts = self.table.split(meant.flatten().tolist())
        self.calls += 1
        self.misses += sum(self.table.step(part) for part in parts)
        for cache in self.caches:
            named = [assert_holds(meant, part, self.weights) for part in cache.groups(ids, overlap=overlap)]
            assert torch.equal(sum(each.int() for each in named), (meant >= 0).int())
            if overlap and cache.engine == "device" and not cache.may_need_groups(ids):
                assert torch.equal(named[0], hits)

    @rule(expert=st.integers(0, EXPERTS - 1))
    def prefetch(self, expert: int) -> None:
        ids = self.make_ids([[expert]])
        self.prefetched += self.table.step(ids[0].tolist())
        for cache in self.caches:
            cache.prefetch(ids[0])

    @rule(rows=calls, streams=st.booleans())
    def seed(self, rows: list[list[int]], streams: bool) -> None:
        """`streams`: from weights that are all on the device."""
        ids = self.make_ids(rows)
        followed = choose_followed(ids, self.rows) if streams else ids
        self.table = predict_table(followed, self.experts, self.table.capacity, self.table.policy)
        for cache in self.caches:
            _ = cache.seed_from(ids, self.weights) if streams else cache.seed(ids)

    @invariant()
    def agree(self) -> None:
        for cache in getattr(self, "caches", ()):
            assert cache.resident() == self.table.expert_of, cache.engine
            assert cache._engine.read_table().clock == self.table.clock, cache.engine
            assert_consistent(cache, self.weights)
            stats = cache.stats
            counts = self.calls, self.misses, self.prefetched
            assert (stats.calls, stats.misses, stats.prefetched) == counts, cache.engine


def stateful() -> None:
    examples, steps = int(os.environ.get("EXAMPLES", "24")), int(os.environ.get("STEPS", "10"))
    same = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    run(Engines, settings=settings(same, max_examples=examples, stateful_step_count=steps))


def many_ids() -> None:
    """More ids than are compared in registers, more experts than are ranked at once, ids out of range."""
    weights = {"w": torch.randn(200, 8)}
    made = partial(ExpertCache, weights, 60, device="cpu", policy="lfru")
    device, host = made(engine="device"), made(engine="host")
    rows, draw = torch.tensor([EVERY_ROW], dtype=torch.int32), torch.Generator().manual_seed(0)
    for cache in (device, host):
        cache.skip_padding(rows)
    for real in (EVERY_ROW, 39, 1):
        rows.fill_(real)
        ids = torch.randint(-1, 200, (40, 4), generator=draw)  # [T, K]
        for ours, theirs in zip(device.groups(ids), host.groups(ids), strict=False):
            assert_holds(name_padding(ids, real), ours, weights)
            assert torch.equal(ours.slot_ids, theirs.slot_ids)
        assert device.resident() == host.resident()
    ids = torch.tensor([[3, 200, -7, 1 << 30]])
    assert (device.acquire(ids).slot_ids >= 0).tolist() == [[True, False, False, False]]


def mapped() -> None:
    """Kernels read the host's memory at the address that the driver gives, and unpack it to the same bits."""
    draw = torch.Generator().manual_seed(0)
    right = {
        "w13": torch.randn(6, 112, 128, generator=draw).bfloat16(),  # a block and three quarters
        "w2": (torch.randn(6, 128, 64, generator=draw) * 0.02).bfloat16(),
        "bias": torch.randn(6, 112, generator=draw),
        "odd": torch.randn(6, 3, generator=draw).bfloat16(),
    }
    right["w2"].view(-1)[::4001] = 300.0
    right["w2"].view(-1)[7::4001] = 0.0
    right["w2"].view(-1)[9] = -torch.inf
    right["w2"].view(-1)[8191] = torch.nan
    for packed in (set(), {"w13", "w2"}):
        store = ExpertStore({name: tensor.clone() for name, tensor in right.items()}, packed=bool(packed))
        assert set(store.packed) == packed
        held = [*store.tensors.values(), *(part.blocks for part in store.packed.values())]
        mirrors = {tensor.data_ptr(): tensor.clone() for tensor in held}
        for tensor in held:
            tensor.zero_()
        addresses = {address: mirror.data_ptr() for address, mirror in mirrors.items()}
        find = mock.Mock(side_effect=lambda memory, device, at=addresses: at[memory.data_ptr()])
        with mock.patch.object(transfer, "find_device_address", find):
            cache = ExpertCache(store, 4, engine="device", device="cpu")
        for start in (0, 3):
            ids = torch.arange(start, start + 3)[None]
            assert_holds(ids, cache.acquire(ids), right)


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
    for tokens, slots, activation, dtype, bias in (
        (2, 5, "silu", torch.bfloat16, False),
        (2, 5, "relu2", torch.float32, True),
        (1, 5, "silu", torch.float8_e4m3fn, True),
        (1, 1, "silu", torch.bfloat16, True),
        (130, 1, "silu", torch.bfloat16, True),
        (90, 5, "silu", torch.bfloat16, True),
        (90, 5, "relu2", torch.float8_e4m3fn, False),
        (170, 5, "silu", torch.bfloat16, False),  # two programs share the rows of an expert
    ):
        hidden = 40
        weights = random_weights(draw, slots, dtype, activation, bias=bias)
        x = torch.randn(tokens, hidden, generator=draw)  # [T, H]
        x = x if dtype is torch.float32 else x.bfloat16()
        ids = torch.randint(-1, slots, (tokens, 3), generator=draw, dtype=torch.int32)  # [T, K]
        ids[: tokens // 4] = 0  # more rows than a tile has
        ids[tokens // 4 : 2 * tokens // 3] = slots // 2  # more than a tall one has
        topk_weights = torch.rand(tokens, 3, generator=draw)  # [T, K]
        right = reference(x, MoeWeights.from_tensors(weights, activation), topk_weights, ids)  # [T, H]
        tolerance = 1e-5 if tokens < 10 else 1e-2  # bfloat16 intermediates
        for out in (None, torch.ones(tokens, hidden)) if tokens < 10 else (torch.ones(tokens, hidden),):
            before = 0.0 if out is None else 1.0
            total = moe_forward(x, weights, ids, topk_weights, activation=activation, out=out)
            error = float((total - before - right).norm() / right.norm())
            assert error < tolerance, (tokens, activation, dtype, error)


@mock.patch("moedoctor.fixes.moe.forward._MOST_DECODE_PAIRS", 16)
def wrong_ids() -> None:
    """An id below 0 or from E on is ignored; around the weights is NaN, which no kernel may read."""
    draw = torch.Generator().manual_seed(0)
    experts, hidden = 4, 40
    wrong = (-7, experts, experts + 1, 1 << 30, (1 << 32) + 1, -(1 << 32) + 2, (1 << 63) - 1)
    for tokens, activation, dtype, bias, id_type, start in (
        (3, "silu", torch.bfloat16, True, torch.int32, None),
        (3, "relu2", torch.float8_e4m3fn, False, torch.int64, 1.0),
        (20, "silu", torch.bfloat16, True, torch.int64, None),
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
        fitting = [id_ for id_ in wrong if abs(id_) <= torch.iinfo(id_type).max]
        ids, right = right_ids.clone(), right_ids.to(id_type)
        empty = ids < 0  # [T, K]
        ids[empty] = torch.tensor([fitting[place % len(fitting)] for place in range(int(empty.sum()))])
        ids = ids.to(id_type)
        outs = []
        for some in (ids, right):
            out = None if start is None else torch.full((tokens, hidden), start)
            outs.append(moe_forward(x, weights, some, topk_weights, activation=activation, out=out))
        assert torch.equal(*outs), (tokens, activation, id_type)
        call = GroupedForward(x, ids, topk_weights, experts, activation=activation)
        # The last two slots are of experts that there are not: not of this call, and of none.
        spare = {name: torch.cat([tensor, tensor[:2]]) for name, tensor in weights.items()}
        call.add(spare, torch.tensor([0, 1, 2, 3, experts, 1 << 30], dtype=torch.int32))
        total = call.sum()
        assert bool(total.isfinite().all())
        assert torch.allclose(total, outs[1] - (start or 0.0), atol=1e-4), (tokens, id_type)
    cache = ExpertCache(WEIGHTS, 8, engine="device", device="cpu")
    for ids in (torch.tensor([[3, (1 << 32) + 5, EXPERTS]]), torch.tensor([[3] + [(1 << 32) + 5] * 70])):
        assert next(iter(cache.groups(ids))).slot_ids[0, 0] == 0
        assert cache.resident() == [3] + [-1] * 7, "2**32 + 5 is not expert 5"


@mock.patch("moedoctor.fixes.moe.forward._MOST_DECODE_PAIRS", 16)
def grouped() -> None:
    """Groups that are resident one after another, or hits and then misses, give the bits of one call."""
    draw = torch.Generator().manual_seed(0)
    half, quarter = torch.bfloat16, torch.float8_e4m3fn
    for tokens, experts, capacity, dtype, engine, overlap in (
        (30, 5, 2, half, "device", False),
        (30, 5, 2, quarter, "host", False),
        (4, 5, 2, torch.float32, "device", False),
        (4, 5, 2, torch.float32, "host", False),
        (2, 9, 6, half, "device", True),  # pair by pair
        (30, 5, 5, half, "device", True),  # in tiles
        (2, 3, 1, half, "device", True),
    ):
        weights = random_weights(draw, experts, dtype, bias=dtype is half)
        cache = ExpertCache(weights, capacity, engine=engine, device="cpu")
        for _ in range(2 if overlap or tokens < 10 else 1):
            x = torch.randn(tokens, 40, generator=draw)  # [T, H]
            ids = torch.randint(-1, experts, (tokens, 3), generator=draw, dtype=torch.int32)  # [T, K]
            topk_weights = torch.rand(tokens, 3, generator=draw)  # [T, K]
            call = GroupedForward(x, ids, topk_weights, experts)
            for part in cache.groups(ids, overlap=overlap):
                call.add(part.weights, part.experts)
            total, whole = call.sum(), moe_forward(x, weights, ids, topk_weights)
            assert torch.equal(total, whole) or (tokens < 10 and torch.allclose(total, whole, rtol=1e-5))


def policies() -> None:
    """After a reset the kernel decides as a table of the same state does; `aging` halves counts, too."""
    draw = torch.Generator().manual_seed(2)
    for policy in ONLINE_POLICIES:
        cache = new(policy)
        with (
            mock.patch.object(Transfer, "launch", mock.Mock(side_effect=MemoryError)),
            pytest.raises(MemoryError),
        ):
            cache.acquire(IDS)
        table = cache._engine.read_table()
        for _ in range(HALVED_EVERY + 12 if policy == "aging" else 12):
            ids = torch.randint(0, EXPERTS, (1, 3), generator=draw)  # [T, K]
            table.step(sorted(set(ids.flatten().tolist())))
            assert_holds(ids, cache.acquire(ids))
            assert cache.resident() == table.expert_of
            assert_consistent(cache)


def reseeded() -> None:
    """A call after `seed` has the number of an earlier call, whose loads are not this one's."""
    cache = ExpertCache(WEIGHTS, 6, engine="device", device="cpu")
    for expert in (5, 0):
        cache.acquire(torch.tensor([[expert]]))
    cache.seed(torch.tensor([[0, 1]]))  # one call: the next is the second again, as that which loaded 0 was
    for nothing in (torch.full((1, 2), -1), torch.empty((0, 2), dtype=torch.int64)):
        assert all(bool((part.slot_ids == -1).all()) for part in cache.groups(nothing, overlap=True))
    parts = [(part.slot_ids >= 0).tolist() for part in cache.groups(torch.tensor([[0, 5]]), overlap=True)]
    assert parts == [[[True, False]], [[False, True]]]


class Breaking:
    """Raises `error` instead of call number `at`, or right after that call."""

    def __init__(self, wrapped: Callable[..., Any], error: BaseException, at: int, after: bool) -> None:
        self._wrapped, self._error, self._left, self._after = wrapped, error, at, after

    def __call__(self, *given: Any, **named: Any) -> None:
        self._left -= 1
        if self._left or self._after:
            self._wrapped(*given, **named)
        if not self._left:
            raise self._error


def broken() -> None:
    """After a call that fails at any step, the state is right and the next call uses the right experts."""
    kinds = (torch.OutOfMemoryError("out of memory"), False), (KeyboardInterrupt(), True)
    for how, (error, after), where in product(CALLS, kinds, ("copies", "lookup")):
        if (how, where) == ("seed", "lookup"):
            continue  # it has none
        for at in (1, 2) if how == "groups" else (1,):
            cache = new()
            owner, name = (Transfer, "launch") if where == "copies" else (device, "launch_lookup")
            real = cache._engine._transfer.launch if where == "copies" else device.launch_lookup
            with (
                mock.patch.object(owner, name, Breaking(real, error, at, after)),
                pytest.raises(type(error)) as caught,
            ):
                CALLS[how](cache)
            assert caught.value is error
            assert_consistent(cache)
            assert_holds(IDS, cache.acquire(IDS))


def between() -> None:
    """A call between two groups is right or an error; no group lacks experts."""
    others: dict[str, Callable[[ExpertCache], Any]] = {
        **CALLS,
        "begun groups": lambda cache: next(cache.groups(MANY + 4)),
        "begun overlap": lambda cache: next(cache.groups(IDS + 6, overlap=True)),
    }
    for engine in ("device", "host"):
        for how, other in others.items():
            cache = new(engine=engine)
            parts = cache.groups(MANY)
            first = next(parts)
            assert_holds(MANY, first)
            computed = (first.slot_ids >= 0).int()  # [T, K]
            other(cache)
            if engine == "device" and how in ("groups", "begun groups"):
                with pytest.raises(RuntimeError, match=r"another groups\(\) of this cache has begun"):
                    next(parts)
            else:
                for part in parts:
                    assert_holds(MANY, part)
                    computed += part.slot_ids >= 0
                assert bool((computed == 1).all()), (engine, how)
            assert_consistent(cache)
    for other in others.values():
        cache = new()
        hits_and_misses = cache.groups(IDS, overlap=True)
        next(hits_and_misses)
        other(cache)
        with pytest.raises(RuntimeError, match="may have evicted the second group's experts"):
            next(hits_and_misses)
        assert_consistent(cache)


def streamed() -> None:
    """Buffers hold every expert of their layer, packed or not, in any order of layers."""
    shape = (6, 60, 256)  # more than one packed block, the last of them padded
    draws = [torch.Generator().manual_seed(seed) for seed in range(3)]
    drawn = [torch.randn(shape, generator=draw).bfloat16() for draw in draws]
    layers = [{"w": weight, "bias": WEIGHTS["w13_bias"][:6]} for weight in drawn]
    for layer in layers:
        layer["w"][:, -1, -1] = 1.0  # padding repeats it
    for packed in (False, True):
        caches = [ExpertCache(layer, SLOTS, engine="device", device="cpu", packed=packed) for layer in layers]
        assert all(cache.packed is packed for cache in caches)
        stream = LayerStream(caches)
        for number in (0, 1, 0, 2, 2):
            with stream.fetch(number) as weights:
                for name, tensor in layers[number].items():
                    assert torch.equal(weights[name].view(torch.uint8), tensor.view(torch.uint8)), name
                caches[number].seed_from(torch.tensor([[number, 3], [4, 5]]), weights)
            assert_consistent(caches[number], layers[number])


def cpus_part() -> None:
    """The next request waits for a call that broke off; each share is timed from the same residents."""
    side = check_sums(torch.device("cpu"))
    cache, x, weights = side._caches[0], torch.ones(1, 64).bfloat16(), torch.ones(1, 3)
    cache.seed(torch.arange(6)[None])
    plant = partial(side._workers._library.moedoctor_fault, side._workers._crew, 0)
    plant(2)  # hangs
    Timer(1.0, plant, [0]).start()
    side.ask(0, x, weights, torch.tensor([[7, 8, 9]], dtype=torch.int32), 256)
    nothing = torch.tensor([[-1, 12, 3]], dtype=torch.int32)
    assert torch.equal(side.ask(0, x, weights, nothing, 256), nothing)
    assert side._workers.box.answers.tolist() == [int(side.stamps[0])] * 2
    side.add(x)
    assert x.eq(1).all()
    counters = [each.clone() for each in cpu_experts._list_counters(cache)]
    found, timed = [], side.time_step
    side.time_step = lambda *given: (found.append(cache.resident()), timed(*given))[1]
    with mock.patch.multiple(cpu_experts, CANDIDATES=(0, 256), _TIMED_STEPS=1):
        assert cpu_experts._choose_all(side, [1], 2)[0].share in (0, 256)
    assert len(found) > 1
    assert {*map(tuple, found), tuple(cache.resident())} == {(0, 1, 2, 3, 4, 5)}
    assert all(map(torch.equal, counters, cpu_experts._list_counters(cache)))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
