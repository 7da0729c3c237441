"""Runs checks of the NaN trace's kernels in Triton's interpreter; a script for `test_nan_outputs`."""

from __future__ import annotations

import contextlib
import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch

from moedoctor.kernels import watch as kernels
from moedoctor.trace import nan_state as record

NAN, INF = float("nan"), float("inf")
FIELDS = [record.ROWS, record.STEPS_FOUND, record.FIRST_STEP, record.LAST_STEP]


def new() -> tuple[torch.Tensor, torch.Tensor]:
    header = torch.zeros(record.HEADER, dtype=torch.int32)
    return header, torch.zeros(4, record.KINDS, record.FIELDS, dtype=torch.int32)


def check_rows() -> None:
    """Compare the kernel with the reference for numbers of rows and groups, with and without masks.

    A step that begins during another ends it.
    """
    for name in ("STEP", "ACTIVE", "SEQUENCE", "STEPS_WITH", "NOW", "THROUGH", "MASKED", "KINDS", "FIELDS"):
        assert getattr(record, name) == getattr(kernels, f"_{name}").value, name
    mask = torch.tensor([1, 0, 0, 1], dtype=torch.int8)
    counts = set()
    for real, padded, masked in ((3, 4, 0), (4, 4, 0), (4, 6, 4), (5, 6, 5), (record.ALL_REAL,) * 2 + (0,)):
        for number in (4, 8, 9):
            for group in (0, 1, 2):
                for padding in (None, mask) if 4 * group == number else (None,):
                    x = torch.full((number, 3), NAN)
                    x[0, 1] = INF
                    (ours, found), (theirs, expected) = new(), new()
                    for _ in range(2):
                        kernels.launch_begin(ours, real, padded)
                        record.begin_step(theirs, real, padded)
                    ours[record.MASKED] = theirs[record.MASKED] = masked
                    kernels.launch_watch(x, ours, found, 1, padding, group=group)
                    record.watch_rows(x, theirs, expected, padding, 1, group)
                    case = (real, padded, masked, number, group, padding)
                    assert found[..., FIELDS].tolist() == expected[..., FIELDS].tolist(), case
                    counts.add(tuple(expected[1, ::2, record.ROWS].tolist()))
                    kernels.launch_end(ours)
                    record.end_step(theirs)
                    assert ours.tolist() == theirs.tolist(), (case, ours, theirs)
    assert {(3, 1, 0), (0, 0, 8), (2, 2, 0), (4, 4, 0), (9, 0, 0)} <= counts, counts


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*cuda.*")
    torch.cuda.device_of = lambda x: contextlib.nullcontext()
    check_rows()
