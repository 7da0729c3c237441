"""Every stored report is listed, agrees with its Markdown, and holds no path of the machine."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from evidence.promises import load_reports
from moedoctor.plugin import extensions

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted((ROOT / "reports").glob("nvidia-*"))
REPORTS = sorted(file for folder in FOLDERS for file in folder.glob("*.json"))
_HOME = re.compile(r"(?<![\w.])/(work|root|home|tmp)/\w")
_CUT = re.compile(r"interrupted\b")
"""The first reason of a benchmark that a signal ended; it has no verdicts and so no other mark."""
_PART = re.compile(r"_cpu$|(?<=^crash_engines)_\w+$")
"""A part of what a script makes: without a GPU, or one of its cases."""


sys.path.insert(0, str(ROOT / "scripts"))
pages = importlib.import_module("stored_pages")


@pytest.mark.parametrize("file", [*pages.list_reports()], ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_markdown_of_a_report_is_the_page_of_its_json(file: Path) -> None:
    assert pages.render(file) == file.with_suffix(".md").read_text(encoding="utf-8"), "run: make reports"


def test_a_page_that_differs_from_its_json_is_found_and_written_again(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "reports" / "nvidia-h200"
    folder.mkdir(parents=True)
    text = (ROOT / "reports" / "nvidia-h200" / "sentinel_ids.json").read_text()
    (folder / "sentinel_ids.json").write_text(text.replace("580.159.04", "590.1"))
    page = folder / "sentinel_ids.md"
    page.write_text((ROOT / "reports" / "nvidia-h200" / "sentinel_ids.md").read_text())
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.main([]) == 1
    assert "nvidia-h200/sentinel_ids.md: is not the page of its JSON: make reports" in capsys.readouterr().err
    assert pages.main(["--write"]) == pages.main([]) == 0
    assert "590.1" in page.read_text()


@pytest.mark.parametrize("file", REPORTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_report_is_whole_names_no_folder_and_is_of_the_release_of_its_own(file: Path) -> None:
    text = file.read_text()
    assert not _HOME.search(text.replace("/tmp/capsules", "")), "but that of a promise's command"
    report = json.loads(text)
    index = (file.parent / "README.md").read_text()
    (line,) = [line for line in index.splitlines() if f"]({file.stem}.md)" in line]
    summary = report["summary"]
    cut = summary.get("interrupted") or any(map(_CUT.match, summary.get("reasons", ())))
    assert bool(cut) == ("; cut before" in line), "the index names what was cut"
    release = file.parent.name.partition("-vllm-")[2] or "0.21.0"
    assert _vllm(report) in (release, None)


def _vllm(report: dict[str, Any]) -> str | None:
    """Return the release in a report, or of the largest group of a fleet."""
    if report["command"] == "fleet":
        facts: dict[str, str] = report["groups"][0]["facts"]
        return facts.get("vLLM")
    environment: dict[str, str | None] = report.get("environment", {})  # a core dump is of any machine
    return environment.get("vllm")


def test_every_report_has_its_command() -> None:
    # They show which extension ran in an engine, and stay until a report of a promise shows it.
    rows = [row for each in extensions.load_evidence().values() for row in each.values()]
    named = {report.partition("/")[2] for row in rows for report in row.reports}
    assert {_PART.sub("", file.stem) for file in REPORTS} <= load_reports().keys() | named


def test_every_case_of_a_recorded_call_has_its_report() -> None:
    cases = importlib.import_module("evidence.record_engines").CASES
    listed = [name for name in load_reports() if name.startswith("recorded_")]
    assert listed == [f"recorded_{name}" for name in cases]
