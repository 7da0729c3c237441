"""Finds how the experts of a served model are quantized, from a command line or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedoctor.diagnose.checkpoint.checkpoint import read_json
from moedoctor.diagnose.checkpoint.quantization import find_quantization_config, from_config
from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError
from moedoctor.diagnose.settings.flags import read_flags
from moedoctor.fixes.backends.release_tables import SCHEMES
from moedoctor.text import shorten

_BY_METHOD: Mapping[str, str] = {"modelopt_fp4": "nvfp4", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4"}
"""Values of ``--quantization`` and of ``quant_method`` that name a scheme by themselves."""

_BY_MODEL: Mapping[str, str] = {"gpt_oss": "swigluoai", "gemma4_text": "gelu_tanh"}
_ACTIVATION_KEYS = ("mlp_hidden_act", "hidden_act", "hidden_activation")
_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2_no_mul",
}
"""Name in config.json -> vLLM's. Models with relu2 have no gate."""


@dataclass(frozen=True)
class Found:
    """The possible schemes of the weights."""

    schemes: tuple[str, ...]
    """One scheme; or all that it may be, if nothing says which."""
    why: str
    """The source of the scheme, or the reason why it is not known."""


def find_scheme(command: Sequence[str], release: str) -> Found:
    if not command:
        return Found(SCHEMES, "no model is named: give --scheme, or a server's command line after --")
    given = [flag.value for flag in read_flags(command, release) if flag.name == "--quantization"]
    method = (given[-1] or "").lower() if given else None
    if method is not None and method in _BY_METHOD:
        return Found((_BY_METHOD[method],), f"--quantization {method}")
    model = _find_model(command, release)
    if model is None:
        return Found(SCHEMES, "the command line names no model: name its scheme with --scheme")
    config = Path(model, "config.json")
    if not os.path.isfile(config):  # Path.is_file raises for impossible names
        return Found(
            SCHEMES,
            f"{shorten(model)} is not a folder with a config.json here, so how its weights are quantized is "
            "not known: name it with --scheme, or give the folder",
        )
    return _read_config(config, method)


def find_activation(command: Sequence[str], release: str) -> tuple[str | None, str]:
    """Return the activation of the experts of a served model as config.json names it, and where from.

    None, and why, if that does not say. Some of vLLM's models name theirs whatever config.json says.
    """
    model = _find_model(command, release) if command else None
    if model is None or not os.path.isfile(Path(model, "config.json")):
        return None, "no config.json of a model is here"
    try:
        file = read_json(Path(model), "config.json")
    except CheckpointError as error:
        return None, str(error)
    config = file.value if file is not None and isinstance(file.value, dict) else {}
    text = config.get("text_config", config)
    text = text if isinstance(text, dict) else config
    if text.get("model_type") in _BY_MODEL:
        return _BY_MODEL[text["model_type"]], f"model_type {text['model_type']}"
    given = next((key for key in _ACTIVATION_KEYS if isinstance(text.get(key), str)), None)
    if given is None:
        return None, f"{model}/config.json names none"
    return _ACTIVATIONS.get(text[given]), f"{given} {shorten(text[given])} in config.json"


def _find_model(command: Sequence[str], release: str) -> str | None:
    """Return the model: the value of --model, or the word after ``serve``."""
    given = [flag.value for flag in read_flags(command, release) if flag.name == "--model"]
    if given and given[-1]:
        return given[-1]
    place = next((place for place, word in enumerate(command) if word == "serve"), None)
    after = command[place + 1] if place is not None and place + 1 < len(command) else None
    return after if after is not None and not after.startswith("-") else None


def _read_config(path: Path, method: str | None) -> Found:
    try:
        file = read_json(path.parent, path.name)
    except CheckpointError as error:
        return Found(SCHEMES, f"{error}: name the scheme with --scheme")
    if file is None:
        return Found(SCHEMES, f"{path} is not there: name the scheme with --scheme")
    value = find_quantization_config(file.value)
    if value is None:
        if method == "fp8":
            return Found(("fp8",), "--quantization fp8 of a checkpoint that is not quantized")
        if method is None:
            return Found(("bf16",), f"{path} declares no quantization")
        return Found(SCHEMES, f"{path} declares no quantization, and --quantization is {method}")
    declared = from_config(file)
    named = str(value.get("quant_method", "")).lower() if isinstance(value, dict) else ""
    if named in _BY_METHOD:
        return Found((_BY_METHOD[named],), f"{path} declares {named}")
    rule = declared.rules.groups[0] if declared is not None and declared.rules.groups else None
    scheme = None if declared is None else declared.scheme
    if scheme == "nvfp4" and rule is not None:
        return Found(("nvfp4" if rule.static_inputs else "nvfp4-w4a16",), f"{path} declares NVFP4")
    if scheme == "fp8" and rule is not None:
        return Found(("fp8-block" if rule.block else "fp8",), f"{path} declares FP8")
    return Found(SCHEMES, f"{path} does not say clearly how the experts are quantized: name it with --scheme")
