"""`moedoctor conform TARGET`: ask a router, MoE kernel, expert cache or offloader what ours are asked."""

from __future__ import annotations

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
    declare,
    number,
    option,
    parse_names,
)
from moedoctor.commands.pages import deliver_document


@declare(
    target=typer.Argument(
        metavar="TARGET", help="The function or class: package.module:name, or file.py:name."
    ),
    kind=option(
        "NAME",
        "router, moe, cache or offloader. Default: what TARGET declares, or its parameters say.",
        choose_from("moedoctor.testing.questions:KINDS"),
    ),
    question=option("NAME", "Ask only this question. May be repeated."),
    scoring=option(
        "FUNCTION", "How a router scores: softmax (default) or sigmoid.", choose_from(("softmax", "sigmoid"))
    ),
    formats=option("NAMES", "Formats of a MoE kernel's weights: bf16, fp8, fp8-block, nvfp4, mxfp4."),
    activation=option("NAMES", "Activations of a MoE kernel: silu, gelu, gelu_tanh, relu2."),
    gate=option(
        "ORDER",
        "The place of the gate's rows in w13: first, last or interleaved.",
        choose_from(("first", "last", "interleaved")),
    ),
    seed=typer.Option(help="Seed of the problems."),
    seconds=option("S", "The time after which a problem is a crash.", number()),
)
def conform(
    target: str,
    kind: str | None = None,
    question: list[str] | None = None,
    scoring: str | None = None,
    formats: list[str] | None = None,
    activation: list[str] | None = None,
    gate: str | None = None,
    seed: int = 0,
    seconds: float = 60.0,
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
