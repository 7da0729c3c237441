"""The kernels of routing, ids, the NaN trace, recordings and the expert cache, compiled for GPUs not here."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from moedoctor.fixes.cache.packed import LANES, SIZE
from moedoctor.kernels.cache import handover, lookup, transfer
from moedoctor.kernels.expert_ids import launch_check, launch_deduplicate
from moedoctor.kernels.keep import launch_keep, launch_step
from moedoctor.kernels.kept_rows import HEADER, KeptRows, MoeCall, MoeInput, SavedCalls, Sizes
from moedoctor.kernels.routing.launch import launch_topk
from moedoctor.kernels.save_call import launch_save
from moedoctor.kernels.watch import launch_begin, launch_end, launch_watch, launch_watch_three
from tests.compiled_kernels import LOWERINGS, compile_launches

# None uses tensor cores, so the lowerings between the oldest and the newest add nothing.
pytestmark = pytest.mark.parametrize(
    "capability", [LOWERINGS[0], pytest.param(LOWERINGS[-1], marks=pytest.mark.slow)]
)


def _empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


def test_routing(capability: int) -> None:
    with compile_launches(capability) as kernels:
        weights, ids = _empty(64, 8, dtype=torch.float32), _empty(64, 8)
        # More experts are more instructions and no others, so one case has as many as models have.
        for experts, dtype, options in (
            (256, torch.bfloat16, {"scoring": "softmax"}),
            (64, torch.float16, {"scoring": "softmax", "renormalize": True, "nan_policy": "finite"}),
            (64, torch.float32, {"scoring": "softmax"}),
            (64, torch.bfloat16, {"scoring": "sigmoid", "num_groups": 8, "topk_groups": 4}),
            (64, torch.float32, {"scoring": "sigmoid", "bias": _empty(64, dtype=torch.float32)}),
        ):
            launch_topk(_empty(64, experts, dtype=dtype), weights, ids, **options)
    assert {kernel.metadata.name for kernel in kernels} == {"half_softmax_kernel", "topk_kernel"}


def test_expert_ids(capability: int) -> None:
    with compile_launches(capability) as kernels:
        for dtype, kind, spare in ((torch.int32, torch.bfloat16, False), (torch.int64, torch.float32, True)):
            ids, out = _empty(64, 8, dtype=dtype), (_empty(64, 8), _empty(64, 8, dtype=torch.float32))
            launch_check(ids, 128, _empty(2, 3))
            launch_check(ids, 128, _empty(2, 2, 3), _empty(1), _empty(2))
            launch_deduplicate(ids, _empty(64, 8, dtype=kind), *out, use_spare=spare)
    assert {kernel.metadata.name for kernel in kernels} == {"check_ids_kernel", "deduplicate_kernel"}


def test_the_nan_trace(capability: int) -> None:
    with compile_launches(capability) as kernels:
        header, found = _empty(32), _empty(3, 6, 5)
        launch_begin(header, 3, 8)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = _empty(8, 2048, dtype=dtype)
            launch_watch(x, header, found, 0, None)
            launch_watch(x, header, found, 0, _empty(8, dtype=torch.int8), ends=True)
        launch_watch_three([x, x, _empty(8, 128, dtype=torch.bfloat16)], header, found, [0, 1, 2])
        launch_end(header)
    assert len({kernel.metadata.name for kernel in kernels}) == 4


@pytest.mark.parametrize(("dtype", "routes_itself"), [(torch.bfloat16, False), (torch.float16, True)])
def test_recordings(capability: int, dtype: torch.dtype, routes_itself: bool) -> None:
    """A backend that routes by itself gives no ids and no weights; others may give no logits."""
    with compile_launches(capability) as kernels:
        x, ids, weights = _empty(8, 2048, dtype=dtype), _empty(8, 8), _empty(8, 8, dtype=torch.float32)
        logits = _empty(8, 128, dtype=dtype)
        given = MoeInput(x, logits=logits) if routes_itself else MoeInput(x, ids, weights)
        sizes = Sizes(2048, dtype, 2048, dtype, 8, 128)
        kept = KeptRows.make(64, sizes, _empty(HEADER))
        launch_step(kept.header, 3, -1, 0, frees=True)
        launch_keep(kept, 0, MoeCall(given, x))
        ring = [memory.unsqueeze(0) for memory in (kept.x, kept.ids, kept.weights, kept.logits)]
        launch_save(SavedCalls(_empty(1, 6, dtype=torch.int64), *ring), _empty(1), given)
    assert len({kernel.metadata.name for kernel in kernels}) == 3


@pytest.mark.slow
def test_the_expert_cache(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookkeeping of few and many experts and ids, and the copies."""
    monkeypatch.setattr(transfer, "find_device_address", lambda memory, device: 0)
    with compile_launches(capability) as kernels:
        device = torch.device("cuda")
        for experts, count in ((128, 64), (512, 64), (128, 4096)):
            state = lookup.LookupState.make(experts, 32, "lfru" if experts > 128 else "aging", device)
            ids = torch.empty(count // 8, 8, dtype=torch.int32)
            lookup.launch_groups(state, ids)
            lookup.launch_lookup(state, ids, torch.empty_like(ids), group=0)
            lookup.launch_lookup(state, ids, torch.empty_like(ids), late=torch.empty_like(ids))
            if (experts, count) == (128, 64):
                x, stamp = torch.empty(8, 2048, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int64)
                box = stamp, ids, ids, torch.empty(64, 8), x
                handover.launch_ask(state, ids, torch.empty(8, 8), x, stamp, box, 128, 5)
                handover.launch_add(x, torch.empty(8, 2048), stamp, stamp)
        host = {"whole": torch.empty(128, 4096), "odd": torch.empty(128, 3, dtype=torch.uint8)}
        packed = {"packed": (torch.empty(128, 1, 12_000, dtype=torch.uint8), SIZE, 256, 128)}
        slots = {
            name: torch.empty(32, *tensor.shape[1:], dtype=tensor.dtype) for name, tensor in host.items()
        }
        slots["packed"] = torch.empty(32, SIZE, dtype=torch.bfloat16)
        transfer.Transfer(host, packed, slots, (SIZE, LANES)).launch(state.copies)
    names = {kernel.metadata.name for kernel in kernels}
    ours = {"ask_kernel", "add_kernel"}
    assert names == {"group_kernel", "lookup_kernel", "transfer_kernel", "unpack_kernel", *ours}
    assert all("fence.acq_rel.sys" in kernel.asm["ptx"] for kernel in kernels if kernel.metadata.name in ours)
