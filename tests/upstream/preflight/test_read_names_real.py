"""The table of names that `lint` uses without a vLLM is what the installed vLLM does."""

import json

import pytest
from scripts_of_tests import load_script

from moedoctor.diagnose.checkpoint.checks.names import TABLE

pytestmark = pytest.mark.upstream


def test_the_table_is_what_this_release_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    names = load_script("release/names", monkeypatch)
    stored = json.loads(TABLE.read_text(encoding="utf-8"))
    release, rows = names.ask_rows()
    if not any(release in row["releases"] for row in stored):
        pytest.skip(f"the table has nothing of {release}: make release V={release}")
    assert names.merge_rows(stored, release, rows) == stored
