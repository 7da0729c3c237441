"""`moedoctor list`: the whole catalogue and other projects' failures; our faults are not loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moedoctor import catalogue
from moedoctor.commands.list import list_, list_rows
from moedoctor.entries import entries


def shown(capsys: pytest.CaptureFixture[str], format: str) -> str:
    assert list_(format) == 0
    return capsys.readouterr().out


def test_every_entry_is_listed_with_whether_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(shown(capsys, "json"))
    assert listed["schema_version"] == 1
    rows = listed["catalogue"]
    assert [row["id"] for row in rows][:20] == list(entries())
    registered = catalogue.registered_names()
    for row in rows[:20]:
        assert row["scenario"] is (row["name"] in registered)
        assert row["title"] == entries()[row["id"]].title
    assert rows[0]["scenario"] is True


def test_an_entry_without_a_scenario_says_not_yet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "registered_names", lambda: frozenset({"nan_routing"}))
    lines = shown(capsys, "table").splitlines()
    assert lines[2].split()[:3] == ["MD001", "nan_routing", "yes"]
    assert lines[3].split()[:4] == ["MD002", "unpinned_copy", "not", "yet"]


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "markdown").splitlines()
    assert lines[:2] == ["| id | name | runs | failure |", "| --- | --- | --- | --- |"]
    table = [line for line in lines if line.startswith("|")]
    assert len(table) >= 22
    assert all(line.count("|") == 5 for line in table)


@pytest.mark.usefixtures("dying_plugin")
def test_failures_of_other_projects_are_listed_after_ours() -> None:
    behind = {row.id: row for row in list_rows() if row.id not in entries()}
    assert set(behind) == {"MD901", "PARITY"}  # our scenario that is not a known failure is listed there too
    assert behind["MD901"].scenario is True
    assert [row.id for row in list_rows()][: len(entries())] == sorted(entries())


def test_none_of_our_faults_is_loaded() -> None:
    probe = (
        "import sys\nfrom moedoctor.commands.list import list_\nlist_('table')\n"
        "loaded = {name for name in sys.modules if name.startswith('moedoctor.faults.')}\n"
        # The comparison of backends is in no entry, so its title is its own.
        "loaded -= {'moedoctor.faults.base', 'moedoctor.faults.selection'}\n"
        "loaded -= {'moedoctor.faults.selection.backend_parity'}\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
