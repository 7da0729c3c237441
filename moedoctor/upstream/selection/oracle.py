"""Asks an importable vLLM which MoE backend it would select, backend by backend and with its own reasons.

No weights are loaded and no GPU is used: vLLM's own selection runs against a substituted compute capability
(`moedoctor.upstream.selection.substitute`), and every `is_supported_config` that it calls is recorded.
For a child process only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

from moedoctor.models.layer_shape import LayerShape
from moedoctor.upstream.moe_backends.moe_config import make_moe_config
from moedoctor.upstream.selection.substitute import Substitute, install

ORACLES = "vllm.model_executor.layers.fused_moe.oracle"
_KEYS = {
    "nvfp4": ("kNvfp4Static", "kNvfp4Dynamic"),
    "nvfp4-w4a16": ("kNvfp4Static", None),
    "fp8": ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    "fp8-block": ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
}
"""Scheme -> the names of vLLM's keys for weights and activations."""
_MODULES = {"nvfp4": "nvfp4", "nvfp4-w4a16": "nvfp4", "mxfp4": "mxfp4", "bf16": "unquantized"}
_SELECT = (
    "select_nvfp4_moe_backend",
    "select_fp8_moe_backend",
    "select_gpt_oss_mxfp4_moe_backend",  # 0.20 only; select_mxfp4_moe_backend is DeepSeek-V4's there
    "select_mxfp4_moe_backend",
    "select_unquantized_moe_backend",
)
UNIMPORTABLE = "?"
"""In place of the kernel's name, if the backend's module cannot be imported."""
_SHAPE = LayerShape(hidden=4096, intermediate=2048, experts=128, top_k=8)


@dataclasses.dataclass(frozen=True)
class Answer:
    """vLLM's answer about one kernel class."""

    backend: str
    """Upstream's name, as its log prints it."""
    kernel: str
    """The class of the experts; empty for releases that select without one."""
    supported: bool
    reason: str | None


@dataclasses.dataclass(frozen=True)
class Asked:
    answers: tuple[Answer, ...]
    """In the order in which vLLM asks; a backend with two kernels comes twice."""
    chosen: str | None
    error: str | None = None
    """vLLM's error if nothing fits."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """The MoE layer that vLLM is asked about."""

    scheme: str
    activation: str = "silu"
    ep: bool = False
    dp: bool = False
    moe_backend: str = "auto"


class Oracle:
    """The selection code of the vLLM of this process."""

    def __init__(self, libraries: Mapping[str, bool] | None = None) -> None:
        """Substitute the platform. Raises SubstituteError if vLLM cannot be asked."""
        self.substitute: Substitute = install(libraries)
        self.activation = importlib.import_module(
            "vllm.model_executor.layers.fused_moe.activation"
        ).MoEActivation
        engine: Any = importlib.import_module("vllm.config.vllm")
        # What selection reads of the engine: the model's type and quantization.
        text = types.SimpleNamespace(model_type=None)
        model = types.SimpleNamespace(quantization_config=None, hf_text_config=text, hf_config=text)
        parallel = types.SimpleNamespace(enable_dbo=False, enable_eplb=False)
        engine._current_vllm_config = types.SimpleNamespace(
            model_config=model, parallel_config=parallel, weight_transfer_config=None
        )
        self.keys = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")

    def list_activations(self) -> tuple[str, ...]:
        return tuple(activation.value for activation in self.activation)

    def ask(self, capability: tuple[int, int], layer: Layer) -> Asked:
        """Run the release's own selection for `layer` on a GPU of this capability."""
        self.substitute.use(capability)
        return self.ask_again(layer)

    def ask_again(self, layer: Layer) -> Asked:
        """Run the selection on the capability that is substituted already. Keeps vLLM's cached answers."""
        name = f"{ORACLES}.{_MODULES.get(layer.scheme, 'fp8')}"
        if importlib.util.find_spec(name) is None:
            # MXFP4 up to 0.18.1: chosen by a chain of conditions that do not include --moe-backend.
            module = importlib.import_module("vllm.model_executor.layers.quantization.mxfp4")
            backend = module.get_mxfp4_backend(with_lora_support=False)
            return Asked((Answer(backend.name, "", True, None),), backend.name)
        module = importlib.import_module(name)
        if not hasattr(module, "backend_to_kernel_cls"):
            # Unquantized layers up to 0.19.1: one backend is computed, and no other is asked.
            select = module.select_unquantized_moe_backend
            try:
                backend = select(self._make_layer_config(layer), layer.ep, layer.dp)
            except ValueError as refusal:
                return Asked((), None, " ".join(str(refusal).split()))
            return Asked((Answer(backend.value, "", True, None),), backend.value)
        answers: list[Answer] = []
        with _listen(module, answers, to_the_end=True):
            self._select(module, layer)
        heard = tuple(answers)
        with _listen(module, [], to_the_end=False):
            chosen, error = self._select(module, layer)
        return Asked(heard, chosen, error)

    def _select(self, module: Any, layer: Layer) -> tuple[str | None, str | None]:
        names = _KEYS.get(layer.scheme, ())
        keys = (None if name is None else getattr(self.keys, name) for name in names)
        select = next(vars(module)[name] for name in _SELECT if name in vars(module))
        try:
            backend, *_ = select(self._make_layer_config(layer), *keys)
        except (ValueError, NotImplementedError, ImportError) as error:
            return None, " ".join(str(error).split())
        return str(backend.value), None

    def _make_layer_config(self, layer: Layer) -> Any:
        more: dict[str, Any] = {
            "moe_backend": layer.moe_backend,
            "has_bias": layer.scheme == "mxfp4" and layer.activation == "swigluoai",  # gpt-oss
        }
        if layer.moe_backend.startswith("flashinfer_moe_ep"):
            # The engine does so, too: vllm/config/kernel.py, bind_passthrough_all2all_backend.
            more["all2all_backend"] = "passthrough"
        return make_moe_config(_SHAPE, layer.activation, ep=layer.ep, dp=layer.dp, **more)


@contextlib.contextmanager
def _listen(module: Any, answers: list[Answer], *, to_the_end: bool) -> Iterator[None]:
    """Record what each kernel class answers. `to_the_end` makes vLLM go on past the first that fits."""
    original: Callable[[Any], Any] = module.backend_to_kernel_cls

    def listen(backend: Any) -> Any:
        try:
            kernels = original(backend)
        except ImportError as error:
            if not to_the_end:
                raise
            # Selection alone would not have come to this library. It is missing, and so is the backend.
            answers.append(Answer(backend.value, UNIMPORTABLE, False, f"cannot be imported: {error}"))
            return []
        if not isinstance(kernels, list):  # FP8 up to 0.17.1
            return _Listener(backend.value, kernels, answers, to_the_end)
        return [_Listener(backend.value, kernel, answers, to_the_end) for kernel in kernels]

    with mock.patch.object(module, "backend_to_kernel_cls", listen):
        yield


class _Listener:
    """Replaces a kernel class while backends are selected."""

    def __init__(self, backend: str, kernel: Any, answers: list[Answer], to_the_end: bool) -> None:
        self._backend, self._kernel, self._answers, self._to_the_end = backend, kernel, answers, to_the_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def is_supported_config(self, cls: Any, *arguments: Any) -> tuple[bool, str | None]:
        supported, reason = self._kernel.is_supported_config(self._kernel, *arguments)
        self._answers.append(Answer(self._backend, self._kernel.__name__, bool(supported), reason))
        return (False if self._to_the_end else supported), reason


@contextlib.contextmanager
def record_selections(heard: list[tuple[Any, ...]]) -> Iterator[None]:
    """Record what vLLM asks kernel classes while it builds layers: (backend, arguments of the question)."""
    watched: set[Any] = set()
    with contextlib.ExitStack() as stack:

        def watch(kernel: Any, backend: Any) -> None:
            ask = kernel.is_supported_config

            def note(cls: Any, *arguments: Any) -> Any:
                heard.append((backend, *arguments))
                return ask(cls, *arguments)

            watched.add(kernel)
            stack.enter_context(mock.patch.object(kernel, "is_supported_config", staticmethod(note)))

        def listen(original: Callable[[Any], Any], backend: Any) -> Any:
            kernels = original(backend)
            for kernel in kernels if isinstance(kernels, list) else [kernels]:
                if kernel not in watched:
                    watch(kernel, backend)
            return kernels

        package: Any = importlib.import_module(ORACLES)
        for found in pkgutil.iter_modules(package.__path__):
            with contextlib.suppress(ImportError):
                module = importlib.import_module(f"{ORACLES}.{found.name}")
                if original := getattr(module, "backend_to_kernel_cls", None):
                    change = mock.patch.object(module, "backend_to_kernel_cls", partial(listen, original))
                    stack.enter_context(change)
        yield


def explain_others(question: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """Yield (backend, why it does not take a layer), for each backend of the layer's scheme.

    `question` is one of `record_selections`. The reason is empty for a backend that takes the layer.
    """
    backend, *arguments = question
    module = importlib.import_module(type(backend).__module__)
    for other in type(backend):
        refusals: dict[str, None] = {}
        try:
            kernels = module.backend_to_kernel_cls(other)
            for kernel in kernels if isinstance(kernels, list) else [kernels]:
                supported, reason = kernel.is_supported_config(kernel, *arguments)
                if supported:
                    refusals = {"": None}
                    break
                refusals[reason or "no reason is given"] = None
        except ValueError:  # a name without kernels for this scheme
            continue
        except Exception as error:
            refusals = {f"cannot be asked here: {' '.join(str(error).split())}": None}
        yield str(other.value), "; ".join(refusals)
