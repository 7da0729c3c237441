"""The real output of every command is as its schema says.

An object in a schema is open, because new keys may come. Here every object is closed first: a key that a
schema does not know would be documented nowhere.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from every_command import CALLS, MORE_CALLS, prepare

from moedoctor.cli import app, main
from moedoctor.reporters.schemas import DOCUMENTS

NAMES = {*DOCUMENTS, "scenario"}
REPORTS = Path(__file__).parents[2] / "reports"


def closed(schema: Any) -> Any:
    """Return a copy in which every object with properties takes no others."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "type" in made and "additionalProperties" not in made:
        made["additionalProperties"] = False
    return made


def schema_of(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["schema", command]) == 0
    schema: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def check(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a command, and return its JSON once it is valid and has the head of every output."""
    schema = schema_of(command, capsys)
    assert main([*arguments, "--format", "json"]) in (0, 1, 2)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema).validate(document)
    jsonschema.Draft202012Validator(closed(schema)).validate(document)
    assert list(document)[:3] == ["schema_version", "moedoctor", "command"]
    assert document["origin"]["command_line"].startswith(f"moedoctor {arguments[0]}")
    return document


def test_every_command_that_writes_json_has_a_schema() -> None:
    import typer

    group = typer.main.get_command(app)
    names = {name for name, command in group.commands.items() if _has_format(command)}  # type: ignore[attr-defined]
    assert names | {"scenario"} == NAMES


def _has_format(command: Any) -> bool:
    inner = getattr(command, "commands", {})
    return any(option.name == "format" for option in command.params) or any(map(_has_format, inner.values()))


def test_the_schema_of_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema_of("scenario", capsys)["type"] == "object"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which every call answers."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    return tmp_path


def test_every_command_is_called_here() -> None:
    assert {*CALLS, "show", "scenario"} == NAMES


@pytest.mark.usefixtures("folder", "replayed_here")
@pytest.mark.parametrize("name", [*CALLS, *MORE_CALLS])
def test_the_output_of_a_command_is_as_its_schema_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {**CALLS, **MORE_CALLS}[name]
    assert check(arguments[0], arguments, capsys)["command"] == arguments[0]


@pytest.mark.parametrize("file", sorted(REPORTS.glob("nvidia-*/*.json")), ids=lambda file: file.stem)
def test_a_stored_report_of_an_older_release_is_valid(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(file.read_text())
    jsonschema.validate(document, schema_of(document["command"], capsys))
    assert "origin" not in document or document["origin"]["date"]
