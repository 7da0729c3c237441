"""The trace `record`: the MoE call of an engine that shows a failure, kept as a capsule.

``MOEDOCTOR_RECORD=DIR`` names the folder; ``MOEDOCTOR_RECORD_WHEN`` says which call: ``nan`` (default),
``first``, ``call=LAYER:N`` or ``mismatch=RATE``. Calls are watched by one launch a layer, which CUDA graphs
hold. Weights are read from the checkpoint's files; the backend's own tensors come along as they are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moedoctor.upstream.plugin.register import FixError, OptionError, Patch, apply_patches, installed_version
from moedoctor.upstream.plugin.steps import Steps

logger = logging.getLogger("vllm.moedoctor")

VARIABLE, WHEN, SIZE = "MOEDOCTOR_RECORD", "MOEDOCTOR_RECORD_WHEN", "MOEDOCTOR_RECORD_SIZE"
_FUSED = "vllm.model_executor.layers.fused_moe"
_QUANTIZATIONS = {
    "UnquantizedFusedMoEMethod": "bf16",
    "Fp8MoEMethod": "fp8",
    "ModelOptNvFp4FusedMoE": "nvfp4",
    "CompressedTensorsW4A4Nvfp4MoEMethod": "nvfp4",
}
"""Class of a MoE method -> quantization of its weights."""
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_tanh", "relu2_no_mul": "relu2"}
"""vLLM's names -> ours."""


class EngineRecorder:
    """Watches the MoE layers of one worker process."""

    def __init__(self, folder: Path, wish: Any) -> None:
        from moedoctor.reference.agreement import BOUNDS
        from moedoctor.trace.moe_recorder import CallKeeper

        self.folder = folder
        self.keeper = CallKeeper(wish, self.save, bounds=BOUNDS)
        self._numbers: dict[int, int | None] = {}
        """id of a runner -> the number of its layer; None if it cannot be recorded."""
        self.model: Path | None = None
        """The folder of the checkpoint that is served, if it is one."""
        self._routed: tuple[Any, Any] | None = None
        """Weights and ids [T, K] that the router gave last."""

    def around_method(self, original: Any) -> Any:
        """Remember the checkpoint when a MoE layer is made."""

        def construct(method: Any, moe: Any, *arguments: Any, **options: Any) -> None:
            original(method, moe, *arguments, **options)
            config = importlib.import_module("vllm.config").get_current_vllm_config()
            model = None if config.model_config is None else Path(config.model_config.model)
            self.model = model if model is not None and model.is_dir() else None

        return construct

    def around_router(self, original: Any) -> Any:
        """Hold what a router gives until its experts have run."""

        def select_experts(router: Any, *arguments: Any, **options: Any) -> Any:
            weights, ids = original(router, *arguments, **options)
            self._routed = (weights, ids)
            return weights, ids

        return select_experts

    def around_moe(self, original: Any) -> Any:
        """Watch the call of a MoE layer."""
        parameters = list(inspect.signature(original).parameters)[1:]

        def apply_quant_method(runner: Any, *arguments: Any, **options: Any) -> Any:
            if self.keeper.done:
                return original(runner, *arguments, **options)
            given = {**dict(zip(parameters, arguments, strict=False)), **options}
            layer, x = given.get("layer", runner), given["hidden_states"]  # x: [T, H]
            number = self._number(runner, layer)
            self._routed = None
            if number is not None and _overwrites(runner):
                x = x.clone()
            shared, routed = original(runner, *arguments, **options)
            if number is not None and self._routed is not None and hasattr(routed, "shape"):
                weights, ids = self._routed
                self.keeper.watch(number, x, routed, ids, weights)
            return shared, routed

        return apply_quant_method

    def begin(self, real: int, rows: int) -> None:
        """Begin a step, and save what the last step kept."""
        self.keeper.begin(real)

    def end(self, hidden: Any) -> None:
        """End a step."""
        self.keeper.end()

    def save(self, capsule: Any) -> None:
        """Write the capsule."""
        from moedoctor.trace.capsule import SUFFIX, save

        record = capsule.record
        name = f"{record.layer.replace('/', '_')}-call{record.call}-{os.getpid()}{SUFFIX}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save(capsule, self.folder / name)
        except OSError as error:
            logger.warning("moedoctor: record: call %d of %s is lost: %s", record.call, record.layer, error)
            return
        logger.warning(
            "moedoctor: record: call %d of %s is kept in %s (%.1f MB, %d tokens): %s",
            record.call,
            record.layer,
            self.folder / name,
            capsule.size / 1e6,
            len(record.tokens),
            record.reason,
        )

    # --- What is known of a layer ---------------------------------------------------------------------------

    def _number(self, runner: Any, layer: Any) -> int | None:
        key = id(runner)
        if key not in self._numbers:
            name = str(getattr(layer, "layer_name", "experts"))
            try:
                self._numbers[key] = self.keeper.add(_watched(name, runner, layer, lambda: self.model))
            except FixError as error:
                logger.warning("moedoctor: record: %s is not watched: %s", name, error)
                self._numbers[key] = None
        return self._numbers[key]


def _overwrites(runner: Any) -> bool:
    """Return whether the experts may write their output over their input."""
    kernel = getattr(runner._quant_method, "moe_kernel", None)
    return bool(getattr(kernel, "inplace", False) or getattr(getattr(kernel, "impl", None), "inplace", False))


def _watched(name: str, runner: Any, layer: Any, find: Callable[[], Path | None]) -> Any:
    """Return the `WatchedLayer` of a MoE layer. Raises FixError if it cannot be recorded."""
    from moedoctor.trace.capsule import Record
    from moedoctor.trace.moe_recorder import WatchedLayer

    method = runner._quant_method
    config = method.moe
    quantization = _QUANTIZATIONS.get(type(method).__name__)
    if quantization is None:
        raise FixError(f"{type(method).__name__} holds weights in a way that capsules do not know")
    activation = _ACTIVATIONS.get(str(config.activation.value))
    if activation is None:
        raise FixError(f"its activation is {config.activation.value}; expected {', '.join(_ACTIVATIONS)}")
    parallel = config.moe_parallel_config
    sizes = {size: int(getattr(parallel, size, 1)) for size in ("tp_size", "dp_size", "ep_size")}
    if max(sizes.values()) > 1:
        raise FixError("its experts are spread over several GPUs; a capsule holds whole experts")
    record = Record.model_validate(
        {
            "layer": name,
            "hidden": int(config.hidden_dim),
            "intermediate": int(config.intermediate_size_per_partition),
            "experts": int(config.num_experts),
            "top_k": int(config.experts_per_token),
            "activation": activation,
            "quantization": quantization,
            "activations": _quantized_activations(method),
            "backend": _backend(method),
            "parallel": sizes,
            "packages": {"vllm": installed_version(), **_packages()},
            "environment": _environment(),
        }
    )
    weights = getattr(runner, "routed_experts", layer)
    return WatchedLayer(record, functools.partial(_tensors, find, record, weights))


def _quantized_activations(method: Any) -> str:
    """Return how the backend quantizes activations: ``none``, ``fp8`` or ``nvfp4``."""
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    kind = str(getattr(getattr(experts, "quant_config", None), "quant_dtype", None))
    if "fp4" in kind:
        return "nvfp4"
    return "fp8" if "float8" in kind else "none"


def _backend(method: Any) -> str:
    kernel = getattr(method, "moe_kernel", None)
    return type(getattr(kernel, "fused_experts", method)).__name__


def _packages() -> dict[str, str]:
    import torch

    return {"torch": str(torch.__version__)}


def _environment() -> dict[str, str]:
    """Return vLLM's and our variables, masked."""
    from moedoctor.redaction import Redactor

    redactor = Redactor.of_this_process()
    wanted = ("VLLM_", "MOEDOCTOR_", "CUDA_VISIBLE_DEVICES")
    return {
        name: redactor.setting(name, value)[:900]
        for name, value in sorted(os.environ.items())
        if name.startswith(wanted)
    }


def _tensors(
    find: Callable[[], Path | None], record: Any, layer: Any, experts: list[int]
) -> Mapping[str, Any]:
    """Return the weights of some experts as the checkpoint has them, and as the backend got them."""
    from moedoctor.trace.capsule import CapsuleError
    from moedoctor.trace.expert_weights import ExpertFiles

    own = {
        f"backend.{name}": parameter.detach()[experts].cpu()
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.dim() and len(parameter) == record.experts
    }
    try:
        folder = find()
        if folder is None:
            raise CapsuleError("the model is no local folder with safetensors files")
        return {**own, **ExpertFiles(folder).capsule_tensors(record.layer, experts, record.quantization)}
    except CapsuleError as error:
        logger.warning("moedoctor: record: the capsule is made without the checkpoint's weights: %s", error)
        return own


_active: EngineRecorder | None = None


def apply(version: str) -> str:
    """Start recording in the vLLM of this process; see `moedoctor.upstream.plugin.register`."""
    global _active
    folder = os.environ.get(VARIABLE, "").strip()
    if not folder:
        raise FixError(f"{VARIABLE} is not set; expected the folder for capsules")
    from moedoctor.trace.moe_recorder import Wish

    text = os.environ.get(WHEN, "").strip() or "nan"
    try:
        wish = Wish.parse(text, _max_bytes(os.environ))
    except ValueError as error:
        raise OptionError(f"{WHEN} is {error}") from None
    if _active is not None:
        return "is active already"
    recorder = EngineRecorder(Path(folder), wish)
    moe, router = f"{_FUSED}.runner.moe_runner:MoERunner", f"{_FUSED}.router.base_router:BaseRouter"
    calls = ("self.router.select_experts(",)
    patches = [
        Patch(
            f"{_FUSED}.fused_moe_method_base:FusedMoEMethodBase", "__init__", recorder.around_method, "moe"
        ),
        Patch(moe, "_apply_quant_method", recorder.around_moe, "hidden_states router_logits", calls),
        Patch(
            router,
            "select_experts",
            recorder.around_router,
            "router_logits",
            ("return topk_weights, topk_ids",),
        ),
        *Steps(recorder.begin, recorder.end).patches(),
    ]
    apply_patches("record", version, patches)
    _active = recorder
    return f"MoE calls are watched ({text}); what is kept goes to {folder}"


def _max_bytes(environ: Mapping[str, str]) -> int:
    """Return the largest size of a capsule. Raises OptionError."""
    from moedoctor.trace.capsule import MAX_BYTES

    text = environ.get(SIZE, "").strip()
    if not text:
        return MAX_BYTES
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 100_000):
        raise OptionError(f"{SIZE} is {text[:40]!r}; expected a size in MB, 1 to 100000")
    return int(text) * 10**6
