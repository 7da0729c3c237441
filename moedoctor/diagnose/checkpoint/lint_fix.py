"""Corrected copies of a checkpoint's JSON files, as far as its tensors say what is right."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import INDEX, Checkpoint
from moedoctor.diagnose.checkpoint.lint import Lint
from moedoctor.diagnose.checkpoint.modules import BLOCK, Parts, group, is_projection, scheme
from moedoctor.diagnose.checkpoint.name_patterns import Patterns
from moedoctor.diagnose.checkpoint.quantization import Declared, from_config, from_hf_quant

_ALGOS = {"nvfp4": "NVFP4", "fp8": "FP8"}
_KV_KEYS = ("kv_cache_quant_algo", "kv_cache_scheme")


def corrected(result: Lint) -> dict[str, str]:
    """File name -> new text, for those JSON files that `result` says are wrong and that can be corrected.

    The tensors stay as they are: a missing scale is not invented, but what asks for it is taken out.
    """
    checks = {one.check for one in result.findings}
    checkpoint = result.checkpoint
    files: dict[str, str] = {}
    if checks & {"index_disagrees", "tensor_duplicated"} and checkpoint.index is not None:
        files[INDEX] = _text(_index(checkpoint))
    modules = group(checkpoint)
    for declared in (from_config(checkpoint), from_hf_quant(checkpoint)):
        if declared is None or not declared.judged:
            continue
        value = copy.deepcopy(declared.file.value)
        inner = _quantization(value)
        if "kv_scales_missing" in checks:
            for key in _KV_KEYS:
                if inner.get(key) is not None:
                    inner[key] = None
        if checks & {"excluded_quantised", "unquantised_not_excluded"} and not result.not_read:
            inner[declared.exclude_key] = _excluded(modules, declared)
        if checks & {"quant_algo_tensors", "quant_algo_unknown", "quant_algo_missing"}:
            _set_algo(inner, declared, modules)
        if "group_size_tensors" in checks:
            _set_group_size(inner)
        if value != declared.file.value:
            files[declared.file.name] = _text(value)
    _agree(checkpoint, files, checks)
    return files


def _agree(checkpoint: Checkpoint, files: dict[str, str], checks: set[str]) -> None:
    """Give hf_quant_config.json what config.json says where only they disagree."""
    if "config_disagrees" not in checks or checkpoint.hf_quant is None:
        return
    config = json.loads(files.get("config.json", checkpoint.config.text))
    hf_quant = json.loads(files.get(checkpoint.hf_quant.name, checkpoint.hf_quant.text))
    said, inner = _quantization(config), _quantization(hf_quant)
    if isinstance(said.get("quant_algo"), str):
        inner["quant_algo"] = said["quant_algo"]
    excluded = said.get("ignore", said.get("exclude_modules"))
    if isinstance(excluded, list):
        inner["exclude_modules"] = excluded
    if isinstance(said.get("quantized_layers"), dict) and "quantized_layers" in inner:
        inner["quantized_layers"] = said["quantized_layers"]
    declared = from_config(checkpoint)
    if declared is not None:
        kept = said.get("kv_cache_quant_algo") or said.get("kv_cache_scheme")
        inner["kv_cache_quant_algo"] = declared.kv if kept else None
        if declared.group_size is not None and declared.scheme != "mixed":
            inner["group_size"] = BLOCK if "group_size_tensors" in checks else declared.group_size
    files[checkpoint.hf_quant.name] = _text(hf_quant)


def _quantization(value: dict[str, Any]) -> dict[str, Any]:
    """The object in which a file describes the quantisation, to be changed in place."""
    for owner in (value, value.get("text_config")):
        if isinstance(owner, dict) and isinstance(owner.get("quantization_config"), dict):
            found: dict[str, Any] = owner["quantization_config"]
            inner = found.get("quantization")
            return inner if isinstance(inner, dict) else found
    inner = value.get("quantization")
    return inner if isinstance(inner, dict) else value


def _excluded(modules: Mapping[str, Parts], declared: Declared) -> list[str]:
    """The old list without what names quantised modules, and with the modules that it lacks."""
    substrings = declared.method != "compressed-tensors"
    kinds = {module: kind for module, parts in modules.items() if (kind := scheme(parts)) is not None}
    quantised = [module for module, kind in kinds.items() if kind != "none"]
    kept = [
        one
        for one in declared.excluded
        if not any(Patterns([one], substrings).match(module) for module in quantised)
    ]
    patterns = Patterns(kept, substrings)
    lacking = sorted(
        module
        for module, kind in kinds.items()
        if kind == "none" and is_projection(module) and not patterns.match(module)
    )
    return [*kept, *lacking]


def _set_algo(inner: dict[str, Any], declared: Declared, modules: Mapping[str, Parts]) -> None:
    """Name the scheme that all quantised tensors have, where it is one that ModelOpt has a name for."""
    if not (declared.method or "").startswith("modelopt"):
        return
    kinds = {
        module: kind for module, parts in modules.items() if (kind := scheme(parts)) not in (None, "none")
    }
    if declared.rules.layers is not None:
        inner["quantized_layers"] = _layers(declared, modules, inner.get("quantized_layers"))
    elif declared.scheme != "mixed" and len(set(kinds.values())) == 1:
        name = _ALGOS.get(str(next(iter(kinds.values()))))
        if name is not None:
            inner["quant_algo"] = name


def _layers(declared: Declared, modules: Mapping[str, Parts], old: Any) -> dict[str, Any]:
    """The entries of `quantized_layers` that are right, and those that are lacking, by the tensors.

    An entry that names no module of this checkpoint is kept: it may be another name of one.
    """
    lacking: dict[str, Any] = {}
    for module, parts in modules.items():
        rule, kind = declared.rules.of(module), str(scheme(parts))
        if kind in _ALGOS and (rule is None or rule.scheme != kind):
            lacking[module] = {"quant_algo": _ALGOS[kind]}
    bare = {module for module, parts in modules.items() if scheme(parts) == "none"}
    kept = old if isinstance(old, dict) else {}
    return {name: one for name, one in kept.items() if name not in bare} | lacking


def _set_group_size(inner: dict[str, Any]) -> None:
    """16, which NVFP4 has, wherever a group size of 4-bit floats is said."""
    groups, layers = inner.get("config_groups"), inner.get("quantized_layers")
    entries = [inner] if inner.get("group_size") is not None and layers is None else []
    for one in groups.values() if isinstance(groups, dict) else ():
        weights = one.get("weights") if isinstance(one, dict) else None
        if isinstance(weights, dict) and weights.get("num_bits") == 4 and weights.get("type") == "float":
            entries.append(weights)
    for one in layers.values() if isinstance(layers, dict) else ():
        if isinstance(one, dict) and "NVFP4" in str(one.get("quant_algo")).upper():
            entries.append(one)
    for one in entries:
        if one.get("group_size") is not None:
            one["group_size"] = BLOCK


def _index(checkpoint: Checkpoint) -> dict[str, Any]:
    """An index made from the shards, with the metadata of the old one."""
    old = checkpoint.index.value if checkpoint.index is not None else {}
    metadata = old.get("metadata")
    size = sum(one.size for one in checkpoint.tensors.values())
    return {
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": size},
        "weight_map": {name: one.shard for name, one in sorted(checkpoint.tensors.items())},
    }


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
