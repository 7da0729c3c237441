"""The page and the JSON of `check`."""

from typing import Any

import pytest
from machine_fakes import probes, sources

from moedoctor.diagnose.check.check import check
from moedoctor.diagnose.check.records import CheckResult, Finding
from moedoctor.reporters.pages.check import make_check_page, summarize
from moedoctor.reporters.table import to_text

PACKAGES = {"vllm": "0.18.0", "torch": "2.13.0+cu129", "flashinfer-python": "0.6.6"}
GPU = ("NVIDIA H200", "9.0")


@pytest.fixture(scope="module")
def result() -> CheckResult:
    return check(sources(PACKAGES, gpu=GPU, wsl=True, torch_cuda="12.9"), probes())


def finding(**changed: Any) -> Finding:
    values: dict[str, Any] = {
        "id": "MD001", "name": "nan_routing", "title": "a title", "severity": "error", "confidence": 0.9,
        "why": "why it is so", "needs": "a flag",
        "evidence": {"vllm": "0.18.0", "variables": {"VLLM_X": "1"}, "builds_for": ["120"]},
        "next_step": "do this",
    }  # fmt: skip
    return Finding(**{**values, **changed})


def test_the_page_begins_with_the_counts_and_ends_with_the_facts(result: CheckResult) -> None:
    lines = to_text(make_check_page(result), width=100).splitlines()
    assert lines[1] == summarize(result)
    assert all(any(f"{each.id} {each.name}" in line for line in lines) for each in result.findings)
    assert lines.index("Environment") > lines.index("Not looked at")


def test_a_finding_shows_its_reason_evidence_and_next_step() -> None:
    text = to_text(make_check_page(CheckResult(environment={}, findings=(finding(),))))
    for part in ("why it is so", "a flag", "do this", "builds_for [120]", "error       MD001 nan_routing"):
        assert part in text


def test_without_vllm_the_page_says_so_below_the_counts() -> None:
    bare = check(sources({"torch": "2.13.0"}), probes())
    lines = to_text(make_check_page(bare)).splitlines()
    assert lines[1] == summarize(bare)
    assert lines[2].startswith("vLLM was not found in this Python: nothing about it was checked; install")
