"""A server's command line is split: variables, the launcher, and vLLM's own arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.diagnose.settings.flags import read_flags, read_parallelism, split_command
from moedoctor.diagnose.settings.tables import load_replacements, load_vllm_flags

IMAGE = "vllm/vllm-openai:v0.21.0"


@pytest.mark.parametrize(
    ("line", "settings", "command"),
    [
        ("vllm serve m --x", {}, "vllm serve m --x"),
        ("VLLM_A=1 nice -n 5 /opt/bin/vllm serve m", {"VLLM_A": "1"}, "/opt/bin/vllm serve m"),
        ("python -m vllm.entrypoints.openai.api_server --model m", {}, None),
        (f"docker run -e VLLM_A=x=y --env=FLASHINFER_B=2 {IMAGE} --model m", {"VLLM_A": "x=y"}, None),
        (f"docker run -eVLLM_A=1 -e HF_TOKEN=secret {IMAGE}", {"VLLM_A": "1"}, IMAGE),
        ("serve m --moe-backend marlin", {}, "serve m --moe-backend marlin"),
        ("", {}, ""),
    ],
)
def test_the_launcher_and_its_variables_are_separated(line, settings, command):
    found = split_command(line.split())
    assert settings.items() <= found.settings.items()
    assert "HF_TOKEN" not in found.settings
    if command is None:
        assert found.command[-2:] == ("--model", "m")
        assert found.command[0].startswith("vllm")
    else:
        assert " ".join(found.command) == command


@given(
    st.lists(st.sampled_from(["vllm", "serve", "-e", "VLLM_A=1", "FLASHINFER_B=", "--ep", "x=y", IMAGE, ""]))
)
def test_nothing_is_lost_or_made_up(words: list[str]) -> None:
    found = split_command(words)
    before = words[: len(words) - len(found.command)]
    assert [*before, *found.command] == words
    assert set(found.settings) <= {word.removeprefix("-e").partition("=")[0] for word in before}


@pytest.mark.parametrize(
    ("flags", "split"),
    [
        ("", (False, False)),
        ("--enable-expert-parallel", (False, False)),  # vLLM needs more than one GPU for it
        ("-tp 2 --enable-expert-parallel", (True, False)),
        ("-tp 2 -ep", (True, False)),
        ("-ep -dp 2", (True, True)),
        ("-e -pcp 2", (True, False)),  # any unique beginning is enough
        ("-ep --config a.yaml", (True, False)),  # whose sizes are not read
        ("--enable-expert-parallel --no-enable-expert-parallel", (False, False)),
        ("--data-parallel-size 2", (False, True)),
        ("-dp=4 -dp 1", (False, False)),
        ("-tp 8 --enable-expert-parallel --data-parallel-size=8", (True, True)),
    ],
)
def test_how_it_is_split(flags: str, split: tuple[bool, bool]) -> None:
    assert read_parallelism(["vllm", "serve", "m", *flags.split()], "0.21.0") == split


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--disable-offline-docs", "--enable-offline-docs"),
        ("--enable-fastapi-docs", "--disable-fastapi-docs"),
        ("--moe-backend-of-mine", None),
        ("-ep", "--enable-expert-parallel"),
        ("-sc", "--speculative-config"),
        ("-cc.mode=3", "--compilation-config"),
        ("-O3", "--optimization-level"),
        ("-dp2", None),
    ],
)
def test_what_a_flag_is_taken_for(written: str, meant: str | None) -> None:
    (flag,) = read_flags([written], "0.33.0")
    assert flag.name == meant


def test_a_value_of_a_short_flag_stands_after_it_in_the_word_or_after_an_equals_sign() -> None:
    flags = read_flags(["-q", "fp8", "-qfp8", "-q=fp8", "--seed", "-1", "-ep", "-tp", "2"], "0.33.0")
    others = ["--seed -1", "--enable-expert-parallel None", "--tensor-parallel-size 2"]
    assert [f"{flag.name} {flag.value}" for flag in flags] == [*["--quantization fp8"] * 3, *others]


def test_every_short_form_leads_to_a_flag_of_the_same_release() -> None:
    for release in load_vllm_flags().releases:
        known = load_vllm_flags().list_at(release)
        short = {name: row.of for name, row in known.items() if not name.startswith("--")}
        assert {"-ep", "-dp", "-tp", "-q"} <= set(short)
        assert set(short.values()) <= set(known)


def test_every_flag_that_is_not_considered_is_a_flag_of_vllm() -> None:
    table = load_replacements()["not_considered"]
    assert set(table["flags"]) <= set(load_vllm_flags().rows)
    assert set(table["assumed"]) <= set(table["flags"])
