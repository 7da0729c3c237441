"""Prefixes and markup of a log line are removed, and the message stays whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.diagnose.triage.line_text import OF_VLLM, clean, split_prefix
from tests.cases import load_cases

CASES = load_cases(__file__)

MESSAGE = "RuntimeError: b_scales is not on GPU"


@pytest.mark.parametrize("line", CASES["prefixes_are_removed_from_the_message"])
def test_prefixes_are_removed_from_the_message(line: str) -> None:
    assert clean(line.encode()) == MESSAGE


@pytest.mark.parametrize(
    "line",
    [
        *("", "   ^^^^^^^^^^^^", "~~~~~~^^^^", "-----", "━━━━━", "```", "> ", "|---|---|", "vllm-1  | "),
        "Apr 22 10:00:00 gpu7 vllm[47]: ",
    ],
)
def test_a_line_of_decoration_becomes_empty(line: str) -> None:
    assert clean(line.encode()) == ""


@pytest.mark.parametrize(("line", "left"), CASES["the_rest_of_a_line_stays"])
def test_the_rest_of_a_line_stays(line: str, left: str) -> None:
    assert clean(line.encode()) == left


def test_other_encodings_are_read_as_windows_writes_them() -> None:
    assert clean("größer als –".encode("cp1252")) == "größer als –"


@pytest.mark.parametrize(("line", "of_vllm"), CASES["a_prefix_of_vllm_is_known"])
def test_a_prefix_of_vllm_is_known(line: str, of_vllm: bool) -> None:
    prefix, text = split_prefix(line.encode())
    assert bool(OF_VLLM.search(prefix)) is of_vllm
    assert text.startswith("boom")


@given(st.binary(max_size=400))
def test_any_bytes_give_one_line(line: bytes) -> None:
    assert "\n" not in clean(line.replace(b"\n", b""))
