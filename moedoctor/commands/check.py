"""`moedoctor check`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.reporters.check import FORMATS, check_json, check_markdown, summary_line
from moedoctor.reporters.check_table import check_table
from moedoctor.reporters.output import OutputError, check_writable, write


def check_command(format: str, output: Path | None) -> int:
    """Say which known failures can strike this environment; 1 where any can, else 0."""
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    with as_input_error(OutputError):
        check_writable(output)
    from moedoctor.diagnose.check.check import check

    result = check()
    if format == "json":
        text = check_json(result)
    elif format == "markdown":
        text = check_markdown(result)
    else:
        terminal = output is None and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else None
        text = check_table(result, colour=terminal and not os.environ.get("NO_COLOR"), width=width)
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        with as_input_error(OutputError):
            write(output, text)
        print(f"moedoctor: {summary_line(result)}; written to {output}", file=sys.stderr)
    return result.exit_code
