"""Which MoE backend, which fix, on this machine, with this model: real engines, compared and timed.

Each engine is a `vllm.LLM` in a process of its own, one after another. The first that answers is the
reference: the greedy tokens of the others and their logprobs are compared with its own up to the first token
that differs, and an engine that is wrong gets no times. Rounding changes logprobs little, except in the rare
step in which it sends a token to another expert. If each engine is started once, the reference is started
again after the others: the step of a small model is mostly the host's time, and other work on the host can
change that between two engines.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moedoctor.upstream.engine.engine import ENVIRON, EngineRequest, EngineResult, run_engine
from moedoctor.upstream.plugin.extensions import FIXES, Need

BATCHES = (1, 8)
TOKENS = 64
REPEATS = 5
MAX_LEAD = 1.0
"""A step is far if a logprob differs from the reference's by more than this."""
MAX_FAR = 0.01
"""The largest share of far steps that is rounding: it sends a token to another expert now and then."""
NO_FIX = "none"
_SECONDS = 1800.0
_TEXTS = (
    "The capital of France is",
    "A mixture-of-experts layer sends each token to",
    "def fibonacci(n):",
    "Water boils at a lower temperature on a mountain because",
    "Once upon a time, in a village by the sea,",
    "The three primary colours of light are",
    "To sort a list of numbers quickly, one can",
    "In 1969, two astronauts",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
_MAX_ID = 32_000


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    model: Path
    """A folder with config.json."""
    backends: Sequence[str] = ("auto",)
    """Values of ``--moe-backend``."""
    fixes: Sequence[str] = ()
    """Values of MOEDOCTOR_FIXES, each in an engine of its own beside the one without a fix."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `vllm.LLM`."""
    rounds: int = 1
    """How often each engine is started, in turn with the others."""
    batches: Sequence[int] = BATCHES
    tokens: int = TOKENS
    repeats: int = REPEATS

    def engines(self) -> list[tuple[str, str]]:
        """Return (backend, fix) of each engine."""
        return [(backend, fix) for backend in self.backends for fix in (NO_FIX, *self.fixes)]


def prompts_for(model: Path) -> list[list[int] | str]:
    """Return eight prompts: text if the model has a tokenizer, else random token ids."""
    if any((model / name).is_file() for name in _TOKENIZERS):
        return list(_TEXTS)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 512)
    draw = random.Random(0)
    return [[draw.randrange(5, min(size, _MAX_ID)) for _ in range(8 + place)] for place in range(len(_TEXTS))]


def request_for(plan: Plan, backend: str, fix: str) -> EngineRequest:
    """Return the request of one engine."""
    prompts = prompts_for(plan.model)
    arguments: dict[str, Any] = {
        "attention_backend": None,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": max(plan.batches),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": not isinstance(prompts[0], str),
        "moe_backend": None if backend == "auto" else backend,
        **plan.arguments,
    }
    return EngineRequest(
        str(plan.model.resolve()),
        prompts[:1],
        arguments,
        # What the user set for vLLM holds here, too.
        {
            **{name: os.environ[name] for name in ENVIRON if name in os.environ},
            "MOEDOCTOR_FIXES": "" if fix == NO_FIX else fix.replace("+", ","),
        },
        max_tokens=1,
        probe="moedoctor.upstream.engine.decode_speed:decode_speed",
        probe_options={
            "prompts": prompts,
            "batches": list(plan.batches),
            "tokens": plan.tokens,
            "repeats": plan.repeats,
        },
        seconds=_SECONDS,
        label=f"{backend}, {fix}",
    )


def measure(
    plan: Plan,
    *,
    run: Callable[[EngineRequest], EngineResult] = run_engine,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[dict[str, Any]]:
    """Run every engine in every round; return a row for each engine and batch size.

    `progress` takes how many engines are done, how many there are, and which one runs now.
    """
    engines = plan.engines()
    results: dict[tuple[str, str], list[EngineResult]] = {engine: [] for engine in engines}

    def start(key: tuple[str, str], turn: str, more: int = 0) -> EngineResult:
        done, what = sum(map(len, results.values())), f"engine {key[0]}, fix {key[1]}{turn}"
        progress(done, len(engines) * plan.rounds + more, what)
        return run(request_for(plan, *key))

    for turn in range(plan.rounds):
        for key in engines if turn % 2 == 0 else engines[::-1]:
            results[key].append(start(key, f", round {turn + 1}" if plan.rounds > 1 else ""))
    reference = next((key for key in engines if all(map(_answered, results[key]))), None)
    lost = None
    if plan.rounds == 1 and len(engines) > 1 and reference is not None:
        again = start(reference, ", again", more=1)
        if _answered(again):
            results[reference].append(again)
        else:  # the first run is still right
            lost = _failure(again)
    rows = []
    for key in engines:
        for batch in plan.batches:
            expected = [_by_batch(run)[batch] for run in results[reference]] if reference else []
            row = _row(results[key], key, batch, expected, is_reference=key == reference)
            if lost is not None and key == reference:
                row["again"] = f"failed: {lost}"
            rows.append({**_names(key, results[key], batch), **row})
    return _with_ratios(rows, reference)


def _failure(result: EngineResult) -> str:
    return result.error.line()[:300] if result.error else "the engine gave no figures"


def _answered(result: EngineResult) -> bool:
    return result.error is None and bool(result.probe)


def _is_active(fix: str, result: EngineResult) -> bool:
    """Whether the fix was active, or none was asked for, or this release does not need it."""
    names = () if fix == NO_FIX else fix.split("+")
    return bool(result.fixes) or all(
        FIXES[name].need(result.version or "0")[0] is Need.UNNEEDED for name in names
    )


def _by_batch(result: EngineResult) -> dict[int, Mapping[str, Any]]:
    return {int(row["batch"]): row for row in result.probe or ()}


def _names(key: tuple[str, str], results: Sequence[EngineResult], batch: int) -> dict[str, Any]:
    first = results[0]
    return {"moe_backend": key[0], "fix": key[1], "chosen": first.log.moe_backend or "", "batch": batch}


def _row(
    results: Sequence[EngineResult],
    key: tuple[str, str],
    batch: int,
    expected: Sequence[Mapping[str, Any]],
    *,
    is_reference: bool,
) -> dict[str, Any]:
    """Return what one engine did at one batch size; times only if its tokens are right.

    `expected`: what each run of the reference gave, which differs if its kernels add up in no fixed order.
    """
    failed = next((result for result in results if not _answered(result)), None)
    if failed is not None:
        return {"failed": _failure(failed)}
    if without := next((result for result in results if not _is_active(key[1], result)), None):
        return {"failed": "; ".join(without.log.refused)[:300] or "the fix was asked for and is not active"}
    measured = [_by_batch(result)[batch] for result in results]
    verdicts = []
    for place, row in enumerate(measured):
        # A run of the reference is compared with its other runs.
        others = [*expected[:place], *expected[place + 1 :]] if is_reference else []
        verdicts.append(compare_tokens(others or expected, row))
    wrong = next((verdict for verdict in verdicts if verdict["wrong"]), None)
    figures: dict[str, Any] = {
        "starts": len(measured),
        "tokens_same": min(verdict["same"] for verdict in verdicts),
        "tokens_of": verdicts[0]["of"],
        "repeatable": all(row["repeatable"] and row["tokens"] == measured[0]["tokens"] for row in measured),
    }
    if wrong is not None:
        return {**figures, "wrong": wrong["wrong"]}
    if parting := next((verdict["parting"] for verdict in verdicts if verdict["parting"]), None):
        figures["rounding"] = parting
    first = [1e3 * value for row in measured for value in row["first_s"]]
    rates = [
        row["decoded"] / (whole - start)
        for row in measured
        for start, whole in zip(row["first_s"], row["whole_s"], strict=True)
        if whole > start
    ]
    return {
        **figures,
        **_spread("first_token_ms", first),
        **(_spread("tokens_per_second", rates) if rates else {}),
        "repeats": len(first),
        "gpu_bytes": results[0].allocated,
        "load_s": round(statistics.median(result.seconds.get("load", 0.0) for result in results), 1),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median with the 20th and 80th percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        name: statistics.median(ordered),
        f"{name}_p20": ordered[round(last * 0.2)],
        f"{name}_p80": ordered[round(last * 0.8)],
    }


@dataclass(frozen=True)
class _Comparison:
    """An answer beside the reference's, up to the step in which they part."""

    steps: int = 0
    far: int = 0
    """How many of the steps are far."""
    far_at: str = ""
    """The first of them, in words."""
    parting: str | None = None
    """Where the answers part, in words."""
    broken: str | None = None
    """What no rounding explains."""


def compare_tokens(references: Sequence[Mapping[str, Any]], other: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the greedy tokens of an engine with those of each run of the reference, for the same prompts.

    Each answer is compared with the run whose answer is nearest. Returns ``same`` and ``of``, numbers of
    prompts, ``parting``, where the first answer parts from the reference's or None, and ``wrong``, why the
    difference is more than rounding, or None.
    """
    answers = [
        min(
            (_compare_answers(reference, other, prompt) for reference in references),
            key=lambda answer: (answer.broken is not None, answer.far, answer.parting is not None),
        )
        for prompt in range(len(other["tokens"]))
    ]
    steps, far = sum(answer.steps for answer in answers), sum(answer.far for answer in answers)
    share = f"{far} of {steps} steps differ by more than {MAX_LEAD:g} in logprob"
    wrong = next((answer.broken for answer in answers if answer.broken), None)
    if wrong is None and far > MAX_FAR * steps:
        wrong = f"{next(answer.far_at for answer in answers if answer.far)}; {share}"
    parting = next((answer.parting for answer in answers if answer.parting), None)
    if far and parting:
        parting += f"; {share}"
    return {
        "same": sum(answer.parting is None and answer.broken is None for answer in answers),
        "of": len(answers),
        "parting": None if wrong else parting,
        "wrong": wrong,
    }


def _compare_answers(reference: Mapping[str, Any], other: Mapping[str, Any], prompt: int) -> _Comparison:
    ids, expected = other["tokens"][prompt], reference["tokens"][prompt]
    steps = list(zip(ids, expected, other["logprobs"][prompt], reference["logprobs"][prompt], strict=False))
    if not all(math.isfinite(float(value)) for step in other["logprobs"][prompt] for value in step.values()):
        return _Comparison(broken=f"prompt {prompt + 1}: a logprob is not finite")
    far, far_at = 0, ""
    for place, (token, right, own, theirs) in enumerate(steps):
        where = f"prompt {prompt + 1}, token {place + 1}"
        if token == right:
            gap = abs(float(own[str(token)]) - float(theirs[str(token)]))
            words = f"{where}: the logprob of {token} is {gap:.2g} from the reference's"
        elif str(token) in theirs:
            gap = float(theirs[str(right)]) - float(theirs[str(token)])
            words = f"{where}: the reference's {right} leads {token} by {gap:.2g}"
        else:
            gap = math.inf
            words = f"{where}: {token} is not among the reference's {len(theirs)} best"
        if not gap <= MAX_LEAD:
            far, far_at = far + 1, far_at or words
        if token != right:
            return _Comparison(place + 1, far, far_at, words)
    if len(ids) != len(expected):
        return _Comparison(broken=f"prompt {prompt + 1}, token {len(steps) + 1}: one answer ends")
    return _Comparison(len(steps), far, far_at)


def _with_ratios(rows: list[dict[str, Any]], reference: tuple[str, str] | None) -> list[dict[str, Any]]:
    """Add the rate over the reference's at the same batch size."""
    rates = {
        row["batch"]: row["tokens_per_second"]
        for row in rows
        if (row["moe_backend"], row["fix"]) == reference and "tokens_per_second" in row
    }
    return [
        {**row, "ratio": row["tokens_per_second"] / rates[row["batch"]]}
        if "tokens_per_second" in row and row["batch"] in rates
        else row
        for row in rows
    ]
