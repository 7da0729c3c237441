"""`run` and what reads its reports and the catalogue: parsed, and handed to the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.cli_options import FormatOption, OutputOption, TableFormatOption, ToleranceOption


def run(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH|NAME|ID", help="Scenario files, folders, names or ids; none = all."),
    ] = None,
    format: FormatOption = "table",
    output: OutputOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID|KEY=VALUE",
            help="Run only cases with KEY=VALUE (a parameter, subject, tier, id or name), or of this id.",
        ),
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run only this subject: faulty, fixed, installed, vllm@X.Y.Z or flashinfer@X.Y.Z.",
        ),
    ] = None,
    vllm_kernels: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X.Y.Z=PATH", help="Add subject vllm@X.Y.Z, its kernels out of a wheel or .so file."
        ),
    ] = None,
    flashinfer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X.Y.Z=PATH", help="Add subject flashinfer@X.Y.Z, its sources out of a wheel or folder."
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu or cuda:N.")] = "auto",
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Seconds a case may take, in place of the scenario's."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", metavar="N", min=1, help="CPU cases side by side; default: the cores."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A skip counts as something found.")] = False,
    fail_on: Annotated[
        str, typer.Option(metavar="SEVERITY", help="error, warning (also absent and skipped) or never.")
    ] = "error",
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON report that this run must not be worse than.")
    ] = None,
    tolerance: ToleranceOption = None,
) -> None:
    """Reproduce failures, apply the fix, prove it.

    Without a target all built-in scenarios run. Every case runs in a process of its own.
    """
    from moedoctor.commands.run import RunRequest, run_command

    request = RunRequest(
        targets=tuple(targets or ()),
        format=format,
        output=output,
        only=tuple(only or ()),
        subjects=tuple(subject or ()),
        kernels=tuple(vllm_kernels or ()),
        flashinfer=tuple(flashinfer or ()),
        device=device,
        timeout=timeout,
        jobs=jobs,
        strict=strict,
        fail_on=fail_on,
        baseline=baseline,
        tolerance=tuple(tolerance or ()),
    )
    raise typer.Exit(run_command(request))


def list_(
    format: TableFormatOption = "table",
) -> None:
    """Show the catalogue of known failures."""
    from moedoctor.commands.listing import list_text

    typer.echo(list_text(format), nl=False)


def explain(
    entry: Annotated[str, typer.Argument(metavar="ID|NAME", help="A catalogue entry, such as MD001.")],
    format: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", help="table, markdown or json.")
    ] = "table",
) -> None:
    """Explain one entry of the catalogue in full.

    Mechanism, affected releases, claims with the evidence measured so far, fix and links.
    """
    from moedoctor.commands.explain import explain_text

    typer.echo(explain_text(entry, format), nl=False)


def compare(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="The JSON report to compare with.")],
    current: Annotated[Path, typer.Argument(metavar="CURRENT", help="The JSON report to judge.")],
    tolerance: ToleranceOption = None,
    format: TableFormatOption = "table",
) -> None:
    """Compare two JSON reports.

    Exit code 1 where something got worse. Reports of different GPUs or releases are not comparable.
    """
    from moedoctor.commands.compare import compare_command

    raise typer.Exit(compare_command(baseline, current, tuple(tolerance or ()), format))


def show(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A JSON report.")],
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Show a stored JSON report in another format.

    Nothing is run and nothing is judged again.
    """
    from moedoctor.commands.show import show_command

    raise typer.Exit(show_command(report, format, output))
