"""`moedoctor bench --engine`: what to run, the measurement, and its report."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moedoctor import environment
from moedoctor.bench import engines
from moedoctor.bench.gpu_state import sampled
from moedoctor.commands.options import FULL_FORMATS, InputError, deliver, ended, texts
from moedoctor.environment import no_gpu
from moedoctor.origin import origin
from moedoctor.redaction import Redactor
from moedoctor.reporters.output import progress_bar
from moedoctor.reporters.pages.bench_engines import (
    EngineBench,
    bench_document,
    bench_page,
    reasons,
    summary_line,
)
from moedoctor.text import print_message
from moedoctor.upstream.plugin.extensions import FIXES

_BACKEND = re.compile(r"[a-z0-9_]{1,60}")


def make_plan(
    models: Sequence[str],
    backends: Sequence[str] | None,
    fixes: Sequence[str] | None,
    arguments: str | None,
    rounds: int,
) -> engines.Plan:
    """Return what to measure. Raises InputError."""
    if len(models) != 1:
        raise InputError(f"--engine: {len(models)} models given; expected one: --model FOLDER")
    model = Path(models[0])
    if not os.path.isfile(model / "config.json"):
        raise InputError(f"--model {model}: expected a folder with config.json and the weights")
    return engines.Plan(
        model=model,
        backends=_backends(backends) or ("auto",),
        fixes=_fixes(fixes),
        arguments=_arguments(arguments),
        rounds=rounds,
    )


def _backends(given: Sequence[str] | None) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(name.lower().replace("-", "_") for name in texts(given)))
    for name in chosen:
        if _BACKEND.fullmatch(name) is None:
            raise InputError(
                f"--moe-backend {name}: expected names of vLLM's --moe-backend, such as marlin,triton"
            )
    return chosen


def _fixes(given: Sequence[str] | None) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(texts(given)))
    for text in chosen:
        for name in text.split("+"):
            if name not in FIXES:
                raise InputError(
                    f"--fixes {text}: expected some of {', '.join(FIXES)}; A+B for two in one engine"
                )
    return chosen


def _arguments(given: str | None) -> Mapping[str, Any]:
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


def measure(plan: engines.Plan) -> EngineBench:
    """Run and time the engines. Raises InputError if none can run here."""
    facts = environment.collect()
    reason = no_gpu(facts) or (None if facts.get("vllm") else "vLLM is not installed here")
    if reason is not None:
        raise InputError(f"--engine: {reason}; expected a GPU and an installed vLLM")
    with sampled(facts) as readings, progress_bar(remaining=True) as bar:
        rows = engines.measure(plan, progress=bar if sys.stderr.isatty() else _log)
    redactor = Redactor.of_this_process()
    return EngineBench(
        model=redactor.text(str(plan.model)),
        tokens=plan.tokens,
        max_lead=engines.MAX_LEAD,
        max_far=engines.MAX_FAR,
        arguments=redactor.record(dict(plan.arguments)),
        rows=redactor.record(tuple(rows)),
        environment=facts,
        exit_code=1 if any("wrong" in row or "failed" in row for row in rows) else 0,
        origin=origin(
            variables=facts.get("env"),
            gpu_state=readings.state,
            iterations={"rounds": plan.rounds, "repeats": plan.repeats, "new_tokens": plan.tokens},
        ),
    )


def write_report(bench: EngineBench, format: str, output: Path | None, *, full: bool = False) -> int:
    """Print the report or write it to a file; return the exit code."""
    page = bench_page(bench, full=format in FULL_FORMATS)
    code, why = ended(bench.exit_code, reasons(bench))
    deliver(
        page,
        bench_document(bench),
        format=format,
        output=output,
        summary=summary_line(bench),
        code=code,
        reasons=why,
        full=full,
    )
    return code


def _log(done: int, total: int, what: str) -> None:
    if done < total:
        print_message(f"{what} ({done + 1} of {total})")
