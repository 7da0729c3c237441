"""`moedoctor bench --cache`: the report in three formats, its pictures, and bad input in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from moedoctor.cli import main
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


def test_a_trace_file_is_replayed_and_its_text_cannot_format(capsys, tmp_path):
    trace = draw_zipf_trace(ZipfSettings.parse(ZIPF))
    path = tmp_path / "t.safetensors"
    save(type(trace)(**{**vars(trace), "model": "<b>\x1b[31mmodel</b>"}), path)
    code, out, _ = run(capsys, "--trace", str(path), "--format", "markdown")
    assert code == 0
    assert "<b>" not in out
    assert "\x1b" not in out
    assert "model" in out
