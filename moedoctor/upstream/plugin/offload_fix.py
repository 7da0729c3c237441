"""The fix `offload`: vLLM's CPU offload without UVA, by the offloader of `moedoctor.fixes.offloader`.

Without UVA (WSL, or ``VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1``) vLLM puts parameters into host memory, and
every layer's `forward` copies all of its state to the GPU and runs the module with the copies. Dynamo of
torch 2.11 cannot trace that, what the quantisation config holds stays on the host, and the copies start when
they are needed.

Here vLLM still chooses the parameters and loads the weights. When they are loaded and repacked, the offloader
takes over: every parameter, the same object as before, lies on the GPU for good, the large ones in buffers
that are filled ahead of each layer, scales and other small ones by themselves. Nothing is swapped in
`forward`, so nothing holds a host address. With UVA nothing is changed.

Weights cannot be reloaded into such an engine: vLLM's `reload_weights` and `update_weights` write into
`data` of parameters, which is a buffer here, so what they write is lost and nothing says so. Start the engine
anew.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from moedoctor.upstream.plugin.fix_support import FixError, expect, replace_once
from moedoctor.upstream.plugin.offload_mark import MARK, taking_off
from moedoctor.upstream.plugin.offload_readers import readers

logger = logging.getLogger("vllm.moedoctor")

NAME = "offload"
FIRST_WITHOUT_ASSERTION = Version("0.20.0")
FIRST_KEEPING_MARKS = Version("0.33.0")
_UNPINNED = "host memory is not pinned"
_PENDING = "_moedoctor_layers"
_HANDLE = "_moedoctor_offload"
_WRAPS = ("if not self.uva_offloading", "module.state_dict()", "functional_call(", "module.forward = forward")
_ASSERTS = "assert self.offload_config.uva.cpu_offload_gb == 0"


def apply(version: str) -> str:
    """Apply the fix to the vLLM of this process, of release `version`; what is active, in a few words.

    Raises FixError where vLLM is not as expected; nothing has been changed then.
    """
    offloader = importlib.import_module("vllm.model_executor.offloader.uva").UVAOffloader
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    expect(offloader, "_maybe_offload_to_cpu", ("self", "module"), _WRAPS)
    expect(offloader, "post_init", ("self",), ())
    expect(arguments, "create_engine_config", ("self",), ("additional_config=self.additional_config",))
    lift, mark = _assertion_of(version), _marks_of(version)
    offload = importlib.import_module("moedoctor.fixes.offloader").offload
    replace_once(offloader, "_maybe_offload_to_cpu", _collecting, by=NAME)
    replace_once(offloader, "post_init", functools.partial(_finishing, offload=offload), by=NAME)
    replace_once(arguments, "create_engine_config", _configuring, by=NAME)
    lift()
    mark()
    said = ["without UVA weights are copied ahead of each layer, scales stay on the GPU"]
    if Version(version) < FIRST_WITHOUT_ASSERTION:
        said.append("the input batch may be rebuilt")
    if Version(version) >= FIRST_KEEPING_MARKS:
        said.append("repacked weights go back to the host")
    return ", ".join(said)


@dataclass(frozen=True)
class _Layer:
    """A module with parameters that vLLM put on the host."""

    module: Any
    device: Any
    """Where it runs."""
    theirs: Any
    """vLLM's own `forward` around it, which is off for the time being."""


def _collecting(original: Any) -> Any:
    """`_maybe_offload_to_cpu`, which leaves the module's own `forward` in place and remembers the module.

    With UVA it does not touch `forward`, so nothing is remembered.
    """

    @functools.wraps(original)
    def _maybe_offload_to_cpu(self: Any, module: Any, *arguments: Any, **options: Any) -> Any:
        first = next(iter(module.parameters()), None)
        device = None if first is None else first.device  # it is moved to the host below
        before = module.__dict__.get("forward")
        result = original(self, module, *arguments, **options)
        theirs = module.__dict__.get("forward")
        if theirs is not before:
            if before is None:
                del module.forward
            else:
                module.forward = before
            self.__dict__.setdefault(_PENDING, []).append(_Layer(module, device, theirs))
        return result

    return _maybe_offload_to_cpu


def _finishing(original: Any, *, offload: Callable[..., Any]) -> Any:
    """`post_init`, which vLLM calls when the weights are loaded and repacked: our offloader takes over."""

    @functools.wraps(original)
    def post_init(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        pending = self.__dict__.pop(_PENDING, [])
        if pending:
            try:
                setattr(self, _HANDLE, _take_over(pending, offload, pin=bool(self.pin_memory)))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                logger.warning("moedoctor: offload is left to vLLM, which ours could not take over: %s", said)
                for one in pending:
                    one.module.forward = one.theirs
        return result

    return post_init


def _take_over(pending: Sequence[_Layer], offload: Callable[..., Any], *, pin: bool) -> Any:
    """Offload what vLLM left on the host, by exactly those names; None where the rules keep all of it."""
    import torch

    layers, device = [one.module for one in pending], pending[0].device
    chosen = torch.nn.ModuleList(layers)
    on_host = {name: one for name, one in chosen.named_parameters() if one.device.type == "cpu"}
    size = sum(one.numel() * one.element_size() for one in on_host.values())
    if not size:
        return None
    found = readers(layers, list(on_host.values()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _UNPINNED, RuntimeWarning)  # a note, and notes are logged
        handle = offload(
            chosen,
            size,
            device=device,
            patterns=tuple(on_host),
            layers=list(found) or layers,
            pin=pin,
            reader=found.__getitem__ if found else None,
        )
    report = handle.report()
    for note in report.notes:
        logger.info("moedoctor: offload: %s", note)
    if report.pinned_bytes < report.host_bytes and not any(one.startswith(_UNPINNED) for one in report.notes):
        logger.info("moedoctor: offload: %s, so copies block", _UNPINNED)
    logger.info(
        "moedoctor: offload: %.1f of %.1f MiB on the host, fetched %s, %d layers, %.1f MiB pinned,"
        " %.1f MiB of buffers",
        report.host_bytes / 2**20,
        size / 2**20,
        "inside the MoE operator" if found else "around each layer",
        len(layers),
        report.pinned_bytes / 2**20,
        report.buffer_bytes / 2**20,
    )
    return handle


def _configuring(original: Any) -> Any:
    """`create_engine_config`, for an engine that offloads without UVA.

    CUDA graphs are left out, since a graph cannot hold copies from memory that is not pinned, and what is
    compiled gets a mark of its own, so that vLLM's cache never gives it to an engine without the fix.
    """

    @functools.wraps(original)
    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        if offloads_without_uva(self):
            self.additional_config = {**(self.additional_config or {}), "moedoctor": NAME}
            config = importlib.import_module("vllm.config")
            modes = getattr(config, "CUDAGraphMode", None)
            if modes is not None and not self.enforce_eager:
                self.compilation_config.cudagraph_mode = modes.NONE
                logger.info("moedoctor: offload: no CUDA graphs, since weights are copied in every forward")
        return original(self, *arguments, **options)

    return create_engine_config


def offloads_without_uva(arguments: Any) -> bool:
    """Whether the engine of these `EngineArgs` offloads by copies in every forward."""
    if getattr(arguments, "offload_backend", "auto") not in ("auto", "uva"):
        return False
    if not arguments.cpu_offload_gb or getattr(arguments, "offload_group_size", 0) > 0:
        return False
    envs = importlib.import_module("vllm.envs")
    utilities = importlib.import_module("vllm.utils.platform_utils")
    return bool(envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA) or not utilities.is_uva_available()


def _assertion_of(version: str) -> Callable[[], None]:
    """What lifts the assertion of releases before 0.20.0 against offload with other block sizes."""
    if Version(version) >= FIRST_WITHOUT_ASSERTION:
        return lambda: None
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    wanted = ("self", "kv_cache_config", "kernel_block_sizes")
    expect(runner, "may_reinitialize_input_batch", wanted, (_ASSERTS,))
    source = inspect.getsource(runner.may_reinitialize_input_batch)
    if source.count("offload_config") != 1:
        raise FixError(
            "GPUModelRunner.may_reinitialize_input_batch reads offload_config for more than its check"
        )
    return lambda: _replaced(runner)


def _marks_of(version: str) -> Callable[[], None]:
    """What has repacked weights offloaded again, in releases that keep the parameter and its mark."""
    if Version(version) < FIRST_KEEPING_MARKS:
        return lambda: None
    utilities = importlib.import_module("vllm.model_executor.model_loader.utils")
    expect(utilities, "device_loading_context", ("module", "target_device"), (MARK,))

    def mark() -> None:
        replace_once(utilities, "device_loading_context", taking_off, by=NAME)

    return mark


def _replaced(runner: Any) -> None:
    replace_once(runner, "may_reinitialize_input_batch", unasserted, by=NAME)


def unasserted(original: Any) -> Any:
    """`may_reinitialize_input_batch`, to which offload looks switched off: it asks for nothing else of it."""

    @functools.wraps(original)
    def may_reinitialize_input_batch(self: Any, *arguments: Any, **options: Any) -> Any:
        real = self.offload_config
        self.offload_config = _NoOffload
        try:
            return original(self, *arguments, **options)
        finally:
            self.offload_config = real

    return may_reinitialize_input_batch


class _NoOffload:
    class uva:  # noqa: N801
        cpu_offload_gb = 0
