"""Engines of vLLM with other variables and flags, compared and timed on one model.

A `Variant` is an engine. The first that answers is the base: the greedy tokens of the others are compared
with its tokens (`moedoctor.upstream.engine.clear_prompts`), and an engine that is wrong gets no times.
Engines start one after another, in each round in turn, because a server's model fills the GPU. With
`Plan.together` all are up at once and take turns, which is faster and tells smaller differences apart.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moedoctor.plugin.extensions import FIXES, TRACES, Extension, Need, read_choice
from moedoctor.plugin.register import RECORD
from moedoctor.redaction import strip_folders
from moedoctor.upstream.engine import clear_prompts
from moedoctor.upstream.engine.clear_prompts import Answers, Comparison
from moedoctor.upstream.engine.engine import ENVIRON, EngineRequest, EngineResult, run_engine

BATCHES = (1, 8)
TOKENS = 64
REPEATS = 5
REFERENCE = "reference"
"""The engine whose MoE layers are computed in float32, with `Plan.reference`."""
_SECONDS = 1800.0
_OWN_MODEL: Mapping[str, Any] = {
    "attention_backend": None,
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": 0.9,
}
_TOGETHER: Mapping[str, Any] = {
    "attention_backend": None,
    "kv_cache_memory_bytes": 256 << 20,  # so that vLLM profiles no memory, which the others use, too
    "gpu_memory_utilization": 0.02,
}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_NAME = re.compile(r"[\w.+-]{1,60}")
_LISTS: Mapping[str, Mapping[str, Extension]] = {"MOEDOCTOR_FIXES": FIXES, "MOEDOCTOR_TRACE": TRACES}
"""Variable -> what it can name."""


@dataclass(frozen=True)
class Variant:
    """An engine with variables and flags of its own."""

    name: str
    environ: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Flags of `vllm serve`."""

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read ``NAME=VAR=VALUE … --flag …``, words as in a shell. Raises ValueError with one line."""
        name, separator, rest = text.partition("=")
        if not separator or _NAME.fullmatch(name) is None:
            raise ValueError(
                "expected NAME='VARIABLE=VALUE … --flag …', such as base= or fast='--moe-backend marlin'"
            )
        words = shlex.split(rest)
        count = next((place for place, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
        pairs = (word.split("=", 1) if word.startswith("--model=") else [word] for word in words[count:])
        flags = [part for pair in pairs for part in pair]
        if flags and not flags[0].startswith("--"):
            raise ValueError(f"{flags[0]!r} is neither VARIABLE=VALUE nor a flag such as --enforce-eager")
        return cls(name, dict(word.split("=", 1) for word in words[:count]), tuple(flags))

    def __str__(self) -> str:
        """Return the variables and flags as they are typed."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environ.items()), *self.flags])


@dataclass(frozen=True)
class Plan:
    """The engines, and how they are measured."""

    model: Path
    """A folder with config.json."""
    variants: Sequence[Variant]
    """The first is the base."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `vllm.LLM`, for every engine."""
    rounds: int = 1
    """The number of starts of each engine, in turn with the others."""
    batches: Sequence[int] = BATCHES
    tokens: int = TOKENS
    repeats: int = REPEATS
    together: bool = False
    """Start all engines at once; they must fit on the GPU together."""
    reference: bool = False
    """Also compare with an engine whose MoE layers are computed in float32."""
    control: bool = False
    """Also let each engine answer with wrong experts, which its tokens must show."""


@dataclass(frozen=True)
class EngineRow:
    """An engine: whether it started, whether it is right, and what it holds."""

    variant: str
    settings: str
    """Its variables and flags."""
    moe_backend: str = ""
    """As vLLM logged it."""
    experts: str = ""
    """The classes that compute its MoE layers."""
    starts: int = 0
    failed: str | None = None
    """The line that ended it."""
    wrong: str | None = None
    tokens_same: int | None = None
    tokens_of: int | None = None
    """Of so many clear prompts, `tokens_same` have the base's tokens."""
    reference_same: int | None = None
    reference_of: int | None = None
    reference_distance: float | None = None
    """Median of the largest distances of logprobs from the float32 reference, over its clear prompts."""
    control_same: int | None = None
    """Of `tokens_of` clear prompts, so many have the base's tokens although all experts are wrong."""
    gpu_bytes: int | None = None
    """After loading, without the KV cache if its size is logged."""
    load_peak_bytes: int | None = None
    """Beyond what weights hold afterwards, while they are loaded and repacked."""
    planned_peak_bytes: int | None = None
    """The same as `moedoctor plan` computes it, without what a layer keeps."""
    host_bytes: int | None = None
    host_peak_bytes: int | None = None
    """The most that the engine's process held on the host up to the end of loading, mapped files included."""
    host_growth_bytes: int | None = None
    """Bytes that the repeats after the first added to the process's memory on the host."""
    kv_cache_tokens: int | None = None
    freed_to_kv_cache: float | None = None
    """The share of the GPU memory saved on weights, against the base, that went to the KV cache."""
    load_s: float | None = None


@dataclass(frozen=True)
class SpeedRow:
    """The speed of an engine with a number of sequences: medians with the 20th and 80th percentile."""

    variant: str
    batch: int
    tokens_per_second: float
    tokens_per_second_p20: float
    tokens_per_second_p80: float
    ratio: float | None
    """Of the base's tokens per second."""
    gpu_ratio: float | None
    """The base's GPU time of a step over this engine's, if both are between the same events."""
    gpu_clock: str | None
    """The work between these events: ``graphs`` or ``steps``."""
    gpu_step_ms: float | None
    gpu_step_ms_p20: float | None
    gpu_step_ms_p80: float | None
    first_token_ms: float
    first_token_ms_p20: float
    first_token_ms_p80: float
    repeats: int


@dataclass(frozen=True)
class Measured:
    engines: tuple[EngineRow, ...]
    speeds: tuple[SpeedRow, ...]


def make_request(plan: Plan, variant: Variant, meet: str | None = None) -> EngineRequest:
    """Return the request of one engine; engines that share the folder `meet` take turns."""
    prompts = clear_prompts.make_prompts(plan.model)
    is_reference = variant.name == REFERENCE and plan.reference
    arguments: dict[str, Any] = {
        **(_TOGETHER if meet else _OWN_MODEL),
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": max(*plan.batches, 16),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": not isinstance(prompts[0], str),
        **plan.arguments,
    }
    return EngineRequest(
        str(plan.model.resolve()),
        prompts[:1],
        arguments,
        # What the user set for vLLM holds here, too.
        {
            **{name: os.environ[name] for name in ENVIRON if name in os.environ},
            "MOEDOCTOR_FIXES": "",
            **variant.environ,
        },
        flags=tuple(
            os.path.abspath(word) if flag == "--model" else word  # the child is in another folder
            for flag, word in itertools.pairwise(("", *variant.flags))
        ),
        max_tokens=1,
        probe="moedoctor.upstream.engine.decode_speed:measure_engine",
        probe_options={
            "prompts": prompts,
            "batches": [] if is_reference else list(plan.batches),
            "tokens": plan.tokens,
            "repeats": plan.repeats,
            "control": plan.control and not is_reference,
            **({"meet": meet, "engines": len(_list_engines(plan))} if meet else {}),
        },
        seconds=_SECONDS,
        label=variant.name,
    )


def measure(
    plan: Plan,
    *,
    run: Callable[[EngineRequest], EngineResult] = run_engine,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Measured:
    """Run every engine in every round, and compare them.

    `progress` takes how many engines are done, how many there are, and which one runs now.
    """
    variants = _list_engines(plan)
    results: dict[str, list[EngineResult]] = {variant.name: [] for variant in variants}
    total = len(variants) * plan.rounds
    for turn in range(plan.rounds):
        ordered = variants if turn % 2 == 0 else variants[::-1]
        if plan.together:
            progress(turn * len(variants), total, f"{len(variants)} engines together")
            answered = _run_together(plan, ordered, run)
        else:
            answered = []
            for variant in ordered:
                progress(sum(map(len, results.values())) + len(answered), total, f"engine {variant.name}")
                answered.append(run(make_request(plan, variant)))
        for variant, result in zip(ordered, answered, strict=True):
            results[variant.name].append(result)
    return summarize(plan, results)


def _list_engines(plan: Plan) -> list[Variant]:
    environ = {"MOEDOCTOR_FIXES": "moe", "MOEDOCTOR_MOE": "reference"}
    reference = Variant(REFERENCE, environ, (*plan.variants[0].flags, "--enforce-eager"))
    return [*plan.variants, *([reference] if plan.reference else [])]


def _run_together(
    plan: Plan, variants: Sequence[Variant], run: Callable[[EngineRequest], EngineResult]
) -> list[EngineResult]:
    """Run engines at once, which take turns; one that ends counts as ready, so that no other waits for it."""
    with (
        tempfile.TemporaryDirectory(prefix="moedoctor-") as meet,
        ThreadPoolExecutor(max_workers=len(variants)) as pool,
    ):

        def start(variant: Variant) -> EngineResult:
            result = run(make_request(plan, variant, meet))
            (Path(meet) / f"{variant.name}.ready").touch()
            return result

        return list(pool.map(start, variants))


def summarize(plan: Plan, results: Mapping[str, Sequence[EngineResult]]) -> Measured:
    """Compare the results of each engine, one a round, with the base's."""
    variants = _list_engines(plan)
    failures = {
        variant.name: next(filter(None, (_find_failure(variant, run) for run in results[variant.name])), None)
        for variant in variants
    }
    candidates = [variant.name for variant in plan.variants if failures[variant.name] is None]
    base = candidates[0] if candidates else None
    references = results[REFERENCE] if plan.reference and failures[REFERENCE] is None else ()
    rows = [
        _describe(
            variant, results[variant.name], failures[variant.name], results[base] if base else (), references
        )
        for variant in variants
    ]
    right = [row.variant for row in rows if not row.failed and not row.wrong and row.variant != REFERENCE]
    times = {name: _collect_times(results[name]) for name in right}
    speeds = [
        _describe_speed(name, batch, times[name][batch], times[base].get(batch) if base in times else None)
        for name in right
        for batch in times[name]
    ]
    return Measured(tuple(rows), tuple(speeds))


def _find_failure(variant: Variant, result: EngineResult) -> str | None:
    """Return why an engine gave nothing that could be compared, or None."""
    if result.error is not None:
        return result.error.summarize()[:300]
    if not result.probe:
        return "the engine gave no figures"
    active = [line.partition(" ")[0] for line in (result.fixes or "").split("; ")]
    asked = {
        name: known[name]
        for variable, known in _LISTS.items()
        for name in read_choice(variant.environ.get(variable, ""), known).required
    }
    if variant.environ.get(RECORD):
        asked["record"] = TRACES["record"]
    for name, extension in asked.items():
        if name not in active and extension.need(result.version or "0")[0] is not Need.UNNEEDED:
            return "; ".join(result.log.refused)[:300] or f"{name} was asked for and is not active"
    if idle := [line for line in result.log.refused if " computes nothing" in line]:
        return idle[0][:300]
    if "moe" in active and "MoedoctorExperts" not in result.probe["experts"]:
        return "no MoE layer of this engine was computed by moedoctor"
    return None


def _describe(
    variant: Variant,
    results: Sequence[EngineResult],
    failed: str | None,
    bases: Sequence[EngineResult],
    references: Sequence[EngineResult],
) -> EngineRow:
    first = results[0]
    facts: dict[str, Any] = {
        "variant": variant.name,
        "settings": strip_folders(str(variant)),
        "moe_backend": first.log.moe_backend or "",
        "starts": len(results),
    }
    if failed is not None:
        return EngineRow(**facts, failed=failed)
    to_base, kv_tokens = _compare(results, bases, "answers"), first.log.kv_cache_tokens
    facts |= {
        "experts": ", ".join(f"{name} × {count}" for name, count in first.probe["experts"].items()),
        "wrong": to_base.problem,
        **({"tokens_same": to_base.same, "tokens_of": to_base.clear} if to_base.is_compared else {}),
        "gpu_bytes": _count_held_bytes(first),
        "load_peak_bytes": first.load_peak,
        "host_bytes": first.host_bytes,
        "host_peak_bytes": first.host_peak,
        "host_growth_bytes": first.probe.get("host_growth"),
        "kv_cache_tokens": None if kv_tokens is None else int(kv_tokens.replace(",", "")),
        "load_s": round(statistics.median(result.seconds.get("load", 0.0) for result in results), 1),
    }
    if bases and first is not bases[0]:
        facts["freed_to_kv_cache"] = _compute_freed_share(first, bases[0])
    if references and first is not references[0]:
        to_reference = _compare(results, references, "answers")
        facts |= {
            "reference_same": to_reference.same,
            "reference_of": to_reference.clear,
            "reference_distance": to_reference.distance,
        }
    if all(result.probe.get("wrong_answers") for result in results):
        planted = _compare(results, bases, "wrong_answers")
        facts["control_same"] = planted.same
        if planted.problem is None and to_base.problem is None:
            facts["wrong"] = (
                f"{planted.same} of {planted.clear} clear prompts keep their tokens with wrong experts, "
                "so equal tokens prove nothing"
            )
    return EngineRow(**facts)


def _compare(results: Sequence[EngineResult], others: Sequence[EngineResult], key: str) -> Comparison:
    """Return the worst comparison of the rounds; a run of the base is compared with its other runs."""
    pairs = [
        clear_prompts.compare(Answers(**result.probe[key]), Answers(**other.probe["answers"]))
        for result in results
        for other in [*(other for other in others if other is not result)] or others
    ]
    return min(pairs, key=lambda pair: (pair.problem is None, pair.same))


def _count_kv_cache_bytes(result: EngineResult) -> float:
    return float(result.log.kv_cache_gib or 0) * 2**30


def _count_held_bytes(result: EngineResult) -> int | None:
    return None if result.allocated is None else int(max(0, result.allocated - _count_kv_cache_bytes(result)))


def _compute_freed_share(result: EngineResult, base: EngineResult) -> float | None:
    """Return the KV cache's gain over what the rest takes less than the base's; None if unknown."""
    own, others = _count_held_bytes(result), _count_held_bytes(base)
    if own is None or others is None or own >= others or not _count_kv_cache_bytes(base):
        return None
    return round((_count_kv_cache_bytes(result) - _count_kv_cache_bytes(base)) / (others - own), 3)


@dataclass(frozen=True)
class _Times:
    rates: list[float]
    """Tokens per second of each repeat."""
    first: list[float]
    """Milliseconds until one token."""
    steps: list[float]
    """Milliseconds of a decode step on the GPU."""
    clock: str | None
    """The work between the events of all steps; None if it differs."""


def _collect_times(results: Sequence[EngineResult]) -> dict[int, _Times]:
    """Return the times of all rounds for each batch size."""
    rows = [row for result in results for row in result.probe.get("speeds", ())]
    times = {}
    for batch in dict.fromkeys(row["batch"] for row in rows):
        own = [row for row in rows if row["batch"] == batch]
        pairs = [pair for row in own for pair in zip(row["first_s"], row["whole_s"], strict=True)]
        decoded = own[0]["decoded"]
        clocks = {clock for row in own for clock in row["gpu_clock"]}
        times[batch] = _Times(
            [decoded / (whole - first) for first, whole in pairs if whole > first],
            [1e3 * first for first, _ in pairs],
            [step for row in own for step in row["gpu_step_ms"]],
            clocks.pop() if len(clocks) == 1 else None,
        )
    return {batch: own for batch, own in times.items() if own.rates}


def _describe_speed(name: str, batch: int, times: _Times, base: _Times | None) -> SpeedRow:
    spread = {
        f"{key}{end}": value
        for key, values in (
            ("tokens_per_second", times.rates),
            ("gpu_step_ms", times.steps),
            ("first_token_ms", times.first),
        )
        for end, value in zip(("", "_p20", "_p80"), _spread(values), strict=True)
    }
    by_gpu = base is not None and times.clock is not None and times.clock == base.clock
    return SpeedRow(
        variant=name,
        batch=batch,
        ratio=statistics.median(times.rates) / statistics.median(base.rates) if base else None,
        gpu_ratio=statistics.median(base.steps) / statistics.median(times.steps) if base and by_gpu else None,
        gpu_clock=times.clock,
        repeats=len(times.rates),
        **spread,
    )


def _spread(values: Sequence[float]) -> tuple[Any, Any, Any]:
    """Return the median with the 20th and 80th percentile, or None for each."""
    if not values:
        return None, None, None
    ordered = sorted(values)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(last * 0.2)], ordered[round(last * 0.8)]


def drop_empty(row: EngineRow | SpeedRow) -> dict[str, Any]:
    """Return a row for a report, without what was not measured."""
    return {name: value for name, value in asdict(row).items() if value is not None}
