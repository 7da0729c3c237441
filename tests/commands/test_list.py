"""`moedoctor list`: the whole catalogue and other projects' failures; our faults are not loaded."""

import json

import pytest

from moedoctor import catalogue
from moedoctor.commands.list import list_, list_rows
from moedoctor.entries import load_entries


def shown(capsys: pytest.CaptureFixture[str], format: str) -> str:
    assert list_(format=format) == 0
    return capsys.readouterr().out


def test_every_entry_is_listed_with_who_has_it_and_what_fixes_it(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(shown(capsys, "json"))
    assert listed["schema_version"] == 1
    rows = listed["catalogue"][: len(load_entries())]
    assert [row["id"] for row in rows] == list(load_entries())
    registered = catalogue.list_registered_names()
    for row in rows:
        assert row["scenario"] is (row["name"] in registered)
        entry = load_entries()[row["id"]]
        values = (row["title"], row["affects"], row["fixed_in"])
        assert values == (entry.title, entry.where, entry.fixed)
    assert rows[0]["scenario"] is True
    assert "| id | failure | affects | fixed in |" in shown(capsys, "markdown").splitlines()


@pytest.mark.parametrize(
    ("words", "ids"),
    [(["b_scales is not on gpu"], {"MD003"}), (["DYNAMO"], {"MD005"}), (["no such words"], set())],
)
def test_words_search_titles_and_messages(words, ids, capsys):
    assert list_(words, format="json") == 0
    found = {row["id"] for row in json.loads(capsys.readouterr().out)["catalogue"]}
    assert ids <= found
    assert len(found) < 6


@pytest.mark.usefixtures("dying_plugin")
def test_failures_of_other_projects_are_listed_after_ours() -> None:
    behind = {row.id: row for row in list_rows() if row.id not in load_entries()}
    assert set(behind) == {"MD901", "PARITY"}  # our scenario that is not a known failure is listed there too
    assert behind["MD901"].scenario is True
    assert [row.id for row in list_rows()][: len(load_entries())] == sorted(load_entries())
