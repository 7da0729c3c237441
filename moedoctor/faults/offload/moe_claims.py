"""MD008's claims about MoE layers that moedoctor computes inside vLLM, which only real engines can decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moedoctor.faults.base import ClaimCases, ClaimJudgement, claim, decide, untested

_ENGINES = "moedoctor.upstream.engine.moe_layers"
_OPTIONS: dict[str, Any] = {"needs_gpu": True, "needs": "an installed vLLM that starts"}
_PLANTED, _OURS, _THEIRS = "experts exchanged", "moedoctor", "vLLM"


@claim("moe_tokens", measure=f"{_ENGINES}:tokens", thresholds=("max_ratio",), **_OPTIONS)
def moe_tokens(cases: ClaimCases) -> ClaimJudgement:
    """Engines with the fix give the tokens of the float32 reference.

    Their logprobs may be `max_ratio` times as far from the reference's as those of vLLM's own backend in the
    same mode: compiled layers round otherwise than the eager ones of the reference. Equal tokens confirm the
    claim only if wrong experts change the tokens of the same quantization.
    """
    rows = cases.rows()
    ours = [row for row in rows if row["computer"] == _OURS and row["outcome"] != "no control"]
    if not ours:
        return untested("no engine with the reference ran", {"rows": rows})
    distance = {_place(row): row["logprob_distance"] for row in rows if row["computer"] == _THEIRS}
    unmeasured = sorted({" ".join(_place(row)) for row in ours if not distance.get(_place(row))})
    if unmeasured:
        return untested(f"vLLM's own backend gave no logprobs for {', '.join(unmeasured)}", {"rows": rows})

    def is_near(row: dict[str, Any]) -> bool:
        return cases.keeps("max_ratio", float(row["logprob_distance"]) / float(distance[_place(row)]))

    same = [row for row in ours if row["outcome"] == "same tokens" and is_near(row)]
    apart = "; ".join(
        f"{row['quantization']} {row['mode']} {float(row['logprob_distance']):.2g}, vLLM's own "
        f"{float(distance[_place(row)]):.2g}"
        for row in ours
        if row["logprob_distance"] is not None
    )
    figure = f"{len(same)} of {len(ours)} engines give the reference's tokens; logprobs differ: {apart}"
    wrong = next((row for row in ours if row not in same), None)
    if wrong is not None:
        where = f"{wrong['quantization']}, {wrong['mode']}: {wrong['outcome']}, {wrong['detail']}"
        return decide(False, {"rows": rows}, f"{figure}; {where}")
    noticed = {
        row["quantization"]
        for row in rows
        if row["computer"] == _PLANTED and row["outcome"] == "other tokens"
    }
    blind = sorted({row["quantization"] for row in same} - noticed)
    if blind:
        return untested(f"{figure}; wrong experts changed no token of {', '.join(blind)}", {"rows": rows})
    return decide(True, {"rows": rows}, f"{figure}; with wrong experts every quantization gives others")


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["quantization"]), str(row["mode"])


_FEWEST, _NOTICED = 8, 0.5
"""The fewest clear prompts that decide anything, and the share of them that wrong experts may leave equal."""


def _judge_clear_prompts(cases: ClaimCases) -> ClaimJudgement:
    """Engines with the fix give the tokens of the float32 reference where it decides clearly.

    Of those prompts a share of `min_same` must have its tokens. Rounding may still choose another expert for
    a token, which is why not all need to. Logprobs may be `max_ratio` times as far from the reference's as
    those of vLLM's own backend in the same mode. Wrong experts must change the tokens of at least half of the
    prompts.
    """
    rows = cases.rows()
    ours = [row for row in rows if row["computer"] == _OURS]
    if not ours:
        return untested("no engine ran", {"rows": rows})
    theirs = {_engine(row): row for row in rows if row["computer"] == _THEIRS}
    planted = {_checkpoint(row): row for row in rows if row["computer"] == _PLANTED}
    failed = next((row for row in ours if "clear_prompts" not in row), None)
    if failed is not None:
        reason = f"{_engine(failed)}: {failed['detail']}"
        if str(failed["detail"]).startswith("no reference"):
            return untested(reason, {"rows": rows})
        if "clear_prompts" not in theirs[_engine(failed)]:
            return untested(f"{reason}; vLLM's own backend did not run either", {"rows": rows})
        return decide(False, {"rows": rows}, reason)
    few = next((row for row in ours if row["clear_prompts"] < _FEWEST), None)
    if few is not None:
        clear = f"the reference decides {few['clear_prompts']} prompts clearly, fewer than {_FEWEST}"
        return untested(f"{_engine(few)}: {clear}", {"rows": rows})
    blind = [row for row in ours if "clear_prompts" not in theirs[_engine(row)]]
    if blind:
        beside = theirs[_engine(blind[0])]
        return untested(f"vLLM's own backend, {_engine(blind[0])}: {beside['detail']}", {"rows": rows})
    figure = "; ".join(
        f"{_engine(row)}: {row['same_prompts']} of {row['clear_prompts']} prompts, vLLM's own "
        f"{theirs[_engine(row)]['same_prompts']}, logprobs differ by {float(row['logprob_distance']):.2g}, "
        f"vLLM's own {float(theirs[_engine(row)]['logprob_distance']):.2g}"
        for row in ours
    )
    holds = all(
        cases.keeps("min_same", row["same_prompts"] / row["clear_prompts"])
        and float(row["logprob_distance"])
        <= cases.limits["max_ratio"] * float(theirs[_engine(row)]["logprob_distance"])
        for row in ours
    )
    unnoticed = [_checkpoint(row) for row in ours if not _is_noticed(planted[_checkpoint(row)])]
    if holds and unnoticed:
        return untested(
            f"{figure}; wrong experts changed too few tokens of {'; '.join(unnoticed)}", {"rows": rows}
        )
    return decide(holds, {"rows": rows}, figure)


_CLEAR: dict[str, Any] = {"thresholds": ("min_same", "max_ratio"), **_OPTIONS}
moe_activations = claim(
    "moe_activations", measure="moedoctor.upstream.engine.moe_activations:tokens", **_CLEAR
)(_judge_clear_prompts)
moe_formats = claim("moe_formats", measure="moedoctor.upstream.engine.moe_formats:tokens", **_CLEAR)(
    _judge_clear_prompts
)


def _checkpoint(row: Mapping[str, Any]) -> str:
    model = f"{row['model']} ({row['activation']}), " if "model" in row else ""
    return f"{model}{row['quantization']}"


def _engine(row: Mapping[str, Any]) -> str:
    return f"{_checkpoint(row)}, {row['mode']}"


def _is_noticed(row: Mapping[str, Any]) -> bool:
    return "clear_prompts" in row and row["same_prompts"] <= _NOTICED * row["clear_prompts"]


@claim("moe_speed", measure=f"{_ENGINES}:speed", thresholds=("min_share",), **_OPTIONS)
def moe_speed(cases: ClaimCases) -> ClaimJudgement:
    """Judge decode tokens per second with the fix over those of the backend that vLLM selects."""
    rows = cases.rows()
    timed = [row for row in rows if "share" in row]
    if not timed:
        return untested(rows[0]["error"] if rows else "no engine was timed", {"rows": rows})
    figure = "; ".join(
        f"{row['quantization']} beside {row['backend']}, batch {row['batch']}: {row['share']:.2f}"
        + ("" if row["gpu_share"] is None else f" ({row['gpu_share']:.2f} by GPU events)")
        for row in timed
    )
    failed = [row for row in rows if row not in timed]
    if failed:
        return untested(f"{figure}; {failed[0]['quantization']}: {failed[0]['error']}", {"rows": rows})
    ratios = [(row["share"], row["gpu_share"]) for row in timed]
    return cases.decide_times("min_share", ratios, {"rows": rows}, figure)
