"""The call that a recording keeps."""

import random
from unittest.mock import Mock

import pytest
import torch

from moedoctor.kernels.kept_rows import KeptRows, MoeCall, MoeInput
from moedoctor.trace.call_keeper import CallKeeper, WatchedLayer, Wish
from moedoctor.trace.capsule import Capsule, Record
from tests.trace.late_stream import LateStream

NAN = float("nan")
Sizes = tuple[int, int, int]
"""Hidden size, experts and top_k of a layer."""


class Watched:
    """A keeper of layers, and what it made of their calls."""

    def __init__(self, when: str, *sizes: Sizes, background: bool = True) -> None:
        self.sizes, self.step = sizes or ((8, 4, 2),) * 3, 0
        self.made: list[Capsule] = []
        self.warned: list[str] = []
        ends = self.made.append, self.warned.append
        self.keeper = CallKeeper(Wish.parse(when), *ends, background=background)
        for layer, (hidden, experts, top_k) in enumerate(self.sizes):
            size = {"hidden": hidden, "intermediate": 8, "experts": experts, "top_k": top_k}
            kind = {"layer": f"layers.{layer}.experts", "activation": "silu", "quantization": "bf16"}
            self.keeper.add(WatchedLayer(Record.model_validate(size | kind), lambda experts: {}))
            self.keeper.watch(layer, self.call(layer))  # the profile run

    def call(self, layer: int, fill: float | None = None, rows: int = 3) -> MoeCall:
        """Return a call whose x names layer and step, with an output full of `fill`."""
        hidden, experts, top_k = self.sizes[layer]
        x = torch.full((rows, hidden), value_of(self.step, layer), dtype=torch.bfloat16)
        ids = torch.arange(top_k).expand(rows, top_k)
        weights, logits = torch.full(ids.shape, x[0, 0].item()), torch.ones(rows, experts)
        return MoeCall(MoeInput(x, ids, weights, logits), x.float() if fill is None else x.float() + fill)

    def run_step(self, nan: int | None = None) -> None:
        """Run a step, in which the layer `nan` gives NaN."""
        self.step += 1
        self.keeper.begin(3)
        for layer in range(len(self.sizes)):
            self.keeper.watch(layer, self.call(layer, NAN if layer == nan else None))
        self.keeper.end()


def value_of(step: int, layer: int) -> float:
    """Return what the tensors of a call are full of; BF16 holds such numbers."""
    return step % 25 * 10.0 + layer


def is_of_one_call(capsule: Capsule) -> bool:
    """Return whether all that a capsule of `Watched` holds is of the call that it names."""
    expected = value_of(capsule.record.call, int(capsule.record.layer.split(".")[1]))
    tensors = capsule.tensors
    return tensors["x"].shape[0] == 3 and all(
        bool((tensors[name] == expected).all()) for name in ("x", "output", "topk_weights")
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_capsule_holds_one_call_however_late_the_device_is(monkeypatch, seed):
    """The device goes on while a call is compared, and copies of the steps before that still arrive."""
    stream, chance, mixed = LateStream(monkeypatch), random.Random(seed), []
    random.seed(seed)
    watched = Watched("mismatch=0.5")

    def judge(capsule: Capsule) -> bool:
        mixed.append(not is_of_one_call(capsule))
        stream.run(chance.randrange(12))
        return True

    watched.keeper.judge = judge
    for _ in range(400):
        watched.run_step()
        for _ in range(chance.randrange(3)):
            stream.run(chance.randrange(9))
            watched.keeper.collect(wait=False)
        stream.run(max(0, len(stream.work) - 40))  # the host is a few steps ahead at most
    assert len(mixed) > 30
    assert sum(mixed) == 0, f"{sum(mixed)} of {len(mixed)} capsules hold two calls"
    assert watched.keeper.compared == len(mixed)


@pytest.mark.parametrize(("behind", "most"), [(1, 20), (12, 40)])
def test_nan_is_saved_while_the_server_is_never_idle(monkeypatch, behind, most):
    """As with asynchronous scheduling: whenever it is asked, the last steps have not ended."""
    stream = LateStream(monkeypatch)
    watched = Watched("nan")
    for step in range(1, most + 1):
        watched.run_step(nan=1 if step == 15 else None)
        stream.run(len(stream.work) - 6 * behind + 2)  # a step is begin, three layers, copy and event
        if step % 20 == 0:  # another thread asks every few steps
            watched.keeper.collect(wait=False)
    (capsule,) = watched.made
    assert (capsule.record.layer, capsule.record.call) == ("layers.1.experts", 15)


def test_nan_of_a_device_that_died_a_step_later_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LateStream(monkeypatch)
    watched = Watched("nan")
    for step in range(1, 13):
        watched.run_step(nan=1 if step == 12 else None)
        stream.run(100)
        watched.keeper.collect(wait=False) if step < 12 else None
    for _ in range(3):
        watched.run_step()  # the copies of these steps never arrive: they hold old headers
    stream.dead = True
    watched.keeper.collect()
    assert [capsule.record.call for capsule in watched.made] == [12]


def test_layers_of_different_sizes_share_one_record() -> None:
    """As NemotronHPuzzle's layers, and a draft model's."""
    watched = Watched("nan", (8, 4, 2), (24, 6, 3), (8, 4, 2))
    for nan in (None, 1, 2):
        watched.run_step(nan)
    watched.keeper.collect()
    (capsule,) = watched.made
    assert (capsule.record.layer, capsule.record.call) == ("layers.1.experts", 2)
    assert bool((capsule.tensors["x"] == 21).all())
    assert capsule.tensors["output"].dtype is torch.float32, "it has the type that the layer gave"
    assert capsule.tensors["topk_ids"].tolist() == [[0, 1, 2]] * 3
    assert [capsule.tensors[name].shape[1] for name in ("x", "output", "router_logits")] == [24, 24, 6]
    assert len(watched.keeper._memory) == 2, "layers of the same sizes share memory"


def test_a_capsule_has_the_top_k_of_its_call() -> None:
    """A backend may route to shared experts too, and its logits may not be one for each expert."""
    watched = Watched("first")
    watched.sizes = ((8, 5, 3),) * 3
    watched.keeper._rows.clear()  # as if these were the first calls
    watched.run_step()
    watched.keeper.collect()
    (capsule,) = watched.made
    assert (capsule.record.top_k, capsule.tensors["topk_ids"].shape) == (3, (3, 3))
    assert "router_logits" not in capsule.tensors


def test_a_call_that_does_not_fit_is_refused_in_one_line() -> None:
    watched = Watched("nan", (8, 4, 2), (8, 4, 2))
    wide = Watched("nan", (16, 4, 2)).call(0, NAN)
    watched.keeper.begin(3)
    for _ in range(2):
        watched.keeper.watch(0, wide)
    watched.keeper.watch(1, watched.call(1, NAN))
    watched.keeper.end()
    watched.keeper.collect()
    assert watched.warned == [
        "layers.0.experts is no longer watched: "
        "its output is torch.float32 [3, 16], expected torch.float32 [3, 8] as in its first call"
    ]
    assert [capsule.record.layer for capsule in watched.made] == ["layers.1.experts"]


def test_an_error_of_ours_ends_the_recording_and_not_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("nan")
    watched.run_step(nan=2)
    monkeypatch.setattr(KeptRows, "keep_on_host", Mock(side_effect=RuntimeError("no memory\nmore")))
    for _ in range(2):
        watched.run_step()
    assert watched.warned == ["no more calls are watched: RuntimeError: no memory"]
    watched.keeper.collect()
    assert [capsule.record.call for capsule in watched.made] == [1], "what was kept before is saved"


def test_a_wish_is_read_or_is_one_line() -> None:
    for text in ("nan", "first", "crash"):
        assert Wish.parse(text) == Wish(text)  # type: ignore[arg-type]
    called = Wish("call", "model.layers.3.mlp.experts", 17)
    assert Wish.parse("call=model.layers.3.mlp.experts:17") == called
    assert Wish.parse("mismatch=0.01") == Wish("mismatch", rate=0.01)
    for text in ("nan=1", "call=3", "call=:3", "call=a:0", "mismatch=2", "mismatch=x", "all"):
        with pytest.raises(ValueError, match="expected nan, first, crash, call=LAYER:N or mismatch=RATE"):
            Wish.parse(text)
