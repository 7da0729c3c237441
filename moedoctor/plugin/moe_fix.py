"""The fix `moe`: vLLM's MoE layers are computed by moedoctor's own Triton kernels.

For models that talk garbage on every backend (vllm-project/vllm#38718): if the answer is right with this fix,
the backend was wrong; if it is still garbage, the fault is elsewhere. Weights and scales are taken as they
were loaded, so no backend has repacked them. Unquantized, FP8 and NVFP4 experts; activations are never
quantized, and sums are float32. ``MOEDOCTOR_MOE=reference`` computes with plain torch in float32 instead:
very slow, without CUDA graphs, and independent of Triton too.

A layer that cannot be computed is refused with the reason when the model is built.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from moedoctor.plugin.moe_layer import (
    ACTIVATIONS,
    COMPRESSED_TENSORS,
    FUSED,
    MODELOPT,
    Take,
    make_experts_class,
    take_fp8,
    take_nvfp4,
    take_over,
    take_plain,
)
from moedoctor.plugin.register import (
    FixError,
    OptionError,
    Patch,
    apply_patches,
    log,
    refuse,
    stop_engine,
)
from moedoctor.results import UnavailableError

logger = logging.getLogger("vllm.moedoctor")

NAME = "moe"
VARIABLE = "MOEDOCTOR_MOE"
KERNELS, REFERENCE = "kernels", "reference"
_COMPUTERS = {KERNELS: "moedoctor's kernels", REFERENCE: "the float32 reference"}
LEAST_CAPABILITY = (8, 0)
"""Older tensor cores have no bfloat16."""
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_LOADER = "vllm.model_executor.model_loader.base_loader:BaseModelLoader"
_MODEL_UTILS, _ASK_REPACKED = "vllm.model_executor.utils", "is_weights_pre_processed"
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"


_KINDS = {
    "unquantized": ("UnquantizedMoeBackend", "TRITON"),
    "fp8": ("Fp8MoeBackend", "TRITON"),
    "nvfp4": ("NvFp4MoeBackend", "EMULATION"),
}
"""vLLM's name of a kind of weights -> its enumeration of backends, and the backend that vLLM believes to use:
one that does not pad the weights' sizes."""


@dataclass(frozen=True)
class Format:
    """One way in which vLLM holds expert weights."""

    name: str
    kind: str
    module: str
    """The module of the method, which selects a backend by ``select_{kind}_moe_backend``."""
    method: str
    take: Take
    holds: str = 'layer.register_parameter("w13_weight_scale", w13_weight_scale)'
    """A line of the method's `create_weights`."""


FORMATS = (
    Format(
        "unquantized",
        "unquantized",
        f"{FUSED}.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod",
        take_plain,
        'layer.register_parameter("w13_weight", w13_weight)',
    ),
    Format(
        "FP8",
        "fp8",
        f"{_QUANTIZATION}.fp8",
        "Fp8MoEMethod",
        take_fp8,
        'layer.register_parameter(f"w13_{self.weight_scale_name}", w13_weight_scale)',
    ),
    Format("FP8 of ModelOpt", "fp8", f"{_QUANTIZATION}.modelopt", "ModelOptFp8MoEMethod", take_fp8),
    Format(
        "FP8 of compressed-tensors",
        "fp8",
        f"{_COMPRESSED}_w8a8_fp8",
        "CompressedTensorsW8A8Fp8MoEMethod",
        take_fp8,
    ),
    Format(
        "NVFP4",
        "nvfp4",
        f"{_QUANTIZATION}.modelopt",
        "ModelOptNvFp4FusedMoE",
        functools.partial(take_nvfp4, MODELOPT),
        'layer.register_parameter("w13_weight_scale_2", w13_weight_scale_2)',
    ),
    Format(
        "NVFP4 of compressed-tensors",
        "nvfp4",
        f"{_COMPRESSED}_w4a4_nvfp4",
        "CompressedTensorsW4A4Nvfp4MoEMethod",
        functools.partial(take_nvfp4, COMPRESSED_TENSORS),
        'layer.register_parameter("w13_weight_global_scale", w13_weight_scale_2)',
    ),
)
_PARALLEL = (
    ("use_ep", "expert parallel spreads the experts over GPUs"),
    ("enable_eplb", "expert parallel load balancing moves experts"),
    ("is_sequence_parallel", "sequence parallel divides the tokens of a layer"),
)
"""Settings of a layer that are refused, and why."""


def apply(version: str) -> str:
    """Apply the fix; see `moedoctor.plugin.register`. Raises OptionError for a bad variable."""
    computer = read_computer(os.environ)
    patches = [
        Patch(f"{FUSED}.fused_moe_method_base:FusedMoEMethodBase", "__init__", _wrap_constructor, "moe"),
        Patch(_LOADER, "load_model", _wrap_load_model, "self vllm_config model_config"),
        Patch(_MODEL_UTILS, _ASK_REPACKED, None, releases=">=0.33.0"),
    ]
    for form in FORMATS:
        owner = f"{form.module}:{form.method}"
        processing = functools.partial(_wrap_process_weights, form=form)
        selecting = functools.partial(_wrap_select, form=form, stand_in=_find_stand_in(form))
        call = (".moe_kernel.apply(",)
        patches += [
            Patch(form.module, f"select_{form.kind}_moe_backend", selecting),
            Patch(owner, "create_weights", None, "layer num_experts", (form.holds,)),
            Patch(owner, "process_weights_after_loading", processing, "layer"),
            Patch(owner, "forward_native" if form.name == "unquantized" else "apply", None, "layer x", call),
        ]
    apply_patches(NAME, version, patches)
    return f"MoE layers by {_COMPUTERS[computer]}"


def read_computer(environ: Mapping[str, str]) -> str:
    """Return what computes the layers, `KERNELS` or `REFERENCE`. Raises OptionError."""
    value = environ.get(VARIABLE, "").strip().lower() or KERNELS
    if value not in _COMPUTERS:
        raise OptionError(f"{VARIABLE} is {value[:40]!r}; expected {' or '.join(_COMPUTERS)}")
    return value


def _wrap_constructor(original: Any) -> Any:
    """Wrap the constructor of all MoE methods: refuse what cannot be computed before weights are loaded."""

    def construct(self: Any, moe: Any, *arguments: Any, **options: Any) -> None:
        reason = check_method(self, moe)
        if reason is not None:
            refuse(NAME, reason)
        self.__dict__[_OURS] = reason is None
        _OURS_NEXT.set(reason is None)
        original(self, moe, *arguments, **options)

    return construct


def _wrap_load_model(original: Any) -> Any:
    """Wrap `load_model`: a model without a MoE layer is refused, because the fix would do nothing."""

    def load_model(self: Any, *arguments: Any, **options: Any) -> Any:
        model = original(self, *arguments, **options)
        if not _announce.cache_info().currsize:
            refuse(NAME, "the model has no MoE layer that it can compute; expected one, or leave moe out")
        return model

    return load_model


def check_method(method: Any, moe: Any) -> str | None:
    """Return why a layer with this method and configuration cannot be computed, or None if it can."""
    name = type(method).__name__
    if "Online" in name:  # so vLLM names all of them
        return f"{name} quantizes while it loads; leave --quantization out, so that weights stay as they are"
    if name not in [form.method for form in FORMATS]:
        return f"{name} holds its weights in another way than {', '.join(form.method for form in FORMATS)}"
    parallel = moe.moe_parallel_config
    for setting, reason in _PARALLEL:
        if getattr(parallel, setting, False) or getattr(moe, setting, False):
            return reason
    for setting in ("dp_size", "pcp_size"):
        if getattr(parallel, setting, 1) > 1:
            return f"{setting} is {getattr(parallel, setting)}: layers exchange tokens with other ranks"
    if moe.is_lora_enabled:
        return "LoRA changes the experts"
    if moe.activation.value not in ACTIVATIONS:
        return f"the activation is {moe.activation.value}; expected {', '.join(ACTIVATIONS)}"
    if str(moe.in_dtype) not in ("torch.bfloat16", "torch.float16"):
        return f"activations are {moe.in_dtype}; expected bfloat16 or float16"
    if getattr(moe, "swiglu_limit", None) is not None:
        return "swiglu_limit clamps the activation"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        return "VLLM_BATCH_INVARIANT is set, and our tiles depend on the batch"
    return _check_machine()


def _check_machine() -> str | None:
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        return "the kernels are for NVIDIA GPUs"
    capability = tuple(platform.get_device_capability()[:2])
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"the GPU has compute capability {'.'.join(map(str, capability))}; expected {least} or later"
    config = importlib.import_module("vllm.config").get_current_vllm_config()
    if config.load_config.load_format == "ipc_cache":
        return _REPACKED
    eager = config.model_config is None or config.model_config.enforce_eager
    if read_computer(os.environ) == REFERENCE and not eager:
        return f"{VARIABLE}={REFERENCE} needs --enforce-eager"
    return None


_REPACKED = "weights come from a weight cache, and a backend repacked them; expected --load-format auto"


def _are_repacked() -> bool:
    """Return True if vLLM loads weights that another process processed, which it can since 0.33.0."""
    ask = getattr(importlib.import_module(_MODEL_UTILS), _ASK_REPACKED, None)
    return ask is not None and bool(ask())


_OURS = "_moedoctor_computes"
"""Attribute of a method: whether its layer is computed by us. A layer that is refused may be left to vLLM."""
_OURS_NEXT: ContextVar[bool] = ContextVar("moedoctor_computes", default=True)
"""The same of the method that was made last: vLLM selects its backend right after that."""
_REPLACED: dict[str, str] = {}
"""Format -> the backend that vLLM selected."""
_SELECTED: dict[str, tuple[Any, Any]] = {}
"""Format -> that backend and its experts, as vLLM holds them; none if vLLM has no backend."""


def _find_stand_in(form: Format) -> Any:
    enumeration, stand_in = _KINDS[form.kind]
    backends = f"{FUSED}.oracle.{form.kind}:{enumeration}"
    try:
        return pkgutil.resolve_name(backends)[stand_in]
    except (ImportError, AttributeError, KeyError):
        raise FixError(f"there is no {stand_in} in {backends}") from None


def _wrap_select(original: Any, *, form: Format, stand_in: Any) -> Any:
    """Wrap the selection of a backend: note which it is, and return our experts."""

    def select(*arguments: Any, **options: Any) -> Any:
        if not _OURS_NEXT.get():
            return original(*arguments, **options)
        _SELECTED.pop(form.name, None)
        try:
            _SELECTED[form.name] = selected = original(*arguments, **options)[:2]
            backend = getattr(selected[0], "value", "its own")
        except (ValueError, NotImplementedError) as error:
            first = str(error).partition("\n")[0]
            logger.warning("moedoctor: vLLM has no backend for these %s experts: %s", form.name, first)
            backend = "no backend"
        _REPLACED[form.name] = str(backend)
        return stand_in, make_experts_class()

    return select


def _wrap_process_weights(original: Any, *, form: Format) -> Any:
    """Wrap `process_weights_after_loading`: keep vLLM's own from repacking the weights."""

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if not getattr(self, _OURS) or type(self).__name__ != form.method:
            original(self, layer)
            return
        computer = read_computer(os.environ)
        try:
            if getattr(layer, "swiglu_limit", None) is not None:
                raise UnavailableError("swiglu_limit clamps the activation")
            if _are_repacked():  # of a draft model, whose load format `check_method` does not see
                raise UnavailableError(_REPACKED)
            take_over(self, layer, form.take, by_reference=computer == REFERENCE)
        except UnavailableError as error:
            refuse(NAME, str(error))  # it shows only in loaded weights
            _leave(self, form, str(error))
            original(self, layer)
            return
        _announce(form.name, computer)

    return process_weights_after_loading


def _leave(method: Any, form: Format, reason: str) -> None:
    """Give a method back the backend that vLLM selected for it, or stop the engine if vLLM has none."""
    if form.name not in _SELECTED:
        stop_engine(
            f"vLLM is stopped: {NAME} is refused: {reason}; vLLM has no backend for this layer either"
        )
    backend, experts = _SELECTED[form.name]
    given = {id(_find_stand_in(form)): backend, id(make_experts_class()): experts}
    for name, value in list(vars(method).items()):
        if id(value) in given:
            setattr(method, name, given[id(value)])
    method.__dict__[_OURS] = False


@functools.cache
def _announce(name: str, computer: str) -> None:
    backend = _REPLACED.get(name, "vLLM's backend")
    log(
        "moedoctor: moe: %s experts are computed by %s in place of %s; if the answer is right now, %s was "
        "wrong, or input scales, which are not read here (moedoctor lint CHECKPOINT); if it is still "
        "garbage, look elsewhere: the checkpoint, attention, the KV cache",
        name,
        _COMPUTERS[computer],
        backend,
        backend,
    )
