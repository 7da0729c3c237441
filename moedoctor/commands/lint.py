"""`moedoctor lint CHECKPOINT`: what is wrong with its quantisation, without loading weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import moedoctor
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.diagnose.checkpoint.findings import CHECKS, LintFinding
from moedoctor.diagnose.checkpoint.json_fix import corrected
from moedoctor.diagnose.checkpoint.lint import Lint, lint
from moedoctor.diagnose.checkpoint.safetensors_header import CheckpointError
from moedoctor.redaction import Redactor
from moedoctor.reporters.output import OutputError, check_writable, write
from moedoctor.text import escape

FORMATS = ("table", "json", "markdown")


def lint_command(
    folder: Path, format: str = "table", output: Path | None = None, fix: Path | None = None
) -> int:
    """Print what is wrong with the checkpoint in `folder`; 1 where something is, remarks alone apart.

    With `fix`, corrected copies of JSON files are written into that folder, never into the checkpoint's own.
    Raises InputError for a wrong option and for a checkpoint that cannot be read.
    """
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    with as_input_error(OutputError):
        check_writable(output)
    if fix is not None:
        _check_fix(folder, fix)
    try:
        result = lint(folder)
    except CheckpointError as error:
        raise InputError(escape(str(error))) from error
    code = 1 if result.damage else 0
    redactor = Redactor.of_this_process()
    if format == "json":
        text = json.dumps(_document(result, code, redactor), indent=1, allow_nan=False) + "\n"
    else:
        text = "\n".join(_page(result, format, redactor)) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        with as_input_error(OutputError):
            write(output, text)
        print(f"moedoctor: {_count(result)}; written to {output}", file=sys.stderr)
    if fix is not None:
        _write_fix(result, fix)
    return code


def _check_fix(folder: Path, fix: Path) -> None:
    """Raises InputError for a place that is not fit to write to."""
    # os.path raises nothing for a name that cannot be one, as Path does.
    if os.path.exists(fix) and not os.path.isdir(fix):
        raise InputError(f"{fix}: is no folder; expected one for the corrected JSON files")
    if not os.path.exists(fix) and not os.path.isdir(fix.parent):
        raise InputError(f"{fix}: its parent folder does not exist; create it first")
    own, other = folder.resolve(), fix.resolve()
    if other == own or own in other.parents:
        raise InputError(f"{fix}: is the checkpoint's own folder; expected another one")


def _write_fix(result: Lint, fix: Path) -> None:
    files = corrected(result)
    if files:
        with as_input_error(OutputError, OSError):
            fix.mkdir(exist_ok=True)
            for name, text in files.items():
                write(fix / name, text)
    names = ", ".join(sorted(files)) if files else "nothing that a JSON file could correct"
    print(f"moedoctor: --fix: {names}{f' written to {fix}' if files else ''}", file=sys.stderr)


def _document(result: Lint, code: int, redactor: Redactor) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "moedoctor": moedoctor.__version__,
        "command": "lint",
        "checkpoint": redactor.text(str(result.checkpoint.folder)),
        "quantization": result.scheme,
        "findings": [one.record() for one in result.findings],
        "summary": {
            "shards": result.shards,
            "tensors": result.tensors,
            "block_scales_seen": round(result.block_scales_seen, 6),
            "patterns_not_read": list(result.not_read),
            "exit_code": code,
        },
    }


def _page(result: Lint, format: str, redactor: Redactor) -> list[str]:
    head = f"{redactor.text(escape(str(result.checkpoint.folder)))}: {escape(result.scheme)}"
    lines = [f"# {head}" if format == "markdown" else head, ""]
    if not result.damage:
        lines += ["nothing wrong was found", ""]
    for one in result.findings:
        lines += _markdown(one) if format == "markdown" else _table(one)
    for pattern in result.not_read:
        lines.append(f"not read: the pattern {escape(pattern[:120])}; excluded modules were not checked")
    return [*lines, _count(result)]


def _table(finding: LintFinding) -> list[str]:
    check = CHECKS[finding.check]
    known = f"{finding.id}  " if check.id else "remark  " if check.remark else ""
    lines = [f"{known}{finding.check}  confidence {check.confidence:.2f}  {_places(finding)}: {check.what}"]
    lines += [
        f"    {escape(one.tensor)}  in {escape(one.shard)}: {escape(one.value)}" for one in finding.places
    ]
    return [*lines, f"    next: {check.next_step}", ""]


def _markdown(finding: LintFinding) -> list[str]:
    check = CHECKS[finding.check]
    known = f"{finding.id} " if check.id else "Remark: " if check.remark else ""
    lines = [f"## {known}{finding.check}", ""]
    lines += [f"{check.what}: {_places(finding)}, confidence {check.confidence:.2f}.", ""]
    lines += ["| tensor | file | value |", "|---|---|---|"]
    lines += [
        f"| {' | '.join(escape(cell).replace('|', chr(92) + '|') for cell in vars(one).values())} |"
        for one in finding.places
    ]
    return [*lines, "", f"Next: {check.next_step}", ""]


def _places(finding: LintFinding) -> str:
    count = "1 place" if finding.count == 1 else f"{finding.count} places"
    return count if finding.line is None else f"{count}, line {finding.line}"


def _count(result: Lint) -> str:
    kinds = f"{len(result.damage)} {'kind' if len(result.damage) == 1 else 'kinds'} of damage"
    if remarks := len(result.findings) - len(result.damage):
        kinds += f" and {remarks} {'remark' if remarks == 1 else 'remarks'}"
    seen = result.block_scales_seen
    sampled = "" if seen >= 1 else f"; of the block scales {seen:.1%} were read"
    return f"{kinds} in {result.tensors:,} tensors of {result.shards} files{sampled}"
