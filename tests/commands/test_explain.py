"""`moedoctor explain`: entries in every format, their evidence, and failures of other projects."""

import functools
import json
from pathlib import Path

import pytest
from report_samples import report, scenario

from moedoctor.commands.explain import _find, explain
from moedoctor.entries import load_entries
from moedoctor.entries.entry import SECTIONS
from moedoctor.reporters.json import JsonReporter, to_document, to_json
from moedoctor.reporters.markdown_page import link_source, to_markdown
from moedoctor.reporters.pages import explain as page
from moedoctor.reporters.table import to_text
from moedoctor.results import ClaimResult, ClaimVerdict

SOURCE = "vllm-project/vllm#39593"
TEXT = "On NaN the top-k kernel picks the same expert index K times"


@pytest.fixture
def reports_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the stored reports once for all entries: this takes most of the time of an explanation."""
    monkeypatch.setattr(page, "_load_reports", _stored_reports)


_stored_reports = functools.cache(page._load_reports)


def explain_text(name: str, format: str) -> str:
    explained = _find(name)
    return to_json(to_document(explained)) if format == "json" else to_markdown(explained.make_page())


@pytest.mark.usefixtures("reports_read_once")
@pytest.mark.parametrize("id", load_entries())
def test_every_entry_is_explained_in_full_and_on_two_screens_without_figures(id: str) -> None:
    entry, explained = load_entries()[id], _find(id)
    text = to_markdown(explained.make_page())
    assert text.startswith(f"# {id} {entry.name}: {entry.title}\n")
    facts = {"Affected": entry.where, "Do today": entry.next, "Fixed in": entry.fixed}
    assert text.splitlines()[2:5] == [f"- **{name}**: {value}" for name, value in facts.items()]
    for affected in entry.releases:
        assert affected.evidence in text
    places = [text.index(f"\n## {heading}\n") for heading in SECTIONS]
    assert places == sorted(places)
    for part in (entry.mechanism, entry.affected, entry.detection, entry.fix):
        assert part in text
    for link in entry.links:
        assert f"- {link.url} {link.text}\n" in text
    data = json.loads(to_json(to_document(explained)))
    assert (data["schema_version"], data["id"], data["name"]) == (1, id, entry.name)
    assert (data["mechanism"], data["fix"]) == (entry.mechanism, entry.fix)
    assert [link["url"] for link in data["links"]] == [link.url for link in entry.links]
    brief = to_text(explained.make_page(brief=True), width=80)
    assert len(brief.splitlines()) <= 2 * 40
    for claim in explained.claims:
        assert " ".join(claim.text.split()) in " ".join(brief.split())
    if explained.runs:
        assert f"moedoctor explain {id} -v" in " ".join(brief.split())


def evidence(folder: Path, machine: str, verdict: ClaimVerdict, reason: str | None) -> None:
    claim = ClaimResult(TEXT, SOURCE, verdict, {}, reason)
    (folder / machine).mkdir()
    (folder / machine / "run.json").write_text(JsonReporter().render(report(scenario(claims=(claim,)))))


def test_claims_show_the_figures_of_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence(tmp_path, "nvidia-h200", ClaimVerdict.CONFIRMED, "100 % of the rows")
    evidence(tmp_path, "a-cpu", ClaimVerdict.UNTESTED, None)
    evidence(tmp_path, "baselines", ClaimVerdict.REFUTED, "never shown")
    monkeypatch.setattr(page, "find_reports_folder", lambda: tmp_path)
    text = explain_text("MD001", "markdown")
    assert (
        f"- **confirmed** {TEXT} ({link_source(SOURCE)})\n"
        "  - about: the top-k kernels of vLLM before the fix; a row of NaN router logits\n"
        "  - a-cpu: untested\n  - nvidia-h200: confirmed: 100 % of the rows\n"
    ) in text
    assert "never shown" not in text
    assert "  - not measured yet\n" in text  # the other claims
    claim = json.loads(explain_text("MD001", "json"))["claims"][0]
    values = ("nvidia-h200", "confirmed", "100 % of the rows")
    assert claim["outcomes"][1] == dict(zip(("machine", "verdict", "reason"), values, strict=True))


def test_an_unreadable_report_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    monkeypatch.setattr(page, "find_reports_folder", lambda: tmp_path)
    assert "not measured yet" in explain_text("MD001", "markdown")
    assert "run.json:1:" in capsys.readouterr().err


def test_reports_of_other_commands_are_no_evidence_for_claims(capsys: pytest.CaptureFixture[str]) -> None:
    files = list(page.find_reports_folder().glob("*/*.json"))
    assert any(b'"command": "fleet"' in file.read_bytes() for file in files)
    assert explain("MD001") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("dying_plugin")
def test_a_failure_of_another_project_explains_itself() -> None:
    text = explain_text("dying", "markdown")
    assert text.startswith("# MD901 dying: a case that ends in the way it is told to\n")
    assert "\n## What happens\n\nm\n" in text
    assert text.endswith("\nRun it: `moedoctor run MD901`\n")
