"""What the engines of the NaN experiments have in common: their arguments, prompts and environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.upstream.engine.engine import EngineResult

BATCH = 11
"""Prompts at once: no size that graphs are captured for, so decode steps are padded to 16."""
SECONDS = 280.0
"""Time limit of an engine."""
_SIZES = [1, 2, 4, 8, 16, 32]


def engine_arguments() -> dict[str, Any]:
    """Compiled, with piecewise CUDA graphs, and the Triton experts."""
    return {
        "moe_backend": "triton",
        "enforce_eager": False,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": _SIZES},
    }


def traced(experiment: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The environment of an engine with the trace, and with an experiment where one is given."""
    environ = {"MOEDOCTOR_TRACE": "nan"}
    if experiment is not None:
        environ["MOEDOCTOR_EXPERIMENT"] = json.dumps(experiment)
    return environ


def prompts() -> Sequence[list[int]]:
    """Prompts of 3 to 13 tokens, so that prefill steps are padded, too."""
    return [[(7 * prompt + 13 * place) % 500 + 5 for place in range(3 + prompt)] for prompt in range(BATCH)]


def said(result: EngineResult) -> str:
    """How an engine failed, in one line."""
    error = result.error
    return "" if error is None else f"{error.stage}: {error.kind}: {error.message.splitlines()[0][:300]}"


def evidence_row(result: EngineResult) -> dict[str, Any]:
    """The line of the table that vllm-project/vllm#39593 prints, of an engine that ran with the trace."""
    from moedoctor.trace.nan_report import row_of

    return row_of(result.probe)
