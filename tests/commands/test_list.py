"""`moedoctor list`: the whole catalogue and other projects' failures; our faults are not loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from moedoctor import catalogue
from moedoctor.commands.list import list_, list_rows
from moedoctor.entries import load_entries


def shown(capsys: pytest.CaptureFixture[str], format: str) -> str:
    assert list_(format=format) == 0
    return capsys.readouterr().out


def test_every_entry_is_listed_with_whether_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(shown(capsys, "json"))
    assert listed["schema_version"] == 1
    rows = listed["catalogue"]
    assert [row["id"] for row in rows][:20] == list(load_entries())
    registered = catalogue.list_registered_names()
    for row in rows[:20]:
        assert row["scenario"] is (row["name"] in registered)
        assert row["title"] == load_entries()[row["id"]].title
    assert rows[0]["scenario"] is True


def test_the_list_says_who_has_it_and_what_fixes_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["id"]: row for row in json.loads(shown(capsys, "json"))["catalogue"]}
    for entry in load_entries().values():
        assert (rows[entry.id]["affects"], rows[entry.id]["fixed_in"]) == (entry.where, entry.fixed)
    assert "| id | failure | affects | fixed in |" in shown(capsys, "markdown").splitlines()


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["nan", "router"], {"MD001"}),
        (["b_scales is not on gpu"], {"MD003"}),
        (["DYNAMO"], {"MD005"}),
        (["no such words"], set()),
    ],
)
def test_words_search_titles_and_messages(
    words: list[str], ids: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_(words, format="json") == 0
    found = {row["id"] for row in json.loads(capsys.readouterr().out)["catalogue"]}
    assert ids <= found
    assert len(found) < 6


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "markdown").splitlines()
    assert lines[0] == "# Known failures"
    assert [line.split(":")[0] for line in lines[2:5]] == ["- **Looked at", "- **Found", "- **To do"]
    number = re.search(r"(\d+) known failures; moedoctor runs (\d+) of them", lines[3])
    assert number is not None
    assert int(number[1]) == len(list_rows()) >= int(number[2]) == sum(row.scenario for row in list_rows())
    origin = lines.index("<details><summary>How this report was made</summary>")
    table = [line for line in lines[:origin] if line.startswith("|")]
    assert len(table) >= 22
    assert all(line.count("|") == 5 for line in table)


@pytest.mark.usefixtures("dying_plugin")
def test_failures_of_other_projects_are_listed_after_ours() -> None:
    behind = {row.id: row for row in list_rows() if row.id not in load_entries()}
    assert set(behind) == {"MD901", "PARITY"}  # our scenario that is not a known failure is listed there too
    assert behind["MD901"].scenario is True
    assert [row.id for row in list_rows()][: len(load_entries())] == sorted(load_entries())


def test_none_of_our_faults_is_loaded() -> None:
    probe = (
        "import sys\nfrom moedoctor.commands.list import list_\nlist_()\n"
        "loaded = {name for name in sys.modules if name.startswith('moedoctor.faults.')}\n"
        # The comparison of backends is in no entry, so its title is its own.
        "loaded -= {'moedoctor.faults.base', 'moedoctor.faults.selection'}\n"
        "loaded -= {'moedoctor.faults.selection.backend_parity'}\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
