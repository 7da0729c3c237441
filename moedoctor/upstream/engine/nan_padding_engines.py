"""Real engines with the NaN trace: how often padding holds NaN, and what that does to real rows.

Every engine is a tiny Qwen3-MoE in BF16 with random weights, compiled, with piecewise CUDA graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.results import UnavailableError
from moedoctor.upstream.engine.engine import EngineRequest, run_engines
from moedoctor.upstream.engine.nan_requests import (
    SECONDS,
    engine_arguments,
    evidence_row,
    prompts,
    said,
    traced,
)
from moedoctor.upstream.releases.wheel import shared_object

OWN, OLD = "own topk_softmax", "topk_softmax of 0.19.1"
POISONED = "1 GPU, TRITON_ATTN, memory held NaN before"
_TOKENS = 24


def padding_table(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row a configuration, with the columns of vllm-project/vllm#39593.

    The third engine is given memory that held NaN before: what attention does not write shows there.
    """
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        model = write_qwen3_moe(Path(folder), experts=16, top_k=4)
        requests = [
            _request(model, f"1 GPU, {backend}", {"attention_backend": backend}, traced())
            for backend in ("TRITON_ATTN", "FLASH_ATTN")
        ]
        requests.append(_request(model, POISONED, {}, traced({"poison_memory": True})))
        rows: list[dict[str, Any]] = []
        for result in run_engines(requests, parallel=3):
            if result.error is not None:
                rows.append({"config": result.label, "error": said(result)})
                continue
            rows.append({"config": result.label, **evidence_row(result)})
    _some_ran(rows)
    return [*rows, {"config": "DP=2", "not_run": "scenarios/engine/nan_padding_dp.yaml does, on two GPUs"}]


def end_to_end(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Padding rows made NaN by a hook: with vLLM's own top-k, and with that of the last one before the fix.

    The first row is the engine without the hook, whose tokens the others are held against; that figure is
    None where it did not run. The third needs the kernels of 0.19.1 and is left out without them.
    """
    poison = {"poison_padding": True}
    experiments: list[tuple[str, dict[str, Any] | None]] = [("untouched", None), (OWN, poison)]
    old = sources.get("vllm@0.19.1")
    if old is not None:
        experiments.append((OLD, {**poison, "topk_softmax": str(shared_object(Path(old)))}))
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        model = write_qwen3_moe(Path(folder), experts=16, top_k=4)
        requests = [_request(model, name, {}, traced(one)) for name, one in experiments]
        results = run_engines(requests, parallel=3)
    plain = results[0]
    rows: list[dict[str, Any]] = []
    for result in results:
        if result.error is not None:
            rows.append({"engine": result.label, "error": said(result)})
            continue
        same = None  # where there is nothing to hold the tokens against
        if plain.error is None:
            same = sum(mine == base for mine, base in zip(result.tokens, plain.tokens, strict=True))
        seen = result.probe
        rows.append(
            {
                "engine": result.label,
                "prompts": len(result.tokens),
                "prompts_with_the_same_tokens": same,
                **evidence_row(result),
                "nan_in_real": seen["nan_in_real"],
                "routers_watched": seen["routers_watched"],
                "rows_with_repeated_ids": sum(sum(one["repeated"]) for one in seen["routers"]),
                "real_rows_with_repeated_ids": sum(one["repeated"][0] for one in seen["routers"]),
                "first_in_padding": _place(seen["first_padding"]),
                "first_in_real": _place(seen["first_real"]),
            }
        )
    return _some_ran(rows)


def report(llm: Any) -> dict[str, Any]:
    """Probe: what the NaN trace of this engine has found."""
    from moedoctor.upstream.plugin.nan_trace import trace_of_this_process

    found = trace_of_this_process().report()
    if found is None:
        raise LookupError("the NaN trace saw no model")
    return found.evidence()


def _request(
    model: Path, label: str, arguments: Mapping[str, Any], environ: Mapping[str, str]
) -> EngineRequest:
    return EngineRequest(
        str(model),
        prompts(),
        {**engine_arguments(), **arguments},
        environ,
        max_tokens=_TOKENS,
        probe="moedoctor.upstream.engine.nan_padding_engines:report",
        seconds=SECONDS,
        label=label,
    )


def _place(finding: Mapping[str, Any] | None) -> str:
    return "" if finding is None else f"{finding['what']} at {finding['point']}, step {finding['step']}"


def _some_ran(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if all("error" in row for row in rows):
        raise UnavailableError(f"no engine ran: {rows[0]['error']}")
    return rows
