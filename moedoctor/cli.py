"""The command line: parse, call, print, exit code. No logic, and no torch."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moedoctor import __version__

EPILOG = (
    "Exit codes: 0 nothing found, 1 something found, 2 wrong usage or bad input, 3 moedoctor's own fault."
)

app = typer.Typer(
    name="moedoctor",
    help="Reproduce known Mixture-of-Experts failures of vLLM and FlashInfer, apply the fix, "
    "prove it in the same run.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

FormatOption = Annotated[str, typer.Option("--format", "-f", help="table, json, markdown, junit or github.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Write the report to this file.")]
ToleranceOption = Annotated[
    list[str] | None, typer.Option(help="How much worse a figure may be: 5%, or KEY=5% for one figure.")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moedoctor {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EPILOG)
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
            help="Run only cases with KEY=VALUE (a parameter, subject, tier, id or name), or of this id."
        ),
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(help="Run only this subject: faulty, fixed, installed or vllm@X.Y.Z."),
    ] = None,
    vllm_kernels: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X.Y.Z=PATH", help="Add subject vllm@X.Y.Z, its kernels out of a wheel or .so file."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    timeout: Annotated[
        float | None, typer.Option(help="Seconds a case may take, in place of the scenario's.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="CPU cases side by side; default: the cores.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A skip counts as something found.")] = False,
    fail_on: Annotated[
        str, typer.Option(help="error, warning (also absent and skipped) or never.")
    ] = "error",
    baseline: Annotated[
        Path | None, typer.Option(help="A JSON report that this run must not be worse than.")
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
        device=device,
        timeout=timeout,
        jobs=jobs,
        strict=strict,
        fail_on=fail_on,
        baseline=baseline,
        tolerance=tuple(tolerance or ()),
    )
    raise typer.Exit(run_command(request))


@app.command(epilog=EPILOG)
def check(
    format: Annotated[str, typer.Option("--format", "-f", help="table, json or markdown.")] = "table",
    output: OutputOption = None,
) -> None:
    """Say which known failures can strike this environment.

    Looks at GPUs, driver, packages, settings and caches, tries to pin memory, and runs no model. Nothing is
    changed. Exit code 1 where something was found.
    """
    from moedoctor.commands.check import check_command

    raise typer.Exit(check_command(format, output))


@app.command("list")
def list_(
    format: Annotated[str, typer.Option("--format", "-f", help="table, json or markdown.")] = "table",
) -> None:
    """Show the catalogue of known failures."""
    from moedoctor.commands.listing import list_text

    typer.echo(list_text(format), nl=False)


@app.command()
def explain(
    entry: Annotated[str, typer.Argument(metavar="ID|NAME", help="A catalogue entry, such as MD001.")],
    format: Annotated[str, typer.Option("--format", "-f", help="table, markdown or json.")] = "table",
) -> None:
    """Explain one entry of the catalogue in full.

    Mechanism, affected releases, claims with the evidence measured so far, fix and links.
    """
    from moedoctor.commands.explain import explain_text

    typer.echo(explain_text(entry, format), nl=False)


@app.command(epilog=EPILOG)
def compare(
    baseline: Annotated[Path, typer.Argument(help="The JSON report to compare with.")],
    current: Annotated[Path, typer.Argument(help="The JSON report to judge.")],
    tolerance: ToleranceOption = None,
    format: Annotated[str, typer.Option("--format", "-f", help="table, json or markdown.")] = "table",
) -> None:
    """Compare two JSON reports.

    Exit code 1 where something got worse. Reports of different GPUs or releases are not comparable.
    """
    from moedoctor.commands.compare import compare_command

    raise typer.Exit(compare_command(baseline, current, tuple(tolerance or ()), format))


@app.command(epilog=EPILOG)
def triage(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="A log, traceback or report; - reads stdin.")],
    format: Annotated[str, typer.Option("--format", "-f", help="table, json or markdown.")] = "table",
    output: OutputOption = None,
) -> None:
    """Find known failures in a log or a bug report.

    Names the line that shows each and the next step; says nothing rather than guess.
    """
    from moedoctor.commands.triage import triage_command

    raise typer.Exit(triage_command(file, format, output))


@app.command(epilog=EPILOG)
def audit(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="A FlashInfer JIT cache, a folder, wheel, .so or .cubin file."),
    ],
    sm: Annotated[
        str | None, typer.Option(help="Compute capability, such as 12.0; default: this machine's GPU.")
    ] = None,
    format: Annotated[str, typer.Option("--format", "-f", help="table, json or markdown.")] = "table",
    output: OutputOption = None,
) -> None:
    """Tell which GPUs compiled kernels are for.

    Lists the SASS and PTX targets inside, and whether each loads on a GPU, is compiled from PTX or is
    missing.
    """
    from moedoctor.commands.audit import audit_command

    raise typer.Exit(audit_command(paths, capability=sm, format=format, output=output))


@app.command(epilog=EPILOG)
def plan(
    model: Annotated[str, typer.Option(help="A preset (see the README) or a folder with a config.json.")],
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="Memory of the GPU.")] = None,
    utilization: Annotated[float, typer.Option(help="vLLM's --gpu-memory-utilization.")] = 0.9,
    available_kv: Annotated[
        float | None, typer.Option(metavar="GIB", help="KV memory from vLLM's log, in place of --gpu-memory.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a request; default: the model's most.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block; hybrid models raise it.")] = 16,
    batched_tokens: Annotated[int, typer.Option(help="vLLM's --max-num-batched-tokens.")] = 8192,
    scheme: Annotated[str, typer.Option(help="Of the experts: nvfp4, mxfp4, fp8 or bf16.")] = "nvfp4",
    other_scheme: Annotated[str, typer.Option(help="Of everything else.")] = "bf16",
    backend: Annotated[str, typer.Option(help="MoE backend, for its workspace.")] = "MARLIN",
    workspace: Annotated[
        float | None, typer.Option(metavar="GIB", help="Measured workspace, in place of the computed one.")
    ] = None,
    offload: Annotated[float, typer.Option(metavar="GIB", help="Weights kept in host memory.")] = 0.0,
    offload_mode: Annotated[str, typer.Option(help="uva, or copy: everything in every step.")] = "uva",
    expert_cache: Annotated[
        int | None, typer.Option(metavar="SLOTS", help="Slots a layer of an expert cache.")
    ] = None,
    hit_rate: Annotated[
        float | None, typer.Option(help="Of that cache, from bench --cache; default: uniform routing.")
    ] = None,
    pcie: Annotated[float, typer.Option(metavar="GB/S", help="Host to device bandwidth.")] = 50.0,
    format: Annotated[str, typer.Option("--format", "-f", help="table, json or markdown.")] = "table",
    output: OutputOption = None,
) -> None:
    """Weigh memory against speed.

    Weights, workspace, KV tokens, concurrency and the bound that PCIe sets, computed for a model and a GPU.
    Exit code 1 where not one request of the context fits.
    """
    from moedoctor.commands.plan import PlanOptions, plan_command

    options = PlanOptions(
        model=model,
        gpu_memory=gpu_memory,
        utilization=utilization,
        available_kv=available_kv,
        context=context,
        kv_type=kv_dtype.lower(),
        block_size=block_size,
        batched_tokens=batched_tokens,
        scheme=scheme.lower(),
        other_scheme=other_scheme.lower(),
        backend=backend,
        workspace=workspace,
        offload=offload,
        offload_mode=offload_mode.lower(),
        expert_cache=expert_cache,
        hit_rate=hit_rate,
        bandwidth=pcie,
        format=format,
        output=output,
    )
    raise typer.Exit(plan_command(options))


@app.command()
def show(
    report: Annotated[Path, typer.Argument(help="A JSON report.")],
    format: FormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Show a stored JSON report in another format.

    Nothing is run and nothing is judged again.
    """
    from moedoctor.commands.show import show_command

    raise typer.Exit(show_command(report, format, output))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; bad input gives one line on stderr."""
    from moedoctor.commands.errors import InputError

    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        code: Any = app(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except InputError as error:
        print(f"moedoctor: {error}", file=sys.stderr)
        return 2
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("moedoctor: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away, as `| head` does
        return 0
    except Exception as error:
        return _usage_or_own_fault(error)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _usage_or_own_fault(error: Exception) -> int:
    show = getattr(error, "format_message", None)  # the parser's own usage errors
    if show is not None:
        message = show()
        if message.startswith("Usage:"):
            print(message, file=sys.stderr)  # called without a command
            return 2
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context else ""
        print(f"moedoctor: {' '.join(message.split()).rstrip('.')}{hint}", file=sys.stderr)
        return 2
    import traceback

    traceback.print_exc()
    print(
        "moedoctor: this is a fault of moedoctor itself, please report it with the lines above",
        file=sys.stderr,
    )
    return 3
