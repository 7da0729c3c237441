"""`moedoctor schema NAME`: the JSON schema of a command's output, or of a scenario."""

from __future__ import annotations

from typing import Annotated

import typer

from moedoctor.commands.options import InputError, Output

NAMES = (
    "run",
    "check",
    "triage",
    "explain",
    "list",
    "backends",
    "lint",
    "audit",
    "plan",
    "bench",
    "compare",
    "show",
    "replay",
    "capsule",
    "fleet",
    "scenario",
)


def schema(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A command, or scenario for the YAML that run takes.")
    ],
    output: Output = None,
) -> int:
    """Print the JSON schema of what a command writes.

    Also of a scenario file, for editors. New keys may be added within a schema_version.
    """
    from importlib.resources import files

    from moedoctor.entries import builtin_folder
    from moedoctor.reporters.output import emit
    from moedoctor.text import expected_names

    if name not in NAMES:
        raise InputError(f"{name}: no such schema; {expected_names(name, NAMES)}")
    if name == "scenario":
        text = (builtin_folder() / "schema.json").read_text(encoding="utf-8")
    else:
        folder = files("moedoctor.reporters") / "schema_files"
        text = (folder / f"{name}.json").read_text(encoding="utf-8")
    emit(text, output, f"schema of {name}")
    return 0
