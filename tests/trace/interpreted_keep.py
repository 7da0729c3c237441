"""Recordings in Triton's interpreter; a script."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import random
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from moedoctor.kernels import kept_rows
from moedoctor.kernels.keep import launch_keep, launch_step
from moedoctor.kernels.kept_rows import COUNT, OWNER, KeptRows, MoeCall, MoeInput, Sizes, begin_step_on_host
from moedoctor.kernels.save_call import launch_save

ROOM = 4
SIZES = (
    Sizes(40, torch.float32, 40, torch.float32, 3, 9),
    Sizes(70, torch.bfloat16, 64, torch.float32, 4, 12),
    Sizes(33, torch.float32, 33, torch.float32, 2, 5),
)
PARTS = ("x", "output", "ids", "weights", "logits")


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 7))
@settings(max_examples=15, deadline=None)
def check_rows_with_nan(seed: int, layers: int, rows: int) -> None:
    """The first layer with NaN that its input has not owns the record, and only rows that are no padding."""
    chance = random.Random(seed)
    header, plain_header = (kept_rows.make_header(torch.device("cpu")) for _ in range(2))
    kept, plain = ([KeptRows.make(ROOM, size, of) for size in SIZES] for of in (header, plain_header))
    expected: tuple[int, int, list[int]] | None = None
    for step in range(1, 4):
        real = chance.randint(0, rows)
        launch_step(header, real, 0, 0, frees=False)
        begin_step_on_host(plain_header, real, 0, 0, frees=False)
        for layer in range(layers):
            call = make_call(layer, rows)
            x, output = call.input.x, call.output
            bad = []
            for row in range(rows):
                kind = chance.randrange(6)
                if kind in (0, 1):
                    output[row, chance.randrange(output.shape[1])] = (float("nan"), float("-inf"))[kind]
                if kind == 1:
                    x[row, chance.randrange(x.shape[1])] = float("nan")
                if kind == 0 and row < real:
                    bad.append(row)
            launch_keep(kept[layer], layer, call)
            plain[layer].keep_on_host(layer, call)
            if bad and expected is None:
                expected = (layer + 1, step, bad)
                given = call.input
                tensors = (x, output, given.ids, given.weights, given.logits)
    assert plain_header.tolist() == header.tolist()
    if int(header[COUNT]) <= ROOM:  # else any of them are kept
        for ours, theirs in zip(kept, plain, strict=True):
            order, plain_order = ours.row.argsort(stable=True), theirs.row.argsort(stable=True)
            for name in ("row", *PARTS):
                got, same = getattr(ours, name)[order], getattr(theirs, name)[plain_order]
                assert torch.equal(got.nan_to_num(), same.nan_to_num()), name
    if expected is None:
        assert int(header[OWNER]) == 0
        assert int(header[COUNT]) == 0
        return
    owner, step, bad = expected
    assert (int(header[OWNER]), int(header[kept_rows.OWNED_STEP])) == (owner, step)
    assert int(header[COUNT]) == len(bad)
    count = min(len(bad), ROOM)
    memory = kept[owner - 1]
    found = memory.row[:count].tolist()
    assert set(found) <= set(bad)
    assert len(set(found)) == count
    for name, tensor in zip(PARTS, tensors, strict=True):
        got = getattr(memory, name)[:count]
        assert torch.equal(got.nan_to_num(), tensor[found].to(got.dtype).nan_to_num()), name


def make_call(layer: int, rows: int) -> MoeCall:
    """Return a call of a layer, whose sizes are its own."""
    hidden, dtype, output_hidden, output_dtype, top_k, experts = SIZES[layer]
    x, output = torch.randn(rows, hidden, dtype=dtype), torch.randn(rows, output_hidden, dtype=output_dtype)
    ids = torch.randint(-1, experts, (rows, top_k), dtype=torch.int32)
    return MoeCall(MoeInput(x, ids, torch.rand(rows, top_k), torch.randn(rows, experts)), output)


def check_that_a_wanted_call_is_kept_once() -> None:
    """A layer that runs again in the step, as a draft model's does, adds nothing; another step frees it."""
    header, plain_header = (kept_rows.make_header(torch.device("cpu")) for _ in range(2))
    kept, plain = (KeptRows.make(ROOM, SIZES[0], of) for of in (header, plain_header))
    for step, real in ((1, 2), (2, 9)):
        launch_step(header, real, 1, step, frees=step > 1)
        begin_step_on_host(plain_header, real, 1, step, frees=step > 1)
        calls = [make_call(0, 3) for _ in range(2)]
        for call in calls:
            launch_keep(kept, 0, call)
            plain.keep_on_host(0, call)
        assert header.tolist() == plain_header.tolist()
        count = min(real, 3)
        places = [OWNER, kept_rows.OWNED_STEP, COUNT, kept_rows.WANTED_LAYER]
        assert header[places].tolist() == [1, step, count, -1]
        order = kept.row[:count].argsort()
        assert torch.equal(kept.x[:count][order], calls[0].input.x[:count])
        assert torch.equal(kept.x[:count][order], plain.x[:count])


def check_that_wider_calls_are_refused() -> None:
    """Nothing is written outside of the memory for a layer."""
    kept = KeptRows.make(ROOM, SIZES[0], kept_rows.make_header(torch.device("cpu")))
    rows = (torch.zeros(2, 2, width) for width in (SIZES[0].hidden, 3, 3, 9))
    saved = kept_rows.SavedCalls(torch.full((2, 6), -1), *rows)
    launch_step(kept.header, 3, 1, 1, frees=False)
    for layer in (1, 2):
        call = make_call(layer, 3)
        for launch in (
            partial(launch_keep, kept, 0, call),
            partial(kept.keep_on_host, 0, call),
            partial(launch_save, saved, torch.ones(1, dtype=torch.int32), call.input),
            partial(saved.save_on_host, 1, call.input),
        ):
            with pytest.raises(ValueError, match="as in its first call"):
                launch()
    assert int(kept.header[OWNER]) == 0
    assert int(saved.header.max()) == -1


if __name__ == "__main__":
    check_rows_with_nan()
    check_that_a_wanted_call_is_kept_once()
    check_that_wider_calls_are_refused()
