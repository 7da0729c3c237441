"""What is looked at inside an engine: where its weights really are, and what its layers put out."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

_MEMORY_TYPE = 2
"""CU_POINTER_ATTRIBUTE_MEMORY_TYPE"""
_KINDS = {1: "host", 2: "device", 3: "array", 4: "unified"}
_DIRECTIONS, _ROWS = 8, 16
"""A digest holds at most `_ROWS` projections onto `_DIRECTIONS` directions, each of a token or several."""


def where_weights_live(llm: Any, names: str = "") -> dict[str, Any]:
    """Bytes of the model's parameters by the memory that they are really in, as the CUDA driver says it.

    A tensor that torch calls a CUDA tensor may be a view of host memory. `names` keeps parameters whose name
    contains it. Gives ``{"bytes": {place: bytes}, "marked": {place: bytes}, "parameters": [{...}]}``;
    `marked` counts those that vLLM has marked as offloaded.
    """
    found: dict[str, Any] = in_model(llm, lambda model: weights_by_place(model, names))
    return found


def weights_by_place(model: Any, names: str = "") -> dict[str, Any]:
    """`where_weights_live` for the parameters of a torch module."""
    places: dict[str, int] = {}
    marked: dict[str, int] = {}
    parameters = []
    for name, parameter in model.named_parameters():
        if names not in name or not parameter.numel():  # an empty one has no address to ask about
            continue
        place, size = memory_of(parameter), parameter.numel() * parameter.element_size()
        is_marked = bool(getattr(parameter, "_vllm_is_uva_offloaded", False))
        places[place] = places.get(place, 0) + size
        if is_marked:
            marked[place] = marked.get(place, 0) + size
        parameters.append({"name": name, "bytes": size, "place": place, "marked": is_marked})
    return {"bytes": places, "marked": marked, "parameters": parameters}


def layers_and_places(llm: Any, names: str = "", calls: int = 0) -> Callable[[], dict[str, Any]]:
    """For a probe before generating: `layer_outputs` of the first `calls` calls, and `bytes_on_host` at the
    end."""
    outputs = layer_outputs(llm, calls) if calls else dict
    return lambda: {**outputs(), **in_model(llm, lambda model: bytes_on_host(model, names))}


def bytes_on_host(model: Any, names: str = "") -> dict[str, int]:
    """``{"parameter_bytes", "host_bytes"}``: of the parameters whose name contains `names`, all bytes and
    those in host memory: mapped, on the CPU, or in the blocks that the fix `offload` copies from."""
    places = weights_by_place(model, names)["bytes"]
    stored = sum(
        region.nbytes
        for pipeline in _pipelines(model)
        for unit in pipeline.units
        if unit.host.device.type == "cpu"
        for region in unit.regions
    )
    on_host = sum(size for place, size in places.items() if place in ("host", "cpu"))
    return {"parameter_bytes": sum(places.values()), "host_bytes": on_host + stored}


def memory_of(tensor: Any) -> str:
    """``device``, ``host`` (a CUDA tensor over host memory that the GPU reads), or ``cpu`` (a CPU tensor)."""
    if tensor.device.type != "cuda":
        return str(tensor.device.type)
    kind = ctypes.c_uint(0)
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64(tensor.data_ptr())
    status = driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, pointer)
    if status != 0:
        raise RuntimeError(f"cuPointerGetAttribute: CUDA error {status}")
    return _KINDS.get(kind.value, str(kind.value))


def kv_cache_scales(llm: Any) -> list[dict[str, Any]]:
    """What each attention layer keeps keys and values in: ``{"layer", "dtype", "k_scale", "v_scale"}``."""
    found: list[dict[str, Any]] = in_model(llm, _cache_scales)
    return found


def _cache_scales(model: Any) -> list[dict[str, Any]]:
    return [
        {
            "layer": name,
            "dtype": str(module.kv_cache_dtype),
            "k_scale": float(module._k_scale_float),
            "v_scale": float(module._v_scale_float),
        }
        for name, module in model.named_modules()
        if hasattr(module, "kv_cache_dtype") and hasattr(module, "_k_scale_float")
    ]


def layer_outputs(llm: Any, calls: int = 1) -> Callable[[], dict[str, Any]]:
    """Hooks on the decoder layers, for a probe before generating: what each put out in its first calls.

    Each output is a digest (equal bits, equal digest) with its norm and its tokens' projections onto 8
    directions, so that two runs can be compared through JSON. Of more than 16 tokens several are added up
    with random weights, so that one that is wrong, negated or elsewhere still shows. Needs `enforce_eager`:
    compiled code passes the hooks by.
    """
    seen: list[dict[str, Any]] = []

    def watch(model: Any) -> int:
        found = list(decoder_layers(model))
        for name, layer in found:
            layer.register_forward_hook(_recorder(name, seen, calls))
        return len(found)

    watched = in_model(llm, watch)
    return lambda: {"layers": watched, "outputs": seen}


def decoder_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules of the longest list of layers in `model`, with their names."""
    import torch

    lists = [(name, one) for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList)]
    if not lists:
        raise ValueError("the model has no list of layers")
    name, longest = max(lists, key=lambda one: len(one[1]))
    for index, layer in enumerate(longest):
        yield f"{name}.{index}", layer


def _recorder(name: str, seen: list[dict[str, Any]], calls: int) -> Callable[..., None]:
    counted = {"calls": 0}

    def hook(module: Any, inputs: Any, output: Any) -> None:
        counted["calls"] += 1
        if counted["calls"] <= calls:
            seen.append({"layer": name, "call": counted["calls"], **_digest(output)})

    return hook


def _digest(output: Any) -> Mapping[str, Any]:
    import torch

    parts = [one for one in (output if isinstance(output, (tuple, list)) else (output,)) if one is not None]
    # vLLM's layers give the update and the residual apart; the hidden state is their sum.
    state = torch.stack([one.detach().float() for one in parts]).sum(0).cpu()  # [..., hidden]
    state = state.reshape(-1, state.shape[-1])  # [tokens, hidden]
    digest = hashlib.sha256(state.contiguous().numpy().tobytes()).hexdigest()[:16]
    return {
        "tokens": int(state.shape[0]),
        "digest": digest,
        "norm": float(state.norm()),
        "finite": bool(state.isfinite().all()),
        "projection": [[float(f"{one:.6g}") for one in row] for row in _projected(state).tolist()],
    }


def _projected(state: Any) -> Any:
    """Float32 [min(tokens, 16), 8] for the float32 `state` [tokens, hidden], with the same numbers always."""
    import torch

    tokens, hidden = state.shape
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(hidden, _DIRECTIONS, generator=generator)  # [hidden, 8]
    weights = torch.rand(tokens, generator=generator) + 0.5  # [tokens]: none is near 0
    weights *= torch.randint(2, (tokens,), generator=generator) * 2 - 1
    rows = max(1, min(tokens, _ROWS))
    projected = (state @ directions) * weights[:, None]  # [tokens, 8]
    return torch.zeros(rows, _DIRECTIONS).index_add_(0, torch.arange(tokens) % rows, projected)  # [rows, 8]


def serve_from_gpu(llm: Any) -> dict[str, Any]:
    """For an engine with the fix `offload`, before generating: its weights come from GPU memory from now on.

    The compiled code stays as it is and copies as before, out of GPU memory; what was on the host is
    overwritten, so that reading it would show. Gives ``{"bytes": moved}``.
    """
    return {"bytes": in_model(llm, take_off_the_host)}


def take_off_the_host(model: Any) -> int:
    """`serve_from_gpu` for a torch module; the bytes that were moved."""
    moved = 0
    for pipeline in _pipelines(model):
        pipeline.settle()
        device = pipeline.buffers[0].device
        copies = [replace(unit, host=unit.host.to(device, copy=True)) for unit in pipeline.units]
        for unit in pipeline.units:
            unit.host.fill_(255)
            moved += unit.host.numel()
        pipeline.units = copies
    return moved


def _pipelines(model: Any) -> list[Any]:
    """Those of the fix `offload` in a torch module, each once."""
    from moedoctor.fixes.offload.hooks import MARK

    found = {id(one): one for module in model.modules() if (one := vars(module).get(MARK)) is not None}
    return list(found.values())


def in_model(llm: Any, function: Callable[[Any], Any]) -> Any:
    """What `function` gives for the model of a single worker in this process."""
    results = llm.apply_model(function)
    if len(results) != 1:
        raise ValueError(f"{len(results)} workers answered; expected one")
    return results[0]
