"""The expert cache's kernels, compiled for GPUs that need not be here."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from moedoctor.fixes.cache.packed import LANES, SIZE
from moedoctor.kernels.cache import handover, lookup, transfer
from tests.compiled_kernels import LOWERINGS, compile_launches


@pytest.mark.slow
@pytest.mark.parametrize("capability", [LOWERINGS[0], LOWERINGS[-1]])  # none uses tensor cores
def test_compiled(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
