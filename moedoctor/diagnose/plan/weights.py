"""The bytes of a model's weights and the scheme of its experts, by the files of its folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import INDEX, JsonFile, read_json
from moedoctor.diagnose.checkpoint.quantization import (
    Rule,
    find_quantization_config,
    read_groups,
    read_layers,
)
from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError
from moedoctor.diagnose.plan.kv_cache import PlanError
from moedoctor.text import TextFileError, list_names

_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
"""Routed experts in a module's name; ``shared_experts`` and ``shared_expert`` are others."""
_IN_TARGET = re.compile(r"(?<![a-z_])experts(?![a-z])")
"""The same in a target of compressed-tensors, which is a name or a regular expression."""
_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4"}
_MXFP4_GROUP = 32


def count_checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the safetensors files of the model, or None without any.

    These are the shards that the index names, else ``model.safetensors``, else all: a folder may hold the
    same weights a second time, as ``consolidated.safetensors``. Raises PlanError if some shards of the index
    are missing, or the index cannot be read.
    """
    index = _read(folder, INDEX)
    if index is not None:
        shards = index.value.get("weight_map")
        if not isinstance(shards, dict) or not all(
            isinstance(shard, str) and Path(shard).name == shard and "\0" not in shard
            for shard in shards.values()
        ):  # names of files in the folder itself
            raise PlanError(f"{folder / INDEX}: weight_map names no files, expected tensors and their shards")
        files = [folder / shard for shard in sorted(set(shards.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing and len(missing) < len(files):
            raise PlanError(
                f"{folder}: {len(missing)} of {len(files)} shards are missing, the first is "
                f"{missing[0][:120]!a}; give a complete folder, or its config.json to compute the size"
            )
        return None if missing else _add_sizes(files)
    if (folder / "model.safetensors").is_file():
        return _add_sizes([folder / "model.safetensors"])
    try:
        names = list_names(folder, "*.safetensors")
    except TextFileError as error:
        raise PlanError(f"{folder}: {error.message}") from error
    return _add_sizes(file for file in map(folder.joinpath, names) if file.is_file())


def find_expert_scheme(config: Path) -> tuple[str, str]:
    """Return (scheme of the routed experts, the file that names it) for a ``config.json``.

    ModelOpt's file beside it is read too. A model without a quantization has ``bf16``. Raises PlanError for
    a quantization that plan does not know.
    """
    file = _read(config.parent, config.name)
    value = find_quantization_config(file.value) if file is not None else None
    path, source = config, f"by {config.name}"
    if value is None:
        path, source = config.parent / "hf_quant_config.json", "by ModelOpt's file beside config.json"
        file = _read(path.parent, path.name)
        value = file.value.get("quantization") if file is not None else None
    if value is None:
        return "bf16", f"{config.name} names no quantization"
    if not isinstance(value, dict):
        raise PlanError(f"{path}: its quantization is not an object; give --scheme")
    schemes = _list_expert_schemes(value, path)
    if len(schemes) != 1:
        shown = " and ".join(sorted(schemes)) or "nothing"
        raise PlanError(f"{path}: stores experts in {shown}; give the --scheme to plan with")
    return schemes.pop(), source


def _list_expert_schemes(value: Mapping[str, Any], path: Path) -> set[str]:
    method = str(value.get("quant_method") or "").lower()
    grouped = method in ("", "compressed-tensors") or method.startswith("modelopt")
    if grouped and isinstance(value.get("config_groups"), dict) and not value.get("quant_algo"):
        groups = read_groups(value)
        named = [rule for rule in groups if any(map(_IN_TARGET.search, rule.targets))]
        of_linear = [rule for rule in groups if "Linear" in rule.targets]
        return {_read_group(rule, path) for rule in named or of_linear or groups}
    if method in _METHODS:
        return {_METHODS[method]}
    if method and not method.startswith("modelopt"):
        raise _refuse(path, f"quant_method {method!a}")
    inner = value.get("quantization")
    value = inner if isinstance(inner, dict) else value
    if value.get("quant_algo") != "MIXED_PRECISION":
        return {_read_algo(value.get("quant_algo"), path)}
    layers = read_layers(value.get("quantized_layers"))
    return {_read_algo(rule.name, path) for name, rule in layers.items() if _EXPERTS.search(name)} or {"bf16"}


def _read_group(rule: Rule, path: Path) -> str:
    if rule.scheme not in ("nvfp4", "fp8"):
        raise _refuse(path, "config_groups with weights that are not floats of 4 or 8 bits")
    return "mxfp4" if rule.scheme == "nvfp4" and rule.group_size == _MXFP4_GROUP else rule.scheme


def _read_algo(algo: Any, path: Path) -> str:
    """Return the scheme of ModelOpt's `quant_algo`; without one only the cache is quantized."""
    if not algo:
        return "bf16"
    # In this order: the name also has the activations', which are FP8 in W4A8_NVFP4_FP8.
    for part in ("MXFP4", "NVFP4", "FP8"):
        if part in str(algo).upper():
            return part.lower()
    raise _refuse(path, f"quant_algo {algo!a}")


def _refuse(path: Path, what: str) -> PlanError:
    return PlanError(f"{path}: plan does not know the scheme {what[:120]}; give --scheme with the nearest")


def _read(folder: Path, name: str) -> JsonFile | None:
    try:
        return read_json(folder, name)
    except CheckpointError as error:
        raise PlanError(f"{folder}: {error}") from None


def _add_sizes(files: Iterable[Path]) -> int | None:
    return sum(file.stat().st_size for file in files) or None
