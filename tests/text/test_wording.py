"""Words for error messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.text import dotted, escape, nearest, shorten, show


@given(st.text())
def test_escaped_text_is_printable(text: str) -> None:
    assert escape(text).isprintable()
    if text.isprintable():
        assert escape(text) == text


def test_escapes() -> None:
    assert escape("a\n\t\x1b[0m\u202e\ud800é") == r"a\n\t\x1b[0m\u202e\ud800é"


def test_shorten() -> None:
    assert shorten("x" * 60) == "x" * 60
    assert shorten("x" * 61) == "x" * 40 + "… (61 characters)"
    assert shorten("x" * 30, 25) == "x" * 5 + "… (30 characters)"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (0, "0"),
        (1.5, "1.5"),
        ("none", "'none'"),
        ("a\nb", r"'a\nb'"),
        ([1], "a list"),
        ((), "a list"),
        ({}, "a mapping"),
    ],
)
def test_show(value: object, shown: str) -> None:
    assert show(value) == shown


def test_dotted() -> None:
    assert dotted(()) == ""
    assert dotted(("claims", 0, "thresholds", "a\nb")) == r"claims[0].thresholds.a\nb"
    assert dotted((0, "a")) == "[0].a"


def test_nearest() -> None:
    assert nearest("topk", ["tokens", "top_k"]) == "did you mean top_k?"
    assert nearest("TOP_K", ["tokens", "top_k"]) == "did you mean top_k?"
    assert nearest("zzz", ["a", "b"]) == "expected one of a, b"
    assert nearest("zzz", ["a"]) == "expected a"
    assert nearest("zzz", []) == "expected nothing here"
    many = nearest("zzz", [f"name{index}" for index in range(50)])
    assert many.endswith("name11 …")
