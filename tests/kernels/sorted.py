"""Sorts every sequence of zeros and ones in Triton's interpreter; a script for `test_routing`."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from moedoctor.kernels.routing.sorting import sort_lane, split_lanes


@triton.jit
def _sort(x_ptr, rows: tl.constexpr, width: tl.constexpr):
    place = tl.arange(0, rows)[None, :, None] * width + tl.arange(0, width)[None, None, :]  # [1, rows, width]
    lists = sort_lane(split_lanes(tl.load(x_ptr + place), width), width)
    for i in tl.static_range(width):
        tl.store(x_ptr + tl.arange(0, rows)[None, :] * width + i, lists[i])


if __name__ == "__main__":
    for width in (1, 2, 4, 8, 16):
        rows = 1 << width
        x = (torch.arange(rows)[:, None] >> torch.arange(width)[None, :] & 1).int()  # [rows, width]
        expected = x.sort(dim=-1, descending=True).values
        _sort[(1,)](x, rows, width)
        assert torch.equal(x, expected), width
