"""Corrected copies of a checkpoint's JSON files, as far as its tensors say what is right."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from moedoctor.diagnose.checkpoint import INDEX, Checkpoint
from moedoctor.diagnose.checkpoint_modules import Parts, group, is_projection, scheme
from moedoctor.diagnose.checkpoint_quant import Declared, from_config, from_hf_quant
from moedoctor.diagnose.lint import Lint
from moedoctor.diagnose.name_patterns import Patterns

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
    declared = from_config(checkpoint)
    if declared is not None:
        kept = said.get("kv_cache_quant_algo") or said.get("kv_cache_scheme")
        inner["kv_cache_quant_algo"] = declared.kv if kept else None
        if declared.group_size is not None:
            inner["group_size"] = declared.group_size
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
    kinds = {kind for parts in modules.values() if (kind := scheme(parts)) not in (None, "none")}
    if (declared.method or "").startswith("modelopt") and len(kinds) == 1:
        name = {"nvfp4": "NVFP4", "fp8": "FP8"}.get(str(kinds.pop()))
        if name is not None:
            inner["quant_algo"] = name


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
