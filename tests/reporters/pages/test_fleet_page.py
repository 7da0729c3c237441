"""The page of a fleet: whatever a node calls itself or says, nothing that reads the output acts on it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from fleet_answers import parity_report, write_answers
from hostile import TEXTS, echoes_too_much, problem

from moedoctor.cli import main
from moedoctor.fleet.rows import Place, Row, Status, make_failed_row, to_document
from moedoctor.results import to_json

FORMATS = ("table", "markdown", "html", "json", "junit", "github", "sarif")
_TAG = re.compile(r"<\s*/?\s*([a-zA-Z]+)")


def _write_fleet(folder: Path, texts: Sequence[str]) -> None:
    """Write usual GPUs, and for each text nodes that have it for their host, label, facts and reasons.

    Two nodes answer alike, so that the text is compared: a fact that each node has of its own is not.
    """
    write_answers(folder)
    for number, text in enumerate(texts):
        report = parity_report("c", driver=text)
        report["environment"]["env"] = {f"VLLM_{text}": text, f"NCCL_{text}": "1"}
        report["findings"] = [{"id": text, "title": text}]
        report["problems"] = [{"what": text, "why": text}]
        report["scenarios"] = [{"id": text, "title": text, "verdict": "found", "claims": [{"text": text}]}]
        report["cases"][0].update(case=text, backend=text)
        rows = [
            Row(Place(text, text, text), Status.ANSWERED, report=report, checksums={text: text}),
            Row(Place(f"again {text}", text), Status.ANSWERED, report=report, checksums={text: text}),
            Row(Place("model", text), Status.ANSWERED, report=parity_report(gpu=text)),
            make_failed_row(Place("died", text), Status.DIED, text),
            make_failed_row(Place("cancelled", text), Status.CANCELLED, text),
        ]
        for index, row in enumerate(rows):
            document = {**to_document(row), "host": text or "empty"}
            (folder / f"{number}-{index}.json").write_text(to_json(document))


def _output(folder: Path, format: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    arguments = ["fleet", "run", "parity", "--from-reports", str(folder), "--show-hosts", "--format", format]
    assert main([*arguments, *more]) == 1
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_no_name_or_fact_of_a_node_is_acted_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_fleet(tmp_path / "hostile", TEXTS)
    _write_fleet(tmp_path / "plain", ["plain"])
    for format in FORMATS:
        shown, messages = _output(tmp_path / "hostile", format, capsys, "--full")
        ours = [line for line in shown.split("\n") if not (format == "github" and line.startswith("::"))]
        assert problem("\n".join(ours)) is None, format
        assert problem(messages) is None, format
        assert not [text[:20] for text in TEXTS if echoes_too_much(messages, text)], format
        if format == "html":
            plain, _ = _output(tmp_path / "plain", format, capsys, "--full")
            assert set(_TAG.findall(shown)) <= {*_TAG.findall(plain), "code"}
            assert shown.count("<script") == plain.count("<script")
            assert "&lt;script&gt;alert(1)" in shown


def test_hosts_are_shown_if_asked_for_and_numbered_else(tmp_path, capsys):
    _write_fleet(tmp_path / "reports", ["gpu-host-17"])
    for format in FORMATS:
        assert "gpu-host-17" in _output(tmp_path / "reports", format, capsys)[0], format
    assert main(["fleet", "run", "parity", "--from-reports", str(tmp_path / "reports")]) == 1
    shown = capsys.readouterr().out
    assert "node-0001" in shown
    assert "gpu-host-17 GPU" not in shown


def test_a_report_names_the_folder_beside_it_so_that_they_can_be_moved(tmp_path: Path) -> None:
    write_answers(tmp_path / "answers")
    report = tmp_path / "fleet.json"
    call = ["fleet", "run", "parity", "--from-reports", str(tmp_path / "answers"), "-o", str(report)]
    assert main(call) == 1
    document = json.loads(report.read_text())
    assert document["reports"] == "answers"
    assert all((tmp_path / document["reports"] / node["file"]).is_file() for node in document["nodes"])
    assert str(tmp_path) not in report.read_text()
