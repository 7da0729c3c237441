"""Names, types and shapes of the tensors that a release reads for a configuration, without a checkpoint.

They are made of the parameters of a model that is built for one GPU, by the release's own mappings: the parts
of merged layers, and the experts. The release's loader then says whether they are what it reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moedoctor.models.tensor_names import OPTIONAL
from moedoctor.upstream.preflight.meta import DTYPES
from moedoctor.upstream.selection.linear_kernels import CHOOSERS

_TYPES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCKS = [2**power for power in range(10)]
Tensor = tuple[str, str, Sequence[int]]
"""Name, type as safetensors has it, shape."""


def list_tensors(model: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model that was built for one rank.

    Raises LookupError for experts that the release's mapping does not name.
    """
    from vllm.model_executor.utils import get_moe_expert_mapping, get_packed_modules_mapping

    owners, merged = dict(model.named_modules()), get_packed_modules_mapping(model)
    experts = get_moe_expert_mapping(model)
    for name, parameter in model.named_parameters():
        place, _, part = name.rpartition(".")
        owner = owners[place]
        if OPTIONAL.search(name) or is_unused(owners, name):
            continue
        kind = _TYPES[parameter.dtype]
        if hasattr(owner, "moe_config") and parameter.dim():
            for full, shape in _split_experts(name, parameter, owner, experts):
                yield full, kind, shape
        else:
            above, _, leaf = place.rpartition(".")
            parts = merged.get(leaf, [leaf])
            sizes = getattr(owner, "output_sizes", None) or [1]
            for each, shape in zip(
                parts, _split_linear(part, parameter, owner, sizes[: len(parts)]), strict=False
            ):
                yield ".".join(filter(None, (above, each, part))), kind, shape


def _split_experts(
    name: str, parameter: Any, layer: Any, mapping: Sequence[tuple[str, str, int, str]]
) -> Iterator[tuple[str, list[int]]]:
    """Yield (name, shape) of what each expert has in a parameter of all of them."""
    short = name.replace(".routed_experts.", ".")
    rows = {
        (short.replace(part.replace(".routed_experts.", "."), own), expert, side)
        for part, own, expert, side in mapping
        if part.replace(".routed_experts.", ".") in short and own.count(".") > 1
    }
    if not rows:
        raise LookupError(f"the mapping of experts does not have {name}")
    whole = list(parameter.shape[1:])
    sides = 2 if ".w13_" in name and getattr(layer.moe_config, "is_act_and_mul", True) else 1
    if name.endswith("_shape"):
        pass  # the same two numbers for each side
    elif sides == 2 and whole == [2]:  # a scale of each side
        whole = []
    elif getattr(parameter, "is_transposed", False):
        whole[-1] //= sides
        if type(layer.quant_method).__name__.startswith("CompressedTensors"):
            whole = whole[::-1]
    elif whole:
        whole[0] //= sides
    for full, _, _ in sorted(rows):
        yield full, whole


def _split_linear(part: str, parameter: Any, layer: Any, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the shape of each part of a merged layer; of the layer itself if it has one part."""
    dim = getattr(parameter, "output_dim", None)
    for size in sizes:
        shape = list(parameter.shape)
        if hasattr(layer, "org_vocab_size") and shape:  # without the rows that fill it up
            shape[0] = layer.org_vocab_size
        elif len(sizes) > 1 and isinstance(dim, int):
            # Rows that share a scale or a packed number: each part has its own.
            block = next(each for each in _BLOCKS if sum(-(-own // each) for own in sizes) == shape[dim])
            shape[dim] = -(-size // block)
        elif shape == [len(sizes)] and "scale" in part and dim is None:  # a number for each part
            shape = []
        yield shape


def find_kernel(module: Any) -> Any:
    """Return the backend of a MoE method, or the kernel object of a linear scheme; None without one."""
    for owner in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
        for name, value in vars(owner).items() if owner is not None else ():
            if value is not None and (
                name.endswith("backend") or type(value).__module__.startswith(CHOOSERS)
            ):
                return value
    return None


def name_kernel(kernel: Any) -> str:
    if kernel is None or isinstance(kernel, str):
        return kernel or ""
    return str(getattr(kernel, "name", type(kernel).__name__))


def is_unused(owners: Mapping[str, Any], name: str) -> bool:
    """Return True for what a method makes for experts in any case, and does not use for these.

    That is GPTQ's bias of experts that have none, and a scale of inputs that MARLIN or HUMMING does not read.
    """
    owner = owners.get(name.rpartition(".")[0])
    moe = getattr(owner, "moe_config", None)
    if moe is None:
        return False
    if name.endswith("_bias"):
        return getattr(moe, "has_bias", None) is False
    # HUMMING reads such a scale only if this variable asks for it, whatever the checkpoint has.
    unread = ["MARLIN"] if "VLLM_HUMMING_INPUT_QUANT_CONFIG" in os.environ else ["MARLIN", "HUMMING"]
    return bool(re.search(r"_input_(?:global_)?scale$", name)) and name_kernel(find_kernel(owner)) in unread
