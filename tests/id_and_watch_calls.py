"""Checks of the kernels for expert ids and the NaN trace against torch; a script for Triton's interpreter."""

import itertools
import sys

import torch

from moedoctor.fixes import expert_ids
from moedoctor.kernels.expert_ids import launch_check, launch_deduplicate
from moedoctor.kernels.watch import launch_begin, launch_end, launch_watch, launch_watch_three
from moedoctor.trace import nan_state

SHAPES = ((1, 1), (40, 8), (300, 10), (3, 33))
FIELDS = [nan_state.ROWS, nan_state.STEPS_FOUND, nan_state.FIRST_STEP, nan_state.LAST_STEP]


def make_ids(tokens: int, top_k: int, experts: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Random ids: some repeat, some are -1, some are out of range; a third of the rows is clean."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=draw)
    clean = torch.rand(tokens, max(experts, top_k), generator=draw).argsort(1)[:, :top_k]
    ids[::3] = clean[::3]
    return ids.to(dtype)


def check_ids(device: str, dtype: torch.dtype = torch.int32) -> None:
    for seed, (tokens, top_k) in enumerate(SHAPES):
        experts = 64
        ids = make_ids(tokens, top_k, experts, seed, dtype)
        if dtype == torch.int64:  # int32 would make expert 1 of it
            ids[1::3, 0] = (1 << 32) + 1
        wide = torch.full((top_k, tokens * 2), -1, dtype=dtype)  # strides of their own
        wide[:, ::2] = ids.t()
        real = torch.tensor([tokens // 2], dtype=torch.int32)
        for real_rows in (None, real):
            expected = expert_ids.validate_expert_ids(ids, experts, real_rows=real_rows).tensor
            counts = torch.zeros(2, 3, dtype=torch.int32, device=device)
            there = wide.to(device)[:, ::2].t()
            launch_check(there, experts, counts, None if real_rows is None else real_rows.to(device))
            assert counts.tolist() == expected.tolist(), (tokens, top_k, counts, expected)


def check_ids_with_a_step(device: str) -> None:
    ids = torch.tensor([[1, 1], [2, 3], [0, 9], [4, 4]], dtype=torch.int32, device=device)
    counts = torch.zeros(2, 2, 3, dtype=torch.int32, device=device)
    real = torch.tensor([3], dtype=torch.int32, device=device)
    for number, active in ((4, 0), (5, 1), (6, 1)):
        step = torch.tensor([number, active], dtype=torch.int32, device=device)
        launch_check(ids, 8, counts, real, step)
    assert counts.tolist() == [[[2, 2, 0], [2, 0, 0]], [[5, 5, 0], [5, 0, 0]]], counts


def check_deduplicate(
    device: str, dtype: torch.dtype = torch.int32, weight_dtype: torch.dtype = torch.float32
) -> None:
    for seed, (tokens, top_k) in enumerate(SHAPES):
        ids = make_ids(tokens, top_k, 64, seed + 10, dtype)
        if dtype == torch.int64:  # int32 would make expert 1 of it, and an id below 0
            ids[1::3, 0], ids[2::3, -1] = (1 << 32) + 1, -(1 << 32) + 1
        draw = torch.Generator().manual_seed(seed)
        weights = torch.randint(0, 9, ids.shape, generator=draw) / 8
        # Sums that are exact in float32, in any order, and that a half does not hold.
        weights[:, 1::2] = torch.tensor(0.0007).to(torch.bfloat16).float()
        weights = weights.to(weight_dtype)
        for spare in (None, 64):
            expected = expert_ids.deduplicate(ids, weights, num_experts=spare)
            out_ids = torch.full((tokens + 1, top_k), -7, dtype=torch.int32, device=device)
            out_weights = torch.full((tokens + 1, top_k), -7.0, device=device)
            out = out_ids[:tokens], out_weights[:tokens]
            launch_deduplicate(ids.to(device), weights.to(device), *out, use_spare=spare is not None)
            assert torch.equal(out_ids[:tokens].cpu(), expected.ids), (tokens, top_k, spare)
            assert torch.equal(out_weights[:tokens].cpu(), expected.weights), (tokens, top_k, spare)
            assert (out_ids[tokens] == -7).all()
            assert (out_weights[tokens] == -7.0).all()


def check_watch(device: str) -> None:
    """The same steps through the kernels and through the CPU form: the same record."""
    nan, inf = float("nan"), float("inf")
    ours, theirs = nan_state.NanState("cpu", 4), nan_state.NanState("cpu", 4)
    header, found = ours.header.to(device), ours.found.to(device)
    mask = torch.tensor([0, 1, 0, 0, 1], dtype=torch.int8)
    for index, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16, torch.float32)):
        x = torch.randn(5, 70, generator=torch.Generator().manual_seed(index)).to(dtype)
        if index:
            x[4, 69], x[1, 3], x[3, 0] = nan, inf, -inf if index == 2 else 1.0
        for active in (True, False):
            padding = mask if index == 3 else None
            if active:
                launch_begin(header, 3, 5)
                theirs.begin(3, 5)
            for point, y in ((1, x), (0, x.t()), (1, x[:, :40])):
                given = None if padding is None or y.shape[0] != 5 else padding
                launch_watch(y.to(device), header, found, point, None if given is None else given.to(device))
                nan_state.watch_rows(y, theirs.header, theirs.found, given, point)
            if active:
                launch_end(header)
                theirs.end()
        assert header.tolist() == theirs.header.tolist(), (index, header, theirs.header)
        # Which of two kinds in one tensor comes first is open; which of two points does is not.
        assert found[..., FIELDS].tolist() == theirs.found[..., FIELDS].tolist(), (index, found)
        assert _order(found) == _order(theirs.found), (index, found, theirs.found)


def check_watch_three(device: str) -> None:
    """Three tensors in one launch and a launch that ends its step: the record of one launch each."""
    nan, inf = float("nan"), float("inf")
    ours, theirs = nan_state.NanState("cpu", 4), nan_state.NanState("cpu", 4)
    for name in "abcd":
        theirs.add_point(name)
    header, found = ours.header.to(device), ours.found.to(device)
    for step, spoil in enumerate(((), (2,), (1, 2), (0, 3))):
        draw = torch.Generator().manual_seed(step)
        a, c = (torch.randn(6, 40, generator=draw).to(torch.bfloat16) for _ in range(2))
        wide = torch.randn(6, 600, generator=draw).to(device)
        last = torch.randn(6, 70, generator=draw)
        b = wide[:, 40:553]  # rows with a gap between them
        for which in spoil:
            (a, b, c, last)[which][which - 4, which] = inf if step == 3 else nan
            (a, b, c, last)[which][0, 0] = nan
        for active in (False, True):
            if active:
                launch_begin(header, 4, 6)
                theirs.begin(4, 6)
            launch_watch_three([tensor.to(device) for tensor in (a, b, c)], header, found, (2, 0, 3))
            launch_watch(last.to(device), header, found, 1, None, ends=True)
            theirs.watch_three((2, 0, 3), (a, b.cpu(), c))
            if active:
                theirs.watch_last(1, last)
        assert header.tolist() == theirs.header.tolist(), (step, header, theirs.header)
        assert found[..., FIELDS].tolist() == theirs.found[..., FIELDS].tolist(), (step, found)
    assert header[nan_state.STEPS].item() == 4


def check_watch_groups(device: str) -> None:
    """Rows in groups, with and without masks, are classified as on the CPU; a step begins twice."""
    mask = torch.tensor([1, 0, 0, 1], dtype=torch.int8)
    counts = set()
    cases = (3, 4, 0), (4, 4, 0), (4, 6, 4), (5, 6, 5), (nan_state.ALL_REAL, nan_state.ALL_REAL, 0)
    rows = (4, 1), (8, 1), (8, 2), (8, 0), (9, 0), (9, 2)  # and their groups
    for (real, padded, masked), (number, group) in itertools.product(cases, rows):
        for padding in (None, mask) if 4 * group == number else (None,):
            x = torch.full((number, 3), float("nan"))
            x[0, 1] = float("inf")
            theirs = nan_state.NanState("cpu", 4)
            header, found = theirs.header.to(device, copy=True), theirs.found.to(device, copy=True)
            for _ in range(2):
                launch_begin(header, real, padded)
                nan_state.begin_step(theirs.header, real, padded)
            header[nan_state.MASKED] = theirs.header[nan_state.MASKED] = masked
            there = None if padding is None else padding.to(device)
            launch_watch(x.to(device), header, found, 1, there, group=group)
            nan_state.watch_rows(x, theirs.header, theirs.found, padding, 1, group)
            case = (real, padded, masked, number, group, padding)
            assert found[..., FIELDS].tolist() == theirs.found[..., FIELDS].tolist(), case
            counts.add(tuple(theirs.found[1, ::2, nan_state.ROWS].tolist()))
            launch_end(header)
            nan_state.end_step(theirs.header)
            assert header.tolist() == theirs.header.tolist(), case
    assert {(3, 1, 0), (0, 0, 8), (2, 2, 0), (4, 4, 0), (9, 0, 0)} <= counts, counts


def _order(found: torch.Tensor) -> list[int]:
    """The points with something in the record, the first one first."""
    is_empty = found[..., nan_state.ROWS] == 0  # [P, 4]
    first = found[..., nan_state.FIRST_SEQUENCE].masked_fill(is_empty, 1 << 30)  # [P, 4]
    points = first.amin(1)  # [P]
    return [int(point) for point in points.argsort() if int(points[point]) < 1 << 30]


CHECKS = {
    "ids int32": lambda device: check_ids(device),
    "ids int64": lambda device: check_ids(device, torch.int64),
    "ids with a step": check_ids_with_a_step,
    "deduplicate": check_deduplicate,
    "deduplicate int64": lambda device: check_deduplicate(device, torch.int64),
    "deduplicate float16": lambda device: check_deduplicate(device, weight_dtype=torch.float16),
    "deduplicate bfloat16": lambda device: check_deduplicate(device, weight_dtype=torch.bfloat16),
    "deduplicate float64": lambda device: check_deduplicate(device, torch.int64, torch.float64),
    "watch": check_watch,
    "watch three": check_watch_three,
    "watch groups": check_watch_groups,
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]("cpu")
