"""Promises: each is measured by a command that users have, judged by a value that its JSON holds."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from evidence.promises import (
    FILE,
    ROOT,
    Promise,
    _find_file,
    judge_folder,
    load_promises,
    load_reports,
    look_up,
    main,
    run_command,
)
from moedoctor import cli
from moedoctor.bench.engines import EngineRow, Plan, SpeedRow
from moedoctor.commands.bench import engines
from moedoctor.commands.options import InputError

PROMISES = load_promises()
COMMANDS = dict.fromkeys(promise.command for promise in PROMISES if not promise.is_of_tests)
TESTS = {promise.command for promise in PROMISES if promise.is_of_tests}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[:60])
def test_each_command_is_one_that_users_have_and_its_values_are_in_its_report(command, monkeypatch, tmp_path):
    """Every variant that a value names is started, every batch is asked for, and every field exists."""
    plans: list[Plan] = []
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "config.json").write_text("{}")

    def measure(plan: Plan) -> Any:
        plans.append(plan)
        raise InputError("enough")

    monkeypatch.setattr(engines, "measure", measure)
    assert cli.main(shlex.split(command.replace("$SCRATCH", str(tmp_path)))) == 2
    (plan,) = plans
    fields = {"engines": EngineRow, "speeds": SpeedRow}
    rows = {
        "engines": [{"variant": variant.name} for variant in plan.variants],
        "speeds": [{"variant": v.name, "batch": batch} for v in plan.variants for batch in plan.batches],
    }
    named = {
        kind: [dict.fromkeys(fields[kind].__dataclass_fields__, 1.0) | row for row in rows[kind]]
        for kind in rows
    }
    for promise in PROMISES:
        if promise.command == command:
            document = {"origin": {"command_line": f"moedoctor {command}"}, "bench": {"engines": named}}
            assert promise.judge(document)[1] is not None, promise.value


DOCUMENT = {
    "origin": {"command_line": "moedoctor run …/x"},
    "rows": [{"name": "a.b", "n": 1, "x": 2.0}, {"name": "c", "n": 1, "x": 4.0}],
    "words": "one two",
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("rows[name=c].x", 4.0),
        ("rows[name=a.b][n=1].x", 2.0),
        ("rows[n=1].x", None),  # two rows
        ("rows[name=d].x", None),
        ("words", "one two"),
        ("words.more", None),
        ("nothing.at.all", None),
    ],
)
def test_a_place_names_one_value_or_none(place: str, value: Any) -> None:
    assert look_up(DOCUMENT, place) == value


@pytest.mark.parametrize(
    ("value", "bound", "verdict"),
    [
        ("rows[name=c].x / rows[name=a.b].x", ">= 2.0", "kept"),
        ("rows[name=c].x / rows[name=a.b].x", ">= 2.1", "broken"),
        ("rows[name=c].x", "<= 4", "kept"),
        ("rows[name=c].x", "<= 3.9", "broken"),
        ("rows[name=c].name", "== c", "kept"),
        ("rows[name=c].name", "== d", "broken"),
        ("words", "has two", "kept"),
        ("words", "has three", "broken"),
        ("rows[name=d].x", ">= 0", "broken"),
    ],
)
def test_a_bound_is_kept_or_broken(value: str, bound: str, verdict: str) -> None:
    assert Promise("x", "run /tmp/x", "words", value, bound).judge(DOCUMENT)[0] == verdict


def test_a_value_that_is_not_a_number_keeps_no_bound() -> None:
    document = {**DOCUMENT, "a": 0.0, "b": "nan"}
    assert Promise("x", "run", "words", "b", ">= 0").judge(document)[0] == "broken"
    assert Promise("x", "run", "words", "b / b", ">= 0").judge(document)[0] == "broken"
    assert Promise("x", "run", "words", "a / a", ">= 0").judge(document)[0] == "broken", "nothing was decided"


def test_what_is_not_stored_was_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    promises = [Promise(name, "run", "words", "a", ">= 1") for name in ("stored", "absent")]
    promises.append(Promise("stored", "run --other", "words", "a", ">= 1"))
    (tmp_path / "stored.json").write_text(json.dumps({**DOCUMENT, "a": 2}))
    verdicts = [verdict for _, verdict, _ in judge_folder(tmp_path, promises)]
    assert verdicts == ["kept", "not run", "not run"], "a report of another command says nothing"
    assert main(["--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PROMISES)
    assert all("not run" in line for line in lines)


def test_every_gpu_test_and_every_release_of_upstream_tests_has_a_row() -> None:
    """A test outside of these rows would be run by nobody, and a row without tests would prove nothing."""
    folders = set[str]()
    for file in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"(?m)^(?:pytestmark|@pytest| +pytest).*\bmark\.gpu\b", file.read_text()):
            folders.add(file.relative_to(ROOT / "tests").parts[0])
    releases = re.findall(r"(?m)^vllm (.+)$", (ROOT / "scripts" / "releases.txt").read_text())
    expected = {f"pytest -m gpu tests/{folder}" for folder in folders}
    expected |= {f"make test-upstream VLLM={release}" for release in releases}
    assert expected == {command for command in TESTS if "-k" not in command}, "-k: a part of a row"


BODIES = {"assert True": "kept", "assert False": "broken", "raise KeyboardInterrupt": "broken"}


@pytest.mark.parametrize(("body", "verdict"), BODIES.items())
def test_a_run_of_tests_is_judged_by_what_passed_and_failed(body: str, verdict: str, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    before = "import pytest\ndef test_a(): pytest.skip()\ndef test_b(): pass\n"
    file.write_text(f"{before}def test_it(): {body}\n")
    command = f"pytest -p no:cacheprovider {file}"
    promise = Promise("gpu_tests_it", command, "words", "tests.passed / tests.decided", ">= 1")
    run_command(promise, tmp_path, limit=60)
    stored = json.loads((tmp_path / "tests" / "gpu_tests_it.json").read_text())
    assert promise.judge(stored)[0] == verdict
    assert promise.find_report(ROOT / "reports" / "a").parent == ROOT / "evidence" / "tests" / "a"
    assert {"gpu", "vllm"} < set(stored["environment"])
    assert set(stored["origin"]) >= {"commit", "date", "version"}
    assert (stored["tests"]["failures"] == []) == (stored["tests"]["failed"] == 0)


def test_a_name_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["nonsense"])
    assert stopped.value.code == 2
    assert "no report is named 'nonsense'" in capsys.readouterr().err
    assert FILE.name == "promises.yaml"


def test_the_moe_kernels_of_a_folder_come_before_what_is_beside_them(tmp_path):
    for name in ("_C.abi3.so", "_moe_C.abi3.so", "cu12"):
        (tmp_path / name).touch()
    assert _find_file(f"0.21.0={tmp_path}/*") == f"0.21.0={tmp_path}/_moe_C.abi3.so"


def test_a_variable_that_a_command_needs_is_asked_for(tmp_path, monkeypatch):
    given = {name for row in load_reports().values() for name in re.findall(r"\$(\w+)", row.command)}
    assert given == {"OUT", "SCRATCH", "MODELS", "RAY", "KERNELS", "FLASHINFER"}
    monkeypatch.delenv("KERNELS", raising=False)
    with pytest.raises(SystemExit, match="logits_stride: set KERNELS"):
        run_command(load_reports()["logits_stride"], tmp_path, None)
