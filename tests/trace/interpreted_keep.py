"""Recordings in Triton's interpreter; a script for `test_call_keeper`."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import random

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from moedoctor.kernels.keep import launch_keep, launch_step
from moedoctor.kernels.kept_rows import COUNT, OWNED_STEP, OWNER, WANTED_LAYER, KeptRows, MoeCall, MoeInput
from moedoctor.trace.call_keeper import CallKeeper, WatchedLayer, Wish
from moedoctor.trace.capsule import Capsule
from tests.capsules import make_capsule

HIDDEN, TOP_K, EXPERTS, ROOM = 40, 3, 9, 4


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def check_rows_with_nan(seed: int, layers: int, rows: int) -> None:
    """The first layer with NaN that its input has not owns the record, and only rows that are no padding."""
    chance = random.Random(seed)
    kept = KeptRows.make(ROOM, HIDDEN, TOP_K, EXPERTS, torch.float32, torch.device("cpu"))
    plain = KeptRows.make(ROOM, HIDDEN, TOP_K, EXPERTS, torch.float32, torch.device("cpu"))
    kept.header[WANTED_LAYER] = plain.header[WANTED_LAYER] = 0
    expected: tuple[int, int, list[int]] | None = None
    for step in range(1, 4):
        real = chance.randint(0, rows)
        launch_step(kept, real)
        plain.begin_on_host(real)
        for layer in range(layers):
            x, output = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
            bad = []
            for row in range(rows):
                kind = chance.randrange(6)
                if kind in (0, 1):
                    output[row, chance.randrange(HIDDEN)] = (float("nan"), float("-inf"))[kind]
                if kind == 1:
                    x[row, chance.randrange(HIDDEN)] = float("nan")
                if kind == 0 and row < real:
                    bad.append(row)
            ids = torch.randint(-1, 9, (rows, TOP_K), dtype=torch.int32)
            weights = torch.rand(rows, TOP_K)
            logits = torch.randn(rows, EXPERTS)
            call = MoeCall(MoeInput(x, ids, weights, logits), output)
            launch_keep(kept, layer, call)
            plain.keep_on_host(layer, call)
            if bad and expected is None:
                expected = (layer + 1, step, bad)
                tensors = tuple(tensor.clone() for tensor in (x, output, ids, weights, logits))
    assert plain.header.tolist() == kept.header.tolist()
    if int(kept.header[COUNT]) <= ROOM:  # else any of them are kept
        order, plain_order = kept.row.argsort(stable=True), plain.row.argsort(stable=True)
        for name in ("row", "x", "output", "ids", "weights", "logits"):
            got, same = getattr(kept, name)[order], getattr(plain, name)[plain_order]
            assert torch.equal(got.nan_to_num(), same.nan_to_num()), name
    if expected is None:
        assert int(kept.header[OWNER]) == 0
        assert int(kept.header[COUNT]) == 0
        return
    owner, step, bad = expected
    assert (int(kept.header[OWNER]), int(kept.header[OWNED_STEP])) == (owner, step)
    assert int(kept.header[COUNT]) == len(bad)
    count = min(len(bad), ROOM)
    found = kept.row[:count].tolist()
    assert set(found) <= set(bad)
    assert len(set(found)) == count
    for name, tensor in zip(("x", "output", "ids", "weights", "logits"), tensors, strict=True):
        got = getattr(kept, name)[:count]
        assert torch.equal(got.nan_to_num(), tensor[found].nan_to_num()), name


def check_a_wanted_call() -> None:
    """`call=LAYER:N` gives that call with all its rows, as a capsule that computes to its output."""
    source = make_capsule("bf16", tokens=5)
    made: list[Capsule] = []
    keeper = CallKeeper(Wish.parse("call=1.mlp.experts:2"), made.append)

    def weights(experts: list[int]) -> dict[str, torch.Tensor]:
        return {name: source.tensors[name][experts] for name in ("w13", "w2")}

    for index in range(3):
        record = source.record.model_copy(update={"layer": f"model.layers.{index}.mlp.experts"})
        keeper.add(WatchedLayer(record, weights))
    given = MoeInput(*(source.tensors[name] for name in ("x", "topk_ids", "topk_weights")))
    call = MoeCall(given, source.tensors["output"])
    for layer in range(3):
        keeper.watch(layer, call)  # a warm-up
    for _ in range(4):
        keeper.begin(5)
        for layer in range(3):
            keeper.watch(layer, call)
        keeper.end()
    keeper.collect()
    (capsule,) = made
    assert capsule.record.layer == "model.layers.1.mlp.experts"
    assert (capsule.record.call, capsule.record.tokens, capsule.record.call_tokens) == (2, (0, 1, 2, 3, 4), 5)
    assert torch.equal(capsule.tensors["output"], source.tensors["output"])
    assert capsule.problem().layer.shape.experts == len(capsule.expert_ids)


if __name__ == "__main__":
    check_rows_with_nan()
    check_a_wanted_call()
    print("agreed")
