"""`moedoctor schema NAME`: the JSON schema of a command's output, or of a scenario."""

from __future__ import annotations

from typing import Annotated

import typer

from moedoctor.commands.options import InputError, Output


def schema(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A command, or scenario for the YAML that run takes.")
    ],
    output: Output = None,
) -> int:
    """Print the JSON schema of what a command writes.

    Also of a scenario file, for editors. New keys may be added within a schema_version.
    """
    import json

    from moedoctor.entries import find_builtin_folder
    from moedoctor.reporters.json import load_documents
    from moedoctor.reporters.output import emit
    from moedoctor.reporters.schemas import make_schema
    from moedoctor.text import suggest_expected

    names = (*load_documents(), "scenario")
    if name not in names:
        raise InputError(f"{name}: no such schema; {suggest_expected(name, names)}")
    if name == "scenario":
        text = (find_builtin_folder() / "schema.json").read_text(encoding="utf-8")
    else:
        text = json.dumps(make_schema(name), indent=2, ensure_ascii=False) + "\n"
    emit(text, output, f"schema of {name}")
    return 0
