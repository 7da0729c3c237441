"""Blocks that are made from code and reports: a figure that changes in a JSON file makes the check fail."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts_of_tests import load_script

SOURCE = "vllm-project/vllm#39593"
ENVIRONMENT = {"gpu": "NVIDIA H200", "vllm": "0.33.0", "torch": "2.14.0"}
MADE = {"command_line": "moedoctor bench --engine"}
PROMISES = """
speed:
  command: bench --engine
  promises:
    - {words: it is fast, value: "bench.engines.speeds[variant=fast].ratio", bound: ">= 1.2"}
size:
  command: bench --engine
  promises:
    - {words: it is small, value: bench.size, bound: "<= 2"}
same:
  command: bench --engine
  promises:
    - {words: tokens are the same, value: bench.tokens_same / bench.tokens_of, bound: ">= 0.9"}
"""


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script in an empty repository with one document, one scenario and one promise."""
    module = load_script("made_blocks", monkeypatch)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "OTHERS", {})
    for name in ("docs", "scenarios", "evidence", "reports/nvidia-h200-vllm-0.33.0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "evidence" / "promises.yaml").write_text(PROMISES)
    asked = {"subject": "a kernel", "conditions": "a GPU"}
    ours = {"key": "speed", "text": "ours is fast", "source": "moedoctor"}
    claims = [{"key": "cost", "text": "it costs 30 %", "source": SOURCE} | asked, ours]
    (tmp_path / "scenarios" / "nan_routing.yaml").write_text(json.dumps({"id": "MD001", "claims": claims}))
    return module


def store(blocks: ModuleType, name: str, **document: Any) -> None:
    """Store a report, and forget what was read before."""
    folder = blocks.ROOT / "reports" / "nvidia-h200-vllm-0.33.0"
    whole = {"command": "run", "environment": ENVIRONMENT, "scenarios": [], **document}
    (folder / f"{name}.json").write_text(json.dumps(whole))
    for function in (blocks._read, blocks._reports, blocks._claims, blocks._read_asked_claims):
        function.cache_clear()


def store_claims(blocks: ModuleType, figures: str, verdict: str = "refuted") -> None:
    texts = {"it costs 30 %": SOURCE, "ours is fast": "moedoctor"}
    judged = {"verdict": verdict, "reason": figures}
    claims = [{"text": text, "source": source, **judged} for text, source in texts.items()]
    store(blocks, "nan_routing", scenarios=[{"id": "MD001", "verdict": "proved", "claims": claims}])


def write(blocks: ModuleType, kind: str, place: str = "docs/page.md") -> Path:
    document: Path = blocks.ROOT / place
    document.write_text(f"before\n<!-- made: {kind} -->\nold\n<!-- made:end -->\nafter\n")
    return document


def test_a_changed_figure_makes_the_check_fail(blocks, capsys):
    document = write(blocks, "claims MD001")
    store_claims(blocks, "+55 %")
    assert blocks.main(["--write"]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- made: claims MD001 -->\n| failure |")
    assert text.endswith("<!-- made:end -->\nafter\n")
    link = "[NVIDIA H200, vLLM 0.33.0](../reports/nvidia-h200-vllm-0.33.0/nan_routing.json)"
    assert f"| a kernel; a GPU | **refuted** | +55 % | {link} |" in text
    assert "ours is fast" not in text, "what we say of ourselves is a promise"
    assert blocks.main([]) == 0
    store_claims(blocks, "+56 %")
    capsys.readouterr()
    assert blocks.main([]) == 1
    assert capsys.readouterr().err == "docs/page.md: a made block is not up to date: make readme\n"
    store_claims(blocks, "+55 %", "confirmed")
    assert blocks.main([]) == 1


def test_a_claim_that_nobody_tested_says_so_and_one_that_is_gone_has_no_row(blocks: ModuleType) -> None:
    document = write(blocks, "claims")
    store(blocks, "nan_routing")
    blocks.main(["--write"])
    assert "| **untested** | not measured yet |" in document.read_text()
    (blocks.ROOT / "scenarios" / "nan_routing.yaml").write_text("id: MD001\n")
    store_claims(blocks, "+55 %")
    blocks.main(["--write"])
    assert "30 %" not in document.read_text()


def test_a_stored_verdict_of_a_stand_in_decides_nothing(blocks: ModuleType) -> None:
    document = write(blocks, "claims")
    scenario = blocks.ROOT / "scenarios" / "nan_routing.yaml"
    scenario.write_text(scenario.read_text().replace('"a GPU"', '"a GPU", "stand_in": "a toy"'))
    store_claims(blocks, "+55 %")
    blocks.main(["--write"])
    assert "| **untested** | only a stand-in ran, a toy: +55 % |" in document.read_text()
    report = blocks._reports()[0][1]
    assert blocks.outcome(report) == "proved: MD001", "the index of the folder does not count it either"


def test_a_promise_is_kept_broken_or_not_run(blocks: ModuleType) -> None:
    document = write(blocks, "promises sp")
    blocks.main(["--write"])
    assert "| `speed` | it is fast | >= 1.2 |  | not run |  |" in document.read_text()
    assert "small" not in document.read_text()
    for ratio, shown in ((1.234, "1.23 | **kept**"), (1.1, "1.1 | **broken**")):
        speeds = [{"variant": "fast", "ratio": ratio}]
        store(blocks, "speed", origin=MADE, bench={"engines": {"speeds": speeds}})
        blocks.main(["--write"])
        assert f"| {shown} | [NVIDIA H200, vLLM 0.33.0]" in document.read_text()
