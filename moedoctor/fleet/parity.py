"""Silent errors: the same seeded MoE layer on each GPU, and which GPU's bits are odd.

``python -m moedoctor.fleet.parity`` computes on one GPU, or on a CPU without one, and prints JSON. `judge`
compares the answers of a fleet. Kernels add in a fixed order, so the same bits must come out each time; that
is checked on each GPU, and where most equals differ from themselves it is the kernel that is not
deterministic, and no GPU is named.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from moedoctor.text import join_lines, shorten

if TYPE_CHECKING:
    import torch

RUNS = 8
CASES: Mapping[str, int] = {"decode": 8, "prefill": 512}
"""Case -> tokens: with few, each pair reads its expert; with many, pairs are multiplied in tiles."""
_SHAPE: Mapping[str, Any] = {"experts": 32, "top_k": 4, "hidden": 2048, "intermediate": 768}
_SHAPE_ON_CPU: Mapping[str, Any] = {"experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128}
_COPY_BYTES = 256 << 20
_COPY_BYTES_ON_CPU = 8 << 20
_MOST_ERROR = 0.02
"""Relative error of bfloat16 products with a bfloat16 intermediate; a wrong expert gives about 1."""
_LONG = 100
_KEPT = (
    "gpu",
    "capability",
    "gpus",
    "driver",
    "cuda_driver",
    "torch",
    "torch_cuda",
    "triton",
    "cpu",
    "machine",
)
"""The facts of the environment that a report has."""
_EQUALS = ("gpu", "capability", "torch", "triton", "torch_cuda", "moedoctor")
_EQUALS_ON_CPU = ("cpu", "machine", "torch", "moedoctor")
"""Facts that must be the same before bits can be compared."""


@dataclass(frozen=True)
class Oddity:
    """A GPU that computes something else than itself before, than its equals, or than the reference."""

    name: str
    case: str
    what: str
    equals: int
    """The number of equal GPUs that answered, this one included."""


@dataclass(frozen=True)
class Judgement:
    """The odd GPUs of a fleet."""

    oddities: tuple[Oddity, ...]
    undecided: tuple[str, ...]
    """Reasons why bits of some GPUs could not be compared."""
    compared: Mapping[str, int]
    """GPU model -> how many GPUs of it were compared with each other."""


def judge(answers: Mapping[str, Mapping[str, Any]]) -> Judgement:
    """Compare the reports of GPUs, by name. The order in which they come changes nothing."""
    oddities: list[Oddity] = []
    undecided: list[str] = []
    compared: dict[str, int] = {}
    equals: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for name, report in sorted(answers.items()):
        environment = report.get("environment")
        facts = dict(environment) if isinstance(environment, Mapping) else {}
        facts["moedoctor"] = report.get("moedoctor")
        compared_by = _EQUALS if facts.get("gpu") else _EQUALS_ON_CPU
        equals[tuple(str(facts.get(fact)) for fact in compared_by)][name] = report
    for key, reports in sorted(equals.items()):
        compared[key[0]] = max(compared.get(key[0], 0), len(reports))
        cases: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for name, report in reports.items():
            for case, row in _read_cases(report):
                cases[case][name] = row
        for case, rows in sorted(cases.items()):
            _judge_case(case, rows, oddities, undecided)
    return Judgement(tuple(oddities), tuple(dict.fromkeys(undecided)), compared)


def _read_cases(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give (name, row) of each case that has the right shape."""
    rows = report.get("cases")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, Mapping) and "case" in row:
            yield shorten(join_lines(str(row["case"])), _LONG), row


def _judge_case(
    case: str, rows: Mapping[str, Mapping[str, Any]], oddities: list[Oddity], undecided: list[str]
) -> None:
    """Judge one case on GPUs that are equal."""
    inputs = Counter(str(row.get("input_sha256")) for row in rows.values())
    usual, _ = _find_most_common(inputs)
    bits: dict[str, tuple[str, ...]] = {}
    for name, row in rows.items():
        sums = row.get("output_sha256")
        if row.get("control_noticed") is not True:
            undecided.append(f"{name}, {case}: a planted change of one bit was not noticed")
        elif not isinstance(sums, list) or len(sums) < 2:
            undecided.append(f"{name}, {case}: it gave no bits of two runs")
        elif str(row.get("input_sha256")) != usual:
            oddities.append(Oddity(name, case, "its inputs have other bits than its equals'", len(rows)))
        else:
            bits[name] = tuple(map(str, sums))
    unsteady = {name for name, sums in bits.items() if len(set(sums)) > 1}
    if len(unsteady) > 1 and 2 * len(unsteady) > len(bits):
        undecided.append(
            f"{case}: {len(unsteady)} of {len(bits)} equal GPUs differ from themselves: "
            "the kernel is not deterministic there, so its bits say nothing"
        )
        return
    for name in sorted(unsteady):
        runs, odd = len(bits[name]), len(bits[name]) - _find_most_common(Counter(bits[name]))[1]
        what = f"differs from itself: {odd} of {runs} runs gave other bits"
        oddities.append(Oddity(name, case, what, len(bits)))
    steady = {name: sums[0] for name, sums in bits.items() if name not in unsteady}
    counts = Counter(steady.values())
    usual, most = _find_most_common(counts)
    majority = 2 * most > len(steady)
    for name, value in sorted(steady.items()):
        error = rows[name].get("relative_error")
        far = f"; relative error {error:.2g}" if isinstance(error, (int, float)) else ""
        if majority and value != usual:
            what = f"differs from {most} equal GPUs of {len(steady)}{far}"
            oddities.append(Oddity(name, case, what, len(bits)))
        elif not majority and len(counts) > 1:
            others = [rows[other].get("relative_error") for other in steady if other != name]
            least = min((each for each in others if isinstance(each, (int, float))), default=None)
            beside = f", the best of the others {least:.2g}" if far and least is not None else ""
            differ = f"{len(counts)} different results on {len(steady)} equal GPUs"
            what = f"{differ}, and no majority{far}{beside}"
            oddities.append(Oddity(name, case, what, len(bits)))
        elif isinstance(error, (int, float)) and not error <= _MOST_ERROR:
            oddities.append(Oddity(name, case, f"wrong: relative error {error:.2g}", len(bits)))


def _find_most_common(counts: Counter[str]) -> tuple[str, int]:
    """Return the most frequent value, the lower one of two, and how often it occurs."""
    return min(counts.items(), key=lambda item: (-item[1], item[0]), default=("", 0))


def answer(runs: int = RUNS) -> dict[str, Any]:
    """Compute on this process's GPU, or on its CPU, and return the report. Each step is a line on stderr."""
    seconds: dict[str, float] = {}
    with _step("importing torch", seconds):
        import torch

        import moedoctor
        from moedoctor import environment
        from moedoctor.models.layer_shape import LayerShape
        from moedoctor.reference.moe_layer import make_layer
    with _step("asking for the facts of this machine", seconds):
        facts = environment.collect()
    device = "cuda" if environment.explain_missing_gpu(facts) is None and torch.cuda.is_available() else "cpu"
    with _step(f"starting {device}", seconds):
        torch.zeros(1, device=device)
    with _step("drawing the weights", seconds):
        shape = LayerShape(**(_SHAPE if device == "cuda" else _SHAPE_ON_CPU))
        layer = make_layer(shape, "bf16")
    cases = []
    for case, tokens in CASES.items():
        with _step(f"computing {case} {runs} times", seconds):
            cases.append(_measure(case, layer, tokens, device, runs))
    with _step(f"copying {runs} times", seconds):
        cases.append(_copy_pattern(device, runs))
    return {
        "schema_version": 1,
        "moedoctor": moedoctor.__version__,
        "command": "fleet parity",
        "environment": {name: facts.get(name) for name in _KEPT},
        "device": device,
        "runs": runs,
        "cases": cases,
        "steps": seconds,
        "summary": {"exit_code": 0},
    }


@contextlib.contextmanager
def _step(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Say on stderr what is done, which the driver shows for a node that is late, and note its seconds."""
    print(name, file=sys.stderr, flush=True)
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def _measure(case: str, layer: Any, tokens: int, device: str, runs: int) -> dict[str, Any]:
    """Compute one layer several times; inputs come from the CPU, so that all GPUs have the same bits."""
    import torch

    from moedoctor.fixes.moe.forward import moe_forward
    from moedoctor.reference.moe_layer import compute_expected, make_problem

    problem = make_problem(layer, tokens, "none")
    inputs = (problem.x, problem.topk_weights, problem.topk_ids, problem.layer.w13, problem.layer.w2)
    x, weights, ids, w13, w2 = (tensor.to(device) for tensor in inputs)  # type: ignore[union-attr]
    outputs, times = [], []
    for _ in range(runs):
        out = torch.zeros_like(x, dtype=torch.float32)  # [T, H]
        compute = partial(moe_forward, x, {"w13": w13, "w2": w2}, ids, weights, out=out)
        times.append(_time(compute, device))
        outputs.append(_hash_bytes(out))
    expected = compute_expected(problem, "none")
    error = float((out.cpu() - expected).norm() / expected.norm())
    return {
        "case": case,
        "tokens": tokens,
        "input_sha256": _hash_bytes(*inputs),
        "output_sha256": outputs,
        "relative_error": error,
        "control_noticed": _notices_a_bit(out, outputs[-1]),
        "layer_us": 1e6 * sorted(times[1:])[len(times[1:]) // 2],
    }


def _copy_pattern(device: str, runs: int) -> dict[str, Any]:
    """Copy a pattern to the GPU, within it and back; its bits must come back, and the copies are timed."""
    import torch

    size = _COPY_BYTES if device == "cuda" else _COPY_BYTES_ON_CPU
    draw = torch.Generator().manual_seed(0)
    pattern = torch.randint(0, 2**62, (size // 8,), generator=draw)  # int64 [N]
    sums, there_times, times = [], [], []
    there, copy = torch.empty_like(pattern, device=device), torch.empty_like(pattern, device=device)
    for _ in range(runs):
        there.zero_()
        copy.zero_()
        there_times.append(_time(lambda: there.copy_(pattern), device))
        times.append(_time(lambda: copy.copy_(there), device))
        sums.append(_hash_bytes(copy))
    return {
        "case": "memory",
        "input_sha256": _hash_bytes(pattern),
        "output_sha256": sums,
        "relative_error": 0.0 if set(sums) == {_hash_bytes(pattern)} else 1.0,
        "control_noticed": _notices_a_bit(copy, sums[-1]),
        "copy_to_device_gb_per_second": size / 1e9 / min(there_times),
        "copy_on_device_gb_per_second": 2 * size / 1e9 / min(times),
    }


def _time(call: Any, device: str) -> float:
    """Return the seconds of a call, by events on a GPU: the host's own time is not in them."""
    import torch

    if device == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _hash_bytes(*tensors: Any) -> str:
    """Return the SHA-256 of the tensors' bytes."""
    import ctypes
    import hashlib

    digest = hashlib.sha256()
    for tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        digest.update((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr()))
    return digest.hexdigest()


def _notices_a_bit(output: torch.Tensor, right: str) -> bool:
    """Return whether the checksum changes with the lowest bit of one element: the positive control."""
    import torch

    changed = output.detach().cpu().contiguous().clone()
    changed.view(torch.uint8).flatten()[0] ^= 1
    return _hash_bytes(output) == right and _hash_bytes(changed) != right


def main(arguments: Sequence[str]) -> int:
    """Print the report of this process's GPU."""
    from moedoctor.results import to_json

    sys.stdout.write(to_json(answer(int(arguments[0]) if arguments else RUNS)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
