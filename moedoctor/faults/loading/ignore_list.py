"""MD023: an ignore list that does not name what a quantized checkpoint stores in BF16.

The control has the rules by which vLLM decides, from such a list, which modules are quantized.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from moedoctor.diagnose.checkpoint.lint import lint
from moedoctor.diagnose.checkpoint.repair import repair
from moedoctor.faults.base import Parameters
from moedoctor.faults.loading.loading import LoadingFault
from moedoctor.results import Case, Evidence, Scalar, Tier

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Tensors

Format = Literal["nvfp4", "fp8", "fp8_compressed"]


class IgnoreListParameters(Parameters):
    format: Format = Field("nvfp4", description="ModelOpt's NVFP4, FP8 in blocks, or compressed-tensors")
    mistake: Literal["nothing", "other_names", "one_part", "prefix"] = Field(
        "other_names", description="what is wrong with the list"
    )


class IgnoreList(LoadingFault):
    """A release's rule for which modules are quantized, given a list that is wrong."""

    id = "MD023"
    parameters = IgnoreListParameters
    summary = "{format}, {mistake}"
    lab = __name__

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """At the tier library, return True for one mistake in each format: each question takes seconds."""
        return tier is Tier.MODEL or parameters["mistake"] == "other_names"


KEYS: Mapping[Format, str] = {"nvfp4": "ignore", "fp8": "modules_to_not_convert", "fp8_compressed": "ignore"}
FUSED: Mapping[str, Sequence[str]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
"""`packed_modules_mapping` of Qwen3MoeForCausalLM."""
MODULES = tuple(
    f"model.layers.0.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate", "mlp.experts")
)
"""Modules that Qwen3-MoE builds by the list; ModelOpt's rule decides on the head, too."""
_SIZES = {"layers": 1, "intermediate": 128, "experts": 4}


def model(case: Case, parameters: IgnoreListParameters, release: object) -> Evidence:
    """Compare what the list says of each module with its tensors; the fix is the list of `lint --fix`."""
    from moedoctor.reference.checkpoints import write_qwen3_moe

    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        damaged = Path(name) / "damaged"
        folder = write_qwen3_moe(damaged, scheme=parameters.format, change=make_change(parameters), **_SIZES)
        found = lint(folder)
        if case.subject == "fixed":
            folder = Path(name) / "repaired"
            repair(found, folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = {module.name: module.kind for module in lint(folder).modules.values()}
    ignored = config["quantization_config"][KEYS[parameters.format]]
    lints = [finding.id for finding in found.findings]
    wrong = []
    for name in (*MODULES, *(["lm_head"] if parameters.format == "nvfp4" else [])):
        parts = [name.replace("qkv_proj", part) for part in FUSED["qkv_proj"]]
        parts = [part for part in parts if part in stored] or [f"{name}.0.down_proj"]
        try:
            quantized = not RULES[parameters.format](name, ignored)
        except ValueError as error:
            return {"stopped": f"ValueError: {error}", "wrong": None, "right": None, "lint": lints}
        if quantized == (stored[parts[0]] == "none"):
            wrong.append(f"{name} is built {'quantized' if quantized else 'in BF16'}")
    shown = f"{', '.join(wrong)}, and the checkpoint stores the other" if wrong else None
    right = "every module is built as it is stored"
    return {"stopped": None, "wrong": shown, "right": right, "lint": lints}


def library(case: Case, parameters: IgnoreListParameters, release: object) -> Evidence:
    """Ask the installed vLLM to load the checkpoint."""
    from moedoctor.faults.loading.loading_lab import ask_installed

    return ask_installed(parameters.format, make_change(parameters), **_SIZES)


def make_change(parameters: IgnoreListParameters) -> Callable[[Tensors, dict[str, Any]], None]:
    """Return the change of config.json that makes the mistake."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        key = KEYS[parameters.format]
        right = [name.removesuffix(".weight") for name in tensors if "proj" in name and "self_attn" in name]
        quantization[key] = WRONG[parameters.mistake]([*right, "model.layers.0.mlp.gate", "lm_head"])

    return change


WRONG: Mapping[str, Callable[[list[str]], list[str]]] = {
    "nothing": lambda names: [],
    "other_names": lambda names: [name.replace("self_attn", "attention") for name in names],
    "one_part": lambda names: [name for name in names if not name.endswith("v_proj")],
    "prefix": lambda names: [f"thinker.{name}" for name in names],
}
"""Mistake -> the wrong list, from the right one."""


def match_parts(name: str, match: Callable[[str], bool], message: str) -> bool:
    """Match a module, or all parts of a fused one. Raises ValueError if only some of them match."""
    last = name.rpartition(".")[2]
    if match(name) or last not in FUSED:
        return match(name)
    shards = {match(name.replace(last, part)) for part in FUSED[last]}
    if len(shards) > 1:
        raise ValueError(message.format(name))
    return shards.pop()


def is_skipped_exactly(name: str, ignored: Sequence[str]) -> bool:
    """FP8: vllm/model_executor/layers/quantization/utils/quant_utils.py:619-693 of 0.33.0, mode exact."""
    if "experts" in name:
        return any(name in each for each in ignored if "experts" in each)
    message = "Detected some but not all shards of {} are quantized."
    return match_parts(name, ignored.__contains__, message)


def is_excluded(name: str, ignored: Sequence[str]) -> bool:
    """ModelOpt: vllm/model_executor/layers/quantization/modelopt.py:191-226 of 0.33.0."""
    if ignored and is_skipped_exactly(name, ignored):
        return True
    short = name.removeprefix("language_model.")
    return any((each != name and (each in name or each in short)) or fnmatch(name, each) for each in ignored)


def is_ignored(name: str, ignored: Sequence[str]) -> bool:
    """compressed-tensors: find_matching_patterns, layers/quantization/utils/config_utils.py:384 of 0.33.0."""

    def match(module: str) -> bool:
        return any(
            re.match(each[3:], module) is not None if each.startswith("re:") else each == module
            for each in ignored
        )

    return match_parts(name, match, "Found different quantization schemes for the shards of {}.")


RULES: Mapping[Format, Callable[[str, Sequence[str]], bool]] = {
    "nvfp4": is_excluded,
    "fp8": is_skipped_exactly,
    "fp8_compressed": is_ignored,
}
