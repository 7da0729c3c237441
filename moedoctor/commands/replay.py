"""`moedoctor replay CAPSULE`: whether a recorded MoE call is right, and what explains it if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from moedoctor.commands.options import (
    Device,
    Full,
    InputError,
    Output,
    PageFormat,
    check_gpu,
    convert_errors,
    declare,
    number,
    option,
    split_texts,
)
from moedoctor.commands.pages import deliver_document


@declare(
    capsule=typer.Argument(metavar="CAPSULE", help="A file that a recording made."),
    backend=option(
        "NAME", "Backends to run on the call: names as in bench, or all. Default: the reference only."
    ),
    timeout=option("SECONDS", "Time limit of each backend.", number(most=86_400)),
)
def replay(
    capsule: Path,
    backend: list[str] | None = None,
    device: Device = "auto",
    timeout: float = 300.0,
    format: PageFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Judge a recorded MoE call and name what is wrong with it.

    Compares the recorded output with the float32 reference, explains a wrong one by known mistakes, and runs
    backends on the same inputs. Exit code 1 if the recorded output is wrong.
    """
    from moedoctor.bench.moe import backends
    from moedoctor.diagnose.capsule.replay import ReplayError, replay
    from moedoctor.environment import collect, explain_missing_gpu
    from moedoctor.reporters.pages.replay import answer_of

    names = split_texts(backend)
    for name in names:
        if not backends.find(name):
            raise InputError(f"--backend {name}: expected all, or one of {', '.join(backends.list_names())}")

    def find_variants(record: Mapping[str, Any]) -> Sequence[Any]:
        quantization = record["quantization"] if record["block"] is None else "fp8-block"
        found = (variant for name in names for variant in backends.find(name, (quantization,)))
        return tuple(dict.fromkeys(found))

    facts = collect()
    check_gpu(device, facts)
    if device == "auto":
        device = "cpu" if not names or explain_missing_gpu(facts) else "cuda:0"
    with convert_errors(ReplayError):
        document = replay(capsule, find_variants, device, seconds=timeout)
    document = replace(document, environment=facts)
    return deliver_document(
        document, format, output, full=full, code=document.exit_code, reasons=[answer_of(document)]
    )
