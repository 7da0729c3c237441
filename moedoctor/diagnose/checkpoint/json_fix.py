"""Corrected copies of a checkpoint's JSON files, by what its tensors show."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from moedoctor.diagnose.checkpoint.checkpoint import INDEX, Checkpoint
from moedoctor.diagnose.checkpoint.findings import Lint
from moedoctor.diagnose.checkpoint.modules import BLOCK, Module
from moedoctor.diagnose.checkpoint.quantization import Declared, find_quantization_config, from_config

_ALGOS = {"nvfp4": "NVFP4", "fp8": "FP8"}
_KV_KEYS = ("kv_cache_quant_algo", "kv_cache_scheme")


CHECKS_OF_FILES = frozenset(
    {
        *("index_disagrees", "tensor_duplicated", "kv_scales_missing", "group_size_tensors"),
        *("excluded_quantised", "unquantised_not_excluded", "config_disagrees"),
        *("quant_algo_tensors", "quant_algo_unknown", "quant_algo_missing"),
    }
)
"""The checks with findings that a JSON file may correct."""


def correct(result: Lint, checks: Collection[str]) -> dict[str, str]:
    """Return file name -> new text for the JSON files that the findings of `checks` can be corrected in.

    The tensors stay as they are: a missing scale is not invented, but the setting that needs it is removed.
    """
    checks = set(checks)
    checkpoint = result.checkpoint
    files: dict[str, dict[str, Any]] = {}
    if checks & {"index_disagrees", "tensor_duplicated"} and checkpoint.index is not None:
        files[INDEX] = _index(checkpoint)
    for declared in result.declared:
        if not declared.judged:
            continue
        value = copy.deepcopy(declared.file.value)
        settings = _find_settings(value)
        if "kv_scales_missing" in checks:
            settings |= {key: None for key in _KV_KEYS if settings.get(key) is not None}
        if checks & {"excluded_quantised", "unquantised_not_excluded"} and not result.not_read:
            settings[declared.exclude_key] = _correct_excluded(result.modules, declared)
        if checks & {"quant_algo_tensors", "quant_algo_unknown", "quant_algo_missing"}:
            _set_algo(settings, declared, result.modules)
        if "group_size_tensors" in checks:
            _set_group_size(settings)
        if value != declared.file.value:
            files[declared.file.name] = value
    if "config_disagrees" in checks and checkpoint.hf_quant is not None:
        config = files.get(checkpoint.config.name, checkpoint.config.value)
        hf_quant = checkpoint.hf_quant
        files[hf_quant.name] = copy.deepcopy(files.get(hf_quant.name, hf_quant.value))
        _agree(files[hf_quant.name], config, from_config(replace(checkpoint.config, value=config)))
    return {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in files.items()}


def _agree(hf_quant: dict[str, Any], config: dict[str, Any], declared: Declared | None) -> None:
    """Change the settings of hf_quant_config.json to those of config.json, which are `declared` there."""
    ours, theirs = _find_settings(config), _find_settings(hf_quant)
    if isinstance(ours.get("quant_algo"), str):
        theirs["quant_algo"] = ours["quant_algo"]
    excluded = ours.get("ignore", ours.get("exclude_modules"))
    if isinstance(excluded, list):
        theirs["exclude_modules"] = excluded
    if isinstance(ours.get("quantized_layers"), dict) and "quantized_layers" in theirs:
        theirs["quantized_layers"] = ours["quantized_layers"]
    theirs["kv_cache_quant_algo"] = declared.kv if declared else None
    if declared and declared.group_size is not None and declared.scheme != "mixed":
        theirs["group_size"] = declared.group_size


def _find_settings(value: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a file that describes the quantization, to be changed in place."""
    outer = find_quantization_config(value)
    settings: dict[str, Any] = outer if isinstance(outer, dict) else value
    inner = settings.get("quantization")
    return inner if isinstance(inner, dict) else settings


def _correct_excluded(modules: Mapping[str, Module], declared: Declared) -> list[str]:
    """Return the list of excluded modules without quantized ones and with those that it lacks.

    Every matrix that is not quantized is named, also a router or a head: some models build them quantized.
    """
    quantized = [module.name for module in modules.values() if module.kind not in (None, "none")]
    right = [
        pattern
        for pattern in declared.excluded
        if not any(map(declared.make_patterns([pattern]).match, quantized))
    ]
    patterns = declared.make_patterns(right)
    lacking = sorted(
        module.name
        for module in modules.values()
        if module.kind == "none"
        and (module.is_projection or len(module.stored.shape) == 2)
        and "embed" not in module.name
        and not patterns.match(module.name)
    )
    return [*right, *lacking]


def _set_algo(settings: dict[str, Any], declared: Declared, modules: Mapping[str, Module]) -> None:
    """Name the scheme that all quantized tensors have, if ModelOpt has a name for it."""
    if not (declared.method or "").startswith("modelopt"):
        return
    kinds = {module.kind for module in modules.values()} - {None, "none"}
    if declared.rules.layers is not None:
        settings["quantized_layers"] = _correct_layers(declared, modules, settings.get("quantized_layers"))
    elif declared.scheme != "mixed" and len(kinds) == 1 and (kind := str(kinds.pop())) in _ALGOS:
        settings["quant_algo"] = _ALGOS[kind]


def _correct_layers(declared: Declared, modules: Mapping[str, Module], old: Any) -> dict[str, Any]:
    """Return the right entries of `quantized_layers` and those that it lacks, by the tensors.

    An entry that names no module of this checkpoint stays: it may be another name of one.
    """
    lacking: dict[str, Any] = {}
    for module in modules.values():
        rule = declared.rules.find(module.name)
        if module.kind in _ALGOS and (rule is None or rule.scheme != module.kind):
            lacking[module.name] = {"quant_algo": _ALGOS[module.kind]}
    bare = {module.name for module in modules.values() if module.kind == "none"}
    entries = old if isinstance(old, dict) else {}
    return {name: entry for name, entry in entries.items() if name not in bare} | lacking


def _set_group_size(settings: dict[str, Any]) -> None:
    """Set every group size of 4-bit floats to 16, which NVFP4 has."""
    groups, layers = settings.get("config_groups"), settings.get("quantized_layers")
    owners = [settings] if layers is None else []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("num_bits") == 4 and weights.get("type") == "float":
            owners.append(weights)
    for layer in layers.values() if isinstance(layers, dict) else ():
        if isinstance(layer, dict) and "NVFP4" in str(layer.get("quant_algo")).upper():
            owners.append(layer)
    for owner in owners:
        if owner.get("group_size") is not None:
            owner["group_size"] = BLOCK


def _index(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return an index made from the shards, with the metadata of the old one."""
    metadata = checkpoint.index.value.get("metadata") if checkpoint.index is not None else None
    size = sum(info.size for info in checkpoint.tensors.values())
    return {
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": size},
        "weight_map": {name: info.shard for name, info in sorted(checkpoint.tensors.items())},
    }
