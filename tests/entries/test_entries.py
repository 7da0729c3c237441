"""The entries are complete, and what they name exists in moedoctor and upstream."""

import re

import pytest
from packaging.specifiers import SpecifierSet

from moedoctor.entries import find_builtin_folder, find_entry, load_entries
from moedoctor.entries.entry import Entry, Rule
from moedoctor.faults.offload.untraceable_offload import FAILING
from moedoctor.fixes.backends.release_tables import load_releases as vllm_releases

PACKAGES = {"vllm", "flashinfer-python", "torch", "vllm-gguf-plugin", "triton_kernels"}
PACKAGES |= {"nvidia-cudnn-cu12", "nvidia-cudnn-cu13"}
REPOSITORIES = {
    "vllm-project/vllm", "vllm-project/vllm-gguf-plugin", "flashinfer-ai/flashinfer", "NVIDIA/cutlass",
    "NVIDIA/Megatron-LM", "NVIDIA/TensorRT-LLM", "sgl-project/sglang", "deepseek-ai/DeepGEMM",
}  # fmt: skip
WITHOUT_SCENARIO = {
    "activation_refused",
    "autotune_fault",
    "deepgemm_selected",
    "default_moe_config",
    "draft_backend",
    "eplb_refused",
    "foreign_kernel",
    "repack_memory",
    "triton_kernels_version",
    "trtllm_nan",
    "weight_sync",
}
"""Failures that are recognized and have no control here, a name a line."""
ENTRIES = pytest.mark.parametrize("entry", load_entries().values(), ids=lambda entry: entry.id)
RULES = [(entry, rule) for entry in load_entries().values() for rule in entry.affects]


def words(entry: Entry) -> str:
    texts = [text for rule in entry.affects for text in (rule.why, rule.next, rule.needs or "")]
    return "\n".join((entry.mechanism, entry.affected, entry.detection, entry.fix, entry.fixed, *texts))


def test_the_catalogue_is_complete_and_in_order() -> None:
    ids = list(load_entries())
    assert ids == sorted(ids)
    assert ids[:20] == [f"MD{number:03}" for number in range(1, 21)]
    scenarios = {file.stem for file in find_builtin_folder().glob("*.yaml")}
    names = {entry.name for entry in load_entries().values()}
    assert names - WITHOUT_SCENARIO == scenarios - {"backend_parity"}
    assert not WITHOUT_SCENARIO & scenarios


@ENTRIES
def test_links_are_threads_of_known_repositories_and_hold_those_that_the_text_names(entry: Entry) -> None:
    urls = [link.url for link in entry.links]
    assert urls
    assert len(urls) == len(set(urls))
    for url in urls:
        match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)/(pull|issues)/\d+", url)
        assert match is not None, url
        assert match[1] in REPOSITORIES
    named = set(re.findall(r"(?:vllm#|issues/|pull/)(\d{4,})", words(entry)))
    assert named <= {url.rpartition("/")[2] for url in urls}


def test_the_torch_releases_of_md005_are_those_that_its_module_names() -> None:
    spans = (f"{affected.first} to {affected.last}" for affected in load_entries()["MD005"].releases)
    assert " and ".join(spans) == FAILING


@pytest.mark.parametrize(("entry", "rule"), RULES, ids=lambda value: getattr(value, "id", ""))
def test_rules_name_packages_and_releases_that_exist(entry: Entry, rule: Rule) -> None:
    assert set(rule.when.packages) <= PACKAGES
    releases = [bound.version for bound in SpecifierSet(rule.when.packages.get("vllm", ""))]
    assert set(releases) <= set(vllm_releases()), "a bound that is no vLLM release is a slip"
    if rule.when.packages.get("vllm"):
        assert any(SpecifierSet(rule.when.packages["vllm"]).contains(release) for release in vllm_releases())


@ENTRIES
def test_notes_say_what_they_depend_on_and_come_last_because_the_first_matching_rule_wins(entry):
    severities = [rule.severity for rule in entry.affects]
    assert severities == sorted(severities, key=lambda severity: severity == "note")
    assert all(rule.needs for rule in entry.affects if rule.severity == "note")


def test_an_entry_is_found_by_id_and_name() -> None:
    for text in ("MD004", "md004", "arch_suffix", "arch-suffix", " ARCH_SUFFIX "):
        assert find_entry(text) is load_entries()["MD004"]
    assert find_entry("MD999") is find_entry("") is None
