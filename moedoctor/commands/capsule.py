"""`moedoctor capsule`: what a recorded MoE call holds, and copies of it that may be shared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.commands.options import Full, InputError, Output, PageFormat, convert_errors, declare, option
from moedoctor.commands.pages import deliver_document

_File = Annotated[Path, typer.Argument(metavar="CAPSULE", help="A file that a recording made.")]

capsule = typer.Typer(
    help="Show what a recorded MoE call holds, or copy it without weights.", no_args_is_help=True
)


@capsule.command()
def show(file: _File, format: PageFormat = "table", output: Output = None, full: Full = False) -> int:
    """List what a capsule holds: the call, and every tensor with its size."""
    from moedoctor.reporters.pages.replay import CapsuleDocument
    from moedoctor.results import from_json
    from moedoctor.trace.capsule import CapsuleError, describe, load

    with convert_errors(CapsuleError):
        held = from_json(CapsuleDocument, {**describe(load(file)), "file": file.name})
    return deliver_document(held, format, output, full=full)


@capsule.command()
@declare(
    target=typer.Argument(metavar="FILE", help="The new capsule."),
    without_weights="Leave out everything that is part of the model.",
    synthetic_weights="Random codes under the same scales, of the same shapes.",
    max_size=option(
        "MB", "Keep as few tokens as show the failure, if all do not fit into this size (10^6 bytes)."
    ),
)
def copy(
    file: _File,
    target: Path,
    without_weights: bool = False,
    synthetic_weights: bool = False,
    max_size: float | None = None,
) -> int:
    """Copy a capsule, so that it can be shared where weights must not be."""
    from moedoctor.processes.files import OutputError
    from moedoctor.trace import capsule as capsules

    if without_weights and synthetic_weights:
        raise InputError("--without-weights and --synthetic-weights: expected one of the two")
    with convert_errors(capsules.CapsuleError, OutputError):
        made = capsules.load(file)
        if without_weights:
            made = capsules.drop_weights(made)
        if synthetic_weights:
            made = capsules.draw_synthetic_weights(made)
        if max_size is not None:
            made = capsules.fit(made, int(max_size * 1e6))
        capsules.save(made, target)
    return 0
