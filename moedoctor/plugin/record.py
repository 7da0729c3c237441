"""The trace `record`: the MoE call of an engine that shows a failure, kept as a capsule.

``MOEDOCTOR_RECORD=DIR`` names the folder; ``MOEDOCTOR_RECORD_WHEN`` says which call: ``nan`` (default),
``first``, ``call=LAYER:N``, ``mismatch=RATE`` or ``crash``. Calls are watched by one launch a layer, which
CUDA graphs hold. Weights are read from the checkpoint's files; the backend's own tensors come along.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moedoctor.kernels.kept_rows import MoeCall, MoeInput
from moedoctor.plugin.process_end import ProcessEnd
from moedoctor.plugin.record_layers import (
    check_folder,
    is_routed_by_kernel,
    list_addresses,
    make_watched_layer,
    overwrites,
)
from moedoctor.plugin.register import FixError, OptionError, Patch, apply_patches, call_after
from moedoctor.plugin.steps import Steps
from moedoctor.processes.files import make_folder
from moedoctor.trace.call_judge import CallJudge
from moedoctor.trace.call_keeper import CallKeeper, Wish
from moedoctor.trace.capsule import MAX_BYTES, Capsule, name_file, save
from moedoctor.trace.crash_ring import CrashRing
from moedoctor.trace.protect import format_error, protect

logger = logging.getLogger("vllm.moedoctor")

VARIABLE, WHEN, SIZE = "MOEDOCTOR_RECORD", "MOEDOCTOR_RECORD_WHEN", "MOEDOCTOR_RECORD_SIZE"
WATCHED = ".watched"
"""The end of the name of the file that shows that a process watched a MoE layer."""
_PAUSE = 0.05
"""Seconds between two looks at what was kept."""
_MOST_MB = 100_000
_FUSED = "vllm.model_executor.layers.fused_moe"


class EngineRecorder:
    """Watches the MoE layers of one worker process.

    The hooks call vLLM's own function outside of what `protect` guards: an error of ours ends the recording.
    """

    def __init__(self, folder: Path, wish: Wish) -> None:
        self.folder = folder
        self.ring = CrashRing(folder, wish.max_bytes, self._warn) if wish.when == "crash" else None
        """Saves what goes into each call; else `keeper` looks at what comes out."""
        self.keeper = CallKeeper(wish, self.save, self._warn, self._is_right, background=True)
        self.stop = (self.ring or self.keeper).stop
        self.model: Path | None = None
        """The folder of the checkpoint that is served, if it is one."""
        self._numbers: dict[int, int | None] = {}
        """id of a runner -> the number of its layer; None if it cannot be recorded."""
        self._routed: tuple[Any, Any] | None = None
        """Weights and ids [T, K] that the router gave last."""
        self._now: tuple[int, Any, Any] | None = None
        """Number of the layer that runs, its input and its logits."""
        self._error: str | None = None
        self._judge: CallJudge | None = None
        """Compares calls for ``mismatch``; None until a MoE layer is made."""
        self._process: int | None = None
        """The process whose calls are watched."""

    @property
    def stopped(self) -> bool:
        """Return True if no more calls are watched."""
        return (self.ring or self.keeper).stopped

    @protect
    def find_checkpoint(self, method: Any) -> None:
        """Remember the checkpoint when the method of a MoE layer is made, and start what reads it."""
        config = importlib.import_module("vllm.config").get_current_vllm_config()
        model = None if config.model_config is None else Path(config.model_config.model)
        self.model = model if model is not None and os.path.isdir(model) else None
        if self.model is not None and self.keeper.wish.when == "mismatch":
            with contextlib.suppress(OSError):  # the first comparison tries again, and says so
                self._judge_of(self.model).start()  # it is ready when the weights are loaded

    def wrap_router(self, original: Any) -> Any:
        """Hold what a router gives until its experts have run."""

        def select_experts(router: Any, *arguments: Any, **options: Any) -> Any:
            self._routed = routed = original(router, *arguments, **options)
            self._save_input()
            return routed

        return select_experts

    def wrap_moe(self, original: Any) -> Any:
        """Watch the call of a MoE layer."""
        parameters = list(inspect.signature(original).parameters)[1:]

        def apply_quant_method(runner: Any, *arguments: Any, **options: Any) -> Any:
            call = self._begin_call(runner, dict(zip(parameters, arguments, strict=False)) | options)
            try:
                result = original(runner, *arguments, **options)
            except Exception as error:
                if call is not None:
                    self._error = self._error or format_error(error)
                raise
            if call is not None and self.ring is None:
                self._end_call(runner, call, result)
            return result

        return apply_quant_method

    @protect
    def begin(self, real: int, rows: int) -> None:
        """Begin a step."""
        if self.ring is not None:
            self._process = os.getpid()
            self.ring.begin()
            return
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=self._collect_always, name="moedoctor-record", daemon=True).start()
        self.keeper.begin(real)

    def end(self, hidden: Any) -> None:
        """End a step."""
        if self.ring is None:
            self.keeper.end()

    def finish(self) -> None:
        """Save what the last step kept, when the process ends."""
        if self._process != os.getpid():
            return
        if self.ring is not None:
            self.ring.finish(self._error or _find_device_error())
            return
        self.keeper.collect()
        if self._judge is not None:
            self._judge.close()
        compared = self.keeper.compared
        if compared:
            took = self.keeper.seconds / compared * 1e3
            logger.warning(
                "moedoctor: record: %d compared calls were right; a comparison took %.0f ms", compared, took
            )
        elif self.keeper.wish.when == "mismatch" and not self.keeper.done:
            logger.warning("moedoctor: record: no call was compared with the reference")

    def save(self, capsule: Capsule) -> None:
        """Write the capsule."""
        record = capsule.record
        file = self.folder / name_file(record, os.getpid())
        try:
            make_folder(self.folder)
            save(capsule, file, lambda line: logger.warning("moedoctor: record: writes %s", line))
        except OSError as error:
            call = f"call {record.call} of {record.layer}"
            self._warn(f"there is no capsule: {call} cannot be written: {error}")
            return
        logger.warning(
            "moedoctor: record: call %d of %s is in %s: %s", record.call, record.layer, file, record.reason
        )

    # --- Inside -------------------------------------------------------------------------------------------

    def _is_right(self, capsule: Capsule) -> bool:
        return self._judge_of(check_folder(self.model)).is_right(capsule)

    def _judge_of(self, checkpoint: Path) -> CallJudge:
        self._judge = self._judge or CallJudge(checkpoint)
        return self._judge

    def _warn(self, line: str) -> None:
        logger.warning("moedoctor: record: %s", line)

    def _collect_always(self) -> None:
        """Save what was kept also while no step follows, as in a server without requests."""
        while not self.keeper.done:
            self.keeper.collect(wait=False)
            time.sleep(_PAUSE)
        if self._judge is not None:
            self._judge.close()

    @protect
    def _begin_call(self, runner: Any, given: Mapping[str, Any]) -> tuple[int, Any, Any] | None:
        """Return the number, input and logits of a layer that is about to run; None if it is not watched."""
        self._routed = self._now = None
        x, logits = given["hidden_states"], given["router_logits"]  # [T, H], [T, E]
        number = self._number(runner, given.get("layer", runner))
        if number is None:
            return None
        if self.ring is None:
            return number, x.clone() if overwrites(runner) else x, logits
        self._now = call = number, x, logits
        if is_routed_by_kernel(runner):
            self._save_input()
        return call

    @protect
    def _save_input(self) -> None:
        """Save what goes into the layer that runs, if calls are saved."""
        if self.ring is None or self._now is None:
            return
        number, x, logits = self._now
        self._now = None
        weights, ids = self._routed or (None, None)
        waits = self.ring.blocking
        self.ring.save(number, MoeInput(x, ids, weights, logits))
        if self.ring.blocking and not waits and x.is_cuda:
            self._warn(
                "host memory cannot be pinned, so each MoE layer waits for its copies, "
                "and calls inside CUDA graphs are not saved: start vLLM with --enforce-eager"
            )

    @protect
    def _end_call(self, runner: Any, call: tuple[int, Any, Any], result: Any) -> None:
        """Look at what came out of a layer."""
        number, x, logits = call
        _, output = result
        if not hasattr(output, "shape"):
            return
        if self._routed is not None:
            weights, ids = self._routed
            self.keeper.watch(number, MoeCall(MoeInput(x, ids, weights, logits), output))
        elif is_routed_by_kernel(runner):
            self.keeper.watch(number, MoeCall(MoeInput(x, logits=logits), output))

    def _number(self, runner: Any, layer: Any) -> int | None:
        key = id(runner)
        if key not in self._numbers:
            try:
                layer_of_runner = make_watched_layer(runner, layer, lambda: self.model)
                if self.ring is None:
                    self._numbers[key] = self.keeper.add(layer_of_runner)
                else:
                    known = {"addresses": list_addresses(getattr(runner, "routed_experts", layer))}
                    record = layer_of_runner.record.model_copy(update=known)
                    self._numbers[key] = self.ring.add(record, self.model)
                if self._numbers[key] is not None:
                    self._mark_active()
            except Exception as error:
                reason = str(error) if isinstance(error, FixError) else format_error(error)
                self._warn(f"{getattr(layer, 'layer_name', 'experts')} is not watched: {reason}")
                self._numbers[key] = None
        return self._numbers[key]

    def _mark_active(self) -> None:
        """Leave a file that shows `moedoctor record` that a MoE layer was watched in this process."""
        try:
            make_folder(self.folder)
            (self.folder / f"{os.getpid()}{WATCHED}").touch(mode=0o600)
        except OSError as error:
            self._warn(f"{self.folder} cannot be written: {error}")


def _find_device_error() -> str | None:
    """Return what is wrong with the device after an illegal access or an assertion; None if it works."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return format_error(error)
    return None


_active: tuple[EngineRecorder, ProcessEnd] | None = None
"""The recorder of this process, and the function that saves the rest when it ends."""


def finish() -> None:
    """Save what the last step kept, in a process that ends without `atexit`."""
    if _active is not None:
        _active[1].run()


def apply(version: str) -> str:
    """Start recording in the vLLM of this process; see `moedoctor.plugin.register`."""
    global _active
    folder = os.environ.get(VARIABLE, "").strip()
    if not folder:
        raise FixError(f"{VARIABLE} is not set; expected the folder for capsules")
    text = os.environ.get(WHEN, "").strip() or "nan"
    try:
        wish = Wish.parse(text, _read_max_bytes(os.environ))
    except ValueError as error:
        raise OptionError(f"{WHEN} is {error}") from None
    if _active is not None:
        _active[1].prepare()  # this process may be a fork of the one where the recording was started
        return "is active already"
    recorder = EngineRecorder(Path(folder), wish)
    moe, router = f"{_FUSED}.runner.moe_runner:MoERunner", f"{_FUSED}.router.base_router:BaseRouter"
    calls, routed = ("self.router.select_experts(",), ("return topk_weights, topk_ids",)
    made = functools.partial(call_after, then=recorder.find_checkpoint)
    patches = [
        Patch(f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase", "__init__", made, "moe"),
        Patch(moe, "_apply_quant_method", recorder.wrap_moe, "hidden_states router_logits", calls),
        Patch(router, "select_experts", recorder.wrap_router, "router_logits", routed),
        *Steps(recorder.begin, recorder.end).list_patches(),
    ]
    apply_patches("record", version, patches)
    _active = recorder, ProcessEnd(recorder.finish)
    return f"MoE calls are watched ({text}); what is kept goes to {folder}"


def _read_max_bytes(environ: Mapping[str, str]) -> int:
    """Return the largest size of a capsule. Raises OptionError."""
    text = environ.get(SIZE, "").strip()
    if not text:
        return MAX_BYTES
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= _MOST_MB:
        raise OptionError(f"{SIZE} is {text[:40]!r}; expected a size in MB, up to {_MOST_MB}")
    return int(size * 10**6)
