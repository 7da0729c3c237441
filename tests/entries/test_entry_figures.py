"""The figures in catalogue entries and in docs agree with the stored reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from moedoctor.diagnose.check.machine import within
from moedoctor.entries import entries
from moedoctor.faults.offload.untraceable_offload import FAILING

ROOT = Path(__file__).parent.parent.parent
REPORTS = ROOT / "reports"


def entry(id: str) -> str:
    return document(f"moedoctor/entries/{id}.md")


def document(path: str) -> str:
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def evidence(report: str, id: str, subject: str, **parameters: Any) -> list[Mapping[str, Any]]:
    """Return the evidence of a subject's cases that ran with these parameters, in the report's order."""
    document = json.loads((REPORTS / report).read_text(encoding="utf-8"))
    (scenario,) = (scenario for scenario in document["scenarios"] if scenario["id"] == id)
    figures = [
        case["evidence"]
        for case in scenario["cases"]
        if case["subject"] == subject
        and case["verdict"] != "skipped"
        and parameters.items() <= case["parameters"].items()
    ]
    assert figures, f"{report} holds no such case of {id}"
    return figures


NEWEST = "nvidia-h200-vllm-0.33.0"
H100 = "nvidia-h100-vllm-0.33.0"
OURS = {"OURS bf16", "OURS fp8", "OURS nvfp4"}


def claim(report: str, id: str, start: str, folder: str = "nvidia-h200") -> tuple[str, Mapping[str, Any]]:
    """Return the verdict and the evidence of the claim whose text starts with `start`."""
    stored = json.loads((REPORTS / folder / report).read_text(encoding="utf-8"))
    (scenario,) = (scenario for scenario in stored["scenarios"] if scenario["id"] == id)
    (result,) = (claim for claim in scenario["claims"] if claim["text"].startswith(start))
    return result["verdict"], result["evidence"]


def percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.0f} %"


def test_md001_trace() -> None:
    text = entry("MD001")
    start = "The NaN trace costs at most 5 % of a decode step of layers"
    verdict, newer = claim("nan_overhead.json", "MD001", start, NEWEST)
    assert verdict == "confirmed"
    wall, apart, events, events_apart = shares_of_a_step(newer)
    assert f"it adds {wall} to a decode step of 12 layers of Qwen3-30B-A3B's size in 0.33.0" in text
    assert f"two identical engines differ by {apart}; by events around the model it is {events}" in text
    assert f"they differ by {events_apart}. That is below the goal of 5 %" in text
    index = document(f"reports/{H100}/README.md")
    for model, words, line in (
        (start, "of Qwen3-30B-A3B's size have", "12 layers of Qwen3-30B-A3B's size"),
        ("The NaN trace costs at most 5 % of a decode step of a tiny", "launches, has", "4 tiny layers"),
    ):
        verdict, newer = claim("nan_overhead.json", "MD001", model, H100)
        assert verdict == "confirmed"
        wall, apart, events, events_apart = shares_of_a_step(newer)
        assert f"{words} {wall} ({apart}) and {events} ({events_apart})" in text
        assert f"| {line} | {wall} ({apart}) | {events} ({events_apart}) |" in index


def test_the_trace_in_0_21_0() -> None:
    start = "The NaN trace costs at most 5 % of a decode step of"
    verdict, figures = claim("nan_overhead.json", "MD001", f"{start} layers")
    assert verdict == "confirmed"
    _, apart, _, events_apart = shares_of_a_step(figures)
    text = document("reports/nvidia-h200/README.md")
    assert f"identical engines differ by {apart} by the host's clock, and by {events_apart} by events" in text
    assert claim("nan_overhead.json", "MD001", f"{start} a tiny")[0] == "untested"


def test_what_the_trace_costs_in_the_index() -> None:
    index = document(f"reports/{NEWEST}/README.md")
    start = "The NaN trace costs at most 5 % of a decode step of"
    _, layers = claim("nan_overhead.json", "MD001", f"{start} layers", NEWEST)
    verdict, tiny = claim("nan_overhead.json", "MD001", f"{start} a tiny", NEWEST)
    assert verdict == "untested"
    *_, events, apart = shares_of_a_step(layers)
    assert f"size: {events} by events on the GPU, identical engines {apart} apart" in index
    assert f"for a tiny model {shares_of_a_step(tiny)[2]}, which is too close to 5 % to tell" in index


def shares_of_a_step(figures: Mapping[str, Any]) -> list[str]:
    """Return what the trace adds and how far identical engines are apart, by the clock, then by events."""
    (row,) = figures["rows"]
    of_step = row["gpu_step_ms_off"] / row["step_ms_off"]
    return [
        f"{100 * row[f'{kind}{key}'] * share:.1f} %"
        for kind, share in (("", 1.0), ("gpu_", of_step))
        for key in ("overhead", "noise")
    ]


def test_md005() -> None:
    """Which releases of torch fail, by their reports; ours compiles under all of them."""
    text = entry("MD005")
    fails = ("2.10.0", "2.11.0", "2.12.1", "2.14.0", "2.14.1", "2.15.0")
    assert "The lines fail under 2.10.0, 2.11.0, 2.12.1, 2.14.0, 2.14.1 and 2.15.0" in text
    assert "and compile as one graph under 2.13.0" in text
    for torch in (*fails, "2.13.0"):
        report = f"releases/torch-{torch}.json"
        for figures in evidence(report, "MD005", "faulty"):
            assert figures["torch"].startswith(torch)
            assert bool(figures["error"]) is (torch in fails)
        assert not any(figures["error"] for figures in evidence(report, "MD005", "fixed"))
    error, warning = (rule.when.packages["torch"] for rule in entries()["MD005"].affects)
    assert all(within(error, torch) for torch in fails)
    assert not any(within(range_, "2.13.0") for range_ in (error, warning))
    for torch in ("2.9.1", "2.15.1", "2.16.0"):
        assert not within(error, torch), "it was not run"
        assert within(warning, torch)
    spans = (f"{affected.first} to {affected.last}" for affected in entries()["MD005"].releases)
    assert " and ".join(spans) == FAILING


def test_md005_own_methods() -> None:
    """Which releases of vLLM fail with the torch that each pins, by their own method."""
    verdicts: dict[str, set[str]] = {}
    for file in sorted((REPORTS / "releases").glob("vllm-*.json")):
        for scenario in json.loads(file.read_text(encoding="utf-8"))["scenarios"]:
            for case in scenario["cases"]:
                if scenario["id"] == "MD005" and case["tier"] == "library":
                    verdicts.setdefault(file.stem.removeprefix("vllm-"), set()).add(case["verdict"])
    fails, passes = (
        sorted((release for release, those in verdicts.items() if those == {verdict}), key=Version)
        for verdict in ("reproduced", "clean")
    )
    assert {*fails, *passes} == verdicts.keys()
    assert (
        f"The method of {enumerated(fails)} fails with the torch that each pins;"
        f" those of {enumerated(passes)} do not"
    ) in entry("MD005")


def test_md005_engines() -> None:
    text = entry("MD005")
    for folder, release, error in (
        (NEWEST, "0.33.0", "setattr() is not supported on type OrderedDict"),
        ("nvidia-h200", "0.21.0", "Dynamo does not know how to trace builtin operator `setattr`"),
    ):
        assert f"`reports/{folder}/offload_engines.md`" in text
        (damaged,) = evidence(f"{folder}/offload_engines.json", "MD005", "faulty", engine="compiled")
        (crash,) = (row for row in damaged["table"] if row["outcome"] == "crash 1")
        assert damaged["vllm"] == release
        assert error in crash["detail"]
        (repaired,) = evidence(f"{folder}/offload_engines.json", "MD005", "fixed", engine="compiled")
        (offloaded,) = (row for row in repaired["table"] if row["host_bytes"])
        assert (offloaded["outcome"], offloaded["backend"]) == ("same tokens", "BF16 TRITON")
    (compiled,) = evidence(f"{NEWEST}/offload_table_compiled.json", "MD003", "fixed", engine="compiled")
    same = {row["backend"] for row in compiled["table"] if row["outcome"] == "same tokens"}
    assert same == {"BF16 TRITON", "NVFP4 MARLIN", "NVFP4 HUMMING", "NVFP4 EMULATION"}
    assert compiled["same"] == compiled["cells"]
    assert (
        f"NVFP4 on MARLIN, HUMMING and EMULATION too (`reports/{NEWEST}/offload_table_compiled.md`)" in text
    )


def releases_stored(id: str) -> list[str]:
    """Return the releases of vLLM in reports/releases in which functions of this failure ran."""
    ran = set()
    for file in (REPORTS / "releases").glob("*.json"):
        stored = json.loads(file.read_text(encoding="utf-8"))
        for scenario in stored["scenarios"]:
            for case in scenario["cases"]:
                if scenario["id"] == id and case["tier"] == "library" and case["verdict"] != "skipped":
                    ran.add(case["subject"].partition("@")[2] or stored["environment"]["vllm"])
    return sorted(ran, key=Version)


def enumerated(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def test_the_releases_that_ran_functions_of_offload_are_named() -> None:
    stored = releases_stored("MD009")
    assert stored == releases_stored("MD013")
    assert f"are stored for the functions of {enumerated(stored)} (" in document("docs/wsl.md")
    refusing = [release for release in stored if Version(release) < Version("0.20.0")]
    others = stored[len(refusing) :]
    assert (
        f"reports of {enumerated(refusing)}, which refuse, and of {enumerated(others)}, which do not"
    ) in entry("MD009")


def test_md006() -> None:
    text = entry("MD006")
    _, figures = claim("expert_cache_faults.json", "MD006", "Eviction by frequency")
    chosen = [row for row in figures["rows"] if row["top_k"] in (6, 8)]
    by_slots = {
        times: [row["pr_share"] for row in chosen if row["slots"] == times * row["top_k"]]
        for times in (1, 2, 4)
    }
    assert f"{percent(min(by_slots[1]))} to {percent(max(by_slots[1]))} of the calls" in text
    twice = f"With twice the slots it is {min(by_slots[2]):.2%} to {max(by_slots[2]):.1%}"
    assert f"{twice}, with four times none".replace("%", " %") in text
    assert max(by_slots[4]) == max(row["plain_lru_share"] for row in figures["rows"]) == 0
    verdict, speed = claim("expert_cache_faults.json", "MD006", "LFRU is 5 % faster")
    assert verdict == "refuted"
    assert "with 8 and with 16 slots a layer, decoding" in text
    assert [row["slots"] for row in speed["rows"]] == [8, 16]
    assert all(row["lru_over_lfru_time"] <= 1 for row in speed["rows"]), "no faster than with LRU"


def test_md007() -> None:
    text = entry("MD007")
    _, theirs = claim("expert_cache_faults.json", "MD007", "Computing a layer in 2, 4 and 8 groups")
    assert theirs["tokens"] == 1024
    added = [percent(row["overhead"]) for row in theirs["rows"]]
    assert f"groups add {added[0]}, {added[1]} and {added[2]} if vLLM's" in text
    eager = [percent(row["overhead_eager_wall_clock"]) for row in theirs["rows"]]
    assert f"and {eager[0]}, {eager[1]} and {eager[2]} with the host's work" in text
    _, ours = claim("expert_cache_faults.json", "MD007", "Our layer costs")
    assert f"they add at most {percent(max(row['overhead'] for row in ours['rows']))}." in text
    in_turn = [percent(row["overhead_in_turn"]) for row in ours["rows"]]
    assert f"then they add {in_turn[0]}, {in_turn[1]} and {in_turn[2]}." in text
    newer, older = (cache_engines(folder) for folder in (NEWEST, "nvidia-h200"))
    alike = [row for row in newer if row["detail"] == "same logprobs"]
    others = {row["backend"] for row in newer if row not in alike}
    assert f"{len(newer)} of {len(newer)} engines of vLLM 0.33.0 gave the tokens" in text
    assert f"and {len(alike)} its logprobs; the other {len(newer) - len(alike)} computed on HUMMING" in text
    assert others == {"NVFP4 HUMMING"}
    same = sum(row["detail"] == "same logprobs" for row in older)
    assert f"it was {len(older)} of {len(older)} engines, and {same} for the logprobs" in text


def cache_engines(folder: str) -> list[Mapping[str, Any]]:
    """Return the rows of the engines with an expert cache and right experts; all give the same tokens."""
    verdict, figures = claim("expert_cache.json", "MD007", "Engines with 2 and 6 slots", folder)
    rows = [row for row in figures["rows"] if not row["planted"]]
    assert verdict == "confirmed"
    assert {row["outcome"] for row in rows} == {"same tokens"}
    return rows


def test_logprobs_of_engines_with_an_expert_cache() -> None:
    newer, older = (cache_engines(folder) for folder in (NEWEST, "nvidia-h200"))
    differ = [row for row in newer if row["detail"] != "same logprobs"]
    (other,) = (row for row in older if row["detail"] != "same logprobs")
    assert {row["backend"] for row in differ} == {"NVFP4 HUMMING"}
    assert max(row["detail"] for row in differ) == "logprobs differ by up to 0.12"
    assert other["detail"] == "logprobs differ by up to 0.062"
    assert (other["backend"], other["mode"], other["slots"]) == ("FP8 MARLIN", "eager", 2)
    assert sum("MARLIN" in row["backend"] for row in older) == 8
    text = document("docs/expert-cache.md")
    assert "those of `humming` differ by up to 0.12 in vLLM 0.33.0" in text
    assert "one of eight engines with `marlin` by 0.062 in 0.21.0 (FP8, eager, 2 slots)" in text
    index = document(f"reports/{NEWEST}/README.md")
    assert f"in {len(older)} of {len(older)} engines, and its logprobs in {len(older) - 1}; FP8 on" in index
    assert f"in {len(newer) - len(differ)} of {len(newer) - len(differ)} engines; on HUMMING" in index


def test_decode_speed_of_engines_with_our_kernels_on_an_h100() -> None:
    verdict, figures = claim("moe_engines_speed.json", "MD008", "Decode with MOEDOCTOR_FIXES=moe", H100)
    assert verdict == "confirmed"
    text = document(f"reports/{H100}/README.md")
    for row in figures["rows"]:
        beside = f"{row['quantization']} beside {row['backend']}, {row['batch']}"
        assert f"| {beside} | {row['share']:.2f} | {row['spread']:.2f} |" in text


def test_decode_speed_of_engines_with_our_kernels() -> None:
    verdict, figures = claim("moe_engines_speed.json", "MD008", "Decode with MOEDOCTOR_FIXES=moe", NEWEST)
    assert verdict == "confirmed"
    assert {row["layers"] for row in figures["rows"]} == {48}
    text = document(f"reports/{NEWEST}/README.md")
    shares = {}
    for row in figures["rows"]:
        shares.setdefault(f"{row['quantization']} beside {row['backend']}", []).append(
            f"{row['share']:.2f}, {row['gpu_share']:.2f}"
        )
    for beside, cells in shares.items():
        assert f"| {beside} | {' | '.join(cells)} |" in text
    share = {(row["quantization"], row["batch"]): f"{row['share']:.2f}" for row in figures["rows"]}
    words = (
        f"BF16 has {share['BF16', 1]} and {share['BF16', 8]} of TRITON's tokens per second at batch 1 and 8, "
        f"NVFP4 {share['NVFP4', 1]} and {share['NVFP4', 8]} of HUMMING's, FP8 {share['FP8', 1]} and "
        f"{share['FP8', 8]} of TRITON's"
    )
    assert words in document("CHANGELOG.md")
    assert min(row[key] for row in figures["rows"] for key in ("share", "gpu_share")) >= 0.95
    _, figures = claim("moe_engines_speed.json", "MD008", "Decode with MOEDOCTOR_FIXES=moe", H100)
    assert {row["layers"] for row in figures["rows"]} == {12}
    steps = [
        row[key] for row in figures["rows"] if row["batch"] == 1 for key in ("step_ms", "step_ms_of_backend")
    ]
    assert f"at batch 1 a step takes {min(steps):.2f} to {max(steps):.2f} ms in all formats" in text


def test_the_commits_of_reports_of_machines_that_did_nothing_else() -> None:
    text = document(f"reports/{NEWEST}/README.md")
    start, end = "These ran on machines that did nothing else: ", ". Tokens per second"
    for made in text.partition(start)[2].partition(end)[0].split("; "):
        commit, _, names = made.removeprefix("of ").partition(" ")
        for name in names.replace(" and ", ", ").split(", "):
            stored = json.loads((REPORTS / NEWEST / f"{name}.json").read_text("utf-8"))
            assert stored["origin"]["commit"].startswith(commit), name
            assert not stored["origin"]["dirty"], name


def test_md011() -> None:
    text = entry("MD011")
    _, figures = claim("duplicate_ids.json", "MD011", "The newest release")
    releases = [release["release"].removeprefix("flashinfer@") for release in figures["releases"]]
    assert f"with {', '.join(releases[:-1])} and {releases[-1]} (`reports" in text
    assert all(release["wrong sum, no error"] for release in figures["releases"]), (
        "every release, the newest too"
    )
    assert (
        "in an illegal memory access up to 0.6.8.post1 and dropped the duplicate in 0.6.13 and later" in text
    )
    assert [release["release"] for release in figures["releases"] if "repeat dropped" in release] == [
        f"flashinfer@{release}" for release in ("0.6.13", "0.7.2.post1")
    ]
    _, fused = claim("duplicate_ids.json", "MD011", "Up to 256 tokens")
    for row in fused["most_local_experts"]:
        assert f"the fused one takes {row['128 tokens']} and declines {row['128 tokens'] + 1}" in text
        assert f"129 to 256 tokens already {row['256 tokens'] + 1} local experts or more" in text
        assert row["129 tokens"] == row["256 tokens"]
    for start in ("After moedoctor.fixes.routing.deduplicate", "Distinct ids", "Ids of -1"):
        assert claim("duplicate_ids.json", "MD011", start)[0] == "confirmed"
    _, cost = claim("duplicate_ids.json", "MD011", "validate_expert_ids takes")
    (row,) = cost["rows"]
    times = sorted((row["validate_us"], row["deduplicate_us"]))
    assert f"Either check takes {times[0]:.1f} to {times[1]:.1f} µs for 128 tokens" in text


def test_md016() -> None:
    text = entry("MD016")
    _, figures = claim("sentinel_ids.json", "MD016", "The Triton and Marlin paths")
    rows = {(row["path"], row["ids"]): row for row in figures["rows"]}
    paths = ("TRITON bf16", "TRITON fp8", "MARLIN nvfp4", "MARLIN fp8")
    assert {path for path, _ in rows} == set(paths)
    assert not any(rows[path, "no -1"]["rows_wrong"] for path in paths), "all right without -1"
    bf16, fp8, nvfp4, marlin = (rows[path, "padding rows of -1"] for path in paths)
    assert nvfp4["death"] == "TimeoutError: its kernels had not ended after 10 s"
    assert "Marlin NVFP4 does not end: its kernels still ran after 10 s" in text
    assert bf16["rows_wrong"] == fp8["rows_wrong"]
    assert bf16["rows_without_empty_slots_wrong"] == fp8["rows_without_empty_slots_wrong"]
    assert (
        f"Triton BF16 and FP8 {bf16['rows_wrong']} of {bf16['rows']} rows, "
        f"{bf16['rows_without_empty_slots_wrong']} of them without any -1; Marlin FP8 {marlin['rows_wrong']} "
        f"of {marlin['rows']}, {marlin['rows_without_empty_slots_wrong']} of them without any -1"
    ) in text
    bf16, fp8, nvfp4, marlin = (rows[path, "one slot of -1 a row"] for path in paths)
    assert bf16["rows_wrong"] == nvfp4["rows_wrong"]
    assert (
        f"Triton BF16 and Marlin NVFP4 {bf16['rows_wrong']} of {bf16['rows']} rows wrong, "
        f"Marlin FP8 {marlin['rows_wrong']}, Triton FP8 {fp8['rows_wrong']}."
    ) in text
    _, align = claim("sentinel_ids.json", "MD016", "The alignment kernel")
    (padding,) = (row for row in align["rows"] if row["call"] == "padding rows of -1")
    assert (
        f"gives {padding['empty_slots_in_blocks']} of {padding['empty_slots']} empty slots to real experts "
        f"and loses {padding['slots_lost']} slots of other rows"
    ) in text
    for folder, expected in (("nvidia-h200", {"OURS bf16", "OURS nvfp4"}), (NEWEST, OURS)):
        verdict, ours = claim("sentinel_ids.json", "MD016", "Our MoE kernels", folder)
        ran = {row["path"] for row in ours["rows"] if "skipped" not in row}
        assert (verdict, ran) == ("confirmed", expected)
    _, newest = claim("sentinel_ids.json", "MD016", "The Triton and Marlin paths", NEWEST)
    assert {row["path"] for row in newest["rows"]} == set(paths)
    assert not any(row["rows_without_empty_slots_wrong"] for row in newest["rows"])
    wrong = {row["ids"]: (row["rows_wrong"], row["rows"]) for row in newest["rows"]}
    assert len({(row["ids"], row["rows_wrong"]) for row in newest["rows"]}) == 3, "the same on each path"
    assert (
        f"{wrong['padding rows of -1'][0]} of {wrong['padding rows of -1'][1]} rows with padding rows" in text
    )
    assert f"all {wrong['one slot of -1 a row'][1]} with one empty slot in each" in text
    assert wrong["one slot of -1 a row"] == (48, 48)


def test_md019() -> None:
    _, figures = claim("expert_cache_faults.json", "MD019", "vLLM's modular kernel")
    wrong, of = (
        {
            what: sum(row[key] for row in figures["rows"] if row["what"] == what)
            for what in ("what apply returns", "the result before apply copies it")
        }
        for key in ("wrong_rows", "rows")
    )
    (returned, before), (tokens, _) = wrong.values(), of.values()
    assert before == tokens
    assert f"{returned} of {tokens} tokens were wrong with the first result and all {before} with" in entry(
        "MD019"
    )
    assert {row["groups"] for row in figures["rows"]} == {2, 4}


def test_expert_cache_page() -> None:
    text = document("docs/expert-cache.md")
    stored = json.loads((REPORTS / "nvidia-h200/expert_cache_speed.json").read_text(encoding="utf-8"))
    cache = stored["bench"]["cache"]
    gained = [row["measured"] for row in cache["limits"] if row["claim"].endswith("per second over the PR's")]
    assert len(gained) == 4
    assert f"{min(gained):.1f} to {max(gained):.1f} times as fast" in text
    shares = {row["subject"]: row.get("of_pinned") for row in cache["measured"]["misses"]}
    rates = {percent(shares[f"ours: {engine} engine"]) for engine in ("device", "host")}
    assert len(rates) == 1
    assert f"{rates.pop()} of the rate of a pinned copy, with the device engine and with the host" in text
    groups = cache["measured"]["groups"]
    assert [row["groups"] for row in groups] == [2, 4, 8]
    for key, before in (("overhead", "side by side"), ("overhead_in_turn", "a full cache requires,")):
        costs = [percent(row[key], "+") for row in groups]
        assert f"{before} they cost {costs[0]}, {costs[1]} and {costs[2]}" in text
    in_turn = [row for row in cache["limits"] if "one after another" in row["claim"]]
    aims = [percent(row["limit"]) for row in in_turn]
    assert f"The aims were {aims[0]}, {aims[1]} and {aims[2]}, so 2 and 4 groups miss them" in text
    assert [row["verdict"] for row in in_turn] == ["refuted", "refuted", "confirmed"]
    slowest = {
        aging: min(
            row["accesses_per_second"] / 1e6
            for row in cache["measured"]["replays"]
            if (row["policy"] == "aging") is aging
        )
        for aging in (False, True)
    }
    assert f"replays {slowest[False]:.2f} million accesses a second on one core at the slowest of lru" in text
    assert f"and {slowest[True]:.2f} million at the slowest of aging" in text


def test_expert_cache_page_gain() -> None:
    text, index = document("docs/expert-cache.md"), document(f"reports/{NEWEST}/README.md")
    verdicts = [
        claim("expert_cache_gain.json", "MD007", words, NEWEST)[0]
        for words in ("With policy aging", "With text that is new", "The first reply after a prompt")
    ]
    assert verdicts == ["confirmed"] * 3
    assert "All three claims are confirmed" in index
    _, figures = claim("expert_cache_gain.json", "MD007", "With policy aging", NEWEST)
    rows = {(row["cache"], row["batch"]): row for row in figures["rows"]}
    new, eight = ({slots: rows[str(slots), batch] for slots in (16, 32, 64)} for batch in (1, 8))
    old = {row["slots"]: row for row in figures["rows"] if "policy" in row["cache"] and row["batch"] == 1}

    def listed(values: Mapping[int, float], form: str) -> str:
        words = [format(values[slots], form) for slots in (16, 32, 64)]
        return f"{words[0]}, {words[1]} and {words[2]}"

    def of(found: Mapping[int, Mapping[str, Any]], key: str, turn: int | None = None) -> dict[int, float]:
        return {slots: row[key] if turn is None else row[key][turn] for slots, row in found.items()}

    gains = of(new, "times_before")
    assert f"are {listed(gains, '.2f')} times as fast as the old ones" in text
    assert f"By events on the GPU they are {listed(of(new, 'gpu_times_before'), '.2f')} times" in text
    assert min(gains.values()) >= 1.2
    assert all(row["control_changes_tokens"] and row["texts"] == 3 for row in new.values())
    _, older = claim("expert_cache_gain.json", "MD007", "With policy aging", H100)
    before = {
        row["slots"]: row for row in older["rows"] if row["cache"] == str(row["slots"]) and row["batch"] == 1
    }
    assert f"and one text, the gain was {listed(of(before, 'times_before'), '.2f')} times" in text
    first_before = {slots: row["rounds"][0] / row["rounds"][-1] for slots, row in before.items()}
    assert f"new text had {listed(first_before, '.2f')} times the speed of the same again" in text
    assert f"{listed(of(new, 'tokens_per_second'), '.1f')} tokens per second for one sequence" in text
    bounds = of(new, "bus_bound_tokens_per_second")
    assert f"where the bus allows {listed(bounds, '.1f')}." in text
    for form, values in (
        ("from 64 slots new text {} and the same again {}", new[64]),
        ("with the old defaults {} and {}", old[64]),
    ):
        assert form.format(*(f"{rate:.1f}" for rate in values["rounds"])) in text
    shares = {slots: eight[slots]["rounds"][0] / new[slots]["rounds"][0] for slots in new}
    limits = of(eight, "bus_bound_rounds", 0)
    assert (
        f"eight sequences together have {listed(shares, '.2f')} times the speed of one: "
        f"{listed(of(eight, 'rounds', 0), '.1f')}, where the bus allows {listed(limits, '.1f')}." in text
    )
    changes = document("CHANGELOG.md")
    assert f"together have {listed(shares, '.2f')} times the speed of one from 16, 32 and 64" in changes
    assert f"decodes {listed(gains, '.2f')} times as fast as with the old defaults from 16" in changes
    again = f"{listed(of(new, 'rounds', 1), '.1f')} beside {listed(of(eight, 'rounds', 1), '.1f')} of eight"
    assert f"whose experts are then there: {again} together" in text
    assert all(row["sequences_as_before"] == row["sequences"] == 3 for row in new.values())
    assert {slots: row["sequences_as_before"] for slots, row in eight.items()} == {16: 0, 32: 0, 64: 8}
    assert "From 64 slots all eight have the tokens of the old defaults" in text
    assert "From 16 and 32 slots none of the eight has" in text
    together_agree = {
        (row["slots"], row["rounds_agree"])
        for row in figures["rows"]
        if row["batch"] == 8 and "overlap=own" not in row["cache"]
    }
    assert together_agree == {(16, False), (32, False), (64, True)}, "with the old and the new defaults"
    packed = {row["packed"]: row["pinned_bytes"] / 2**30 for row in figures["rows"]}
    assert (
        f"page-locked memory: {packed[True]:.1f} GiB for Qwen3-30B-A3B in BF16, or {packed[False]:.1f} GiB"
        " with `packed=0`"
    ) in text
    replies = {
        slots: row["first_reply_tokens_per_second"] / row["repeated_reply_tokens_per_second"]
        for slots, row in new.items()
    }
    assert f"after a prompt of 256 tokens has {listed(replies, '.2f')} times the speed of the same" in text
    rounds = {slots: row["rounds"][0] / row["rounds"][1] for slots, row in new.items()}
    assert f"which leaves few, new text has {listed(rounds, '.2f')} times the speed" in text
    own = rows["64:overlap=own", 1]
    waits = {slots: rows[f"{slots}:overlap=0", 1] for slots in (16, 32, 64)}
    for key, start, again in (
        ("times_before", "shape decoded", "times as fast as with the old defaults from 16, 32 and 64 slots"),
        ("gpu_times_before", "on the GPU", "times"),
    ):
        today, waiting = (listed(of(found, key), ".2f") for found in (new, waits))
        assert f"{start} {today} {again}, and {waiting} times with `overlap=0`" in text
        apart = [abs(new[slots][key] / waits[slots][key] - 1) for slots in waits]
        assert max(apart) < 0.025, "it gains nothing"
        assert own[key] / waits[64][key] > 1.025, "it gains"
    assert (
        f"it decoded {own['times_before']:.2f} times as fast as the old defaults, and by events on the GPU "
        f"{own['gpu_times_before']:.2f} times" in text
    )
    together = (rows["64:overlap=own", 8]["times_before"], eight[64]["times_before"])
    assert f"it was {together[0]:.2f} times, and {together[1]:.2f} times with today's defaults" in text
    assert own["rounds_agree"]
    assert own["sequences_as_before"] == 0

    def cells(values: Mapping[int, float], gains: Mapping[int, float] | None = None) -> str:
        return " | ".join(
            f"{rate:.1f}" + (f" ({gains[slots]:.2f} times)" if gains else "")
            for slots, rate in sorted(values.items())
        )

    assert f"| the old defaults | {cells(of(old, 'tokens_per_second'))} |" in index
    assert f"| today's | {cells(of(new, 'tokens_per_second'), gains)} |" in index
    rates = cells(of(waits, "tokens_per_second"), of(waits, "times_before"))
    assert f"| with `overlap=0` | {rates} |" in index
    rate = f"{own['tokens_per_second']:.1f} ({own['times_before']:.2f} times)"
    assert f"| with `overlap=own` | not run | not run | {rate} |" in index
    assert f"| the bus allows with today's | {cells(bounds)} |" in index
    assert f"| today's, new text | {cells(of(new, 'rounds', 0))} |" in index
    assert f"| eight sequences, new text | {cells(of(eight, 'rounds', 0))} |" in index
    assert f"| the bus allows | {cells(limits)} |" in index


def qwen(folder: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of engines of Qwen3-30B-A3B's shape with an expert cache."""
    verdict, figures = claim("expert_cache_qwen.json", "MD007", "Qwen3-30B-A3B's shape", folder)
    assert verdict == "confirmed"
    return list(figures["rows"])


def test_expert_cache_page_engines() -> None:
    text = document("docs/expert-cache.md")
    alone, older = (
        {row["slots"]: row for row in qwen(folder) if row["batch"] == 1} for folder in (NEWEST, "nvidia-h200")
    )
    newest, before = (
        [f"{rows[slots]['tokens_per_second']:.1f}" for slots in (8, 16, 32, 64, 128)]
        for rows in (alone, older)
    )
    assert f"decodes at {newest[3]} tokens per second from 64 slots" in text
    first, again = alone[64]["rounds"]
    assert f"({first:.1f} when a text comes first, {again:.1f} when it comes again)" in text
    words = f"and at {newest[4]} with all experts on the GPU; in 0.21.0, with one text, at"
    assert f"{words} {before[3]} and {before[4]}" in text
    of_the_bus = alone[64]["tokens_per_second"] / alone[64]["bus_bound_tokens_per_second"]
    assert f"The bus takes {100 * of_the_bus:.0f} % of a step from 64 slots" in text
    together = {row["slots"]: row for row in qwen(NEWEST) if row["batch"] == 8}
    shares = [together[slots]["rounds"][0] / alone[slots]["rounds"][0] for slots in (16, 32, 64)]
    times = f"{enumerated([f'{share:.2f}' for share in shares])} times"
    assert f"In expert_cache_qwen, in another engine, it is {times}." in text
    assert f"({times} its speed in expert_cache_qwen)" in document(f"reports/{NEWEST}/README.md")
    eight = together[64]
    allowed = eight["bus_bound_tokens_per_second"]
    best = allowed * (1 - eight["hit_rate"]) / (1 - eight["optimum_hit_rate"])
    assert f"would then allow {best:.0f} tokens per second; with `aging` it allows {allowed:.1f}" in text
    index = document(f"reports/{NEWEST}/README.md")
    assert f"decodes at {enumerated(newest[:4])} tokens/s from 8, 16, 32 and 64 slots" in index
    assert f"with all experts on the GPU ({newest[4]} tokens/s)" in index
    assert {row["sequences_as_with_all"] for row in alone.values()} == {3}
    assert {row["sequences_as_with_all"] for row in older.values()} == {1}
    _, gain = claim("expert_cache_gain.json", "MD007", "With policy aging", NEWEST)
    packed = {row["pinned_bytes"] for row in gain["rows"] if row["packed"]}
    assert {row["pinned_bytes"] for row in alone.values() if row["packed"]} == packed
    _, memory = claim("expert_cache_memory.json", "MD007", "vLLM's memory profile", NEWEST)
    without, held = memory["rows"]
    gained = held["kv_cache_bytes"] - without["kv_cache_bytes"]
    saved = f"{gained / 2**30:.3f} of {held['saved_bytes'] / 2**30:.3f} GiB"
    assert f"whether the KV cache gets what the expert cache saves: {saved}" in document(
        f"reports/{NEWEST}/README.md"
    )
    verdict, memory = claim("expert_cache_memory.json", "MD007", "vLLM's memory profile", H100)
    without, held = memory["rows"]
    gained = held["kv_cache_bytes"] - without["kv_cache_bytes"]
    assert f"{gained / 2**30:.3f} GiB of the {held['saved_bytes'] / 2**30:.3f} that four layers" in text
    assert verdict == "confirmed"
    index = document(f"reports/{H100}/README.md")
    assert f"what the expert cache saves: {100 * gained / held['saved_bytes']:.1f} % of it" in index
    assert f"{gained / 2**30:.3f} GiB of the {held['saved_bytes'] / 2**30:.3f} GiB that four layers" in index
    unreleased = {row["unreleased_bytes"] / 2**20 for row in memory["rows"]}
    assert {f"torch holds {size:.0f} MiB that it uses for nothing" in index for size in unreleased} == {True}


def test_expert_cache_page_padding() -> None:
    verdict, figures = claim("expert_cache_padding.json", "MD007", "With both model runners", H100)
    assert verdict == "confirmed"
    asked = {(row["runner"], row["graph"]): row["lookups"] for row in figures["rows"]}
    for runner in ("V1", "V2"):
        assert asked[runner, "3"] == asked[runner, "4"] == asked[runner, "4, padding counts"] - 7
    words = f"rows: {asked['V1', '4']} with the V1 model runner and {asked['V2', '4']} with V2, and for seven"
    assert words in document("docs/expert-cache.md")


def test_md014_layers() -> None:
    for ratio in (1.25, 2.0):
        (figures,) = evidence("baselines/cpu.json", "MD014", "faulty", ratio=ratio, merged="gate")
        error = figures["ways"]["gate"]["worst_token_error"]
        assert f"{error:.1%} at {'a ratio of ' if ratio == 1.25 else ''}{ratio:g}" in entry("MD014")
    repaired = evidence("baselines/cpu.json", "MD014", "fixed")
    worst = max(row["ways"]["rescaled"]["worst_token_error"] for row in repaired)
    assert f"by up to {worst:.1%}" in entry("MD014")
    assert max(row["ways"]["folded"]["worst_token_error"] for row in repaired) < 1e-5


@pytest.mark.parametrize(("folder", "release"), [(NEWEST, "0.33.0"), ("nvidia-h200", "0.21.0")])
def test_md014_engines(folder: str, release: str) -> None:
    for backend, before in (("marlin", "logprobs differ by "), ("emulation", "EMULATION (")):
        report = f"{folder}/global_scale_mismatch_{backend}.json"
        (damaged,) = evidence(report, "MD014", "faulty", moe_backend=backend)
        assert f"{before}{damaged['largest_logprob_difference']:g}" in entry("MD014")
        assert damaged["prompts_with_other_tokens"] == damaged["prompts"]
        assert damaged["vllm"] == release
        (repaired,) = evidence(report, "MD014", "fixed", moe_backend=backend)
        assert repaired["largest_logprob_difference"] == repaired["prompts_with_other_tokens"] == 0


def test_md015() -> None:
    repaired = evidence("baselines/cpu.json", "MD015", "fixed")
    shown = {f"{row['error']:.0%}" for row in repaired}
    (whole,) = {f"{row['healthy_error']:.0%}" for row in repaired}
    assert f"has the same error as with a whole checkpoint, {whole}" in entry("MD015")
    (worse,) = shown - {whole}
    assert f"from the current activations, the error is {worse}" in entry("MD015")
    for folder, release in (("nvidia-h200", "0.21.0"), (NEWEST, "0.33.0")):
        report = f"{folder}/input_scale_missing.json"
        (damaged,) = evidence(report, "MD015", "faulty", moe_backend="emulation")
        assert damaged["error"] is None
        assert damaged["prompts_with_other_tokens"] == damaged["prompts"]
        assert damaged["vllm"] == release


@pytest.mark.parametrize(("folder", "release"), [(NEWEST, "0.33.0"), ("nvidia-h200", "0.21.0")])
def test_md012(folder: str, release: str) -> None:
    (damaged,) = evidence(f"{folder}/kv_scales_missing_marlin.json", "MD012", "faulty")
    (repaired,) = evidence(f"{folder}/kv_scales_missing_marlin.json", "MD012", "fixed")
    text = entry("MD012")
    assert f"(`reports/{folder}/kv_scales_missing_marlin.md`)" in text
    assert f"moves {damaged['tested_distance']:.0%} of the probability" in text
    assert f"With computed scales it moves {repaired['tested_distance']:.0%}, as much as" in text
    assert f"{repaired['tested_distance']:.0%}" == f"{repaired['control_distance']:.0%}"
    triton = repaired["triton_attn"]
    assert triton["kv_cache"]["tested"] == repaired["kv_cache"]["tested"], "the same scales"
    figure = f"In the report of {release} it moves {triton['tested_distance']:.0%}"
    assert figure.lower() in text.lower()


@pytest.mark.parametrize(("id", "name"), [("MD017", "gate_up_order"), ("MD018", "scale_layout")])
@pytest.mark.parametrize(
    ("folder", "release", "backends"),
    [
        ("nvidia-h200", "0.21.0", ("marlin", "emulation")),
        (NEWEST, "0.33.0", ("marlin", "humming", "emulation")),
    ],
)
def test_layouts_in_engines(id: str, name: str, folder: str, release: str, backends: tuple[str, ...]) -> None:
    assert f"reports/{folder}/{name}_*.md" in entry(id)
    for backend in backends:
        (damaged,) = evidence(f"{folder}/{name}_{backend}.json", id, "faulty", moe_backend=backend)
        assert damaged["error"] is None, "it starts"
        assert damaged["prompts_with_other_tokens"] == damaged["prompts"]
        assert damaged["vllm"] == release


def padded_steps(folder: str) -> Mapping[str, Mapping[str, Any]]:
    """Return config and rank -> row of the padding table with two data-parallel ranks."""
    verdict, figures = claim("nan_padding_dp.json", "MD001", "Attention leaves NaN in padding rows", folder)
    assert verdict == "refuted"
    rows = {row["config"]: row for row in figures["rows"]}
    assert not any(row["rows_with_repeated_ids"] or row["nan_in_real"] for row in rows.values())
    return rows


def of_padded(row: Mapping[str, Any]) -> str:
    return f"{row['nan_in_padding']} of {row['steps_with_padding']}"


def test_md001_padding_of_two_ranks() -> None:
    text = entry("MD001")
    for folder in ("nvidia-h200", NEWEST):
        figures = claim("nan_padding.json", "MD001", "Attention leaves NaN in padding rows", folder)[1]
        alone = {of_padded(row) for row in figures["rows"] if "not_run" not in row}
        assert alone == {"0 of 23"}
        planted = claim("nan_padding.json", "MD001", "With NaN in padding rows", folder)[1]["rows"]
        (own,) = (row for row in planted if row["engine"] == "own topk_softmax")
        assert own["nan_in_padding"] == own["steps_with_padding"] == 23
        assert own["rows_with_repeated_ids"] == 0
        assert all(row["prompts_with_the_same_tokens"] == row["prompts"] for row in planted)
        repeated = {
            row["engine"]: row["rows_with_repeated_ids"] for row in planted if "0.19.1" in row["engine"]
        }
        others = ["", ", restated"] if folder == "nvidia-h200" else [", restated"]
        assert set(repeated) == {f"topk_softmax of 0.19.1{words}" for words in others}
        every_row = own["steps_with_padding"] * own["mean_pad_tokens"] * own["routers_watched"]
        assert set(repeated.values()) == {every_row}
        assert f"`reports/{folder}/nan_padding.md`" in text
    assert "On one H200 no padding row came to hold NaN by itself in 23 padded steps" in text
    older, newer = padded_steps("nvidia-h200"), padded_steps(H100)
    parallel, experts = (of_padded(older[f"{config}=2, both ranks"]) for config in ("DP", "DEP"))
    assert (
        f"With 0.21.0 on two H200 it was {parallel}, and with expert parallelism besides {experts} (" in text
    )
    assert {of_padded(newer[f"{config}=2, both ranks"]) for config in ("DP", "DEP")} == {"10 of 34"}
    assert (
        "of 0.33.0 on two H100 some did in 10 of 34 padded steps, without and with expert parallelism, all "
        "in the rank with fewer prompts"
    ) in text
    index = document(f"reports/{H100}/README.md")
    for config in ("DP=2", "DEP=2"):
        for rank, prompts in enumerate((11, 3)):
            cells = [of_padded(rows[f"{config}, rank {rank}"]) for rows in (older, newer)]
            row = " | ".join((f"{config}, the rank with {prompts} prompts", *cells))
            assert f"| {row} |" in index
    first = {
        release: {row["first_in_padding"] for row in rows.values()} - {""}
        for release, rows in (("0.33.0", newer), ("0.21.0", older))
    }
    attention = {
        release: f"NaN at model.layers.{layer}.self_attn.attn"
        for release, layer in (("0.33.0", 0), ("0.21.0", 1))
    }
    assert first == {release: {place} for release, place in attention.items()}


def ratios(report: str, backend: str) -> Mapping[str, Mapping[int, float]]:
    """Return model -> tokens -> the time of our kernels divided by that of a backend of vLLM."""
    stored = json.loads((REPORTS / report).read_text(encoding="utf-8"))["bench"]["backends"]
    times = {
        (row["model"], row["backend"], row["tokens"]): row["time_us"]
        for row in stored["rows"]
        if row.get("time_us")
    }
    assert all(row["right"] for row in stored["rows"] if row.get("time_us"))
    shares: dict[str, dict[int, float]] = {}
    for (model, name, tokens), time in times.items():
        if name == backend:
            shares.setdefault(model, {})[tokens] = times[model, "OURS", tokens] / time
    return shares


def assert_shown(ratios: Mapping[str, Mapping[int, float]], tokens: Sequence[int], text: str) -> None:
    """Each of the five models has a row of the table with its ratio for each number of tokens."""
    assert len(ratios) == 5
    for model, shares in ratios.items():
        assert list(shares) == list(tokens)
        assert f"| {model} | {' | '.join(f'{share:.2f}' for share in shares.values())} |" in text


def those_above_one(ratios: Mapping[str, Mapping[int, float]]) -> Mapping[tuple[str, int], float]:
    return {
        (model, tokens): share
        for model, shares in ratios.items()
        for tokens, share in shares.items()
        if share > 1
    }


def test_nvfp4_beside_other_backends_on_an_h100() -> None:
    text = document(f"reports/{H100}/README.md")
    marlin = ratios(f"{H100}/moe_backends_nvfp4.json", "MARLIN")
    assert_shown(marlin, [1, 2, 4, 8, 16, 32, 64], text)
    gemma, cascade = "gemma-4-26b-a4b", "nemotron-cascade-2-30b-a3b"
    assert list(those_above_one(marlin)) == [(gemma, 16), (gemma, 32), (gemma, 64)]
    most = f"{100 * (max(marlin[gemma].values()) - 1):.1f} %"
    assert f"slower only for {gemma} at 16, 32 and 64 tokens, by up to {most}" in text
    (slowest, super_share), (next_model, next_share), *_ = sorted(
        ((model, shares[1]) for model, shares in marlin.items()), key=lambda pair: -pair[1]
    )
    assert (slowest, next_model) == ("nemotron-3-super-120b", cascade)
    assert f"at most {next_share:.2f} of MARLIN's time in four of the models" in text
    assert f"and {super_share:.2f} in {slowest}" in text
    older = [
        share
        for shares in ratios(f"{NEWEST}/moe_backends_nvfp4.json", "MARLIN").values()
        for tokens, share in shares.items()
        if tokens >= 8
    ]
    assert f"takes {min(older):.2f} to {max(older):.2f} of MARLIN's time from 8 tokens on" in text
    single = ratios(f"{NEWEST}/moe_backends_nvfp4.json", "MARLIN")[slowest][1]
    assert f"from 8 tokens on, and {single:.2f} for one token of {slowest}" in text
    humming = ratios(f"{H100}/moe_backends_humming.json", "HUMMING")
    assert_shown(humming, [1, 2, 4, 8, 16, 32, 64], text)
    slower = those_above_one(humming)
    assert sorted(slower) == [("qwen3-30b-a3b", 32), ("qwen3.5-35b-a3b", 16)]
    assert f"qwen3-30b-a3b at 32 tokens ({slower['qwen3-30b-a3b', 32]:.3f})" in text
    assert f"qwen3.5-35b-a3b at 16 ({slower['qwen3.5-35b-a3b', 16]:.3f})" in text
    beside = ratios(f"{H100}/moe_backends_humming.json", "MARLIN")
    changed = {
        tokens: [marlin[model][tokens] / beside[model][tokens] - 1 for model in marlin]
        for tokens in (1, 2, 4, 8, 16, 32, 64)
    }
    apart = max(abs(share) for tokens in (8, 16, 32, 64) for share in changed[tokens])
    assert f"differ by at most {100 * apart:.1f} %" in text
    few = [share for tokens in (1, 2, 4) for share in changed[tokens]]
    assert f"take up to {-100 * min(few):.0f} % less time, or up to {100 * max(few):.0f} % more" in text
    assert max(few) == marlin[gemma][1] / beside[gemma][1] - 1


def test_nvfp4_beside_other_backends_on_an_h200() -> None:
    text = document(f"reports/{NEWEST}/README.md")
    marlin = ratios(f"{NEWEST}/moe_backends_nvfp4.json", "MARLIN")
    assert_shown(marlin, [1, 2, 4, 8, 16, 32, 64], text)
    assert not those_above_one(marlin)
    largest = "nemotron-3-super-120b"
    most = max(shares[1] for model, shares in marlin.items() if model != largest)
    assert f"at most {most:.2f} of MARLIN's time in four of the models" in text
    assert f"and {marlin[largest][1]:.3f} in {largest}" in text
    assert max(shares[1] for shares in marlin.values()) <= 0.7
    beside = ratios(f"{NEWEST}/moe_backends_humming.json", "MARLIN")
    assert f"that is {beside[largest][1]:.3f}; the other ratios" in text
    apart = max(
        abs(share / marlin[model][tokens] - 1)
        for model, shares in beside.items()
        for tokens, share in shares.items()
        if (model, tokens) != (largest, 1)
    )
    assert f"the other ratios to MARLIN there differ by at most {100 * apart:.1f} %" in text
    humming = ratios(f"{NEWEST}/moe_backends_humming.json", "HUMMING")
    assert_shown(humming, [1, 2, 4, 8, 16, 32, 64], text)
    assert not those_above_one(humming)
    changes = document("CHANGELOG.md")
    single = [shares[1] for model, shares in marlin.items() if model != largest]
    assert (
        f"one token takes {min(single):.2f} to {max(single):.2f} of MARLIN's time for four of the five"
        in changes
    )
    several = [share for shares in marlin.values() for tokens, share in shares.items() if tokens > 1]
    assert (
        f"and {marlin[largest][1]:.3f} for nemotron-3-super; from 2 to 64 tokens {min(several):.2f}"
        in changes
    )
    every = [share for shares in humming.values() for share in shares.values()]
    assert f"to {max(several):.2f}, and before these kernels took FP8 {min(every):.2f}" in changes
    assert f"{min(every):.2f} to {max(every):.2f} of HUMMING's from 1 to 64" in changes


def test_fp8_beside_other_backends_on_an_h200() -> None:
    text = document(f"reports/{NEWEST}/README.md")
    changes = document("CHANGELOG.md")
    triton, marlin = (ratios(f"{NEWEST}/moe_backends_fp8.json", name) for name in ("TRITON", "MARLIN"))
    for beside in (triton, marlin):
        assert_shown(beside, [1, 2, 4, 8, 16, 32, 64], text)
    slower = those_above_one(triton)
    models = ("gemma-4-26b-a4b", "nemotron-cascade-2-30b-a3b")
    assert sorted(slower) == [(model, tokens) for model in models for tokens in (16, 32, 64)]
    most = f"{100 * (max(slower.values()) - 1):.1f} %"
    assert f"slower for {' and '.join(models)} from 16 tokens on, by up to {most}" in text
    words = [
        f"{min(shares):.2f} to {max(shares):.2f} of {name}'s"
        for name, beside in (("TRITON", triton), ("MARLIN", marlin))
        for shares in ([share for row in beside.values() for share in row.values()],)
    ]
    assert f"ours take {words[0]} time and {words[1]} from 1 to 64 tokens" in changes


def test_fp8_in_blocks_beside_other_backends_on_an_h200() -> None:
    report = f"{NEWEST}/moe_backends_fp8_block.json"
    text, changes = document(f"reports/{NEWEST}/README.md"), document("CHANGELOG.md")
    words, slower = [], []
    for name in ("TRITON", "MARLIN"):
        beside = ratios(report, name)
        assert len(beside) == 3
        for model, shares in beside.items():
            assert list(shares) == [1, 2, 4, 8, 16, 32, 64]
            assert f"| {model}, {name} | {' | '.join(f'{share:.2f}' for share in shares.values())} |" in text
        every = [share for shares in beside.values() for share in shares.values()]
        words.append(f"{min(every):.2f} to {max(every):.2f} of {name}'s")
        slower.append((sum(share > 1 for share in every), f"{100 * (max(every) - 1):.1f} %"))
    assert f"ours take {words[0]} time and {words[1]}" in changes
    (cells, most), (cell, more) = slower
    assert (cells, cell) == (6, 1)
    assert f"slower in six cells of TRITON's, by up to {most}, and in one of MARLIN's, by {more}." in text
    stored = json.loads((REPORTS / report).read_text("utf-8"))["bench"]["backends"]["rows"]
    refused = {row["model"] for row in stored if "whole blocks of 128" in row.get("unavailable", "")}
    assert refused == {"gemma-4-26b-a4b", "nemotron-cascade-2-30b-a3b"}


def test_bf16_beside_triton_on_an_h200() -> None:
    text = document(f"reports/{NEWEST}/README.md")
    triton = ratios(f"{NEWEST}/moe_backends_bf16.json", "TRITON")
    assert_shown(triton, [2**power for power in range(13)], text)
    assert not those_above_one(triton)
    assert "Ours is faster in each cell." in text
    before = ratios(f"{H100}/moe_backends_bf16.json", "TRITON")
    assert f"ours took up to {max(those_above_one(before).values()):.2f} of TRITON's time there" in text
    shares = [share for row in triton.values() for share in row.values()]
    words = f"ours take {min(shares):.2f} to {max(shares):.2f} of TRITON's time on an H200 from 1 to 4096"
    assert words in document("CHANGELOG.md")


def test_streamed_prompts() -> None:
    counts = []
    for folder, backends in (("nvidia-h200", 4), (NEWEST, 5)):
        verdict, figures = claim("expert_cache_stream.json", "MD007", "Engines whose prompts stream", folder)
        assert verdict == "confirmed"
        streamed = [row for row in figures["rows"] if row["cache"] == "6" and not row["planted"]]
        assert {(row["outcome"], row["logprob_distance"]) for row in streamed} == {("same tokens", 0)}
        graphs = [row["backend"] for row in streamed if (row["runner"], row["mode"]) == ("V2", "CUDA graphs")]
        assert len(set(graphs)) == len(graphs) == backends
        more = {(row["runner"], row["mode"]) for row in streamed if row["backend"] == "BF16 TRITON"}
        assert more == {(runner, mode) for runner in ("V1", "V2") for mode in ("eager", "CUDA graphs")}
        counts.append(len(streamed))
    words = f"all {counts[1]} have the same tokens, and in those of 0.21.0 all {counts[0]}."
    assert words in document("CHANGELOG.md")
    (other,) = [row for row in figures["rows"] if row["cache"] != "6" and row["outcome"] != "same tokens"]
    assert other["backend"] == "NVFP4 HUMMING"
    words = f"{other['same_prompts']} of {other['clear_prompts']} prompts that this one decides clearly"
    assert words in document("docs/expert-cache.md")


def test_activations_in_engines_of_both_releases() -> None:
    for folder in ("nvidia-h200", NEWEST):
        verdict, figures = claim("moe_activations.json", "MD008", "Engines with MOEDOCTOR_FIXES=moe", folder)
        assert verdict == "confirmed"
        ours = [row for row in figures["rows"] if row["computer"] == "moedoctor"]
        assert {(row["model"], row["quantization"], row["mode"]) for row in ours} == {
            (model, quantization, "CUDA graphs")
            for model in ("Gemma-4", "Nemotron-H")
            for quantization in ("BF16", "NVFP4")
        }
        if folder == "nvidia-h200":
            same, clear = (sum(row[f"{name}_prompts"] for row in ours) for name in ("same", "clear"))
            assert f"the reference's tokens in {same} of {clear} prompts" in document("CHANGELOG.md")


def test_fp8_formats_in_engines() -> None:
    verdict, figures = claim("moe_formats.json", "MD008", "Engines with MOEDOCTOR_FIXES=moe", NEWEST)
    assert verdict == "confirmed"
    rows = figures["rows"]

    def prompts(quantization: str, computer: str) -> tuple[set[int], set[int]]:
        compared = [
            row
            for row in rows
            if (row["quantization"], row["computer"]) == (f"FP8 of {quantization}", computer)
        ]
        return {row["same_prompts"] for row in compared}, {row["clear_prompts"] for row in compared}

    assert prompts("ModelOpt", "moedoctor") == ({21}, {21})
    assert prompts("ModelOpt", "vLLM") == ({17}, {21})
    assert prompts("compressed-tensors", "moedoctor") == ({26}, {27})
    assert prompts("compressed-tensors", "vLLM") == ({23, 26}, {27})
    text = document("docs/plugin.md")
    assert "in 21 of 21 prompts that it decides clearly, vLLM's own backend in 17" in text
    assert "compressed-tensors in 26 of 27, vLLM's own in 23 or 26" in text


def test_the_published_table_on_an_h200() -> None:
    start = "Nemotron-Cascade-2"
    verdict, figures = claim("expert_cache_published_nemotron.json", "MD007", start, NEWEST)
    assert verdict == "confirmed"
    rows = {row["scheme"]: row for row in figures["rows"]}
    bf16, nvfp4 = (
        f"{rows[scheme]['tokens_per_second']:.1f} {{}}from {rows[scheme]['gigabytes']:.1f} GB in"
        for scheme in ("bf16", "nvfp4")
    )
    words = f"decodes {bf16} BF16 and {nvfp4} NVFP4"
    assert words.format("", "") in document("docs/expert-cache.md")
    assert words.format("tokens/s ", "") in document(f"reports/{NEWEST}/README.md")
    assert all(row["drawn_tokens"] == row["distinct_tokens"] for row in rows.values())
    assert max(row["gigabytes"] / row["published_gigabytes"] for row in rows.values()) <= 1.15


def test_bf16_beside_triton_on_an_h100() -> None:
    text = document(f"reports/{H100}/README.md")
    triton = ratios(f"{H100}/moe_backends_bf16.json", "TRITON")
    assert_shown(triton, [1, 8, 64, 512, 4096], text)
    few = [share for shares in triton.values() for tokens, share in shares.items() if tokens in (8, 64)]
    slower = [share for shares in triton.values() for share in shares.values() if share > 1]
    assert (len(few), len(slower)) == (10, 8)
    assert sorted(slower) == sorted(share for share in few if share > 1)
    assert f"slower in eight of ten rows for 8 and 64, by up to {100 * (max(slower) - 1):.1f} %" in text


def test_engines_in_bench_on_an_h100() -> None:
    text = document(f"reports/{H100}/README.md")
    stored = json.loads((REPORTS / H100 / "bench_engine.json").read_text(encoding="utf-8"))
    ratio = {
        (row["moe_backend"], row["fix"], row["batch"]): f"{row['ratio']:.2f}"
        for row in stored["bench"]["engines"]["rows"]
    }
    marlin, humming, fixed = (
        [ratio[backend, fix, batch] for batch in (1, 8)]
        for backend, fix in (("marlin", "moe"), ("humming", "none"), ("humming", "moe"))
    )
    assert (
        f"`MOEDOCTOR_FIXES=moe` has {marlin[0]} of the tokens per second at batch 1 and {marlin[1]}" in text
    )
    assert (
        f"HUMMING {humming[0]} and {humming[1]}, and HUMMING with the fix {fixed[0]} and {fixed[1]}" in text
    )


def test_the_expert_cache_on_an_h100() -> None:
    text, guide = document(f"reports/{H100}/README.md"), document("docs/expert-cache.md")
    _, figures = claim("expert_cache_gain.json", "MD007", "With policy aging", H100)
    rows = {row["cache"]: row for row in figures["rows"] if row["batch"] == 1}
    before = "policy=lfru,packed=0,stream=0"
    old = [f"{rows[f'{slots}:{before}']['tokens_per_second']:.1f}" for slots in (16, 32, 64)]
    assert f"| the old defaults | {' | '.join(old)} |" in text

    def cells(*names: str) -> str:
        return " | ".join(
            f"{rows[name]['tokens_per_second']:.1f} ({rows[name]['times_before']:.2f} times)"
            for name in names
        )

    assert f"| `overlap=0,fill=0` | {cells('16', '32', '64')} |" in text
    assert f"(then `overlap=1`) | not run | {cells('32:overlap=1', '64:overlap=1')} |" in text
    own = {name: rows[name]["times_before"] for name in ("32", "32:overlap=1", "64", "64:overlap=1")}
    assert f"decoded {own['32:overlap=1']:.2f} and {own['32']:.2f} times as fast from 32 slots" in guide
    assert f"and {own['64:overlap=1']:.2f} and {own['64']:.2f} times from 64" in guide
    assert all(rows[f"{slots}:overlap=1"]["rounds_agree"] for slots in (32, 64))
    assert not any(rows[f"{slots}:overlap=1"]["sequences_as_before"] for slots in (32, 64))
    eight = {
        row["cache"]: row["times_before"]
        for row in figures["rows"]
        if row["batch"] == 8 and "times_before" in row
    }
    assert f"{eight['32:overlap=1']:.2f} times the speed of the old defaults from both" in text
    assert round(eight["64:overlap=1"], 2) == round(eight["32:overlap=1"], 2)
    assert f"and the second row has {eight['32']:.2f} and {eight['64']:.2f} times" in text
    assert all(rows[f"{slots}"]["sequences_as_before"] == 1 for slots in (16, 32, 64))
    verdict, figures = claim("expert_cache_published_nemotron.json", "MD007", "Nemotron-Cascade-2", H100)
    assert verdict == "refuted"
    published = {row["scheme"]: row for row in figures["rows"]}
    bf16, nvfp4 = (
        f"{published[scheme]['tokens_per_second']:.1f} {unit}from {published[scheme]['gigabytes']:.1f}"
        for scheme, unit in (("bf16", "tokens/s "), ("nvfp4", ""))
    )
    assert f"decodes {bf16} GB in BF16, with the packing before today's, and {nvfp4} GB in NVFP4" in text
    verdict, figures = claim("expert_cache_published_gemma.json", "MD007", "Gemma-4", H100)
    assert verdict == "confirmed"
    gemma = {row["scheme"]: row for row in figures["rows"]}
    bf16, nvfp4 = (
        f"{gemma[scheme]['tokens_per_second']:.1f} {unit}from {gemma[scheme]['gigabytes']:.1f} GB in"
        for scheme, unit in (("bf16", "tokens/s "), ("nvfp4", ""))
    )
    assert f"decodes {bf16} BF16 and {nvfp4} NVFP4; published were 14.8 tokens/s and 8.6 GB" in text
    assert all(row["drawn_tokens"] == row["distinct_tokens"] for row in gemma.values())
    hits = [f"{100 * gemma[scheme]['hit_rate']:.0f} %" for scheme in ("bf16", "nvfp4")]
    assert f"No token was drawn twice, and yet {hits[0]} and {hits[1]} of the experts" in text
    verdict, figures = claim("expert_cache_nvfp4.json", "MD007", "Qwen3-30B-A3B's shape", H100)
    assert verdict == "confirmed"
    alone = {(row["scheme"], row["slots"]): row for row in figures["rows"] if row["batch"] == 1}
    assert all(row["packed"] is (scheme == "bf16") for (scheme, _), row in alone.items())

    def rates(scheme: str, key: str) -> str:
        values = [alone[scheme, slots][key] for slots in (8, 16)]
        return f"{values[0]:.1f} and {values[1]:.1f}"

    times = [
        alone["nvfp4", slots]["tokens_per_second"] / alone["bf16", slots]["tokens_per_second"]
        for slots in (8, 16)
    ]
    gain = f"{times[0]:.2f} and {times[1]:.2f} times as fast"
    nvfp4, bf16 = (rates(scheme, "tokens_per_second") for scheme in ("nvfp4", "bf16"))
    assert f"NVFP4 decodes {gain} as BF16 from 8 and 16 slots: {nvfp4} tokens/s beside {bf16}" in text
    assert f"`overlap=0,fill=0`, NVFP4 was {gain}." in guide


def test_nvfp4_beside_bf16_in_an_expert_cache() -> None:
    text, guide = document(f"reports/{NEWEST}/README.md"), document("docs/expert-cache.md")
    verdict, figures = claim("expert_cache_nvfp4.json", "MD007", "Qwen3-30B-A3B's shape", NEWEST)
    assert verdict == "confirmed"
    rows = {(row["scheme"], row["slots"], row["batch"]): row for row in figures["rows"]}

    def rates(scheme: str, batch: int = 1, key: str = "tokens_per_second") -> list[str]:
        return [f"{rows[scheme, slots, batch][key]:.1f}" for slots in (8, 16)]

    times = [
        f"{rows['nvfp4', slots, 1]['tokens_per_second'] / rows['bf16', slots, 1]['tokens_per_second']:.2f}"
        for slots in (8, 16)
    ]
    gain = f"{' and '.join(times)} times as fast"
    nvfp4, bf16 = (" and ".join(rates(scheme)) for scheme in ("nvfp4", "bf16"))
    assert f"NVFP4 decodes {gain} as BF16 from 8 and 16 slots: {nvfp4} tokens/s beside {bf16}." in text
    assert f"decodes {gain} in NVFP4 as in BF16 from 8 and 16 slots: {nvfp4} tokens per second" in guide
    bounds = [" and ".join(rates(scheme, key="bus_bound_tokens_per_second")) for scheme in ("nvfp4", "bf16")]
    assert f"beside {bf16}. The bus allows {bounds[0]} beside {bounds[1]}." in guide
    together = [" and ".join(rates(scheme, 8)) for scheme in ("nvfp4", "bf16")]
    assert f"faster than one: {together[0]} tokens/s in NVFP4, {together[1]} in BF16." in text
    assert f"faster than one: {together[0]} in NVFP4, {together[1]} in BF16." in guide
    first = [
        f"{rows['nvfp4', slots, 1]['rounds'][0] / rows['bf16', slots, 1]['rounds'][0]:.2f}"
        for slots in (8, 16)
    ]
    assert f"new to the caches NVFP4 is {' and '.join(first)} times as fast" in text
    assert all(
        rows[scheme, slots, 8]["tokens_per_second"] > rows[scheme, slots, 1]["tokens_per_second"]
        for scheme in ("nvfp4", "bf16")
        for slots in (8, 16)
    )


def test_the_other_published_model() -> None:
    verdict, figures = claim("expert_cache_published_gemma.json", "MD007", "Gemma-4", NEWEST)
    assert verdict == "confirmed"
    gemma = {row["scheme"]: row for row in figures["rows"]}
    bf16, nvfp4 = (
        f"{gemma[scheme]['tokens_per_second']:.1f} {{}}from {gemma[scheme]['gigabytes']:.1f} GB in"
        for scheme in ("bf16", "nvfp4")
    )
    guide, index = document("docs/expert-cache.md"), document(f"reports/{NEWEST}/README.md")
    assert f"decodes {bf16.format('tokens per second ')} BF16 and {nvfp4.format('')} NVFP4, where" in guide
    assert f"decodes {bf16.format('tokens/s ')} BF16 and {nvfp4.format('')} NVFP4; published were" in index
    assert all(row["drawn_tokens"] == row["distinct_tokens"] for row in gemma.values())


def answers_of(name: str) -> list[Mapping[str, Any]]:
    """Return the reports of both GPUs of a fleet's report."""
    answers = [
        json.loads(file.read_text("utf-8")) for file in (REPORTS / H100 / f"{name}.nodes").glob("node-*")
    ]
    assert sorted(answer["gpu"] for answer in answers) == ["0", "1"]
    return [answer["report"] for answer in answers]


def test_two_gpus_of_a_fleet() -> None:
    first, second = (
        [case["output_sha256"] for case in report["cases"]] for report in answers_of("fleet_parity")
    )
    assert first == second
    assert {(len(sums), len(set(sums))) for sums in first} == {(8, 1)}
    assert "Two H100 of one host gave the same bits in all eight runs of both" in document("docs/fleet.md")
    times = [
        [row["time_us"] for row in report["bench"]["backends"]["rows"]]
        for report in answers_of("fleet_bench")
    ]
    apart = max(max(pair) / min(pair) - 1 for pair in zip(*times, strict=True))
    assert (
        f"their times of a call in CUDA graphs, with a cold L2 cache, differ by at most {100 * apart:.1f} %"
        in document(f"reports/{H100}/README.md")
    )


@pytest.mark.parametrize("folder", ["nvidia-h200", NEWEST])
def test_engines_with_our_kernels_on_an_h200(folder: str) -> None:
    verdict, figures = claim("moe_engines.json", "MD008", "Engines with MOEDOCTOR_FIXES=moe", folder)
    rows = [row for row in figures["rows"] if row["computer"] == "moedoctor"]
    assert verdict == "confirmed"
    assert [row["outcome"] for row in rows] == ["same tokens"] * 6
    stored = json.loads((REPORTS / folder / "moe_engines.json").read_text(encoding="utf-8"))
    text = document(f"reports/{folder}/README.md")
    if folder == "nvidia-h200":
        assert f"moe_engines is of {stored['origin']['commit'][:7]}" in text
        assert "equal in BF16, FP8 and NVFP4, eager and in CUDA graphs" in text


def test_engines_with_our_kernels_on_an_h100() -> None:
    verdict, figures = claim("moe_engines.json", "MD008", "Engines with MOEDOCTOR_FIXES=moe", H100)
    rows = [row for row in figures["rows"] if row["computer"] == "moedoctor"]
    assert verdict == "confirmed"
    assert [row["outcome"] for row in rows] == ["same tokens"] * 6
    assert "equal in six of six engines" in document(f"reports/{H100}/README.md")
