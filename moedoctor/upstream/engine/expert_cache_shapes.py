"""The two models of vllm-project/vllm#37190's own table with an expert cache of 8 slots, random weights.

Their shapes are presets. Only experts are quantized in NVFP4. What keeps an engine from running is its row.
Each format is a unit of the claim, so that one is kept if the other does not finish.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedoctor.models.presets import preset_document
from moedoctor.upstream.engine.engine import EngineRequest
from moedoctor.upstream.engine.experiment import Ran, Trial, run_trials, short_error
from moedoctor.upstream.engine.expert_cache import PROBES, cached

SLOTS = 8
_STEPS, _TEXTS = 24, 3
_SECONDS = 240.0


@dataclass(frozen=True)
class Published:
    """A row of the pull request's table."""

    preset: str
    architecture: str
    gigabytes: float
    tokens_per_second: float
    unquantized: Sequence[str]
    """What NVFP4 leaves in BF16, as ModelOpt names it."""
    fields: Mapping[str, Any]
    """What the preset's configuration does not say."""


NEMOTRON, GEMMA = (
    Published(
        "nemotron-cascade-2-30b-a3b",
        "NemotronHForCausalLM",
        7.6,
        15.6,
        (
            "lm_head",
            "*embed*",
            "*in_proj*",
            "*out_proj*",
            "*conv1d*",
            "*qkv_proj*",
            "*o_proj*",
            "*shared*",
            "*gate",
        ),
        {"layer_norm_epsilon": 1e-5, "num_hidden_layers": 52},
    ),
    Published(
        "gemma-4-26b-a4b",
        "Gemma4ForCausalLM",
        8.6,
        14.8,
        ("lm_head", "*embed*", "*self_attn*", "*mlp*", "*router*", "*per_layer*"),
        {"rms_norm_eps": 1e-6, "num_hidden_layers": 30, "hidden_size_per_layer_input": 0},
    ),
)
"""On an RTX PRO 6000 Blackwell, one sequence."""


def nemotron(unit: str) -> list[dict[str, Any]]:
    """Return the row of Nemotron-Cascade-2-30B-A3B in one format. Raises UnavailableError."""
    return _measure(NEMOTRON, unit)


def gemma(unit: str) -> list[dict[str, Any]]:
    """Return the row of Gemma-4-26B-A4B in one format. Raises UnavailableError."""
    return _measure(GEMMA, unit)


def _measure(entry: Published, scheme: str) -> list[dict[str, Any]]:
    """Return memory and speed in ``bf16`` or ``nvfp4``, beside the table's.

    `gigabytes` is what torch holds after loading, without the KV cache: weights, slots and bookkeeping.
    """
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        request = _request(Path(name), entry, scheme)
        (engine,) = run_trials([Trial(request, {"model": entry.preset, "scheme": scheme})])
        return [_row(engine, entry)]


def _row(ran: Ran, entry: Published) -> dict[str, Any]:
    result = ran.result
    figures = {"error": short_error(result.error)} if result.error is not None else dict(result.probe)
    return {
        **ran.trial.columns,
        "slots": SLOTS,
        "published_gigabytes": entry.gigabytes,
        "published_tokens_per_second": entry.tokens_per_second,
        "backend": result.log.moe_backend,
        **figures,
        "seconds": dict(result.seconds),
    }


def model_config(
    entry: Published, scheme: str, unquantized: Sequence[str] = (), **changes: Any
) -> dict[str, Any]:
    """Return config.json of a model of the table in ``bf16`` or ``nvfp4``, with fields changed.

    `unquantized`: what NVFP4 leaves in BF16 besides what the entry names.
    """
    document = {key: value for key, value in preset_document(entry.preset).items() if key[0] != "_"}
    document |= {"architectures": [entry.architecture], "torch_dtype": "bfloat16", **entry.fields, **changes}
    if scheme == "nvfp4":
        document["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": [*entry.unquantized, *unquantized],
        }
    return document


def _request(folder: Path, entry: Published, scheme: str) -> EngineRequest:
    document = model_config(entry, scheme)
    own = folder / f"{entry.preset}-{scheme}"
    own.mkdir()
    (own / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return EngineRequest(
        str(own),
        [[17, 4711]],
        {
            "load_format": "dummy",
            "moe_backend": "triton" if scheme == "bf16" else "marlin",
            "enforce_eager": False,
            "compilation_config": {
                # Without torch.compile, which may take minutes for 52 layers of several kinds. Full graphs
                # do not need it: `CompilationConfig.cudagraph_mode`, vllm/config/compilation.py of 0.33.0.
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1],
            },
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": 1 << 30,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 1,
            "enable_prefix_caching": False,
        },
        cached(f"{SLOTS}:stream=0"),
        max_tokens=2,
        probe=f"{PROBES}random_routing",
        probe_options={"steps": _STEPS, "texts": _TEXTS, "vocab": document["vocab_size"]},
        seconds=_SECONDS,
        label=f"{entry.preset}, {scheme}",
    )
