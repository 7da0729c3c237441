"""The page and the JSON of `check`."""

from typing import Any

import pytest
from machine_fakes import probes, sources

from moedoctor.diagnose.check.check import check
from moedoctor.diagnose.check.records import CheckResult, Finding, Problem
from moedoctor.reporters.pages.check import list_facts, make_check_page, summarize
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
    for line in ("why:   why it is so", "needs: a flag", "next:  do this"):
        assert f"            {line}\n" in text
    assert "seen:  vllm 0.18.0, VLLM_X 1, builds_for [120]\n" in text
    assert "error       MD001 nan_routing: a title\n" in text
    assert "needs" not in to_text(
        make_check_page(CheckResult(environment={}, findings=(finding(needs=None),)))
    )


def test_without_vllm_the_page_says_so_below_the_counts() -> None:
    bare = check(sources({"torch": "2.13.0"}), probes())
    lines = to_text(make_check_page(bare)).splitlines()
    assert lines[1:3] == [
        summarize(bare),
        "vLLM was not found in this Python: nothing about it was checked; install moedoctor beside it, "
        "or say `--python PATH`",
    ]


def test_the_first_line_counts() -> None:
    warnings = (finding(), finding(severity="warning"), finding(severity="warning"))
    result = CheckResult(
        environment={"collector_errors": {"gpus": "x"}},
        findings=warnings,
        conditional=(finding(severity="note"),),
        problems=(Problem("p", "error", "w", {}, "n"), Problem("q", "error", "w", {}, "n")),
    )
    counts = "1 error · 2 warnings · 2 problems · 1 not decided here · 1 fact missing"
    assert summarize(result) == counts
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("facts", "name", "text"),
    [
        ({"gpus": None}, "GPU", "unknown"),
        ({"gpus": [{"name": "A", "visible": False}]}, "GPU", "none of 1 is visible to CUDA programs"),
        (
            {"gpus": [{"name": "H200", "capability": "9.0", "memory_bytes": 141 << 30, "visible": True}] * 4},
            "GPU",
            "4 × H200 (9.0, 141 GiB)",
        ),
        ({"driver": "580.1", "cuda_driver": "13.0"}, "driver", "580.1 (CUDA 13.0)"),
        ({"nvcc": "13.0.88", "torch_cuda": "12.9"}, "CUDA toolkit", "nvcc 13.0.88, torch is built for 12.9"),
        (
            {"torch": "2.14.0", "collector_errors": {"torch_cuda": "FileNotFoundError"}},
            "CUDA toolkit",
            "no nvcc, what torch is built for is not known",
        ),
        ({"pinned_memory": {"works": False, "reason": "no"}}, "pinned memory", "FAILS: no"),
        ({"locked_memory_limit_bytes": 8 << 20}, "locked memory", "at most 8 MiB for a process"),
        ({"vllm": None}, "vllm", "not installed"),
        ({"vllm": None, "collector_errors": {"vllm": "x"}}, "vllm", "unknown"),
        ({"collector_errors": {"vllm": "OSError: x"}}, "no vllm", "OSError: x"),
        ({"env": {"VLLM_A": "1", "FLASHINFER_B": "2"}}, "variables", "VLLM_A=1 FLASHINFER_B=2"),
        ({"collectors": {"vllm": {"error": "no answer"}}}, "vllm says", "nothing: no answer"),
    ],
)
def test_facts_in_words(facts: dict[str, Any], name: str, text: str) -> None:
    assert dict(list_facts(facts))[name] == text
