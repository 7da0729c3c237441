"""The workers that compute experts on the CPU: their products, and how they talk with a "GPU" in Python."""

import subprocess
import sys
import time
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from moedoctor.fixes.cache import host_workers
from moedoctor.fixes.cache.host_workers import LEVELS, MOST_TOKENS, HostWorkers, find_levels
from moedoctor.fixes.expert_cache import ExpertStore
from moedoctor.reference import nvfp4
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.testing import marlin

SIZES = dict.fromkeys(("bf16", "fp8"), ((16, 16), (48, 40), (256, 320), (400, 129)))
SIZES |= {"packed": ((64, 64), (192, 128), (256, 320), (448, 576)), "block": ((48, 64), (400, 144), (32, 10))}
SIZES["marlin"] = SIZES["packed"]
USABLE = list(LEVELS)[list(LEVELS).index(find_levels()[0]) :]


def make_weights(hidden: int, inner: int, form: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return weights of 5 experts, and their float32 values; FP8 has scales by expert or block."""
    weights, values, draw = {}, [], torch.Generator().manual_seed(0)
    for name, rows, cols in (("w1", 2 * inner, hidden), ("w2", hidden, inner)):
        wide = torch.randn(5, rows, cols, generator=draw) / cols**0.5
        if form == "marlin":
            quantized = nvfp4.quantize(wide * torch.rand(5, rows, 1, generator=draw))
            weights |= marlin.repack(name, quantized)
            values.append(nvfp4.dequantize(quantized))
            continue
        wide.view(-1)[7::4001] = 300.0 if form == "packed" else 0.0  # has no code among the packed ones
        weights[name] = (wide * 32).to(torch.float8_e4m3fn) if form in ("fp8", "block") else wide.bfloat16()
        values.append(weights[name].float())
        if form in ("fp8", "block"):
            high, long = (16, 32) if form == "block" else (rows, cols)
            half = inner if form == "block" and name == "w1" else rows  # gate and up have blocks of their own
            scale = (
                torch.rand(5, rows // half, -(-half // high), -(-cols // long), generator=draw) + 0.5
            ) / 32
            wide_scale = scale.repeat_interleave(high, 2)[:, :, :half].repeat_interleave(long, 3)[..., :cols]
            values[-1] *= wide_scale.flatten(1, 2)
            scale = scale.flatten(1, 2)
            weights[f"_{name}.scale"] = scale if form == "block" else scale.view(5)
    return weights, values


def compute(values: list[torch.Tensor], ids: list[int], gates: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the sum [T, H] in float32; `gates` [experts, T]."""
    named = MoeWeights.from_tensors({"w13": values[0], "w2": values[1]})
    return forward(x.float(), named, gates.T, torch.tensor([ids] * len(x)))


def ask(crew: HostWorkers, stamp: int, ids: list[int], gates: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Do as both kernels do: write a request, its stamp last, and wait; return the sums [T, H]."""
    box, count = crew.box, len(x)
    box.hidden[:count] = x
    box.head[:] = torch.tensor([0, len(ids), count], dtype=torch.int32)
    box.ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    box.weights.fill_(9.0)  # what is not of this request must not be read
    box.weights[: len(ids), :count] = gates
    box.sums.fill_(torch.nan)
    box.request[0] = stamp
    while not bool((box.answers == stamp).all()):
        time.sleep(0.0002)
    return box.sums[:count].clone()


@pytest.mark.parametrize("level", USABLE)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([(form, each) for form in SIZES for each in SIZES[form]]),
    st.integers(1, MOST_TOKENS),
    st.integers(1, 3),
)
def test_workers_compute_the_sum_of_float32(level, formed, tokens, workers):
    form, sizes = formed
    (weights, values), draw = make_weights(*sizes, form), torch.Generator().manual_seed(tokens)
    store = ExpertStore(weights, pin=False, packed=form == "packed")
    crew = HostWorkers([store], [-1] * workers, torch.device("cpu"), level=level)
    for stamp, ids in ((1, [4]), (2, [3, 0, 2])):
        gates = torch.rand(len(ids), tokens, generator=draw) * (torch.rand(tokens, generator=draw) < 0.7)
        x = torch.randn(tokens, sizes[0], generator=draw).bfloat16()
        right = compute(values, ids, gates, x)
        assert float((ask(crew, stamp, ids, gates, x) - right).norm()) <= 1e-5 * float(right.norm())
    crew.stop()


def test_a_layer_whose_gate_and_up_share_no_whole_blocks_of_scales_is_refused():
    """A row of gate and the one of up below it, inner rows further, must have scales by one rule."""
    weights, _ = make_weights(48, 40, "block")
    assert "shapes" in (host_workers.find_problem(ExpertStore(weights, pin=False)) or "")


@pytest.mark.parametrize(
    ("name", "kept"), [("_w1.scale", (slice(None), slice(2))), ("_w2.alpha_or_gscale", None)]
)
def test_marlins_scales_of_other_groups_are_refused(name, kept):
    """The workers would read past them."""
    weights, _ = make_weights(64, 64, "marlin")
    weights[name] = weights[name][kept] if kept else weights[name].repeat(2, 1).T
    assert "its scales are [" in (host_workers.find_problem(ExpertStore(weights, pin=False)) or "")


SCRIPT = """
import time, torch
from tests.fixes.cache.test_host_workers import *
weights, values = make_weights(64, 32, "bf16")
crew = HostWorkers([ExpertStore(weights, pin=False)], [-1] * 3, torch.device("cpu"), late_ms={late})
x, gates, fault = torch.ones(1, 64).bfloat16(), torch.ones(2, 1), crew._library.moedoctor_fault
ask(crew, 1, [0, 3], gates, x)
{code}
assert torch.allclose(ask(crew, 3, [1, 2], gates, x), compute(values, [1, 2], gates, x), rtol=1e-4, atol=1e-4)
"""
QUIET = """
fault(crew._crew, 1, 2)
crew.box.request[0] = 2
time.sleep(0.3)
assert crew.box.answers.tolist() == [1, 1, 1], "nobody answers before every first half is there"
fault(crew._crew, 1, 0)
time.sleep(2)  # they compute, and look for a while before they sleep
begin = time.process_time()
time.sleep(2)
assert time.process_time() - begin < 0.2, "of two seconds of three workers"
"""


PLANTED = {"fault(crew._crew, 1, 1)": "worker 1 of 3 (core -1) has ended", QUIET: None}
PLANTED["fault(crew._crew, 2, 2)"] = "worker 2 of 3 (core -1) is late"


@pytest.mark.slow
@pytest.mark.parametrize(("code", "line"), PLANTED.items())
def test_a_worker_that_fails_is_named_and_idle_ones_sleep(code: str, line: str | None) -> None:
    """Without a failure the process ends by itself."""
    text = SCRIPT.format(code=code, late=400 if line else 60_000)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == (71 if line else 0), done.stderr
    assert (line or "") in done.stderr
    assert done.stderr.count("moedoctor: ") == bool(line), "one line"


@pytest.mark.slow
def test_every_level_compiles_into_a_private_folder_by_a_real_compiler(monkeypatch, tmp_path):
    """Also for a CPU that this one is not. A variable CC that names no program is not the compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "moedoctor-16-slots")
    assert {host_workers.build(level).parent.stat().st_mode & 0o777 for level in LEVELS} == {0o700}
