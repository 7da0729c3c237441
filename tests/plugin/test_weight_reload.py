"""New weights for a running engine are refused while a fix holds copies of the old ones in host memory."""

import gc
import importlib
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from moedoctor.plugin import offload_fix, weight_reload
from tests.plugin.test_offload_fix import stub, wrapped
from tests.real_vllm import ask_child, read_release


class Model(torch.nn.Module):
    """Keeps what it gets."""

    def load_weights(self, weights: Any) -> None:
        self.weights = weights


def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """Return the worker of an engine of this release that has loaded its model."""
    stub(tmp_path, monkeypatch, version)
    offload_fix.apply(version)
    weight_reload.apply(version)  # for another fix
    model = Model()
    runner = types.SimpleNamespace(
        load_model=lambda: None, get_model=lambda: model, reload_weights=model.load_weights
    )
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker(runner)
    worker.load_model()
    return worker


def ask(worker: Any) -> list[str]:
    """Ask for new weights in every way; return the errors."""
    model = worker.model_runner.get_model()
    ways = [partial(way, "new") for way in (worker.reload_weights, worker.update_weights, model.load_weights)]
    ways[2:2] = [partial(worker.sleep, 2), partial(worker.sleep, level=2)]
    if hasattr(worker, "_check_weight_transfer_engine"):
        ways.append(worker._check_weight_transfer_engine)
    errors = []
    for way in ways:
        try:
            way()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("version", ["0.19.1", "0.21.0", "0.33.0"])
def test_new_weights_are_refused_only_while_a_fix_holds_the_old_ones(tmp_path, monkeypatch, version):
    worker = started(tmp_path, monkeypatch, version)
    transfer = ["transfer"] * (version >= "0.21.0")
    assert ask(worker) == []
    assert worker.asked == ["new", 2, 2, *transfer]
    assert worker.model_runner.get_model().weights == "new"

    worker.asked.clear()
    modules, offloader = wrapped(1 << 20)
    offloader.post_init()
    worker.model_runner.get_model().weights = "old"
    errors = ask(worker)
    asked = ["reload_weights", "update_weights", *["sleep level 2 (level 1 is allowed)"] * 2]
    asked += ["the model's load_weights", *["a weight transfer"] * len(transfer)]
    assert [error.partition(" is refused: the fix offload computes")[0] for error in errors] == [
        f"moedoctor: {name}" for name in asked
    ]
    assert all("\n" not in error and "start the engine again" in error for error in errors)
    assert (worker.asked, worker.model_runner.get_model().weights) == ([], "old"), "nothing was written"
    worker.sleep()
    worker.sleep(level=1)
    assert worker.asked == [1, 1]

    del modules, offloader
    gc.collect()
    assert ask(worker) == []


def test_an_engine_whose_weights_stay_on_the_gpu_takes_new_ones(tmp_path, monkeypatch):
    worker = started(tmp_path, monkeypatch, "0.33.0")
    offloader = wrapped(0)[1]
    offloader.post_init()
    assert ask(worker) == []


REAL = """
import json
from unittest.mock import MagicMock
from moedoctor.plugin import register, weight_reload

weight_reload.apply(register.read_vllm_version())
from vllm.v1.worker.gpu_worker import Worker

class Holder:
    pass

holder, worker, errors = Holder(), object.__new__(Worker), []
worker.vllm_config = MagicMock()
weight_reload.hold("offload", holder)
for name, arguments in {
    "reload_weights": (), "update_weights": ({},), "start_weight_update": (),
    "init_weight_transfer_engine": ({},), "sleep": (2,),
}.items():
    try:
        getattr(worker, name, lambda *_: weight_reload._check("no such function"))(*arguments)
    except RuntimeError as error:
        errors.append(str(error))
print("ANSWER " + json.dumps(errors))
"""


@pytest.mark.upstream
def test_the_worker_of_the_installed_vllm_refuses_before_it_does_anything() -> None:
    if Version(read_release()) < Version("0.21.0"):
        pytest.skip("an update has one step, which is refused")
    errors, _ = ask_child(REAL)
    assert len(errors) == 5
    assert all(" is refused: the fix offload computes with copies" in error for error in errors)
