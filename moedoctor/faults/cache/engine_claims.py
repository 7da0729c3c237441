"""Claims about the expert cache inside vLLM, which only real engines can decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

Limits = Mapping[str, float]
_GIB = 2**30
_SIZES = {8, 16, 32, 64, 128}
"""Slots that `engine_speed` is about."""


def judge_tokens(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Every engine whose experts went through a cache answers as the one without.

    Other tokens refute. The same ones count only where the backend's tokens change with a planted fault, and
    where the engines computed with what was asked for.
    """
    every = _rows(units)
    rows = [row for row in every if not row.get("planted")]
    ran = [row for row in rows if row["outcome"] != "no control"]
    if not ran:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": every}, "no engine without a cache ran")
    same = [row for row in ran if row["outcome"] == "same tokens" and row["misses"]]
    bits = sum(row["detail"] == "same logprobs" for row in same)
    said = (
        f"{len(same)} of {len(rows)} engines give the tokens of the one without a cache, {bits} its logprobs"
    )
    wrong = [row for row in rows if row not in same]
    if wrong:
        first = wrong[0]
        said += (
            f"; {first['backend']}, {first['mode']}, {first['slots']} slots: {first['outcome']}, "
            f"{first['detail']}, {first['misses']} misses"
        )
    holds = len(same) >= limits["min_share"] * len(rows)
    doubt = _doubt(every, same) if holds else None
    if doubt is not None:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": every}, f"{said}; {doubt}")
    if holds:
        said += "; with wrong experts every backend gives others"
    return ClaimJudgement(_verdict(holds), {"rows": every}, said)


def _doubt(rows: Sequence[dict[str, Any]], same: Sequence[dict[str, Any]]) -> str | None:
    """Why the tokens of the rows `same` prove nothing; None where they do."""
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


def _as_asked(row: Mapping[str, Any]) -> bool:
    return bool(row.get("asked") == row["chosen"] and row["engine"] == "device")


def judge_refusals(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Every engine that cannot have a cache ends with the reason."""
    rows = _rows(units)
    asked = [row for row in rows if row["refused"] is not None]
    refused = [row for row in asked if row["refused"]]
    left = [row["setting"] for row in rows if row["refused"] is None]
    if not asked:
        said = f"no engine was asked; not run: {', '.join(left) or 'any'}"
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": rows}, said)
    said = f"{len(refused)} of {len(asked)} refused with the reason"
    said += "".join(f"; {row['setting']}: {row['said']}" for row in asked if not row["refused"])
    if left:
        said += f"; not run: {', '.join(left)}"
    holds = len(refused) >= limits["min_share"] * len(asked)
    return ClaimJudgement(_verdict(holds), {"rows": rows}, said)


def judge_memory(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """What the profile finds more with a cache, over what the caches say that they save."""
    rows = _rows(units)
    failed = next((row["error"] for row in rows if "error" in row), None)
    if failed is not None:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": rows}, f"an engine did not run: {failed}")
    without, with_cache = rows
    gained, saved = with_cache["kv_cache_bytes"] - without["kv_cache_bytes"], with_cache["saved_bytes"]
    said = (
        f"{gained / _GIB:+.3f} GiB for the KV cache with {with_cache['slots']} slots a layer, of "
        f"{saved / _GIB:.3f} GiB that the caches save"
    )
    holds = saved > 0 and gained >= limits["min_share"] * saved
    return ClaimJudgement(_verdict(holds), {"rows": rows}, said)


def judge_speed(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Single sequences draw the tokens that they draw with all experts on the GPU; speeds are told beside.

    Tokens count only where a planted fault changes them and rounds repeat them.
    """
    rows = _rows(units)
    single = [row for row in rows if row["batch"] == 1]
    most = max(row["slots"] for row in rows)
    said = "; ".join(
        f"{row['slots']} slots: {row['tokens_per_second']:.1f} tokens/s, "
        f"{other['tokens_per_second']:.1f} with 8 sequences, {row['torch_bytes'] / _GIB:.1f} GiB"
        + ("" if row["hit_rate"] is None else f", hit rate {row['hit_rate']:.0%}{_at_most(row)}")
        for row, other in zip(single, (row for row in rows if row["batch"] != 1), strict=True)
    )
    held = [row for row in single if row["slots"] < most]
    left = sorted(_SIZES - {row["slots"] for row in single})
    if left:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": rows}, f"{said}; no time for {left} slots")
    blind = [row["slots"] for row in single if not row.get("control_changes_tokens")]
    if blind:
        said += f"; no planted fault was seen to change the tokens with {blind} slots"
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": rows}, said)
    holds = all(row["sequences_as_with_all"] >= limits["min_share"] for row in held) and all(
        row["engine"] == "device" for row in held
    )
    return ClaimJudgement(_verdict(holds), {"rows": rows}, said)


def _at_most(row: Mapping[str, Any]) -> str:
    """The optimum's hit rate, where it is known."""
    bound = row.get("optimum_hit_rate")
    return " (no bound is known)" if bound is None else f" of at most {bound:.0%}"


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def _rows(units: Sequence[Measurement]) -> list[dict[str, Any]]:
    return [
        row for one in units if isinstance(one.outcome, Observation) for row in one.outcome.evidence["rows"]
    ]


def _claim(key: str, judge: Any, measure: str) -> ClaimTest:
    def run(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
        from moedoctor.upstream.engine import expert_cache as expert_cache_engine
        from moedoctor.upstream.engine import expert_cache_shape

        module = expert_cache_shape if measure in ("memory", "qwen") else expert_cache_engine
        return Observation({"rows": getattr(module, measure)(sources)})

    return ClaimTest(
        key, judge, run, needs_gpu=True, needs="an installed vLLM that starts", thresholds=("min_share",)
    )


ENGINE_CLAIMS = (
    _claim("engine_tokens", judge_tokens, "tokens"),
    _claim("engine_refusals", judge_refusals, "refusals"),
    _claim("engine_memory", judge_memory, "memory"),
    _claim("engine_speed", judge_speed, "qwen"),
)
