"""`moedoctor lint CHECKPOINT`: what is wrong with its quantization, found without loading weights."""

from __future__ import annotations

import os
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moedoctor.commands.options import (
    CheckFormat,
    FailOn,
    Full,
    IgnoreOption,
    InputError,
    Output,
    convert_errors,
    declare,
    option,
    read_ignores,
    require_writable,
)
from moedoctor.commands.pages import deliver_document
from moedoctor.text import print_message

if TYPE_CHECKING:
    from moedoctor.diagnose.checkpoint.findings import Lint
    from moedoctor.diagnose.checkpoint.repair import Repaired


@declare(
    checkpoint=typer.Argument(metavar="CHECKPOINT", help="A folder with config.json and safetensors files."),
    fix=option(
        "DIR",
        "Write a repaired copy of the checkpoint to this new folder. Files without repairs are hard "
        "links to the original, which stays as it is.",
    ),
    ask=typer.Option("--ask/--no-ask", help="Also ask the installed vLLM to load it, which takes seconds."),
    adapter=option("DIR", "Also ask the installed vLLM to apply the LoRA adapter in this folder."),
)
def lint(
    checkpoint: Path,
    format: CheckFormat = "table",
    output: Output = None,
    fix: Path | None = None,
    ask: bool = True,
    adapter: Path | None = None,
    fail_on: FailOn = "warning",
    ignore: IgnoreOption = None,
    full: Full = False,
) -> int:
    """Find what is wrong with a checkpoint's quantization.

    Reads JSON files, the headers of safetensors files and the scales, but no weights. An installed vLLM is
    asked, without a GPU, if it loads every tensor. Exit code 1 if something is wrong.
    """
    from moedoctor.diagnose.checkpoint.findings import CHECKS
    from moedoctor.diagnose.checkpoint.lint import lint
    from moedoctor.diagnose.checkpoint.repair import list_repairable_checks
    from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError
    from moedoctor.diagnose.ignores import fails
    from moedoctor.reporters.pages.lint import LintDocument
    from moedoctor.reporters.text import count_of

    if fix is not None:
        _check_fix(checkpoint, fix)
    rules = read_ignores(ignore, lambda given: [*CHECKS, *filter(None, (row.id for row in CHECKS.values()))])
    with convert_errors(CheckpointError):
        result = lint(checkpoint)
    _ask_installed(result, adapter, wanted=ask)
    folder = str(result.checkpoint.folder)
    repaired, missing = None, None
    try:
        repaired = None if fix is None else _write_repaired(result, fix)
    except ModuleNotFoundError as error:  # a repair needs torch, the findings do not
        missing = error
    repairable: Collection[str] = list_repairable_checks(result) if fix is None else ()
    if repaired is not None:  # the copy was not shown to vLLM
        repairable = {each.check for each in result.findings if not CHECKS[each.check].asked} - {
            each.check for each in repaired.result.findings
        }
    copy = None if repaired is None else str(fix)
    document = LintDocument.from_result(result, folder, repairable, copy, rules=rules, today=date.today())
    wrong = [row for row in document.findings if fails(row.level, fail_on)]
    code = 1 if wrong else 0
    reasons = [f"{row.id}: {row.evidence.what} ({count_of(row.evidence.count, 'place')})" for row in wrong]
    deliver_document(document, format, output, full=full, code=code, reasons=reasons)
    if missing is not None:
        raise missing
    if repaired is not None:
        _report_repaired(repaired, str(fix))
    return code


def _ask_installed(result: Lint, adapter: Path | None, *, wanted: bool) -> None:
    """Let the installed vLLM load the checkpoint, or note why it was not asked. Raises InputError."""
    from moedoctor.diagnose.preflight.ask import find_installed
    from moedoctor.diagnose.preflight.checkpoint_load import ask_load, find_capability, make_adapter_flags
    from moedoctor.diagnose.preflight.model import ModelError
    from moedoctor.processes import interrupts

    release = find_installed()
    if release is None or not wanted:
        result.not_asked = "--no-ask" if release is not None else "vLLM is not installed here"
        if adapter is not None:
            raise InputError(f"--adapter: {result.not_asked}; expected a vLLM that can be asked")
        return
    print_message(f"asking vLLM {release.name}, which takes seconds; --no-ask leaves that out")
    with convert_errors(ModelError), interrupts.hold_signals():
        flags = () if adapter is None else make_adapter_flags(adapter)
        ask_load(result, release, find_capability(), flags=flags)


def _check_fix(folder: Path, fix: Path) -> None:
    """Raise InputError for a folder that a repaired copy cannot or must not be written to."""
    own, other = Path(os.path.realpath(folder)), Path(os.path.realpath(fix))
    if other == own or own in other.parents:
        raise InputError(f"{fix}: is the checkpoint's own folder; expected another one")
    # os.path accepts a name that cannot exist; Path raises.
    if os.path.lexists(fix):
        raise InputError(f"{fix}: exists already; expected the name of a new folder")
    if not os.path.exists(fix.parent):
        raise InputError(f"{fix}: its parent folder does not exist; create it first")
    require_writable(fix)


def _write_repaired(result: Lint, fix: Path) -> Repaired | None:
    """Write the repaired copy and return it; if nothing is written, a line on stderr says why."""
    from moedoctor.diagnose.checkpoint.repair import RepairError, repair
    from moedoctor.processes.streams import report_loss

    if not result.findings:
        print_message("--fix: nothing was found, so nothing is written")
        return None
    try:
        return repair(result, fix)
    except RepairError as error:
        print_message(f"--fix: nothing is written: {error}")
    except OSError as error:
        report_loss(f"--fix: nothing is written: {error}")
    return None


def _report_repaired(repaired: Repaired, fix: str) -> None:
    from moedoctor.reporters.pages.lint import LintDocument, summarize
    from moedoctor.reporters.text import count_of

    left_out = f"; {count_of(repaired.left_out, 'folder')} left out" if repaired.left_out else ""
    print_message(
        f"--fix: {fix} is written: {', '.join(repaired.changed)} changed, "
        f"{count_of(repaired.linked, 'file')} linked{left_out}"
    )
    left = LintDocument.from_result(repaired.result, fix, ())
    print_message(f"--fix: lint of {fix}: {summarize(left)}")
