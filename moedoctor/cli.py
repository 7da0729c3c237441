"""The command line: registers the commands of `moedoctor.commands` and turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from moedoctor import __version__
from moedoctor.commands.audit import audit
from moedoctor.commands.autopsy import autopsy
from moedoctor.commands.backends import backends
from moedoctor.commands.bench.bench import bench
from moedoctor.commands.capsule import capsule
from moedoctor.commands.check import check
from moedoctor.commands.compare import compare
from moedoctor.commands.conform import conform
from moedoctor.commands.explain import explain
from moedoctor.commands.fleet import fleet
from moedoctor.commands.lint import lint
from moedoctor.commands.list import list_
from moedoctor.commands.options import InputError
from moedoctor.commands.plan import plan
from moedoctor.commands.preflight import preflight
from moedoctor.commands.record import record
from moedoctor.commands.replay import replay
from moedoctor.commands.run import run
from moedoctor.commands.schema import schema
from moedoctor.commands.show import show
from moedoctor.commands.triage import triage
from moedoctor.origin import ARGUMENTS
from moedoctor.processes import interrupts
from moedoctor.processes.streams import run_with_streams
from moedoctor.text import clean, escape_commands, explain_missing_torch, print_message, print_traceback

EPILOG = (
    "Exit codes: 0 nothing found, 1 something found, 2 wrong usage or bad input, 3 an error in moedoctor."
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


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"moedoctor {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


# In the order of the help.
for command in (
    run,
    preflight,
    check,
    triage,
    autopsy,
    explain,
    list_,
    backends,
    lint,
    audit,
    plan,
    bench,
    conform,
    compare,
    show,
    record,
    replay,
    schema,
):
    # What follows the command that `record` runs is the command's own.
    settings = {"allow_interspersed_args": False} if command is record else {}
    app.command(command.__name__.rstrip("_"), epilog=EPILOG, context_settings=settings)(command)
app.command("fleet", epilog=EPILOG, context_settings={"ignore_unknown_options": True})(fleet)
app.add_typer(capsule, name="capsule", epilog=EPILOG)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; bad input gives one line on stderr."""
    return run_with_streams(lambda: _run(arguments))


def _run(arguments: list[str] | None) -> int:
    # Pydantic would read the entry points of all packages, and raise for a malformed one.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    called = ARGUMENTS.set(tuple(sys.argv[1:] if arguments is None else arguments))
    try:
        code: Any = app(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except InputError as error:
        print_message(str(error), sys.argv[1:] if arguments is None else arguments)
        return 2
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print_message("interrupted")
        return interrupts.exit_code()
    except Exception as error:
        return _print_usage_error(error, sys.argv[1:] if arguments is None else arguments)
    finally:
        ARGUMENTS.reset(called)


def _print_usage_error(error: Exception, arguments: list[str]) -> int:
    """Print an error of the parser in one line; anything else is an error in moedoctor."""
    show = getattr(error, "format_message", None)
    if show is not None:
        message = _explain_server_option(error, arguments) or show()
        if message.startswith("Usage:"):
            print(escape_commands(clean(message)), file=sys.stderr)  # called without a command
            return 2
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context else ""
        print_message(f"{' '.join(message.split()).rstrip('.')}{hint}", arguments)
        return 2
    if needed := explain_missing_torch(error):
        print_message(needed)
        return 2
    if isinstance(error, FileNotFoundError) and (problem := _explain_missing_folder(error)):
        print_message(problem)
        return 2
    from moedoctor.redaction import Redactor

    print_traceback(Redactor.from_this_process().mask)
    print_message("this is an error in moedoctor; please report it with the lines above")
    return 3


def _explain_server_option(error: Exception, arguments: list[str]) -> str | None:
    """Return where an option of vLLM belongs, or None if `error` is about something else."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not option or context is None:
        return None
    from moedoctor.diagnose.settings.flags import read_flags
    from moedoctor.diagnose.settings.tables import load_vllm_flags

    of_vllm = any(flag.name for flag in read_flags([option], load_vllm_flags().releases[-1]))
    takes_server = any((each.metavar or "").startswith("-- ") for each in context.command.params)
    if takes_server and "--" not in arguments and (of_vllm or "serve" in arguments):
        example = f"{context.command_path} -- vllm serve MODEL {f'{option} ' if of_vllm else ''}…"
        # The parser reads -tp as -t.
        word = next((word for word in arguments if word.startswith(option)), option)
        return f"{word}: the options of a server follow its command line behind --, as in: {example}"
    return f"{option} is an option of vLLM and not of this command" if of_vllm else None


def _explain_missing_folder(error: FileNotFoundError) -> str | None:
    """Return which folder this process lacks to work in, or None if `error` has another cause."""
    if "temporary directory" in str(error):  # Python's own text
        return "no usable folder for temporary files; set TMPDIR to one that can be written to"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory was removed; change to one that exists, or give absolute paths"
    return None
