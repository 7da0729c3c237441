"""Two probes on a GPU: weights copied from pageable memory, and a kernel that is given a host address."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def pageable_weights(device: str) -> dict[str, Any]:
    """Layers run through vLLM's path without UVA and without pinned memory, behind a full queue.

    By vLLM's own offloader where that can be imported, else by our restatement; ``whose`` says which.
    """
    from moedoctor.bench.offload import NAMES, StackShape, make_stack
    from moedoctor.reference.offload_paths import functional_call_offload
    from moedoctor.upstream.releases import offload_peers

    shape = StackShape(layers=4, experts=16, hidden=1024, intermediate=512, top_k=4)
    x = torch.randn(256, shape.hidden, device=device, dtype=shape.dtype)  # [T, H]
    stack = make_stack(shape, device)
    expected = stack(x)  # [T, H]
    release = offload_peers.version()
    if release:
        offload_peers.copying_offload(list(stack), NAMES, shape.layers * shape.layer_bytes)
    else:
        functional_call_offload(list(stack), NAMES, pin=False)
    on_host = all(
        one.w13_weight.device.type == "cpu" for one in stack.modules() if hasattr(one, "w13_weight")
    )
    work = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    wrong, passes = 0, 50
    for _ in range(passes):
        for _ in range(10):
            work @ work
        wrong += not torch.equal(stack(x), expected)
    whose = f"vLLM {release}" if release else "restated"
    return {"whose": whose, "weights_on_host": on_host, "passes": passes, "wrong_results": wrong}


def host_address(device: str) -> dict[str, Any]:
    """Launch a kernel on the address of a CPU tensor, as a backend does that does not check."""
    from moedoctor.kernels.unchecked import read_address

    scales = torch.ones(1 << 20)
    out = read_address(scales.data_ptr(), scales.numel(), device)
    torch.cuda.synchronize()
    return {"returned": True, "sum": float(out.sum())}
