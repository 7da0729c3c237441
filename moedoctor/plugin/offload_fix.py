"""The fix `offload`: vLLM's CPU offload without UVA, by the offloader of `moedoctor.fixes.offloader`.

Without UVA (WSL, or ``VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1``) vLLM puts parameters into host memory, and
every layer's `forward` copies all of its state to the GPU and runs the module with the copies. Dynamo of
most torch releases (MD005) cannot trace that, tensors in the quantization config stay on the host, and each
copy starts only when it is needed.

With this fix vLLM still chooses the parameters and loads the weights. After they are loaded and repacked, the
offloader takes over. Every parameter, the same object as before, is then on the GPU for good: the large ones
in buffers that are filled ahead of each layer, scales and other small ones by themselves. Nothing is swapped
in `forward`, so nothing holds a host address.

A buffer that a module made of a weight gets what was loaded (`moedoctor.fixes.offload.views`), also with
UVA, where nothing else is changed.

Weights cannot be reloaded into such an engine: `weight_reload` refuses it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from packaging.specifiers import SpecifierSet

from moedoctor.plugin import weight_reload
from moedoctor.plugin.register import FixError, Patch, apply_patches, refuse

logger = logging.getLogger("vllm.moedoctor")

NAME = "offload"
MARK = "_vllm_is_uva_offloaded"
_ASSERTING, _KEEPING_MARKS = "<0.20.0", ">=0.33.0"
"""Releases with an assertion against offload, and with marks that outlive their memory."""
_ASSERTS = "assert self.offload_config.uva.cpu_offload_gb == 0"
_WRAPS = ("if not self.uva_offloading", "module.state_dict()", "functional_call(", "module.forward = forward")
_ADDITIONAL = "additional_config=self.additional_config"
_LOADING = "device_loading_context"
_UNPINNED = "host memory is not pinned"
_OFFLOADER = "vllm.model_executor.offloader.base"
_PENDING, _VIEWS = "_moedoctor_layers", "_moedoctor_views"
_HANDLE = "_moedoctor_offload"
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_ENTRY, _READER = "_forward_entry", "_forward_impl"


def apply(version: str) -> str:
    """Apply the fix; see `moedoctor.plugin.register`."""
    offload = importlib.import_module("moedoctor.fixes.offloader").offload
    views = importlib.import_module("moedoctor.fixes.offload.views")
    finishing = functools.partial(_wrap_post_init, offload=offload)
    collecting = functools.partial(_collect_modules, find_views=views.find_views)
    loading_model = functools.partial(_wrap_worker_load_model, fill_views=views.fill_views)
    arguments = "vllm.engine.arg_utils:EngineArgs"
    uva, loading = "vllm.model_executor.offloader.uva:UVAOffloader", "vllm.model_executor.model_loader.utils"
    runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    rebuild, sizes = "may_reinitialize_input_batch", "self kv_cache_config kernel_block_sizes"
    loads = ("self.model_runner.load_model(",)
    patches = (
        Patch(uva, "_maybe_offload_to_cpu", collecting, "self module", _WRAPS),
        Patch(uva, "post_init", finishing, "self"),
        Patch(_OFFLOADER, "get_offloader", None),
        Patch(weight_reload.WORKER, "load_model", loading_model, "self", loads),
        Patch(arguments, "create_engine_config", _wrap_create_engine_config, "self", (_ADDITIONAL,)),
        Patch(runner, rebuild, skip_assertion, sizes, (_ASSERTS,), "offload_config", releases=_ASSERTING),
        Patch(loading, _LOADING, remove_marks, "module target_device", (MARK,), releases=_KEEPING_MARKS),
    )
    weight_reload.apply(version)
    apply_patches(NAME, version, patches)
    active = ["without UVA weights are copied ahead of each layer, scales stay on the GPU"]
    active.append("buffers made of weights are filled")
    if version in SpecifierSet(_ASSERTING):
        active.append("the input batch may be rebuilt")
    if version in SpecifierSet(_KEEPING_MARKS):
        active.append("repacked weights go back to the host")
    return ", ".join(active)


@dataclass(frozen=True)
class _Layer:
    """A module with parameters that vLLM put on the host."""

    module: Any
    device: Any
    """The device that it computes on."""
    vllm_forward: Any
    """vLLM's own `forward` around it, which is off for the time being."""


def _collect_modules(original: Any, *, find_views: Callable[[Any], list[Any]]) -> Any:
    """Wrap `_maybe_offload_to_cpu`: leave the module's own `forward` in place and remember the module.

    With UVA it does not touch `forward`, so only buffers made of weights are remembered.
    """

    def _maybe_offload_to_cpu(self: Any, module: Any, *arguments: Any, **options: Any) -> Any:
        first = next(iter(module.parameters()), None)
        device = None if first is None else first.device  # it is moved to the host below
        self.__dict__.setdefault(_VIEWS, []).extend(find_views(module))
        before = module.__dict__.get("forward")
        result = original(self, module, *arguments, **options)
        vllm_forward = module.__dict__.get("forward")
        if vllm_forward is not before:
            if before is None:
                del module.forward
            else:
                module.forward = before
            self.__dict__.setdefault(_PENDING, []).append(_Layer(module, device, vllm_forward))
        return result

    return _maybe_offload_to_cpu


def _wrap_post_init(original: Any, *, offload: Callable[..., Any]) -> Any:
    """Wrap `post_init`, which vLLM calls after weights are loaded and repacked: our offloader takes over."""

    def post_init(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        pending = self.__dict__.pop(_PENDING, [])
        if pending:
            try:
                handle = _take_over(pending, offload, pin=bool(self.pin_memory))
                setattr(self, _HANDLE, handle)
                if handle is not None:
                    weight_reload.hold(NAME, handle)
            except Exception as error:
                for layer in pending:
                    layer.module.forward = layer.vllm_forward
                refuse(NAME, f"ours could not take over from vLLM: {type(error).__name__}: {error}")
        return result

    return post_init


def _wrap_worker_load_model(original: Any, *, fill_views: Callable[[Sequence[Any]], int]) -> Any:
    """Wrap the worker's `load_model`: fill buffers, and call `post_init` where the model runner does not.

    V1 returns before it with STOCK_TORCH_COMPILE, and V2 has no such call before 0.28.0.
    """

    def load_model(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        offloader = importlib.import_module(_OFFLOADER).get_offloader()
        if _PENDING in vars(offloader):
            offloader.post_init()
        views = vars(offloader).get(_VIEWS, ())
        if filled := fill_views(views):
            weight_reload.hold(NAME, views[0])
            names = ", ".join(sorted({view.name.rpartition(".")[2] for view in views}))
            logger.info("moedoctor: offload: %d buffers made of weights are filled: %s", filled, names)
        return result

    return load_model


def _take_over(pending: Sequence[_Layer], offload: Callable[..., Any], *, pin: bool) -> Any:
    """Offload exactly the parameters that vLLM left on the host; return None if there are none."""
    import torch

    layers, device = [layer.module for layer in pending], pending[0].device
    modules = torch.nn.ModuleList(layers)
    on_host = {
        name: parameter for name, parameter in modules.named_parameters() if parameter.device.type == "cpu"
    }
    size = sum(parameter.numel() * parameter.element_size() for parameter in on_host.values())
    if not size:
        return None
    reader_of = find_readers(layers, list(on_host.values()))
    # A buffer in a block that repacking left would keep torch from releasing the rest of that block.
    torch.cuda.empty_cache()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _UNPINNED, RuntimeWarning)  # it is a note too, which is logged
        handle = offload(
            modules,
            size,
            device=device,
            patterns=tuple(on_host),
            layers=list(reader_of) or layers,
            pin=pin,
            reader=reader_of.__getitem__ if reader_of else None,
        )
    report = handle.report()
    for note in report.notes:
        logger.info("moedoctor: offload: %s", note)
    noted = any(note.startswith(_UNPINNED) for note in report.notes)
    if report.pinned_bytes < report.host_bytes and not noted:
        logger.info("moedoctor: offload: %s, so copies block", _UNPINNED)
    logger.info(
        "moedoctor: offload: %.1f of %.1f MiB on the host, fetched %s, %d layers, %.1f MiB pinned,"
        " %.1f MiB of buffers",
        report.host_bytes / 2**20,
        size / 2**20,
        "inside the MoE operator" if reader_of else "around each layer",
        len(layers),
        report.pinned_bytes / 2**20,
        report.buffer_bytes / 2**20,
    )
    return handle


def _wrap_create_engine_config(original: Any) -> Any:
    """Wrap `create_engine_config` for engines that offload without UVA.

    They get no CUDA graphs, because a graph cannot hold copies from memory that is not pinned. Compiled code
    gets a mark, so that vLLM's cache never gives it to an engine without the fix.
    """

    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        if is_offloaded_without_uva(self):
            self.additional_config = {**(self.additional_config or {}), "moedoctor": NAME}
            config = importlib.import_module("vllm.config")
            modes = getattr(config, "CUDAGraphMode", None)
            if modes is not None and not self.enforce_eager:
                self.compilation_config.cudagraph_mode = modes.NONE
                logger.info("moedoctor: offload: no CUDA graphs, since weights are copied in every forward")
        return original(self, *arguments, **options)

    return create_engine_config


def is_offloaded_without_uva(arguments: Any) -> bool:
    """Return True if the engine of these `EngineArgs` offloads by copies in every forward."""
    if getattr(arguments, "offload_backend", "auto") not in ("auto", "uva"):
        return False
    if not arguments.cpu_offload_gb or getattr(arguments, "offload_group_size", 0) > 0:
        return False
    envs = importlib.import_module("vllm.envs")
    utilities = importlib.import_module("vllm.utils.platform_utils")
    return bool(envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA) or not utilities.is_uva_available()


# --- The assertion of releases before 0.20.0 against offload with other block sizes -----------------------


def skip_assertion(original: Any) -> Any:
    """Wrap `may_reinitialize_input_batch`, so that offload looks switched off: it only asserts that."""

    def may_reinitialize_input_batch(self: Any, *arguments: Any, **options: Any) -> Any:
        config = self.offload_config
        self.offload_config = SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0))
        try:
            return original(self, *arguments, **options)
        finally:
            self.offload_config = config

    return may_reinitialize_input_batch


# --- A mark "offloaded" that outlives the memory it was about (MD013) -------------------------------------
#
# vLLM marks parameters whose data is a view of host memory. When a layer is processed after loading, 0.33.0
# keeps the parameter object and gives it the repacked data, which is on the GPU. The mark stays, so the
# weights are not offloaded again.


def remove_marks(original: Any) -> Any:
    """Wrap `device_loading_context`: take the mark off parameters whose memory was exchanged."""

    @contextlib.contextmanager
    def device_loading_context(
        module: Any, target_device: Any, *arguments: Any, **options: Any
    ) -> Iterator[Any]:
        # The storages are held, so that no new one can take the place of an old one.
        before = {
            name: parameter.untyped_storage()
            for name, parameter in module.named_parameters()
            if getattr(parameter, MARK, False)
        }
        with original(module, target_device, *arguments, **options) as inside:
            yield inside
            for name, parameter in module.named_parameters():
                storage = before.get(name)
                if storage is not None and parameter.untyped_storage()._cdata != storage._cdata:
                    setattr(parameter, MARK, False)

    return device_loading_context


# --- The function in which vLLM's MoE layers read the weights of their experts ----------------------------
#
# It runs inside the MoE operator, which compilers do not look into, so weights that are fetched there leave
# the compiled code as it is. Operators of ours around each decoder layer would work as well, but would keep
# the compiler from recomputing the residual where it is used, without rounding it to bfloat16 in between.


def find_readers(layers: Sequence[Any], offloaded: Sequence[Any]) -> Mapping[Any, tuple[Any, str]]:
    """Return which function reads the parameters `offloaded` of `layers`, for the modules that own them.

    Empty if one of them is not an expert's weight, if the MoE operator is left out, and in releases before
    0.20.0, which have other functions.
    """
    if not _has_reader():
        return {}
    reader_of = {}
    for layer in layers:
        for module in layer.modules():
            runner = getattr(module, "runner", module)
            if not _is_operator(getattr(runner, _ENTRY, None)):
                continue
            experts = getattr(runner, "routed_experts", module)  # newer releases: a module of its own
            if any(parameter.numel() for parameter in experts.parameters(recurse=False)):
                reader_of[experts] = (runner, _READER)
    read = {id(parameter) for experts in reader_of for parameter in experts.parameters(recurse=False)}
    return reader_of if all(id(parameter) in read for parameter in offloaded) else {}


def _has_reader() -> bool:
    """Return True if the MoE operator of the installed vLLM calls `_READER`."""
    operator, logits = "hidden_states layer_name", "hidden_states router_logits"
    calls, runner = (f".{_READER}(",), f"{_RUNNER}:MoERunner"
    try:
        Patch(_RUNNER, "_moe_forward", None, operator, calls).check()
        Patch(_RUNNER, "_moe_forward_shared", None, operator, calls).check()
        Patch(runner, _READER, None, logits).check()
        Patch(runner, "forward", None, logits, (f"self.{_ENTRY}(",)).check()
    except FixError:
        return False
    return True


def _is_operator(function: Any) -> bool:
    """Return True if it is an operator of torch's; on a CPU it is the Python function of that name."""
    import torch

    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
