"""The CPU's part of an expert cache with real workers, on a GPU; Triton's interpreter runs the same check."""

import sys

import pytest
import torch
from processes_seen import run

from moedoctor.fixes.cache.host_workers import HostWorkers
from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore
from moedoctor.plugin.cpu_experts import CpuExperts
from moedoctor.reference.moe import MoeWeights, forward

EXPERTS, HIDDEN, INNER, TOP_K = 12, 64, 128, 3


def check_sums(device: torch.device) -> CpuExperts:
    """Check that a layer's sum is that of all experts, for any share of the missing ones."""
    draw = torch.Generator().manual_seed(0)
    w1 = (torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw) / 8).bfloat16()
    w2 = (torch.randn(EXPERTS, HIDDEN, INNER, generator=draw) / 8).bfloat16()
    layers = [{"w1": w1, "w2": w2}, {"w1": w1.flip(0), "w2": w2}]
    gpu = device.type == "cuda"  # the interpreter would take long to unpack
    stores = [ExpertStore(each, pin=gpu, packed=gpu) for each in layers]
    caches = [ExpertCache(store, 6, policy="aging", device=device, engine="device") for store in stores]
    side = CpuExperts(caches, HostWorkers(stores, [-1, -1], device), device)
    for tokens, share, real in ((1, 0, 9), (1, 128, 9), (2, 256, 9), (3, 128, 2), (1, 256, 1)):
        for number, (cache, held) in enumerate(zip(caches, layers, strict=True)):
            cache.skip_padding(torch.tensor([real], dtype=torch.int32, device=device))
            x, weights = torch.randn(tokens, HIDDEN, generator=draw).bfloat16(), torch.rand(tokens, TOP_K)
            ids = torch.rand(tokens, EXPERTS, generator=draw).argsort(1)[:, :TOP_K].int()  # [T, K]
            slot_of, uses = cache.mapping.tolist(), cache.state.uses.tolist()
            kept = side.ask(number, *(tensor.to(device) for tensor in (x, weights, ids)), share)
            out = torch.zeros(tokens, HIDDEN, device=device)
            for part in cache.groups(kept):
                slots = {"w13": part.weights["w1"].cpu(), "w2": part.weights["w2"].cpu()}
                out += forward(x, MoeWeights.from_tensors(slots), weights, part.slot_ids.cpu()).to(device)
            side.add(out)
            missing = [expert for expert in set(ids[:real].flatten().tolist()) if slot_of[expert] < 0]
            least = sorted(missing, key=lambda expert, uses=uses: (uses[expert], expert))
            asked = set(ids[:real][kept.cpu()[:real] < 0].tolist())
            assert asked == set(least[: (len(least) * share + 128) // 256]), "the least used"
            whole = MoeWeights.from_tensors({"w13": held["w1"], "w2": held["w2"]})
            right = forward(x, whole, weights, ids).float()[:real]
            assert float((out.cpu()[:real] - right).norm() / right.norm()) < 5e-3, (tokens, share)
    return side


@pytest.mark.gpu
def test_the_cpu_adds_its_part() -> None:
    side = check_sums(torch.device("cuda", torch.cuda.current_device()))
    assert 0 < side.time_step(2, 128, TOP_K) < 1, "steps in CUDA graphs"
    side.captured = False
    assert 0 < side.time_step(2, 128, TOP_K) < 1


KILLED = """
import torch
from tests.fixes.cache.test_host_workers_gpu import *
device = torch.device("cuda", 0)
side = check_sums(device)
x, weights = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device), torch.ones(1, TOP_K, device=device)
ids = torch.arange(TOP_K, dtype=torch.int32, device=device)[None]
side._caches[0].seed(torch.tensor([[6, 7, 8]], dtype=torch.int32))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    side.ask(0, x, weights, ids, 256)
    side.add(x)
graph.replay()
torch.cuda.synchronize()
print("answered", flush=True)
side._workers._library.moedoctor_fault(side._workers._crew, 1, {fault})
graph.replay()
torch.cuda.synchronize()
print("answered again", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("fault", [0, 1])
def test_a_worker_that_ends_while_a_graph_waits_ends_the_process(fault: int) -> None:
    """Without the fault the second replay is answered."""
    done = run([sys.executable, "-c", KILLED.format(fault=fault)])
    assert done.returncode == (71 if fault else 0), done.stderr
    assert done.stdout.split("\n")[0] == "answered"
    assert ("answered again" in done.stdout) == (not fault)
    assert (
        "moedoctor: expert_cache: CPU worker 1 of 2 (core -1) has ended; the engine stops" in done.stderr
    ) == bool(fault)
