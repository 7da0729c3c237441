"""What a model's folder says of its weights: how many bytes they are, and how its experts are stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moedoctor.diagnose.plan.kv_cache import PlanError

INDEX = "model.safetensors.index.json"
_LARGEST_FILE = 256 << 20
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
"""Routed experts in a module's name; ``shared_experts`` and ``shared_expert`` are others."""
_IN_TARGET = re.compile(r"(?<![a-z_])experts(?![a-z])")
"""The same in a target of compressed-tensors, which is a name or a regular expression."""


def checkpoint_bytes(folder: Path) -> int | None:
    """Bytes of the safetensors files that are the model; None where there are none.

    These are the shards that the index names, else ``model.safetensors``, else all: a folder may hold the
    same weights a second time, as ``consolidated.safetensors``. Raises PlanError where some shards of the
    index are missing, or the index cannot be read.
    """
    index = _object(folder / INDEX)
    if index is not None:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not all(_is_plain(one) for one in shards.values()):
            raise PlanError(f"{folder / INDEX}: weight_map names no files, expected tensors and their shards")
        files = [folder / one for one in sorted(set(shards.values()))]
        missing = [one.name for one in files if not one.is_file()]
        if missing and len(missing) < len(files):
            raise PlanError(
                f"{folder}: {len(missing)} of {len(files)} shards are missing, the first is "
                f"{missing[0][:120]!a}; give a complete folder, or its config.json to compute the size"
            )
        return None if missing else _total(files)
    if (folder / "model.safetensors").is_file():
        return _total([folder / "model.safetensors"])
    return _total(one for one in folder.glob("*.safetensors") if one.is_file())


def expert_scheme(config: Path) -> tuple[str, str]:
    """(scheme of the routed experts, where that is said), by ``config.json`` or ModelOpt's file beside it.

    A model that names no quantisation has ``bf16``. Raises PlanError for one that plan does not count.
    """
    values = _object(config) or {}
    inner = values.get("text_config")
    found = values.get("quantization_config")
    if found is None and isinstance(inner, dict):
        found = inner.get("quantization_config")
    where, said = config, f"by {config.name}"
    if found is None:
        where, said = config.parent / "hf_quant_config.json", "by ModelOpt's file beside config.json"
        found = (_object(where) or {}).get("quantization")
    if found is None:
        return "bf16", f"{config.name} names no quantisation"
    if not isinstance(found, dict):
        raise PlanError(f"{where}: its quantisation is no object; give --scheme")
    return _scheme(found, where), said


def _scheme(found: Mapping[str, Any], where: Path) -> str:
    method = str(found.get("quant_method") or "").lower()
    groups = found.get("config_groups")
    grouped = method in ("", "compressed-tensors") or method.startswith("modelopt")
    if grouped and isinstance(groups, dict) and not found.get("quant_algo"):
        return _of_groups(groups, where)
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return "mxfp4"
    if method and not method.startswith("modelopt"):
        raise _unknown(where, f"quant_method {method!a}")
    nested = found.get("quantization")
    return _of_modelopt(nested if isinstance(nested, dict) else found, where)


def _of_modelopt(found: Mapping[str, Any], where: Path) -> str:
    algo = found.get("quant_algo")
    if algo != "MIXED_PRECISION":
        return _of_algo(algo, where)
    layers = found.get("quantized_layers")
    algos = {
        _of_algo(one.get("quant_algo"), where)
        for name, one in (layers.items() if isinstance(layers, dict) else ())
        if _EXPERTS.search(name) and isinstance(one, dict)
    }
    return _only(algos or {"bf16"}, where)


def _of_algo(algo: Any, where: Path) -> str:
    """The scheme of ModelOpt's `quant_algo`; without one only the cache is quantised."""
    if not algo:
        return "bf16"
    # In this order: the name also says the activations', which for W4A8_NVFP4_FP8 are in FP8.
    for part in ("MXFP4", "NVFP4", "FP8"):
        if part in str(algo).upper():
            return part.lower()
    raise _unknown(where, f"quant_algo {algo!a}")


def _of_groups(groups: Mapping[str, Any], where: Path) -> str:
    """The scheme of the group that has the experts: one that names them, else one of every ``Linear``."""
    made = [one for one in groups.values() if isinstance(one, dict)]
    named = [one for one in made if any(_IN_TARGET.search(name) for name in _targets(one))]
    every = [one for one in made if "Linear" in _targets(one)]
    return _only({_of_weights(one.get("weights"), where) for one in named or every or made}, where)


def _targets(group: Mapping[str, Any]) -> list[str]:
    found = group.get("targets")
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _of_weights(weights: Any, where: Path) -> str:
    weights = weights if isinstance(weights, dict) else {}
    bits, kind, size = (weights.get(name) for name in ("num_bits", "type", "group_size"))
    if kind == "float" and bits == 8:
        return "fp8"
    if kind == "float" and bits == 4:
        return "mxfp4" if size == 32 else "nvfp4"
    raise _unknown(where, f"weights of type {kind!a} with {bits!a} bits")


def _only(schemes: set[str], where: Path) -> str:
    if len(schemes) != 1:
        said = " and ".join(sorted(schemes)) or "nothing"
        raise PlanError(f"{where}: stores experts in {said}; give the --scheme to plan with")
    return schemes.pop()


def _unknown(where: Path, what: str) -> PlanError:
    return PlanError(f"{where}: {what[:120]} is no scheme that plan counts; give --scheme with the nearest")


def _object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file. Raises PlanError."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > _LARGEST_FILE:
            raise PlanError(f"{path}: larger than {_LARGEST_FILE >> 20} MiB, expected a smaller JSON file")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise PlanError(f"{path}: expected an object")
    return found


def _is_plain(name: Any) -> bool:
    """Whether it is the name of a file in the folder itself."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name


def _total(files: Iterable[Path]) -> int | None:
    return sum(one.stat().st_size for one in files) or None
