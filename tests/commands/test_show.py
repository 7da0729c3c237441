"""The JSON of every command is as its schema says, and `show` makes of it what the command writes itself.

An object in a schema is open, because new keys may come. Here every object is closed first: a key that a
schema does not know would be documented nowhere.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from every_command import CALLS, MORE_CALLS, prepare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_samples import json_values, list_places

import moedoctor
from moedoctor.cli import main
from moedoctor.commands.options import CHECK_FORMATS, PAGE_FORMATS, TEXT_FORMATS
from moedoctor.commands.pages import deliver_document
from moedoctor.origin import ARGUMENTS
from moedoctor.reporters.schemas import make_schema

FORMATS = {"check": CHECK_FORMATS, "lint": CHECK_FORMATS, "triage": TEXT_FORMATS, "audit": TEXT_FORMATS}
STORED = {name: call for name, call in {**CALLS, **MORE_CALLS}.items() if name != "run"}
_CHANGES = re.compile(r"\S*T\d\d:\d\d:\d\dZ|--format \w+")
"""The parts that differ between two calls: the time and the format."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stored")
    prepare(made)
    return made


@pytest.fixture
def stored(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Give a function that returns a stored report, made once, in the working directory."""
    monkeypatch.chdir(folder)

    def stored(name: str) -> Path:
        path = Path(f"stored {name}.json")
        if not path.exists():
            with monkeypatch.context() as patch:
                for module in [each for each in COMMANDS if hasattr(each, "deliver_document")]:
                    patch.setattr(module, "deliver_document", functools.partial(keep, name))
                assert main([*STORED[name], "--format", "json"]) in (0, 1, 2)
            path.write_text(capsys.readouterr().out)
        return path

    return stored


COMMANDS = [module for name, module in sys.modules.items() if name.startswith("moedoctor.commands.")]
DELIVERED: dict[str, tuple[Any, dict[str, Any]]] = {}
"""Call -> its document, which some commands need seconds for, and the options that every format has."""


def keep(name: str, document: Any, format: str, output: None, **options: Any) -> int:
    DELIVERED[name] = document, options
    return deliver_document(document, format, output, **options)


def write(name: str, format: str) -> None:
    """Write what a call found in another format."""
    document, options = DELIVERED[name]
    called = ARGUMENTS.set((*STORED[name], "--format", format))
    deliver_document(document, format, None, **options)
    ARGUMENTS.reset(called)


def close_objects(schema: Any) -> Any:
    """Return a copy in which every object with properties takes no others."""
    if isinstance(schema, list):
        return [close_objects(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: close_objects(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "type" in made and "additionalProperties" not in made:
        made["additionalProperties"] = False
    return made


def check_json(document: dict[str, Any], command: str) -> None:
    schema = make_schema(command)
    for each in (schema, close_objects(schema)):
        jsonschema.Draft202012Validator(each).validate(document)
    assert list(document)[:3] == ["schema_version", "moedoctor", "command"]
    assert document["command"] == command
    assert document["origin"]["command_line"].startswith(f"moedoctor {command}")


def test_the_json_of_a_run_is_as_its_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CALLS["run"], "--format", "json"]) == 0
    check_json(json.loads(capsys.readouterr().out), "run")


@pytest.mark.usefixtures("replayed_here", "forked_examination")
@pytest.mark.parametrize("name", STORED)
def test_a_stored_report_is_valid_and_shown_as_its_command_writes_it(name, stored, capsys):
    path, (command, *_) = stored(name), STORED[name]
    document = json.loads(path.read_text())
    check_json(document, command)
    capsys.readouterr()
    for format in FORMATS.get(command, PAGE_FORMATS):
        assert main(["show", str(path), "--format", format]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        if format == "json":
            assert json.loads(shown.out) == document
        else:
            write(name, format)
            written = re.sub(_CHANGES, "", capsys.readouterr().out)
            assert re.sub(_CHANGES, "", shown.out) == written


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(data=st.data())
def test_a_damaged_report_is_shown_or_refused_in_one_line(data, stored, tmp_path, capsys):
    name = data.draw(st.sampled_from(sorted(STORED)))
    document = json.loads(stored(name).read_text())
    inside, last = data.draw(st.sampled_from(list_places(document)))
    if data.draw(st.booleans()):
        del inside[last]
    else:
        inside[last] = data.draw(json_values)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(document))
    format = data.draw(st.sampled_from((*PAGE_FORMATS, "sarif")))
    capsys.readouterr()
    code = main(["show", str(damaged), "--format", format])
    written = capsys.readouterr()
    assert code in (0, 2)
    if code:
        assert written.out == ""
        assert len(written.err.splitlines()) == 1
        assert len(written.err) < 700


EMPTY: dict[str, Any] = {"environment": {}, "summary": {}, "scenarios": []}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "must be a mapping"),
        ({"command": ["check"]}, "command"),
        ({"command": "check", "schema_version": 2, "moedoctor": "9"}, "reads schema_version 1"),
        ({"command": "lint", "moedoctor": "1"}, "is missing"),
        ({"command": "bench", "moedoctor": "1", **EMPTY, "bench": {"x": 1}}, "do not fit"),
    ],
)
def test_what_is_no_report_is_refused(document, message, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    assert main(["show", str(path)]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert message in written.err
    assert len(written.err.splitlines()) == 1


def test_the_line_that_makes_a_report_again_does(stored, monkeypatch):
    path = stored("lint")
    first = json.loads(path.read_text())
    line = first["origin"]["again"][-1]
    program = path.with_name("bin") / "moedoctor"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m moedoctor "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent.resolve()), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(Path(moedoctor.__file__).parents[1]))
    made = subprocess.run(["bash", "-c", line], capture_output=True, check=False, timeout=120)
    again = json.loads(made.stdout)
    assert made.returncode == first["summary"].get("exit_code", 0)
    assert again.pop("origin")["again"] == first.pop("origin")["again"]
    assert again == first


def test_a_report_that_is_shown_keeps_its_origin_and_what_it_ended_with(stored, capsys):
    path = stored("lint")
    document = json.loads(path.read_text())
    document["origin"]["date"] = "2001-02-03T04:05:06Z"
    document["summary"]["reasons"] = ["a reason of its own"]
    path.with_name("old.json").write_text(json.dumps(document))
    assert main(["show", str(path.with_name("old.json")), "--format", "html"]) == 0
    written = capsys.readouterr()
    assert "2001-02-03T04:05:06Z" in written.out
    assert "a reason of its own" in written.out
    assert written.err == ""


def test_each_format_of_an_examination_says_the_same(stored, tmp_path, capsys):
    path = stored("conform")
    report = json.loads(path.read_text())
    assert [(each["question"], each["verdict"]) for each in report["answers"]] == [
        ("ordinary", "right"), ("equal_logits", "wrong"), ("bias", "skipped"),
    ]  # fmt: skip
    assert report["summary"]["failed"] == 1
    assert "equal_logits: wrong: row 0: an expert is chosen twice" in "".join(report["summary"]["reasons"])
    for suffix in ("md", "html", "xml", "sarif"):
        assert main(["show", str(path), "-o", str(tmp_path / f"a.{suffix}")]) == 0
    page = (tmp_path / "a.md").read_text()
    assert "moedoctor router: 1 of 2 right, 1 wrong" in page
    assert "**To do:** mend what does not pass" in page
    (failure,) = ElementTree.parse(tmp_path / "a.xml").iter("failure")
    assert "check_router(" in (failure.get("message") or "") + (failure.text or "")
    assert "equal_logits" in (tmp_path / "a.html").read_text()
    path.with_name("odd.json").write_text(json.dumps({**report, "kind": "../testing/router"}))
    assert main(["show", str(path.with_name("odd.json"))]) == 2
