"""`moedoctor conform TARGET`: ask a router, MoE kernel, expert cache or offloader what ours are asked."""

from __future__ import annotations

from typing import Annotated

import typer

from moedoctor.commands.options import (
    CheckFormat,
    Device,
    Full,
    InputError,
    Output,
    check_gpu,
    choose_from,
    convert_errors,
    number,
    option,
    parse_names,
)
from moedoctor.commands.pages import deliver_document


def conform(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="The function or class: package.module:name, or file.py:name."),
    ],
    kind: Annotated[
        str | None,
        option(
            "NAME",
            "router, moe, cache or offloader. Default: what TARGET declares, or its parameters say.",
            choose_from("--kind", "moedoctor.testing.questions:KINDS"),
        ),
    ] = None,
    question: Annotated[list[str] | None, option("NAME", "Ask only this question. May be repeated.")] = None,
    scoring: Annotated[
        str | None,
        option(
            "FUNCTION",
            "How a router scores: softmax (default) or sigmoid.",
            choose_from("--scoring", ("softmax", "sigmoid")),
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        option("NAMES", "Formats of a MoE kernel's weights: bf16, fp8, fp8-block, nvfp4, mxfp4."),
    ] = None,
    activation: Annotated[
        list[str] | None, option("NAMES", "Activations of a MoE kernel: silu, gelu, gelu_tanh, relu2.")
    ] = None,
    gate: Annotated[
        str | None,
        option(
            "ORDER",
            "The place of the gate's rows in w13: first, last or interleaved.",
            choose_from("--gate", ("first", "last", "interleaved")),
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 0,
    seconds: Annotated[
        float, option("S", "The time after which a problem is a crash.", number("--seconds"))
    ] = 60.0,
    device: Device = "cpu",
    format: CheckFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Ask a router, MoE kernel, expert cache or offloader the questions that ours are asked.

    TARGET runs in a child process, so that a crash is an answer. Each answer that is not right has the
    smallest failing example and one line of Python that repeats it. Exit code 1 if an answer does not pass.
    """
    from moedoctor import environment
    from moedoctor.models.layer_shape import ACTIVATIONS
    from moedoctor.testing.examine import TargetError, examine
    from moedoctor.testing.questions import FORMATS, KINDS, load_questions

    facts = environment.collect()
    check_gpu(device, facts)
    if device == "auto":
        device = "cuda:0" if facts.get("gpus") else "cpu"
    known = [name for each in ((kind,) if kind else KINDS) for name in load_questions(each)]
    only = parse_names("--question", question, known)
    options = {
        "formats": parse_names("--formats", formats, FORMATS) or None,
        "activations": parse_names("--activation", activation, ACTIVATIONS) or None,
        "gate": gate,
        "scoring": scoring,
    }
    with convert_errors(TargetError):
        report = examine(target, kind, options, device=device, only=only, seed=seed, seconds=seconds)
    if not report.answers:
        raise InputError(f"{target}: it is a {report.kind}, which has no question {', '.join(only)}")
    reasons = [f"{answer.name}: {answer.verdict.value}: {answer.reason}" for answer in report.failed]
    return deliver_document(report, format, output, full=full, code=int(bool(reasons)), reasons=reasons)
