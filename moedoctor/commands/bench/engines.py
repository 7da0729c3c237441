"""`moedoctor bench --engine`: what to run, the measurement, and its report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moedoctor import environment
from moedoctor.bench import engines
from moedoctor.bench.engines import EngineRow, Variant
from moedoctor.bench.gpu_state import sample_gpus
from moedoctor.bench.random_model import PREFIX, RandomModel
from moedoctor.commands.options import InputError, convert_errors, split_texts
from moedoctor.diagnose.plan.kv_cache import PlanError
from moedoctor.diagnose.plan.repacking import compute_repacking
from moedoctor.diagnose.plan.weights import find_expert_scheme
from moedoctor.environment import explain_missing_gpu
from moedoctor.models.config_fields import ConfigError
from moedoctor.models.presets import find_model
from moedoctor.origin import record_origin
from moedoctor.plugin.extensions import FIXES
from moedoctor.redaction import Redactor, strip_folders
from moedoctor.reporters.output import show_progress
from moedoctor.reporters.pages.bench import Bench
from moedoctor.text import print_message, shorten

_BACKEND = re.compile(r"[a-z0-9_]{1,60}")


def make_plan(
    models: Sequence[str],
    variants: Sequence[str] | None,
    backends: Sequence[str] | None,
    fixes: Sequence[str] | None,
    arguments: str | None,
    batches: Sequence[int],
    **options: Any,
) -> engines.Plan:
    """Return what to measure; `options` are fields of the plan. Raises InputError."""
    if len(models) != 1:
        raise InputError(f"--engine: {len(models)} models given; expected one: --model FOLDER")
    model = Path(models[0])
    if is_random(model):
        read_random(model)
    elif not os.path.isfile(model / "config.json"):
        raise InputError(
            f"--model {model}: expected a folder with config.json and the weights, or "
            f"{PREFIX}[:KEY=VALUE,...]"
        )
    chosen = [*_read_variants(variants), *_expand_short_forms(backends, fixes, has_base=bool(variants))]
    names = [variant.name for variant in chosen]
    twice = next((name for name in names if names.count(name) > 1 or name == engines.REFERENCE), None)
    if twice is not None:
        raise InputError(f"--variant {twice}: expected names that differ, and not {engines.REFERENCE!r}")
    return engines.Plan(
        model=model,
        variants=chosen,
        arguments=_read_arguments(arguments),
        batches=tuple(batches) or engines.BATCHES,
        **options,
    )


def is_random(model: Path) -> bool:
    """Return True if the name asks for random weights."""
    return str(model).partition(":")[0] == PREFIX and not model.exists()


def read_random(model: Path) -> RandomModel:
    """Return what to draw. Raises InputError."""
    with convert_errors(ValueError, before="--model "):
        return RandomModel.parse(str(model))


def _read_variants(given: Sequence[str] | None) -> list[Variant]:
    variants = []
    for text in given or ():
        with convert_errors(ValueError, before=f"--variant {shorten(text)}: "):
            variants.append(Variant.parse(text))
    return variants


def _expand_short_forms(
    backends: Sequence[str] | None, fixes: Sequence[str] | None, *, has_base: bool
) -> Iterator[Variant]:
    """Yield the variants that --moe-backend and --fixes stand for; the first has no fix."""
    names = list(dict.fromkeys(name.lower().replace("-", "_") for name in split_texts(backends)))
    for name in names:
        if _BACKEND.fullmatch(name) is None:
            raise InputError(
                f"--moe-backend {name}: expected names of vLLM's --moe-backend, such as marlin,triton"
            )
    chosen = list(dict.fromkeys(split_texts(fixes)))
    for text in chosen:
        for name in text.split("+"):
            if name not in FIXES:
                raise InputError(
                    f"--fixes {text}: expected some of {', '.join(FIXES)}; A+B for two in one engine"
                )
    if has_base and not names and not chosen:
        return
    for backend in names or ["auto"]:
        flags = () if backend == "auto" else ("--moe-backend", backend)
        if not has_base or names:
            yield Variant(backend, {}, flags)
        for fix in chosen:
            name = f"{backend}+{fix}" if names else fix
            yield Variant(name, {"MOEDOCTOR_FIXES": fix.replace("+", ",")}, flags)


def _read_arguments(given: str | None) -> Mapping[str, Any]:
    if given is None:
        return {}
    try:
        arguments = json.loads(given)
    except ValueError as error:
        raise InputError(
            f"--arguments: {error}; expected JSON, such as '{{\"cpu_offload_gb\": 4}}'"
        ) from None
    if not isinstance(arguments, dict) or any(not name.isidentifier() for name in arguments):
        raise InputError("--arguments: expected a JSON object with arguments of vllm.LLM")
    return arguments


def measure(plan: engines.Plan) -> Bench:
    """Run and time the engines. Raises InputError if none can run here."""
    facts = environment.collect()
    reason = explain_missing_gpu(facts) or (None if facts.get("vllm") else "vLLM is not installed here")
    if reason is not None:
        raise InputError(f"--engine: {reason}; expected a GPU and an installed vLLM")
    with (
        write_random(plan.model) as model,
        sample_gpus(facts) as readings,
        show_progress(remaining=True) as bar,
    ):
        progress = bar if sys.stderr.isatty() else _print_progress
        measured = engines.measure(replace(plan, model=model), progress=progress)
        rows = [engines.drop_empty(_add_planned_peak(row, model)) for row in measured.engines]
    redactor = Redactor.from_this_process()
    figures = {
        "model": strip_folders(redactor.mask(str(plan.model))),
        "tokens": plan.tokens,
        "arguments": redactor.record(dict(plan.arguments)),
        "together": plan.together,
        "engines": redactor.record(rows),
        "speeds": [engines.drop_empty(row) for row in measured.speeds],
    }
    code = int(any("wrong" in row or "failed" in row for row in rows))
    iterations = {"rounds": plan.rounds, "repeats": plan.repeats, "new_tokens": plan.tokens}
    origin = record_origin(variables=facts.get("env"), gpu_state=readings, iterations=iterations)
    return Bench.from_figures("engines", figures, facts, code, origin)


def _add_planned_peak(row: EngineRow, model: Path) -> EngineRow:
    """Return the row with the peak that `plan` computes for `model` and the backend, if it was measured."""
    if row.load_peak_bytes is None or not row.moe_backend or "--model " in row.settings:
        return row
    with contextlib.suppress(ConfigError, PlanError):
        scheme, _ = find_expert_scheme(model / "config.json")
        layer = find_model(str(model)).experts.layer
        return replace(row, planned_peak_bytes=compute_repacking(row.moe_backend, scheme, layer).bytes)
    return row


@contextlib.contextmanager
def write_random(model: Path) -> Iterator[Path]:
    """Yield the model's folder; random weights are written to a temporary one. Raises InputError."""
    if not is_random(model):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        with convert_errors(ValueError, before=f"--model {model}: "):
            folder = read_random(model).write(Path(name) / PREFIX)
        yield folder


def _print_progress(done: int, total: int, what: str) -> None:
    if done < total:
        print_message(f"{what} ({done + 1} of {total})")
