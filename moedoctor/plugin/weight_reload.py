"""Refuses new weights for a running engine while a fix computes with copies of the old ones in host memory.

vLLM writes new weights to the parameters of its layers. With `offload` and `expert_cache` those are buffers
that are filled from host memory, so what is written there is lost without an error, while scales that stay on
the GPU become new: the engine would compute with two checkpoints at once. Sleep level 2 discards all weights
on the GPU and needs such a write afterwards. Sleep level 1 brings them back by itself, so it is allowed.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from moedoctor.plugin.register import Patch, apply_patches

WORKER = "vllm.v1.worker.gpu_worker:Worker"
"""The worker of both model runners."""
_HOLDERS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The object that holds weights in host memory -> the fix."""


def hold(fix: str, owner: Any) -> None:
    """Refuse new weights from now on, for as long as `owner` lives."""
    _HOLDERS[owner] = fix


def apply(version: str) -> None:
    """Wrap what gives a worker new weights; nothing changes until a fix calls `hold`. Raises FixError."""
    loads, reloads = ("self.model_runner.load_model(",), ("self.model_runner.reload_weights(",)
    transfer = partial(_refuse, "a weight transfer")
    patches = (
        Patch(WORKER, "load_model", _guard_the_model, "self", loads),
        Patch(WORKER, "reload_weights", partial(_refuse, "reload_weights"), "self", reloads),
        Patch(WORKER, "update_weights", partial(_refuse, "update_weights"), "update_info"),
        # All steps of an update call it before they do anything.
        Patch(WORKER, "_check_weight_transfer_engine", transfer, "self", releases=">=0.21.0"),
        Patch(WORKER, "sleep", _refuse_to_discard, "self level"),
    )
    apply_patches("weight_reload", version, patches)


def _check(asked: str) -> None:
    """Raise RuntimeError if a fix holds weights in host memory."""
    if fixes := sorted(set(_HOLDERS.values())):
        raise RuntimeError(
            f"moedoctor: {asked} is refused: the fix {' and '.join(fixes)} computes with copies of the "
            "weights in host memory, which would stay old; start the engine again with the new weights"
        )


def _refuse(asked: str, original: Any) -> Any:
    """Wrap a function that writes new weights."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        _check(asked)
        return original(*arguments, **options)

    return refuse


def _guard_the_model(original: Any) -> Any:
    """Wrap `load_model`: extensions of the worker give new weights to the model itself."""

    def load_model(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        model = self.model_runner.get_model()
        if hasattr(model, "load_weights"):
            model.load_weights = _refuse("the model's load_weights", model.load_weights)
        return result

    return load_model


def _refuse_to_discard(original: Any) -> Any:
    """Wrap `sleep`."""

    def sleep(self: Any, level: int = 1, *arguments: Any, **options: Any) -> Any:
        if level > 1:
            _check(f"sleep level {level} (level 1 is allowed)")
        return original(self, level, *arguments, **options)

    return sleep
