"""The command line: parse, call, print, exit code. No logic, and no torch."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any

import typer

from moedoctor import __version__, cli_diagnose, cli_measure, cli_run

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


# In the order of the help.
app.command(epilog=EPILOG)(cli_run.run)
app.command(epilog=EPILOG)(cli_diagnose.check)
app.command(epilog=EPILOG)(cli_diagnose.backends)
app.command("list")(cli_run.list_)
app.command()(cli_run.explain)
app.command(epilog=EPILOG)(cli_run.compare)
app.command(epilog=EPILOG)(cli_diagnose.triage)
app.command(epilog=EPILOG)(cli_diagnose.lint)
app.command(epilog=EPILOG)(cli_diagnose.audit)
app.command(epilog=EPILOG)(cli_measure.plan)
app.command(epilog=EPILOG)(cli_measure.bench)
app.command()(cli_run.show)


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
