"""The commands that run no model: parsed, and handed to the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.cli_options import OutputOption, TableFormatOption


def check(
    format: TableFormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Say which known failures can strike this environment.

    Looks at GPUs, driver, packages, settings and caches, tries to pin memory, and runs no model. Nothing is
    changed. Exit code 1 where something was found.
    """
    from moedoctor.commands.check import check_command

    raise typer.Exit(check_command(format, output))


def backends(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- vllm serve ...", help="A server's command line, to judge its settings too."
        ),
    ] = None,
    sm: Annotated[
        str | None,
        typer.Option(metavar="X.Y", help="Compute capability, such as 12.0; default: this machine's GPU."),
    ] = None,
    scheme: Annotated[
        str,
        typer.Option(
            metavar="SCHEME",
            help="Weights and activations: nvfp4, nvfp4-w4a16, mxfp4, fp8, fp8-block or bf16.",
        ),
    ] = "nvfp4",
    release: Annotated[
        str | None,
        typer.Option(metavar="X.Y.Z", help="A vLLM release, such as 0.21.0; default: the installed one."),
    ] = None,
    ep: Annotated[bool, typer.Option("--ep", help="With expert parallelism.")] = False,
    dp: Annotated[bool, typer.Option("--dp", help="With data parallelism.")] = False,
    activation: Annotated[
        str, typer.Option(metavar="NAME", help="silu, swigluoai (gpt-oss), relu2 (Nemotron), gelu ...")
    ] = "silu",
    backend: Annotated[
        str | None, typer.Option(metavar="MARLIN", help="Would this one work, and how is it asked for?")
    ] = None,
    ask: Annotated[
        bool, typer.Option("--ask/--no-ask", help="Ask the installed vLLM too; that takes seconds.")
    ] = True,
    format: TableFormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Tell which MoE backend vLLM selects, and why not the others.

    Judges the VLLM_* and FLASHINFER_* variables and a server's command line for the same release. Exit code 1
    where a setting does not take effect, nothing is selected or --backend would not work.
    """
    from moedoctor.commands.backends import BackendsRequest, backends_command

    request = BackendsRequest(
        sm=sm,
        scheme=scheme,
        release=release,
        ep=ep,
        dp=dp,
        activation=activation,
        backend=backend,
        format=format,
        output=output,
        command=tuple(command or ()),
        ask_installed=ask,
    )
    raise typer.Exit(backends_command(request))


def triage(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="A log, traceback or report; - reads stdin.")],
    format: TableFormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Find known failures in a log or a bug report.

    Names the line that shows each and the next step; says nothing rather than guess.
    """
    from moedoctor.commands.triage import triage_command

    raise typer.Exit(triage_command(file, format, output))


def lint(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder with config.json and safetensors.")
    ],
    format: TableFormatOption = "table",
    output: OutputOption = None,
    fix: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write corrected copies of JSON files there, never in place."),
    ] = None,
) -> None:
    """Find what is wrong with a checkpoint's quantisation.

    Reads the headers of its files and the scales, no weights.
    """
    from moedoctor.commands.lint import lint_command

    raise typer.Exit(lint_command(checkpoint, format, output, fix))


def audit(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="A FlashInfer JIT cache, a folder, wheel, .so or .cubin file."),
    ],
    sm: Annotated[
        str | None,
        typer.Option(metavar="X.Y", help="Compute capability, such as 12.0; default: this machine's GPU."),
    ] = None,
    format: TableFormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Tell which GPUs compiled kernels are for.

    Lists the SASS and PTX targets inside, and whether each loads on a GPU, is compiled from PTX or is
    missing.
    """
    from moedoctor.commands.audit import audit_command

    raise typer.Exit(audit_command(paths, capability=sm, format=format, output=output))
