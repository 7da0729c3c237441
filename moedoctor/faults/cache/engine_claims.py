"""MD007's claims about the expert cache inside vLLM, which only real engines can decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.faults.base import ClaimCases, ClaimJudgement, claim, decide, untested

_GIB = 2**30
_SIZES = {8, 16, 32, 64, 128}
"""Slots that `engine_speed` is about."""
_ENGINES = "moedoctor.upstream.engine.expert_cache"
_OPTIONS: dict[str, Any] = {
    "thresholds": ("min_share",),
    "needs_gpu": True,
    "needs": "an installed vLLM that starts",
}
Row = Mapping[str, Any]


@claim("engine_tokens", measure=f"{_ENGINES}:tokens", **_OPTIONS)
def engine_tokens(cases: ClaimCases) -> ClaimJudgement:
    """Every engine whose experts went through a cache gives the tokens of the engine without a cache.

    Other tokens refute the claim. Equal tokens confirm it only if a planted fault changes the tokens of the
    same backend, and if the engines computed with what was asked for.
    """
    every = cases.rows()
    rows = [row for row in every if not row.get("planted")]
    ran = [row for row in rows if row["outcome"] != "no control"]
    if not ran:
        return untested("no engine without a cache ran", {"rows": every})
    same = [row for row in ran if row["outcome"] == "same tokens" and row["misses"]]
    same_logprobs = sum(row["detail"] == "same logprobs" for row in same)
    figure = (
        f"{len(same)} of {len(rows)} engines give the tokens of the one without a cache, "
        f"{same_logprobs} its logprobs"
    )
    wrong = [row for row in rows if row not in same]
    if wrong:
        first = wrong[0]
        figure += (
            f"; {first['backend']}, {first['mode']}, {first['slots']} slots: {first['outcome']}, "
            f"{first['detail']}, {first['misses']} misses"
        )
    holds = len(same) >= cases.limits["min_share"] * len(rows)
    if holds:
        doubt = _doubt(every, same)
        if doubt is not None:
            return untested(f"{figure}; {doubt}", {"rows": every})
        figure += "; with wrong experts every backend gives others"
    return decide(holds, {"rows": every}, figure)


def _doubt(rows: Sequence[Row], same: Sequence[Row]) -> str | None:
    """Return why the tokens of the rows `same` prove nothing, or None if they do."""
    noticed = {
        row["backend"]
        for row in rows
        if row.get("planted") and row["outcome"] == "other tokens" and _as_asked(row)
    }
    blind = sorted({row["backend"] for row in same} - noticed)
    if blind:
        return f"no planted fault was seen to change the tokens of {', '.join(blind)}"
    other = next((row for row in same if not _as_asked(row)), None)
    if other is not None:
        return (
            f"{other['backend']}, {other['mode']}, {other['slots']} slots: computed with "
            f"{other['chosen']} and the cache's engine {other['engine']}"
        )
    return None


def _as_asked(row: Row) -> bool:
    return bool(row.get("asked") == row["chosen"] and row["engine"] == "device")


@claim("engine_refusals", measure=f"{_ENGINES}:refusals", **_OPTIONS)
def engine_refusals(cases: ClaimCases) -> ClaimJudgement:
    """Every engine that cannot have a cache ends with the reason."""
    rows = cases.rows()
    asked = [row for row in rows if row["refused"] is not None]
    refused = [row for row in asked if row["refused"]]
    not_run = [row["setting"] for row in rows if row["refused"] is None]
    if not asked:
        return untested(f"no engine was asked; not run: {', '.join(not_run) or 'any'}", {"rows": rows})
    figure = f"{len(refused)} of {len(asked)} refused with the reason"
    figure += "".join(f"; {row['setting']}: {row['said']}" for row in asked if not row["refused"])
    if not_run:
        figure += f"; not run: {', '.join(not_run)}"
    return decide(len(refused) >= cases.limits["min_share"] * len(asked), {"rows": rows}, figure)


@claim("engine_memory", measure=f"{_ENGINES}:memory", **_OPTIONS)
def engine_memory(cases: ClaimCases) -> ClaimJudgement:
    """vLLM's memory profile finds what the caches say that they save."""
    rows = cases.rows()
    failed = next((row["error"] for row in rows if "error" in row), None)
    if failed is not None:
        return untested(f"an engine did not run: {failed}", {"rows": rows})
    without, with_cache = rows
    gained, saved = with_cache["kv_cache_bytes"] - without["kv_cache_bytes"], with_cache["saved_bytes"]
    figure = (
        f"{gained / _GIB:+.3f} GiB for the KV cache with {with_cache['slots']} slots a layer, of "
        f"{saved / _GIB:.3f} GiB that the caches save"
    )
    return decide(saved > 0 and gained >= cases.limits["min_share"] * saved, {"rows": rows}, figure)


@claim("engine_speed", measure=f"{_ENGINES}:qwen", **_OPTIONS)
def engine_speed(cases: ClaimCases) -> ClaimJudgement:
    """Single sequences get the tokens that they get with all experts on the GPU; speeds are shown beside.

    Tokens decide only if a planted fault changes them and rounds repeat them.
    """
    rows = cases.rows()
    single = [row for row in rows if row["batch"] == 1]
    most = max(row["slots"] for row in rows)
    figure = "; ".join(
        f"{row['slots']} slots: {row['tokens_per_second']:.1f} tokens/s, "
        f"{eight['tokens_per_second']:.1f} with 8 sequences, {row['torch_bytes'] / _GIB:.1f} GiB"
        + ("" if row["hit_rate"] is None else f", hit rate {row['hit_rate']:.0%}{_at_most(row)}")
        for row, eight in zip(single, (row for row in rows if row["batch"] != 1), strict=True)
    )
    missing = sorted(_SIZES - {row["slots"] for row in single})
    if missing:
        return untested(f"{figure}; no time for {missing} slots", {"rows": rows})
    blind = [row["slots"] for row in single if not row.get("control_changes_tokens")]
    if blind:
        figure += f"; no planted fault was seen to change the tokens with {blind} slots"
        return untested(figure, {"rows": rows})
    cached = [row for row in single if row["slots"] < most]
    holds = all(
        row["sequences_as_with_all"] >= cases.limits["min_share"] and row["engine"] == "device"
        for row in cached
    )
    return decide(holds, {"rows": rows}, figure)


def _at_most(row: Row) -> str:
    """Return the optimum's hit rate in words."""
    bound = row.get("optimum_hit_rate")
    return " (no bound is known)" if bound is None else f" of at most {bound:.0%}"


ENGINE_CLAIMS = (engine_tokens, engine_refusals, engine_memory, engine_speed)
