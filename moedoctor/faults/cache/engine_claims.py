"""MD007's claims about the expert cache inside vLLM, which only real engines can decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.faults.base import ClaimCases, ClaimJudgement, claim, decide, untested
from moedoctor.results import Crash, Skip

_GIB = 2**30
_SIZES = {8, 16, 32, 64, 128}
"""Slots that `engine_speed` is about."""
_SCHEMES = ("nvfp4", "bf16")
"""The units of a claim about two formats: an engine each, which is kept if the other does not finish."""
_ENGINES = "moedoctor.upstream.engine.expert_cache"
_OPTIONS: dict[str, Any] = {
    "thresholds": ("min_share",),
    "needs_gpu": True,
    "needs": "an installed vLLM that starts",
}
_REPLIES = ("first_reply_tokens_per_second", "repeated_reply_tokens_per_second")
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
        sequence = ", one sequence" if other.get("sequences") == 1 else ""
        calls = "" if _split_as_asked(other) else " in one call"
        return (
            f"{other['backend']}, {other['mode']}, {other['slots']} slots{sequence}: computed with "
            f"{other['chosen']}{calls} and the cache's engine {other['engine']}"
        )
    return None


def _as_asked(row: Row) -> bool:
    return _split_as_asked(row) and row.get("asked") == row["chosen"] and row["engine"] == "device"


def _split_as_asked(row: Row) -> bool:
    """Return whether the engine would compute a step of one sequence in two calls, if this is one."""
    return row.get("sequences") != 1 or row["hits_first"] == "backend"


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


@claim(
    "engine_padding",
    measure="moedoctor.upstream.engine.expert_cache_padding:padding",
    **{**_OPTIONS, "thresholds": ("max_more",)},
)
def engine_padding(cases: ClaimCases) -> ClaimJudgement:
    """A step in a graph with more rows asks the caches for what it asks for in a graph of its own size.

    Equal numbers decide only if the engine that counts padding asks for more.
    """
    rows = cases.rows()
    failed = next((row["error"] for row in rows if "error" in row), None)
    if failed is not None:
        return untested(f"an engine did not run: {failed}", {"rows": rows})
    other = next((row for row in rows if row["runner_in_use"] != row["runner"]), None)
    if other is not None:
        reason = f"{other['runner']} was asked for, {other['runner_in_use']} ran"
        return untested(reason, {"rows": rows})
    lookups = {(row["runner"], row["graph"]): row["lookups"] for row in rows}
    figure = "; ".join(f"{runner}, {graph} rows: {count}" for (runner, graph), count in lookups.items())
    exact = {runner: count for (runner, graph), count in lookups.items() if graph == "3"}
    more = {runner: lookups[runner, "4"] - count for runner, count in exact.items()}
    counted = {runner: count for (runner, graph), count in lookups.items() if "counts" in graph}
    if not all(counted[runner] > count for runner, count in exact.items()):
        return untested(f"padding asked for nothing where it counts: {figure}", {"rows": rows})
    same = all(row["outcome"] == "same tokens" for row in rows if "counts" not in row["graph"])
    holds = same and max(map(abs, more.values())) <= cases.limits["max_more"]
    return decide(holds, {"rows": rows}, f"experts asked for: {figure}")


@claim(
    "engine_stream",
    measure="moedoctor.upstream.engine.expert_cache_stream:tokens",
    **_OPTIONS,
)
def engine_stream(cases: ClaimCases) -> ClaimJudgement:
    """Prompts that pass through the layer buffers give the tokens of the engine without a cache.

    Equal tokens decide only if the buffers were there, if the caches were asked for less than without them,
    and if a layer that streamed wrong experts gives other tokens.
    """
    rows = cases.rows()
    streamed = [row for row in rows if not row["planted"] and "stream=0" not in row["cache"]]
    if not streamed:
        return untested("no engine ran", {"rows": rows})
    unknown = next((row for row in rows if str(row["detail"]).startswith("no reference")), None)
    if unknown is not None:
        return untested(f"{_where(unknown)}: {unknown['detail']}", {"rows": rows})
    failed = next((row for row in streamed if row["outcome"] == "not compared"), None)
    if failed is not None:
        return decide(False, {"rows": rows}, f"{_where(failed)}: {failed['detail']}")
    same = [row for row in streamed if row["outcome"] == "same tokens"]
    bits = sum(row["same_logprobs"] == row["clear_prompts"] for row in streamed)
    clear = [row["clear_prompts"] for row in streamed]
    figure = (
        f"{len(same)} of {len(streamed)} engines give the tokens of the one without a cache in all of "
        f"{min(clear)} to {max(clear)} prompts, {bits} its logprobs"
    )
    if len(same) < cases.limits["min_share"] * len(streamed):
        wrong = next(row for row in streamed if row not in same)
        return decide(False, {"rows": rows}, f"{figure}; {_where(wrong)}: {wrong['detail']}")
    doubt = _not_streamed(rows, streamed)
    if doubt is not None:
        return untested(f"{figure}; {doubt}", {"rows": rows})
    others = [f"{row['backend']} {row['detail']}" for row in rows if row["planted"]]
    figure += f"; with wrong experts streamed: {', '.join(others)}"
    slots = [
        f"{row['backend']} {row['detail']}"
        for row in rows
        if "stream=0" in row["cache"] and row["outcome"] == "other tokens"
    ]
    if slots:
        figure += f"; through the slots alone: {', '.join(slots)}"
    return decide(True, {"rows": rows}, figure)


_FEWEST_CLEAR, _MOST_SAME = 8, 0.5
"""The fewest clear prompts that decide, and the share of them that wrong experts may leave equal."""


def _not_streamed(rows: Sequence[Row], streamed: Sequence[Row]) -> str | None:
    """Return why equal tokens of the rows `streamed` prove nothing about streaming, or None if they do."""
    lookups = {_place(row): row["lookups"] for row in rows if "stream=0" in row["cache"]}
    for row in streamed:
        if row["clear_prompts"] < _FEWEST_CLEAR:
            return f"{_where(row)}: only {row['clear_prompts']} prompts are clear"
        if (row["chosen"], row["runner_in_use"], row["engine"]) != (row["asked"], row["runner"], "device"):
            return (
                f"{_where(row)}: computed with {row['chosen']}, runner {row['runner_in_use']} and the "
                f"cache's engine {row['engine']}"
            )
        if not row["stream_bytes"]:
            return f"{_where(row)}: has no layer buffers"
        without = lookups.get(_place(row))
        if without is None or row["lookups"] >= without:
            asked = f"its caches were asked for {row['lookups']} experts"
            return f"{_where(row)}: {asked}, without streaming {without}"
    noticed = {
        row["backend"]
        for row in rows
        if row["planted"] and "same_prompts" in row
        if row["same_prompts"] <= _MOST_SAME * row["clear_prompts"]
    }
    blind = sorted({row["backend"] for row in streamed} - noticed)
    return f"no wrong experts were noticed by {', '.join(blind)}" if blind else None


def _place(row: Row) -> tuple[str, str, str]:
    return row["backend"], row["runner"], row["mode"]


def _where(row: Row) -> str:
    return f"{', '.join(_place(row))}, {row['cache']}{', wrong experts' if row['planted'] else ''}"


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
    held = with_cache.get("unreleased_bytes", 0) - without.get("unreleased_bytes", 0)
    if held > 0:
        figure += f"; torch cannot release {held / _GIB:.3f} GiB more"
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
    figure += _cut(rows)
    missing = sorted(_SIZES - {row["slots"] for row in single})
    if missing:
        return untested(f"{figure}; no time for {missing} slots", {"rows": rows})
    blind = [row["slots"] for row in single if not row.get("control_changes_tokens")]
    if blind:
        figure += f"; no planted fault was seen to change the tokens with {blind} slots"
        return untested(figure, {"rows": rows})
    cached = [row for row in single if row["slots"] < most]
    holds = all(
        row["sequences_as_with_all"] >= cases.limits["min_share"] * row["sequences"]
        and row["engine"] == "device"
        for row in cached
    )
    return decide(holds, {"rows": rows}, figure)


_GAIN = {**_OPTIONS, "measure": f"{_ENGINES}:gain"}


@claim("engine_gain", **{**_GAIN, "thresholds": ("min_gain",)})
def engine_gain(cases: ClaimCases) -> ClaimJudgement:
    """The new defaults decode faster than the old ones at each number of slots, with the same tokens.

    Other options than the defaults are only shown.
    """
    rows = cases.rows()
    single = [row for row in rows if row["batch"] == 1]
    tried = [row for row in single if "times_before" in row and "policy" not in row["cache"]]
    new = [row for row in tried if row["cache"] == str(row["slots"])]
    unpaired = [
        row for row in single if row not in tried and row["slots"] not in {row["slots"] for row in tried}
    ]
    figure = "; ".join(
        [
            *map(_gain, new),
            *(f"{row['cache']}: {row['times_before']:.2f} times" for row in tried if row not in new),
            *(f"{row['cache']}: {row['tokens_per_second']:.1f} tokens/s" for row in unpaired),
        ]
    )
    figure += _cut(rows)
    if missing := _missing(new):
        return untested(f"{figure}; no time for {missing} slots", {"rows": rows})
    if not all(row["control_changes_tokens"] for row in new):
        return untested(f"{figure}; no planted fault was seen to change the tokens", {"rows": rows})
    if any(row["sequences_as_before"] < row["sequences"] for row in new):
        return decide(False, {"rows": rows}, f"{figure}; not with the same tokens")
    ratios = [(row["times_before"], row.get("gpu_times_before")) for row in new]
    return cases.decide_times("min_gain", ratios, {"rows": rows}, figure)


@claim("engine_gain_batch", **_GAIN)
def engine_gain_batch(cases: ClaimCases) -> ClaimJudgement:
    """With text that is new to the caches, eight sequences are not slower in total than one.

    The second round is left out: one sequence finds the experts that its first left, eight do not.
    """
    rows = [row for row in cases.rows() if row["cache"] == str(row["slots"])]
    alone, eight = ({row["slots"]: row for row in rows if row["batch"] == batch} for batch in (1, 8))
    pairs = {slots: (row, eight[slots]) for slots, row in alone.items() if slots in eight}
    evidence = {
        "rows": [
            {name: row[name] for name in ("slots", "batch", "rounds", "gpu_rounds", "bus_bound_rounds")}
            for pair in pairs.values()
            for row in pair
        ]
    }
    new = {slots: [row["rounds"][0] for row in pair] for slots, pair in pairs.items()}
    figure = "; ".join(
        f"{slots} slots: {eight_rate:.1f} tokens/s with 8 sequences, {rate:.1f} with one, "
        f"{eight_rate / rate:.2f} times; the bus allows {eight[slots]['bus_bound_rounds'][0]}"
        for slots, (rate, eight_rate) in new.items()
    )
    figure += _cut(cases.rows())
    if missing := _missing([eight[slots] for slots in pairs]):
        return untested(f"{figure}; no time for {missing} slots", evidence)
    ratios = [
        (new[slots][1] / new[slots][0], _over(pair[1]["gpu_rounds"], pair[0]["gpu_rounds"]))
        for slots, pair in pairs.items()
    ]
    return cases.decide_times("min_share", ratios, evidence, figure)


@claim("engine_gain_reply", **{**_GAIN, "thresholds": ("min_reply",)})
def engine_gain_reply(cases: ClaimCases) -> ClaimJudgement:
    """The first reply after a prompt is about as fast as the same reply once more."""
    rows = cases.rows()
    new = [row for row in rows if row["cache"] == str(row["slots"]) and _REPLIES[0] in row]
    evidence = {
        "rows": [
            {name: row[name] for name in ("slots", "prompt_tokens", *_REPLIES, "gpu_replies")} for row in new
        ]
    }
    figure = "; ".join(
        f"{row['slots']} slots, {row['prompt_tokens']} tokens: first reply {row[_REPLIES[0]]:.1f} tokens/s, "
        f"once more {row[_REPLIES[1]]:.1f}"
        for row in new
    )
    figure += _cut(rows)
    if missing := _missing(new):
        return untested(f"{figure}; no time for {missing} slots", evidence)
    ratios = [
        (row[_REPLIES[0]] / row[_REPLIES[1]], _over(row["gpu_replies"], row["gpu_replies"], again=1))
        for row in new
    ]
    return cases.decide_times("min_reply", ratios, evidence, figure)


def _gain(row: Row) -> str:
    first, again = row["rounds"]
    by_gpu = f" ({row['gpu_times_before']:.2f} by GPU events)" if "gpu_times_before" in row else ""
    return (
        f"{row['slots']} slots: {row['tokens_per_second']:.1f} tokens/s, {row['times_before']:.2f} times the "
        f"old defaults'{by_gpu}; new text {first:.1f}, the same again {again:.1f}; the bus allows "
        f"{row['bus_bound_tokens_per_second']}"
    )


def _missing(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of slots that claims about the defaults are about and that have no row."""
    return sorted({16, 32, 64} - {row["slots"] for row in rows})


def _over(rates: Sequence[float] | None, others: Sequence[float] | None, *, again: int = 0) -> float | None:
    """Return the first of `rates` over the one at `again` of `others`; None if one is not known."""
    return rates[0] / others[again] if rates and others else None


@claim(
    "engine_nvfp4",
    measure=f"{_ENGINES}:nvfp4",
    units=lambda subjects: _SCHEMES,
    **{**_OPTIONS, "thresholds": ("min_gain",)},
)
def engine_nvfp4(cases: ClaimCases) -> ClaimJudgement:
    """NVFP4 decodes faster than BF16 at the same number of slots, batch 1."""
    rows = cases.rows()
    rates = {(row["scheme"], row["slots"]): row["tokens_per_second"] for row in rows if row["batch"] == 1}
    sizes = sorted({slots for _, slots in rates if {("nvfp4", slots), ("bf16", slots)} <= set(rates)})
    gains = {slots: rates["nvfp4", slots] / rates["bf16", slots] for slots in sizes}
    figure = "; ".join(
        f"{slots} slots: {rates['nvfp4', slots]:.1f} tokens/s in NVFP4, {rates['bf16', slots]:.1f} in BF16, "
        f"{gains[slots]:.2f} times"
        for slots in sizes
    )
    figure = "; ".join(
        [
            *filter(None, [figure]),
            *(
                f"{scheme}, {slots} slots: {rate:.1f} tokens/s"
                for (scheme, slots), rate in rates.items()
                if slots not in gains
            ),
            *_not_measured(cases),
        ]
    )
    figure += _cut(rows)
    if sizes != [8, 16]:
        return untested(f"{figure or 'nothing to compare'}; expected 8 and 16 slots", {"rows": rows})
    return decide(min(gains.values()) >= cases.limits["min_gain"], {"rows": rows}, figure)


def _published(cases: ClaimCases) -> ClaimJudgement:
    """A model of the pull request's table runs from 8 slots, in BF16 and NVFP4, as fast and as small.

    The table was measured on another GPU, which the figures cannot make up for. A model that draws the same
    token again asks for experts that are there, so its speed decides nothing.
    """
    rows = cases.rows()
    figure = "; ".join(
        f"{row['model']}, {row['scheme']}: "
        + (
            f"not run: {row['error']}"
            if "error" in row
            else f"{row['gigabytes']:.1f} GB ({row['published_gigabytes']} published), "
            f"{row['tokens_per_second']:.1f} tokens/s ({row['published_tokens_per_second']} published)"
        )
        for row in rows
    )
    figure = "; ".join([*filter(None, [figure]), *_not_measured(cases)])
    ran = [row for row in rows if "error" not in row]
    if {row["scheme"] for row in ran} < set(_SCHEMES):
        return untested(figure, {"rows": rows})
    repeated = [
        f"{row['scheme']}: {row['distinct_tokens']} different tokens of {row['drawn_tokens']}"
        for row in ran
        if row["distinct_tokens"] < row["drawn_tokens"]
    ]
    if repeated:
        return untested("; ".join([figure, *repeated]), {"rows": rows})
    holds = all(
        row["tokens_per_second"] >= cases.limits["min_speed"] * row["published_tokens_per_second"]
        and row["gigabytes"] <= cases.limits["max_memory"] * row["published_gigabytes"]
        and row["engine"] == "device"
        for row in ran
    )
    return decide(holds, {"rows": rows}, figure)


engine_published_nemotron, engine_published_gemma = (
    claim(
        f"engine_published_{model}",
        measure=f"moedoctor.upstream.engine.expert_cache_shapes:{model}",
        units=lambda subjects: _SCHEMES[::-1],
        **{**_OPTIONS, "thresholds": ("min_speed", "max_memory")},
    )(_published)
    for model in ("nemotron", "gemma")
)


def _cut(rows: Sequence[Row]) -> str:
    """Return in words which engines ended before they had measured everything, and why."""
    return "".join(f"; the engine was cut: {row['cut']}" for row in rows if "cut" in row)


def _not_measured(cases: ClaimCases) -> list[str]:
    """Return for each unit without rows why it has none."""
    left = [(measurement.unit, measurement.outcome) for measurement in cases.measurements]
    return [
        f"{unit}: {outcome.reason if isinstance(outcome, Skip) else outcome.message}"
        for unit, outcome in left
        if isinstance(outcome, (Skip, Crash))
    ]


def _at_most(row: Row) -> str:
    """Return the optimum's hit rate in words."""
    bound = row.get("optimum_hit_rate")
    return " (no bound is known)" if bound is None else f" of at most {bound:.0%}"


ENGINE_CLAIMS = (
    engine_tokens,
    engine_refusals,
    engine_padding,
    engine_stream,
    engine_memory,
    engine_speed,
    engine_gain,
    engine_gain_batch,
    engine_gain_reply,
    engine_nvfp4,
    engine_published_nemotron,
    engine_published_gemma,
)
