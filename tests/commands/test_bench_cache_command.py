"""`moedoctor bench --cache`: the report in three formats, its pictures, and bad input in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moedoctor.cli import main
from moedoctor.reporters.schemas import make_schema
from moedoctor.results import Report, from_json
from moedoctor.trace.format import save
from moedoctor.trace.synthetic import ZipfSettings, draw_zipf_trace

ZIPF = "zipf:experts=16,top_k=2,layers=2,rows=64,streams=4"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["bench", "--cache", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, "--trace", ZIPF, "--format", "json", *arguments)
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_json_is_a_report_with_every_policy_at_every_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys)
    jsonschema.validate(found, make_schema("bench"))
    assert from_json(Report, found).command == "bench", "evidence is read back as a report"
    cache = found["bench"]["cache"]
    assert found["command"] == "bench"
    assert {(point["policy"], point["capacity"]) for point in cache["points"]} == {
        (policy, capacity)
        for policy in ("lru", "lfu", "lfru", "aging", "belady")
        for capacity in (2, 4, 8, 16)
    }
    for point in cache["points"]:
        assert point["hits"] + point["misses"] == 2 * 64 * 2
        assert point["hit_rate"] == point["hits"] / (point["hits"] + point["misses"])
        assert point["wrong_calls"] == 0
    assert cache["replay_unit"] == "call"
    assert cache["trace"]["made"]["seed"] == 0


def test_capacities_policies_batch_and_scope_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--capacity 4,8 --capacity 12 --policy lru --batch 4 --scope global"
    cache = document(capsys, *options.split())["bench"]["cache"]
    points = [(point["policy"], point["capacity"]) for point in cache["points"]]
    assert points == [("lru", 4), ("lru", 8), ("lru", 12)]
    assert (cache["batch"], cache["scope"]) == (4, "global")
    assert cache["trace"]["calls"] == 16


def test_the_table_holds_the_figures_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    points = document(capsys)["bench"]["cache"]["points"]
    code, out, _ = run(capsys, "--trace", ZIPF)
    assert code == 0
    rows = {words[0]: words for words in map(str.split, out.splitlines()) if words and words[0].isdigit()}
    for capacity in (2, 4, 8, 16):
        rates = {point["policy"]: point["hit_rate"] for point in points if point["capacity"] == capacity}
        shown = [f"{rates[name]:.1%}" for name in ("lru", "lfu", "lfru", "aging", "belady")]
        assert rows[str(capacity)][2:7] == shown


def test_markdown_has_its_picture_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "cache.md"
    code, out, err = run(capsys, "--trace", ZIPF, "--format", "markdown", "-o", str(report))
    assert (code, out) == (0, "")
    assert "written to" in err
    text = report.read_text(encoding="utf-8")
    assert "](cache_hit_rate.svg)" in text
    assert (tmp_path / "cache_hit_rate.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert "Belady (optimum)" in text
    assert "| seed | 0 |" in text


def test_without_matplotlib_the_report_comes_without_pictures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = tmp_path / "cache.md"
    code, _, err = run(capsys, "--trace", ZIPF, "--format", "markdown", "-o", str(report))
    assert code == 0
    assert "needs matplotlib, which this Python lacks: pip install matplotlib" in err
    assert ".svg" not in report.read_text(encoding="utf-8")


def test_a_trace_file_is_replayed_and_its_text_cannot_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = draw_zipf_trace(ZipfSettings.parse(ZIPF))
    path = tmp_path / "t.safetensors"
    save(type(trace)(**{**vars(trace), "model": "<b>\x1b[31mmodel</b>"}), path)
    code, out, _ = run(capsys, "--trace", str(path), "--format", "markdown")
    assert code == 0
    assert "<b>" not in out
    assert "\x1b" not in out
    assert "model" in out


def test_calls_that_overflow_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--trace", ZIPF, "--batch", "4", "--capacity", "2")
    assert "100% of calls" in out
    assert "no strict optimum" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trace", "missing.safetensors"), "missing.safetensors: cannot be read"),
        (("--trace", "zipf:colour=1"), "'colour=1' is none of"),
        (("--trace", ZIPF, "--capacity", "0"), "--capacity 0: expected slots"),
        (("--trace", ZIPF, "--capacity", "many"), "--capacity many: expected slots"),
        (
            ("--trace", ZIPF, "--policy", "fifo"),
            "--policy fifo: expected one of lru, lfu, lfru, aging, belady",
        ),
        (("--trace", ZIPF, "--scope", "model"), "--scope model: expected one of layer, global"),
        (("--trace", ZIPF, "--format", "junit"), "--format junit: expected one of table, json, markdown"),
        (("--trace", ZIPF, "-o", "no/such/folder/x.md"), "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("format", ["json", "markdown", "table"])
def test_a_stored_report_is_shown_as_it_would_have_been_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, format: str
) -> None:
    options = ("--trace", ZIPF, "--capacity", "4,8", "--batch", "2")
    stored = tmp_path / "cache.json"
    assert run(capsys, *options, "--format", "json", "-o", str(stored))[0] == 0
    written, shown = tmp_path / "a.out", tmp_path / "b.out"
    assert run(capsys, *options, "--format", format, "-o", str(written))[0] == 0
    assert main(["show", str(stored), "--format", format, "-o", str(shown)]) == 0
    if format == "json":  # of two runs, only the origin differs
        texts = [json.loads(file.read_text(encoding="utf-8")) for file in (stored, shown, written)]
        assert texts[0] == texts[1]
        assert texts[1].pop("origin") != texts[2].pop("origin")
        assert texts[1] == texts[2]
        return
    parts = [
        file.read_text(encoding="utf-8").partition("<details><summary>How this report was made")[0]
        for file in (shown, written)
    ]
    assert parts[0] == parts[1].replace("](a_", "](b_").replace("![a ", "![b ")


def test_a_stored_report_that_lost_a_part_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = document(capsys)
    stored = tmp_path / "cache.json"
    for broken in ({"other": {}}, {"cache": {}}):
        stored.write_text(json.dumps({**found, "bench": broken}), encoding="utf-8")
        assert main(["show", str(stored)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
