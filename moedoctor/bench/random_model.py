"""A checkpoint of random weights whose answers depend on every weight: ``random:layers=4,scheme=nvfp4``.

It stands in for a model that cannot be downloaded, in any size, for `bench --engine`. Weights that vLLM
makes up itself (``--load-format dummy``) are so small that no expert changes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from moedoctor.models.presets import read_preset

PREFIX = "random"
_UNITS = ("layers", "hidden", "intermediate", "experts", "top_k", "vocab", "seed")


@dataclass(frozen=True)
class RandomModel:
    """A checkpoint: ``random:architecture=qwen3,scheme=nvfp4,layers=4`` as text, each part optional."""

    architecture: str = "qwen3"
    scheme: str = "bf16"
    """The format of the experts: bf16, nvfp4, fp8 (in blocks), fp8_modelopt or fp8_compressed."""
    layers: int = 2
    hidden: int = 256
    intermediate: int = 128
    experts: int = 8
    top_k: int = 2
    vocab: int = 512
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> RandomModel:
        """Read ``random`` or ``random:KEY=VALUE,...``. Raises ValueError with one line."""
        _, _, rest = text.partition(":")
        known = asdict(cls())
        given: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or key not in known:
                raise ValueError(
                    f"{PREFIX}: {part[:40]!r}: expected KEY=VALUE with a key of {', '.join(known)}"
                )
            if key in _UNITS and not (value.isascii() and value.isdigit() and len(value) < 8):
                raise ValueError(f"{PREFIX}: {key} is {value[:40]!r}, expected a number")
            given[key] = int(value) if key in _UNITS else value
        model = cls(**given)
        if model.architecture not in _WRITERS:
            raise ValueError(
                f"{PREFIX}: architecture is {model.architecture[:40]!r}, expected {', '.join(_WRITERS)}"
            )
        sizes = [key for key in given if key in _UNITS and key != "seed"]
        if sizes and model.architecture != "qwen3":
            raise ValueError(
                f"{PREFIX}: {sizes[0]} can be set for qwen3 only; {model.architecture} has sizes of its own"
            )
        return model

    def write(self, folder: Path) -> Path:
        """Write the checkpoint into `folder`; return the folder. Raises ValueError for impossible sizes."""
        from moedoctor.reference.checkpoints import Scheme

        if self.scheme not in get_args(Scheme):
            raise ValueError(
                f"{PREFIX}: scheme is {self.scheme[:40]!r}, expected {', '.join(get_args(Scheme))}"
            )
        return _WRITERS[self.architecture](self, folder)


def _write_qwen3(model: RandomModel, folder: Path) -> Path:
    from moedoctor.reference.checkpoints import write_qwen3_moe

    sizes = {name: value for name, value in asdict(model).items() if name not in ("architecture", "scheme")}
    return write_qwen3_moe(folder, scheme=model.scheme, **sizes)  # type: ignore[arg-type]


def _write_gemma4(model: RandomModel, folder: Path) -> Path:
    from moedoctor.reference import activation_checkpoints as checkpoints

    ignored = ("lm_head", "*embed*", "*self_attn*", "*mlp*", "*router*", "*per_layer*")
    fields = {"rms_norm_eps": 1e-6, "hidden_size_per_layer_input": 0, **checkpoints.GEMMA}
    config = _make_config("gemma-4-26b-a4b", "Gemma4ForCausalLM", model.scheme, ignored, fields)
    return checkpoints.write_gemma4(folder, config, model.scheme, model.seed)  # type: ignore[arg-type]


def _write_nemotron_h(model: RandomModel, folder: Path) -> Path:
    from moedoctor.reference import activation_checkpoints as checkpoints

    # vLLM matches a name only up to a dot after it, so `*shared*` alone would not leave shared experts out.
    parts = ("embed", "in_proj", "out_proj", "conv1d", "qkv_proj", "o_proj", "shared_experts", "latent_proj")
    ignored = ("lm_head", "*gate", "*shared*", *(f"*{part}*" for part in parts))
    fields = {"layer_norm_epsilon": 1e-5, **checkpoints.NEMOTRON}
    config = _make_config("nemotron-cascade-2-30b-a3b", "NemotronHForCausalLM", model.scheme, ignored, fields)
    return checkpoints.write_nemotron_h(folder, config, model.scheme, model.seed)  # type: ignore[arg-type]


def _make_config(
    preset: str, architecture: str, scheme: str, ignored: Sequence[str], fields: Mapping[str, Any]
) -> dict[str, Any]:
    document = {key: value for key, value in read_preset(preset).items() if key[0] != "_"}
    document |= {"architectures": [architecture], "torch_dtype": "bfloat16", **fields}
    if scheme == "nvfp4":
        document["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": list(ignored),
        }
    return document


_WRITERS: Mapping[str, Callable[[RandomModel, Path], Path]] = {
    "qwen3": _write_qwen3,
    "gemma4": _write_gemma4,
    "nemotron_h": _write_nemotron_h,
}
"""Architecture -> what writes its checkpoint; the last two have GELU and squared ReLU."""
