"""Probes inside an engine: where its weights really are, and what its layers put out."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moedoctor.results import find_worst

_MEMORY_TYPE = 2
"""CU_POINTER_ATTRIBUTE_MEMORY_TYPE"""
_KINDS = {1: "host", 2: "device", 3: "array", 4: "unified"}
_DIRECTIONS, _ROWS = 8, 16
"""A digest holds at most `_ROWS` projections onto `_DIRECTIONS` directions, each of one token or several."""


def locate_weights(llm: Any, names: str = "") -> dict[str, Any]:
    """Return the bytes of the model's parameters by the memory that they are in, according to the CUDA
    driver.

    A CUDA tensor of torch may be a view of host memory. Only parameters whose name contains `names` count.
    Returns ``{"bytes": {place: bytes}, "parameters": [{"name", "bytes", "place"}]}``.
    """
    places: dict[str, int] = {}
    parameters = []
    for name, parameter in get_model(llm).named_parameters():
        if names not in name or not parameter.numel():  # an empty parameter has no address to ask about
            continue
        place, size = locate_memory(parameter), parameter.numel() * parameter.element_size()
        places[place] = places.get(place, 0) + size
        parameters.append({"name": name, "bytes": size, "place": place})
    return {"bytes": places, "parameters": parameters}


def record_layers_and_places(llm: Any, names: str = "", calls: int = 0) -> Callable[[], dict[str, Any]]:
    """Probe: the outputs of layers in their first `calls` calls, and at the end `count_bytes_on_host`."""
    outputs = record_layer_outputs(llm, calls) if calls else dict
    return lambda: {**outputs(), **count_bytes_on_host(get_model(llm), names)}


def count_bytes_on_host(model: Any, names: str = "") -> dict[str, int]:
    """Return ``{"parameter_bytes", "host_bytes"}`` of the parameters whose name contains `names`.

    Bytes are on the host if they are mapped, on the CPU, or in the blocks that the fix `offload` copies from.
    """
    places = locate_weights(model, names)["bytes"]
    stored = sum(
        region.nbytes
        for pipeline in list_pipelines(model)
        for unit in pipeline.units
        if unit.host.device.type == "cpu"
        for region in unit.regions
    )
    on_host = sum(size for place, size in places.items() if place in ("host", "cpu"))
    return {"parameter_bytes": sum(places.values()), "host_bytes": on_host + stored}


def locate_memory(tensor: Any) -> str:
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


def read_kv_cache_scales(llm: Any) -> list[dict[str, Any]]:
    """Return the KV cache of each attention layer: ``{"layer", "dtype", "k_scale", "v_scale"}``."""
    return [
        {
            "layer": name,
            "dtype": str(module.kv_cache_dtype),
            "k_scale": float(module._k_scale_float),
            "v_scale": float(module._v_scale_float),
        }
        for name, module in get_model(llm).named_modules()
        if hasattr(module, "kv_cache_dtype") and hasattr(module, "_k_scale_float")
    ]


def record_layer_outputs(llm: Any, calls: int = 1) -> Callable[[], dict[str, Any]]:
    """Probe before generating: hook the decoder layers and record the outputs of their first calls.

    An output is a digest (equal bits, equal digest) with its norm and its tokens' projections onto 8
    directions, so that two runs can be compared through JSON. With more than 16 tokens, several are added up
    with random weights, so that a token that is wrong, negated or elsewhere still shows. Needs
    `enforce_eager`: compiled code does not call the hooks.
    """
    outputs: list[dict[str, Any]] = []
    counted: Counter[str] = Counter()

    def record(name: str, module: Any, inputs: Any, output: Any) -> None:
        counted[name] += 1
        if counted[name] <= calls:
            outputs.append({"layer": name, "call": counted[name], **_summarize(output)})

    layers = list(list_decoder_layers(get_model(llm)))
    for name, layer in layers:
        layer.register_forward_hook(functools.partial(record, name))
    return lambda: {"layers": len(layers), "outputs": outputs}


def list_decoder_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and module of each layer in the longest list of layers in `model`."""
    import torch

    named = model.named_modules()
    lists = [(name, module) for name, module in named if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        raise ValueError("the model has no list of layers")
    name, longest = max(lists, key=lambda pair: len(pair[1]))
    for index, layer in enumerate(longest):
        yield f"{name}.{index}", layer


def _summarize(output: Any) -> Mapping[str, Any]:
    import torch

    outputs = output if isinstance(output, (tuple, list)) else (output,)
    parts = [part for part in outputs if part is not None]
    # vLLM's layers return the update and the residual apart; the hidden state is their sum.
    state = torch.stack([part.detach().float() for part in parts]).sum(0).cpu()  # [..., hidden]
    state = state.reshape(-1, state.shape[-1])  # [tokens, hidden]
    digest = hashlib.sha256(state.contiguous().numpy().tobytes()).hexdigest()[:16]
    return {
        "tokens": int(state.shape[0]),
        "digest": digest,
        "norm": float(state.norm()),
        "finite": bool(state.isfinite().all()),
        "projection": [[float(f"{value:.6g}") for value in row] for row in _project(state).tolist()],
    }


def _project(state: Any) -> Any:
    """Float32 [min(tokens, 16), 8] for the float32 `state` [tokens, hidden], always with the same numbers."""
    import torch

    tokens, hidden = state.shape
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(hidden, _DIRECTIONS, generator=generator)  # [hidden, 8]
    weights = torch.rand(tokens, generator=generator) + 0.5  # [tokens], none near 0
    weights *= torch.randint(2, (tokens,), generator=generator) * 2 - 1
    rows = max(1, min(tokens, _ROWS))
    projected = (state @ directions) * weights[:, None]  # [tokens, 8]
    return torch.zeros(rows, _DIRECTIONS).index_add_(0, torch.arange(tokens) % rows, projected)  # [rows, 8]


def serve_from_gpu(llm: Any) -> dict[str, Any]:
    """Probe before generating, for the fix `offload`: from now on its weights come from GPU memory.

    The compiled code stays the same and copies as before, but out of GPU memory. What was on the host is
    overwritten, so reading it would show. Returns ``{"bytes": moved}``.
    """
    moved = 0
    for pipeline in list_pipelines(get_model(llm)):
        pipeline.settle()
        device = pipeline.buffers[0].device
        copies = [replace(unit, host=unit.host.to(device, copy=True)) for unit in pipeline.units]
        for unit in pipeline.units:
            unit.host.fill_(255)
            moved += unit.host.numel()
        pipeline.units = copies
    return {"bytes": moved}


def list_pipelines(model: Any) -> list[Any]:
    """Return the pipelines of the fix `offload` in a torch module, each once."""
    from moedoctor.fixes.offload.hooks import MARK

    marked = (vars(module).get(MARK) for module in model.modules())
    return list({id(pipeline): pipeline for pipeline in marked if pipeline is not None}.values())


def get_model(llm: Any) -> Any:
    """Return the model of the only worker, which is in this process. Raises ValueError for several.

    Of a torch module, return the module.
    """
    if not hasattr(llm, "apply_model"):
        return llm
    models = llm.apply_model(lambda model: model)
    if len(models) != 1:
        raise ValueError(f"{len(models)} workers answered; expected one")
    return models[0]


ROUNDING = 0.02
"""Relative difference of a layer's output, in its worst token, up to which it is rounding."""


def find_first_difference(control: Any, other: Any, equal_tokens: int | None = None) -> dict[str, Any]:
    """Return where the layers' outputs of two runs differ: first in a bit, and first by more than rounding.

    `control` and `other`: evidence of `record_layer_outputs`. `equal_tokens`: how many tokens both generated
    before the first that differs; later calls have other inputs and are not compared. None: all are equal.
    ``until_parting``: whether the call of the first different token is among those compared.
    """
    outputs, expected = ((run or {}).get("outputs", ()) for run in (other, control))
    # A prompt takes one call, or several if it is long; calls with more than one token belong to it.
    prompt_calls = max((int(row["call"]) for row in expected if row["tokens"] > 1), default=1)
    last = None if equal_tokens is None else prompt_calls + equal_tokens
    figures: dict[str, Any] = {
        "layers_compared": 0,
        "calls_compared": 0,
        "until_parting": False,
        "first_bit": None,
        "first_layer": None,
    }
    layers = set()
    for row, reference in zip(outputs, expected, strict=False):
        if any(row[key] != reference[key] for key in ("layer", "call", "tokens")):
            break
        if last is not None and row["call"] > last:
            break
        layers.add(row["layer"])
        figures |= {"layers_compared": len(layers), "calls_compared": row["call"]}
        if row["digest"] == reference["digest"]:
            continue
        figures["first_bit"] = figures["first_bit"] or row["layer"]
        # Floats that are not finite are text in JSON.
        tokens, right = ([[*map(float, token)] for token in run["projection"]] for run in (row, reference))
        difference = max(map(measure_relative_error, tokens, right), default=0.0)
        if figures["first_layer"] is None and not (row["finite"] and difference <= ROUNDING):
            figures |= {"first_layer": row["layer"], "first_call": row["call"]}
            figures["relative_difference"] = round(difference, 6) if row["finite"] else "not finite"
    figures["until_parting"] = bool(layers) and figures["calls_compared"] == last
    return figures


def measure_relative_error(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return ‖values - reference‖ / ‖reference‖; NaN counts as infinite."""
    difference = sum((a - b) ** 2 for a, b in zip(values, reference, strict=True)) ** 0.5
    length = sum(b * b for b in reference) ** 0.5
    return find_worst(difference / length if length else difference)
