"""Every command that writes JSON has a schema and is called, and stored reports are valid.

`tests/commands/test_show.py` checks what each command writes.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from every_command import CALLS

from moedoctor.cli import app, main
from moedoctor.reporters.json import load_documents
from moedoctor.reporters.schemas import make_schema

REPORTS = Path(__file__).parents[2] / "reports"


def test_every_command_that_writes_json_has_a_schema_and_is_called() -> None:
    group = typer.main.get_command(app)
    names = {name for name, command in group.commands.items() if _has_format(command)}  # type: ignore[attr-defined]
    assert names == set(load_documents()) == {*CALLS, "show"}


def _has_format(command: Any) -> bool:
    inner = getattr(command, "commands", {})
    return any(option.name == "format" for option in command.params) or any(map(_has_format, inner.values()))


@pytest.mark.parametrize("name", [*load_documents(), "scenario"])
def test_every_schema_is_printed_and_is_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["type"] == "object"


@functools.cache
def make_validator(command: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(make_schema(command))


@pytest.mark.parametrize("file", sorted(REPORTS.glob("nvidia-*/*.json")), ids=lambda file: file.stem)
def test_a_stored_report_of_an_older_release_is_valid(file: Path) -> None:
    document = json.loads(file.read_text())
    make_validator(document["command"]).validate(document)
    assert "origin" not in document or document["origin"]["date"]
