"""The start of a server, stage by stage, by the release's own code.

Each stage calls what vLLM's engine and worker call, in the same order. Nothing here decides what is wrong:
the first error of a stage is kept as it was raised, with the file and line in vLLM.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from moedoctor.models.tensor_names import name_pattern
from moedoctor.upstream.preflight.meta import NewMemory, OnMeta, Stored
from moedoctor.upstream.preflight.names import find_kernel, is_unused, list_tensors, name_kernel
from moedoctor.upstream.preflight.substitutes import join_groups, substitute_reading
from moedoctor.upstream.selection.linear_kernels import Offers, explain_kernels, record_offers
from moedoctor.upstream.selection.oracle import explain_others, record_selections

STAGES = ("arguments", "config", "groups", "build", "load", "draft", "memory", "after", "adapters")
"""In the order in which they run. `after`, what is done with loaded weights, never decides."""
_PARSERS = ("common.cli_args", "launchers.cli_args", "openai.cli_args", "cli.serve")
"""Modules below vllm.entrypoints that have had `make_arg_parser`; the last one imports a web server."""
_KINDS = {"moe": "experts", "kvcache": "attention", "embedding": "embedding"}
"""Part of a quantization method's name -> the kind of its layers; the others are linear."""
_MOST_TEXT = 4000
_MODULES = re.compile(r"(?<=target modules in )\{[^}]*\}")
"""The modules of all experts in a message about an adapter, whose own module comes after them."""
_LAYER = re.compile(r"\.\d+\.")
_PASSES = re.compile(r"function(\(\*|, \(\), )arguments")
"""In the lines of `OnMeta` that call torch."""


class StageError(Exception):
    """A stage that raised; as `record`, what it raised."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__(str(record["message"]))
        self.record = record


@contextlib.contextmanager
def run_stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time a stage. Raises StageError for whatever it raises."""
    started = time.perf_counter()
    try:
        yield
    except (Exception, SystemExit) as error:
        raise StageError(describe_error(name, error)) from error
    finally:
        seconds[name] = round(seconds.get(name, 0) + time.perf_counter() - started, 2)


def describe_error(stage: str, error: BaseException) -> dict[str, Any]:
    """Return an error as JSON: its type, its message, and the last frames in vLLM."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/vllm/" in frame.filename]
    # Torch raises for sizes that do not match, below the mode through which every call goes.
    own = [each for each in frames if "/torch/" not in each.filename and not _PASSES.search(each.line or "")]
    last = own[-1] if own else None
    return {
        "stage": stage,
        "type": type(error).__name__,
        "message": _MODULES.sub("{…}", " ".join(str(error).split()))[:_MOST_TEXT],
        "at": [f"vllm/{frame.filename.rpartition('/vllm/')[2]}:{frame.lineno}" for frame in inside[-3:]],
        "line": (inside[-1].line or "")[:200] if inside else "",
        "last_module": "" if last is None else _find_package(last.filename),
        "cause": _explain_inspection(error),
    }


def find_module(error: BaseException | None) -> str:
    """Return the name of the innermost layer that was being built: vLLM passes it on as `prefix`."""
    frames = traceback.walk_tb(error.__traceback__ if error is not None else None)
    named = [frame.f_locals.get("prefix") for frame, _ in frames]
    return next((name for name in reversed(named) if isinstance(name, str) and name), "")


def _explain_inspection(error: BaseException) -> str:
    """Return why a model class cannot be imported: vLLM prints that, and raises another message."""
    match = re.search(r"Model architectures \['(\w+)'.{0,200}failed to be inspected", str(error))
    if match is None:
        return ""
    try:
        registry = importlib.import_module("vllm.model_executor.models.registry")
        registry.ModelRegistry.models[match[1]].load_model_cls()
    except Exception as cause:
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:_MOST_TEXT]}"
    return "it can be imported"


def _find_package(file: str) -> str:
    """Return the package of a source file: vllm, moedoctor, transformers; empty for none that is known."""
    known = ("moedoctor", "vllm", "transformers", "torch", "pydantic", "compressed_tensors")
    place, name = max((file.rfind(f"/{name}/"), name) for name in known)
    return name if place >= 0 else ""


# A command line -> VllmConfig.


def configure(words: Sequence[str], seconds: dict[str, float]) -> tuple[Any, Any]:
    """Return (VllmConfig, arguments) of the words after ``vllm serve``. Raises StageError."""
    printed = io.StringIO()
    with run_stage("arguments", seconds):
        module = _import_parser()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = module.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
        try:
            with contextlib.redirect_stderr(printed):
                arguments = parser.parse_args(list(words))
        except SystemExit:
            lines = [line for line in printed.getvalue().splitlines() if "error:" in line]
            raise ValueError(
                lines[-1].partition("error:")[2].strip() if lines else "--help or --version"
            ) from None
        if getattr(arguments, "model_tag", None):
            arguments.model = arguments.model_tag
        module.validate_parsed_serve_args(arguments)
        engine = AsyncEngineArgs.from_cli_args(arguments)
    with run_stage("config", seconds):
        return engine.create_engine_config(), arguments


def _import_parser() -> Any:
    for place in _PARSERS:
        name = f"vllm.entrypoints.{place}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or name):
                raise  # the module is there and misses another library
            continue
        if hasattr(module, "make_arg_parser"):
            return module
    raise ImportError(f"none of vllm.entrypoints.{{{', '.join(_PARSERS)}}} has make_arg_parser")


def describe_config(config: Any) -> dict[str, Any]:
    """Return the facts of a VllmConfig that an answer names."""
    model, parallel = config.model_config, config.parallel_config
    speculative = config.speculative_config
    return {
        "architecture": ", ".join(getattr(model.hf_config, "architectures", None) or ()),
        "quantization": model.quantization,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "data_parallel": parallel.data_parallel_size,
        "expert_parallel": bool(parallel.enable_expert_parallel),
        "draft": getattr(speculative, "method", None) if speculative is not None else None,
        "load_format": str(getattr(config.load_config.load_format, "value", config.load_config.load_format)),
    }


# One rank.


def run_rank(
    config: Any, arguments: Any, rank: int, on_meta: OnMeta, *, post: bool, names: bool = False
) -> dict[str, Any]:
    """Return what one rank does with the checkpoint: times, layers, what was not written, an error.

    With `names`, it ends with the build, and has the tensors that the model would read as ``tensors``.
    """
    answer: dict[str, Any] = {"rank": rank, "seconds": {}}
    seconds: dict[str, float] = answer["seconds"]
    try:
        with run_stage("groups", seconds):
            join_groups(config, rank)
        _run_model(config, arguments, on_meta, answer, post=post, names=names)
    except StageError as stop:
        module = find_module(stop.__cause__) if "load" not in seconds else ""
        answer["error"] = {**stop.record, "tensor": on_meta.current or module}
    answer["questions"] = on_meta.questions
    return answer


def _run_model(
    config: Any, arguments: Any, on_meta: OnMeta, answer: dict[str, Any], *, post: bool, names: bool
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import base_loader, get_model_loader

    seconds: dict[str, float] = answer["seconds"]
    compilation = config.compilation_config
    config.load_config.device = "meta"
    # Its passes name compiled operators when they are imported.
    compilation.mode = type(compilation.mode).NONE
    for registry in ("static_forward_context", "static_all_moe_layers"):
        if hasattr(compilation, registry):
            getattr(compilation, registry).clear()
    substitute_reading(on_meta)

    def build(model_config: Any, row: dict[str, Any]) -> Any:
        heard: list[tuple[Any, ...]] = []
        offers: Offers = {}
        with contextlib.ExitStack() as stack:
            if post:
                stack.enter_context(record_selections(heard))
                stack.enter_context(record_offers(offers))
            stack.enter_context(base_loader.set_default_torch_dtype(model_config.dtype))
            stack.enter_context(torch.device("meta"))
            model = base_loader.initialize_model(vllm_config=config, model_config=model_config)
        row |= {"bytes": count_bytes(model), "layers": describe_layers(model)}
        row["experts"] = describe_experts(model, config)
        row["stale"] = list_stale_buffers(model, config)
        row["unbalanced"] = find_unbalanced(model, config)
        # One question of each scheme: the layers of a model differ in nothing that a kernel asks about.
        questions = {type(question[0]): question for question in reversed(heard)}
        rows = [("experts", *each) for question in questions.values() for each in explain_others(question)]
        kernels = [find_kernel(module) for module in model.modules()]
        row["backends"] = [*rows, *(("linear", *each) for each in explain_kernels(kernels, offers))]
        return model

    def load(model: Any, model_config: Any) -> dict[str, Any]:
        with on_meta.watch(), base_loader.set_default_torch_dtype(model_config.dtype):
            get_model_loader(config.load_config).load_weights(model, model_config)
        return describe_loaded(model, on_meta, config)

    with set_current_vllm_config(config), on_meta:
        with run_stage("build", seconds):
            model = build(config.model_config, answer)
            if names:
                answer["tensors"] = list(list_tensors(model))
        if not on_meta.headers:  # a config alone has none
            return
        with run_stage("load", seconds):
            answer["loaded"] = load(model, config.model_config)
        stored = on_meta.stored
        speculative = config.speculative_config
        if getattr(speculative, "draft_model_config", None) is not None:
            with run_stage("draft", seconds), use_draft_backend(config):
                answer["draft"] = {}
                draft = build(speculative.draft_model_config, answer["draft"])
                answer["draft"]["loaded"] = load(draft, speculative.draft_model_config)
        try:
            with run_stage("memory", seconds):
                weights = answer["bytes"] + answer.get("draft", {}).get("bytes", 0)
                host = answer["experts"].get("host_bytes", 0)
                answer["kv"] = plan_kv_cache(config, max(0, weights - host))
        except StageError as stop:
            answer["kv"] = {"problem": f"{stop.record['type']}: {stop.record['message'][:200]}"}
        with contextlib.suppress(StageError), run_stage("after", seconds):
            # Since 0.28.0 the layer that adds adapters to experts asks for their kernel, which is made here.
            answer["after"] = process_weights(model, every=config.lora_config is not None)
        if config.lora_config is not None:
            with run_stage("adapters", seconds):
                answer["adapters"] = load_adapters(model, config, arguments, stored)


def use_draft_backend(config: Any) -> contextlib.AbstractContextManager[Any]:
    """Give the draft model the MoE backend of its own that --speculative-config names, as vLLM does.

    Up to 0.18.1 there is no such field. Model runner V2 reads it from 0.30.0 on (MD030).
    """
    own = getattr(config.speculative_config, "moe_backend", None)
    if own is None:
        return contextlib.nullcontext()
    return mock.patch.object(config.kernel_config, "moe_backend", own)


def count_bytes(model: Any) -> int:
    """Return the bytes of a model's parameters; two names of one storage count once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in model.parameters()}
    return sum(storages.values())


def describe_experts(model: Any, config: Any) -> dict[str, Any]:
    """Return the shape of a rank's first layer of experts, and what decides its memory; empty without one."""
    layer = next((each for each in model.modules() if hasattr(each, "moe_config")), None)
    if layer is None:
        return {}
    moe, width = layer.moe_config, "intermediate_size_per_partition"
    offload = getattr(getattr(config, "offload_config", None), "uva", None)
    return {
        "hidden": moe.hidden_dim,
        "intermediate": getattr(moe, width, None) or getattr(layer, width),
        "experts": moe.num_local_experts,
        "top_k": moe.experts_per_token,
        "is_gated": getattr(moe, "is_act_and_mul", True),
        "tokens": config.scheduler_config.max_num_batched_tokens,
        "host_bytes": int(getattr(offload, "cpu_offload_gb", 0) * 2**30),
        "moved": [each.nbytes for name, each in list_movable(model, offload).items() if _LAYER.search(name)],
        "has_uva": os.environ.get("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "0") != "1",
    }


def list_movable(model: Any, uva: Any) -> dict[str, Any]:
    """Return the parameters that --cpu-offload-gb may move, by name, in their order."""
    if not getattr(uva, "cpu_offload_gb", 0):
        return {}
    chosen = getattr(uva, "cpu_offload_params", None) or ()
    weights = model.named_parameters()
    return {n: each for n, each in weights if not chosen or any(f".{c}." in f".{n}." for c in chosen)}


def list_stale_buffers(model: Any, config: Any) -> list[str]:
    """Return the buffers made of a weight that --cpu-offload-gb moves before it is loaded (MD008)."""
    uva = getattr(getattr(config, "offload_config", None), "uva", None)
    if "offload" in os.environ.get("MOEDOCTOR_FIXES", ""):
        return []
    spec = importlib.util.find_spec("vllm.v1.worker.gpu.model_runner")
    source = Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    if getattr(config, "use_v2_model_runner", False) and "set_offloader(" not in source:
        return []  # it offloads nothing (MD013)
    moved = {weight.untyped_storage()._cdata for weight in list_movable(model, uva).values()}
    return [name for name, buffer in model.named_buffers() if buffer.untyped_storage()._cdata in moved]


def find_unbalanced(model: Any, config: Any) -> str:
    """Return the class of a model that --enable-eplb stops in its first step (MD038), or an empty string.

    Model runner V2 goes on without balancing. What is inside a multimodal model counts, as since 0.22.0.
    """
    if not config.parallel_config.enable_eplb or getattr(config, "use_v2_model_runner", False):
        return ""
    from vllm.model_executor.models.interfaces import is_mixture_of_experts

    inner = model.get_language_model() if hasattr(model, "get_language_model") else model
    return "" if any(map(is_mixture_of_experts, (model, inner))) else type(model).__name__


def describe_layers(model: Any) -> list[dict[str, Any]]:
    """Return how many layers of each kind take which quantization method and backend."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for _, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None:
            kind, name = _describe_method(module)
            counts[kind, name, name_kernel(find_kernel(module))] += 1
    return [
        {"kind": kind, "method": method, "backend": backend, "count": count}
        for (kind, method, backend), count in sorted(counts.items())
    ]


def _describe_method(module: Any) -> tuple[str, str]:
    """Return (kind of a layer, as `LayerCount` has it; its quantization method, with the scheme)."""
    name = type(module.quant_method).__name__
    kind = next((kind for part, kind in _KINDS.items() if part in name.lower()), "linear")
    if (scheme := getattr(module, "scheme", None)) is not None:
        name += f", {type(scheme).__name__}"
    return kind, name


def describe_loaded(model: Any, on_meta: OnMeta, config: Any) -> dict[str, Any]:
    """Return which parameters were not wholly written, and which tensors were converted to something else."""
    holes: dict[tuple[str, tuple[int, ...], float], list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and (share := on_meta.share_written(parameter)) < 1:
            key = (name_pattern(name), tuple(parameter.shape), round(share, 4))
            holes.setdefault(key, []).append(name)
    owners = dict(model.named_modules())
    # Nothing reads the zero points of symmetric GPTQ: 0.21.0 keeps them in the model's dtype.
    is_symmetric = getattr(config.quant_config, "is_sym", False)
    cast = [
        (name, *stored.cast)
        for name, stored in on_meta.stored.items()
        if stored.cast is not None and not (is_symmetric and name.endswith(".qzeros"))
    ]
    missing: list[str] = []
    if holes:
        with contextlib.suppress(Exception):  # the release does not name the tensors of every model
            missing = list_missing(model, on_meta.stored, [name for each in holes.values() for name in each])
    return {
        "missing": {"first": missing[0], "count": len(missing)} if missing else {},
        "holes": [
            {
                "pattern": pattern,
                "written": share,
                "padded": _is_padding(owners, names[0], shape, share, config),
                "unused": is_unused(owners, names[0]),
                "count": len(names),
                "example": names[0],
            }
            for (pattern, shape, share), names in holes.items()
        ],
        "cast": cast[:50],
        "largest": max((each.tensor.nbytes for each in on_meta.stored.values()), default=0),
    }


def list_missing(model: Any, stored: Collection[str], holes: Iterable[str]) -> list[str]:
    """Return the tensors that the release looks for and does not find, for these parameters.

    It is empty if the tensors of other modules have other names: then these would not be right, either.
    """
    modules = [name.replace(".routed_experts", "").split(".")[:-1] for name in holes]
    near = tuple(".".join(parts[:-1] or parts) + "." for parts in modules)
    lacking = [name for name, _, _ in list_tensors(model) if name not in stored]
    return lacking if all(name.startswith(near) for name in lacking) else []


def _is_padding(
    owners: Mapping[str, Any], name: str, shape: Sequence[int], share: float, config: Any
) -> bool:
    """Return True if the rest of an expert parameter is what the release adds to round its sizes up."""
    from vllm.distributed import parallel_state

    owner = owners.get(name.rpartition(".")[0])
    text, parallel = config.model_config.hf_text_config, config.parallel_config
    hidden = getattr(text, "hidden_size", None)
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    padded_width = getattr(owner, "intermediate_size_per_partition", None)
    if not (isinstance(hidden, int) and isinstance(width, int) and padded_width and len(shape) > 1):
        return False
    is_whole = getattr(owner, "use_ep", False) or parallel.tensor_parallel_size == 1
    place = 0 if is_whole else int(parallel_state.get_tensor_model_parallel_rank())
    own_width = max(0, min(padded_width, width - place * padded_width)) / padded_width
    own_hidden = min(1.0, hidden / (getattr(owner, "hidden_size", hidden) or hidden))
    expected = {own_width, own_hidden, own_width * own_hidden}
    return any(each < 1 and math.isclose(share, each, abs_tol=2e-3) for each in expected)


# After loading.


def plan_kv_cache(config: Any, weights: int) -> dict[str, Any]:
    """Return how many tokens fit beside the weights if activations took nothing, by vLLM's own arithmetic."""
    from vllm.platforms import current_platform

    with contextlib.suppress(AttributeError):
        current_platform.update_block_size_for_backend(config)
    plan, groups = None, None
    for place in ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"):  # since 0.33.0, before
        with contextlib.suppress(ImportError, AttributeError):
            module = importlib.import_module(place)
            plan, groups = module.get_kv_cache_configs, getattr(module, "get_global_kv_cache_groups", None)
            break
    if plan is None:
        raise ImportError("get_kv_cache_configs is in neither of its known modules")
    specs = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        shares = getattr(layer, "kv_sharing_target_layer_name", None)
        spec = layer.get_kv_cache_spec(config) if hasattr(layer, "get_kv_cache_spec") and not shares else None
        if spec:
            specs[name] = spec
    if getattr(config.cache_config, "kv_cache_layout", "") is None:
        # The engine core would ask its workers; the need is the same.
        config.cache_config.kv_cache_layout = "LBNHC"
    share = config.cache_config.gpu_memory_utilization
    left = int(current_platform.get_device_total_memory() * share) - weights
    left = getattr(config.cache_config, "kv_cache_memory_bytes", None) or left
    answer = {"weights": weights, "left": left, "tokens": None, "refused": ""}
    try:
        made = plan(config, [specs], [left], *([groups(config, [specs])] if groups else []))
    except ValueError as error:
        return {**answer, "refused": " ".join(str(error).split())[:_MOST_TEXT]}
    return {**answer, "tokens": made[0].num_blocks * config.cache_config.block_size}


def load_adapters(model: Any, config: Any, arguments: Any, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Wrap the layers for LoRA and apply each adapter of ``--lora-modules``, by the worker's own manager.

    ``unplaced`` are the parts of an adapter that no layer takes: the manager leaves them out in silence.
    """
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    runner: Any = type("Runner", (LoRAModelRunnerMixin,), {})()
    runner.load_lora_model(model, config, torch.device("meta"))
    manager = runner.lora_manager
    answer: dict[str, Any] = {"adapters": []}
    for number, module in enumerate(getattr(arguments, "lora_modules", None) or (), 1):
        row = {"name": module.name, "unplaced": [], "error": None}
        try:
            manager.add_adapter(LoRARequest(module.name, number, module.path))
            parts = manager._adapter_manager.get_adapter(number).loras
            placed = manager._adapter_manager.modules.keys()
            row["unplaced"] = sorted(parts.keys() - placed)[:50]
            row["misfits"] = find_misfits(Path(module.path, "adapter_model.safetensors"), stored)
        except Exception as error:
            row["error"] = describe_error("adapters", error)
        answer["adapters"].append(row)
    return answer


def find_misfits(file: Path, stored: Mapping[str, Stored]) -> list[str]:
    """Return the tensors of an adapter whose rows or columns are not those of the checkpoint's weight.

    vLLM copies a smaller one into a part of its buffer, and the layer gets a wrong product.
    """
    from safetensors import safe_open

    misfits: list[str] = []
    if not file.is_file():
        return misfits
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
            weight, shape = stored.get(f"{module}.weight"), opened.get_slice(name).get_shape()
            if weight is None or not weight.tensor.is_floating_point() or len(shape) != weight.tensor.dim():
                continue
            place = {"A.weight": 1, "B.weight": 0}.get(part)  # (rank, columns) and (rows, rank)
            if place is not None and shape[place] != weight.tensor.shape[place]:
                misfits.append(f"{name} {shape}, for a weight {list(weight.tensor.shape)}")
    return misfits


def process_weights(model: Any, *, every: bool) -> list[dict[str, Any]]:
    """Call `process_weights_after_loading` for a layer of each kind and shape, or for every layer.

    Return a row for each kind and shape: ``size`` are the bytes of a loaded layer, ``new`` those that
    it takes beside them meanwhile, at most, and ``left`` those that it takes more afterwards.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for _, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            continue
        kind, name = _describe_method(module)
        parts = [(part, each.shape, each.dtype) for part, each in module.named_parameters(recurse=False)]
        first = {"kind": kind, "method": name, "problem": "", "count": 0, "size": count_bytes(module)}
        row = rows.setdefault((name, *parts), first)
        row["count"] += 1
        if row["count"] > 1 and not every:
            continue
        with NewMemory((*module.parameters(), *module.buffers())) as memory:
            try:
                method.process_weights_after_loading(module)
            except Exception as error:
                record = describe_error("after", error)
                where = "".join(record["at"][-1:])
                row["problem"] = f"{record['type']}: {record['message'][:200]} ({where})"
        row |= {"new": memory.peak, "left": memory.count_left((*module.parameters(), *module.buffers()))}
    return list(rows.values())
