"""The start of a server is read from command lines, compose files, logs and calls, without its secrets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.diagnose.triage.advice import NO_HELP, Advice
from moedoctor.diagnose.triage.facts_in_text import Facts
from moedoctor.diagnose.triage.settings_in_text import SettingsReader
from moedoctor.redaction import Redactor


def read(text: str) -> SettingsReader:
    settings = SettingsReader()
    for line in text.splitlines():
        settings.read(line)
    return settings


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --moe-backend marlin --tensor-parallel-size 2",
        "vllm serve m \\\n  --moe-backend marlin \\\n  --tensor-parallel-size=2",
        '- "--moe-backend=marlin"\n- "--tensor-parallel-size=2"',
        '"--moe-backend"\n"marlin"\n"--tensor-parallel-size 2"',
        'command: ["--moe-backend", "marlin"]\nLaunch flags: -tp 2',
        "vllm serve \\\n  /a/b \\\n  -tp 2 --moe-backend='marlin' | tee --tensor-parallel-size 4",
        "docker run vllm/vllm-openai:v0.30.0 --model <a b> --moe-backend marlin -tp 2 # not --moe-backend x",
        'vllm serve "m x" --moe-backend marlin -tp 2 --hf-overrides "{"a": "b", "c": "--moe-backend x"}"',
        "INFO non-default args: {'moe_backend': 'marlin', 'tensor_parallel_size': 2}",
        'llm = LLM(\n    model="m",\n    moe_backend="marlin",\n    tensor_parallel_size=2,\n)',
    ],
)
def test_flags_of_every_way_to_start(text: str) -> None:
    flags = read(text).flags
    assert (flags["moe-backend"], flags["tensor-parallel-size"]) == ("marlin", "2")


def test_what_a_log_of_0_33_0_says_of_itself_is_no_setting() -> None:
    nested = (
        "CompilationConfig(mode=None, sizes=[1, 8], passes={'fuse_norm': True, 'mode': <Mode.X: (0, 2)>})"
    )
    log = f"""
INFO non-default args: {{'max_model_len': 512, 'compilation_config': {nested}, 'moe_backend': 'marlin'}}
INFO [core.py:139] config: compilation_config={{'mode': <CompilationMode.VLLM_COMPILE: 3>, 'eagle': True}}
INFO 2.24 GiB for consumed memory (weights + non-torch), 0.34 GiB for activations; torch 2.5 GiB
INFO To disable, set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0.
"""
    found = read(log)
    assert (found.flags, found.variables) == (
        {"max-model-len": "512", "compilation-config": "CompilationConfig…", "moe-backend": "marlin"},
        {},
    )
    assert found.libraries == {}
    assert read("torch 2.5; PyTorch version: 2.11.0+cu130").libraries == {"torch": "2.5"}


def test_words_beside_a_flag_set_nothing() -> None:
    beside = read("With --enforce-eager. consider passing CUDA_LAUNCH_BLOCKING=1\n| a vllm serve | b |")
    assert (beside.flags, beside.variables, beside.shown) == ({}, {}, False)


def test_secrets_are_left_out() -> None:
    text = "vllm serve m --api-key secret1 --port 8 -sc token=secret1\nVLLM_API_KEY=secret1 VLLM_PORT=1"
    shown = read(text).mask(Redactor())
    assert "secret1" not in str(shown)
    assert (shown.flags, shown.variables) == ({"port": "8", "speculative-config": ""}, {"VLLM_PORT": "1"})


@pytest.mark.parametrize(
    ("step", "again"),
    [
        ("add `--enforce-eager`, or make UVA available", "--enforce-eager"),
        ("use --moe-backend marlin", "--moe-backend marlin"),
        ("set VLLM_MOE_SKIP_PADDING=0", "VLLM_MOE_SKIP_PADDING=0"),
        ("use --moe-backend triton", ""),
        ("use `--moe-backend`", ""),
        ("compare a greedy answer with `--cpu-offload-gb` and one without", ""),
        ("set VLLM_MOE_SKIP_PADDING=1", ""),
    ],
)
def test_only_what_the_text_sets_to_that_value_is_said_to_be_set(step: str, again: str) -> None:
    start = "VLLM_MOE_SKIP_PADDING=0 vllm serve m --enforce-eager --moe-backend marlin --cpu-offload-gb 4"
    assert read(start).explain_repetition(step) == (
        f"{step}; the text sets {again} already" if again else step
    )


def test_what_was_tried_in_a_list_is_not_how_the_server_starts() -> None:
    reader = read("--enforce-eager: stable\n--max-model-len 4096\n- --kv-cache-dtype=fp8")
    assert reader.flags == {"max-model-len": "4096", "kv-cache-dtype": "fp8"}


@given(st.text("ab-='{}[]();|&<>#, ", max_size=40), st.sampled_from("'\""), st.sampled_from((" ", "=")))
def test_words_in_quotation_marks_are_one_value(value: str, mark: str, joint: str) -> None:
    value = value.replace(mark, "")
    start = f"vllm serve a/b --served-model-name{joint}{mark}m {value} --calculate-kv-scales m{mark}"
    flags = read(f"{start} --moe-backend marlin -O3").flags
    assert [*flags] == ["served-model-name", "moe-backend"]
    assert flags["served-model-name"] == f"m {value} --calculate-kv-scales m"


@given(st.text("ab-='\"{}[]\\;|&<># ", max_size=400), st.sampled_from(("vllm serve", "api_server --model")))
def test_marks_without_an_end_hide_no_flag_before_them(rest: str, start: str) -> None:
    reader = read(f"{start} a/b --moe-backend marlin -tp 2 --x {rest}")
    assert (reader.model, reader.flags["tensor-parallel-size"]) == ("a/b", "2")


@pytest.mark.parametrize(
    ("text", "attempts"),
    [
        ("It still crashes with --moe-backend marlin.", ["--moe-backend marlin"]),
        ("NCCL_P2P_DISABLE=1 did not help, but with --enforce-eager it works", ["NCCL_P2P_DISABLE=1"]),
        ("It still crashes unless --enforce-eager is set. Does --enable-eplb have any effect?", []),
        ("--no-enable-prefix-caching did not help", ["--no-enable-prefix-caching"]),
        ("Same error in eager mode.", ["--enforce-eager"]),
        ("No change without MTP", ["without --speculative-config"]),
        ("I tried:\n\n--enforce-eager\n--moe-backend triton: works\n\n--enable-eplb", ["--enforce-eager"]),
        ("Same error without --async-scheduling", ["without --async-scheduling"]),
    ],
)
def test_what_a_text_says_to_change_nothing_is_no_advice_any_more(text: str, attempts: list[str]) -> None:
    reader = read(text)
    assert [*reader.attempts] == attempts
    advice = Advice(Facts(), reader, attempts=reader.attempts.keys())
    for setting in attempts:
        step = f"start once {'' if setting.startswith('without') else 'with '}{setting}"
        assert advice.fit(step) == f"{step}; the text says that {setting}{NO_HELP}"
        assert advice.fit(f"{step}, or with NCCL_ALGO=Ring").endswith(f"{NO_HELP} alone")
        for other in (f"{step}-x", f"`moedoctor record -- vllm serve m {setting}` keeps it"):
            assert NO_HELP not in advice.fit(other)
    assert "attempts" not in str(reader.mask(Redactor()))
