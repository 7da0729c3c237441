"""The twenty entries: all there, each whole, and honest about what moedoctor and upstream have."""

from __future__ import annotations

import re

import pytest
import typer.main
from packaging.specifiers import SpecifierSet

from moedoctor.cli import app
from moedoctor.commands.readme_table import failures_table
from moedoctor.entries import entries, find_entry
from moedoctor.entries.entry import Entry, Rule
from moedoctor.fixes.backends.release_tables import releases as vllm_releases

TITLES = {
    "MD001 nan_routing": "NaN router logits give one token the same expert K times",
    "MD002 unpinned_copy": "asynchronous copies without pinned memory, as on WSL",
    "MD003 offloaded_scales": "quantisation scales offloaded off the GPU: b_scales is not on GPU",
    "MD004 arch_suffix": "kernels built for the wrong CUDA architecture suffix: 120 / 120a / 120f",
    "MD005 untraceable_offload": "state_dict() in forward cannot be traced by Dynamo",
    "MD006 self_evicting_cache": "the LFRU expert cache evicts an expert that the same call needs",
    "MD007 cache_overflow": "more unique experts than cache slots: truncation computes with stale weights",
    "MD008 offload_garbage": "quantised MoE talks garbage with CPU offload",
    "MD009 offload_reinit": "offload refused by an assertion for non-default block sizes",
    "MD010 backend_override": "a backend setting that is unknown, removed, invalid or silently ignored",
    "MD011 duplicate_ids": "duplicate expert ids leave a row unwritten in FlashInfer's three-step sort",
    "MD012 kv_scales_missing": "FP8 KV cache declared, no scales shipped",
    "MD013 offload_noop": "--cpu-offload-gb without effect under the V2 runner, 0.17.1 to 0.27.1",
    "MD014 global_scale_mismatch": "w1 and w3 have different weight_scale_2",
    "MD015 input_scale_missing": "input_scale zero or absent: 1/0",
    "MD016 sentinel_ids": "topk_ids of -1 used as an index",
    "MD017 gate_up_order": "gate and up halves swapped",
    "MD018 scale_layout": "block scales linear where swizzled are expected, or the reverse",
    "MD019 workspace_aliasing": "running expert groups one by one through a shared workspace "
    "overwrites the sum",
    "MD020 stale_parameter": "a quant config that keeps the offloaded CPU parameter: illegal memory access",
}
PACKAGES = {"vllm", "flashinfer-python", "torch", "vllm-gguf-plugin"}
REPOSITORIES = {
    "vllm-project/vllm",
    "vllm-project/vllm-gguf-plugin",
    "flashinfer-ai/flashinfer",
    "NVIDIA/cutlass",
    "NVIDIA/Megatron-LM",
    "NVIDIA/TensorRT-LLM",
    "sgl-project/sglang",
}
ENTRIES = pytest.mark.parametrize("entry", entries().values(), ids=lambda one: one.id)
RULES = [(entry, rule) for entry in entries().values() for rule in entry.affects]


def words(entry: Entry) -> str:
    spoken = [text for rule in entry.affects for text in (rule.why, rule.next, rule.needs or "")]
    return "\n".join((entry.mechanism, entry.affected, entry.detection, entry.fix, entry.fixed, *spoken))


def test_the_catalogue_is_whole_and_in_order() -> None:
    assert {f"{one.id} {one.name}": one.title for one in entries().values()} == TITLES
    assert list(entries()) == sorted(entries())


@ENTRIES
def test_links_are_threads_of_known_repositories_each_once(entry: Entry) -> None:
    urls = [link.url for link in entry.links]
    assert len(urls) == len(set(urls))
    for url in urls:
        match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)/(pull|issues)/\d+", url)
        assert match is not None, url
        assert match[1] in REPOSITORIES


@ENTRIES
def test_pull_requests_that_the_text_names_are_vllms_or_linked(entry: Entry) -> None:
    linked = {link.url.rpartition("/")[2] for link in entry.links}
    assert entry.links
    named = set(re.findall(r"(?:vllm#|issues/|pull/)(\d{4,})", words(entry)))
    assert named <= linked


@ENTRIES
def test_commands_that_the_text_names_exist(entry: Entry) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"`moedoctor (\w+)", words(entry))) <= known


@ENTRIES
def test_nothing_of_this_workplace_and_no_package_host_is_named(entry: Entry) -> None:
    said = words(entry).lower()
    for word in ("session", "helper", "/work", "pypi.org", "todo", "fixme"):
        assert word not in said


@ENTRIES
def test_texts_fit_a_page(entry: Entry) -> None:
    for text in (entry.mechanism, entry.affected, entry.detection, entry.fix):
        assert 20 < len(text) < 2500
        assert max(map(len, text.splitlines())) <= 140
    assert "\n" not in entry.title
    assert len(entry.where) < 80
    assert len(entry.fixed) < 80


@pytest.mark.parametrize(("entry", "rule"), RULES, ids=lambda one: getattr(one, "id", ""))
def test_rules_name_packages_and_releases_that_exist(entry: Entry, rule: Rule) -> None:
    assert set(rule.when.packages) <= PACKAGES
    releases = [one.version for one in SpecifierSet(rule.when.packages.get("vllm", ""))]
    assert set(releases) <= set(vllm_releases()), "a bound that is no vLLM release is a slip"
    if rule.when.packages.get("vllm"):
        assert any(SpecifierSet(rule.when.packages["vllm"]).contains(one) for one in vllm_releases())


@ENTRIES
def test_notes_come_last_because_the_first_rule_that_fits_speaks(entry: Entry) -> None:
    severities = [rule.severity for rule in entry.affects]
    assert severities == sorted(severities, key=lambda one: one == "note")


@ENTRIES
def test_a_note_says_what_it_depends_on(entry: Entry) -> None:
    assert all(rule.needs for rule in entry.affects if rule.severity == "note")


@pytest.mark.parametrize("text", ["MD004", "md004", "arch_suffix", "arch-suffix", " ARCH_SUFFIX "])
def test_an_entry_is_found_by_id_and_name(text: str) -> None:
    found = find_entry(text)
    assert found is not None
    assert found.id == "MD004"


def test_what_is_no_entry_is_not_found() -> None:
    assert find_entry("MD021") is None
    assert find_entry("") is None


def test_the_readme_table_has_a_row_for_each_entry() -> None:
    head, line, *rows = failures_table().splitlines()
    assert (head.count("|"), line) == (6, "| --- | --- | --- | --- | --- |")
    assert [row.split("`")[1] for row in rows] == list(entries())
    assert all(row.count("|") == 6 for row in rows)
    assert rows[0].endswith("| yes |")
    first = entries()["MD001"]
    assert all(text in rows[0] for text in (first.name, first.title, first.where, first.fixed))
