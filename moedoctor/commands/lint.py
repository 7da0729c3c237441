"""`moedoctor lint CHECKPOINT`: what is wrong with its quantization, found without loading weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moedoctor.commands.options import (
    InputError,
    Output,
    PageFormat,
    as_input_error,
    deliver,
    option,
    writable,
)
from moedoctor.text import print_message

if TYPE_CHECKING:
    from moedoctor.diagnose.checkpoint.findings import Lint


def lint(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder with config.json and safetensors files.")
    ],
    format: PageFormat = "table",
    output: Output = None,
    fix: Annotated[
        Path | None,
        option("DIR", "Write corrected copies of JSON files to this folder. Never changes the original."),
    ] = None,
) -> int:
    """Find what is wrong with a checkpoint's quantization.

    Reads JSON files, the headers of safetensors files and the scales, but no weights. Exit code 1 if
    something is wrong.
    """
    from moedoctor.diagnose.checkpoint.findings import CHECKS
    from moedoctor.diagnose.checkpoint.lint import lint
    from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError
    from moedoctor.reporters.lint import lint_document, lint_page, summary_line
    from moedoctor.reporters.text import count_of

    if fix is not None:
        _check_fix(checkpoint, fix)
    with as_input_error(CheckpointError):
        result = lint(checkpoint)
    code = 1 if result.damage else 0
    folder = str(result.checkpoint.folder)
    page, document = lint_page(result, folder), lint_document(result, folder, code)
    reasons = [
        f"{finding.id}: {CHECKS[finding.check].what} ({count_of(finding.count, 'place')})"
        for finding in result.damage
    ]
    deliver(
        page,
        document,
        format=format,
        output=output,
        summary=summary_line(result),
        code=code,
        reasons=reasons,
    )
    if fix is not None:
        _write_fix(result, fix)
    return code


def _check_fix(folder: Path, fix: Path) -> None:
    """Raise InputError for a folder that corrected files cannot or must not be written to."""
    # os.path accepts a name that cannot exist; Path raises.
    if os.path.lexists(fix) and not os.path.isdir(fix):
        raise InputError(f"{fix}: is not a folder; expected one for the corrected JSON files")
    if not os.path.exists(fix) and not os.path.isdir(fix.parent):
        raise InputError(f"{fix}: its parent folder does not exist; create it first")
    own, other = Path(os.path.realpath(folder)), Path(os.path.realpath(fix))
    if other == own or own in other.parents:
        raise InputError(f"{fix}: is the checkpoint's own folder; expected another one")
    writable(fix / "config.json" if os.path.isdir(fix) else fix)


def _write_fix(result: Lint, fix: Path) -> None:
    from moedoctor.diagnose.checkpoint.json_fix import corrected
    from moedoctor.processes.files import write
    from moedoctor.processes.streams import report_loss

    files = corrected(result)
    try:
        if files:
            fix.mkdir(exist_ok=True)
        for name, text in files.items():
            write(fix / name, text)
    except OSError as error:
        report_loss(f"--fix: {error}")
        return
    names = ", ".join(sorted(files)) if files else "nothing that a JSON file could correct"
    print_message(f"--fix: {names}{f' written to {fix}' if files else ''}")
