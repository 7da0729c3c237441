"""One YAML scalar: what both versions of YAML read alike is a value, the rest an error."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.text import MAX_INT, YamlScalar, YamlScalarError, resolve

VALUES: dict[str, YamlScalar] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    "0": 0, "-0": 0, "7": 7, "+7": 7, "-12": -12, str(MAX_INT): MAX_INT, str(-MAX_INT): -MAX_INT,
    "0.5": 0.5, ".5": 0.5, "5.": 5.0, "-1.5e3": -1500.0, "1e3": 1000.0, "1E-3": 0.001, "0.0": 0.0,
    "tRue": "tRue", "nil": "nil", "y": "y", "n": "n", "nan": "nan", "inf": "inf", "1e": "1e",
    "1.2.3": "1.2.3", "vllm@0.19.1": "vllm@0.19.1", "12a": "12a", "-": "-", "2001-01": "2001-01", "_1": "_1",
    "0x": "0x", "१": "१",
}  # fmt: skip

REFUSED = {
    "a boolean to some readers": [
        "yes",
        "Yes",
        "YES",
        "no",
        "No",
        "NO",
        "on",
        "On",
        "ON",
        "off",
        "Off",
        "OFF",
    ],
    "a date to some readers": [
        "2001-01-01",
        "2001-1-1",
        "2001-12-14t21:59:43.10-05:00",
        "2001-12-14 21:59:43",
    ],
    "ambiguous": ["010", "-01", "0x1F", "0o17", "0b11", "1_000", "1_0.5", "1:30", "-1:30:59.5", "0_", "00"],
    "not finite": [".inf", "-.Inf", "+.INF", ".nan", ".NaN", "1e999", "-1.0e400"],
    "too large": [str(MAX_INT + 1), str(-MAX_INT - 1), "9" * 21, "1" * 1_000_000],
    "a surrogate": ["a\ud800"],
}


@pytest.mark.parametrize("text", VALUES)
def test_value(text: str) -> None:
    found = resolve(text, plain=True)
    assert found == VALUES[text]
    assert type(found) is type(VALUES[text])


@pytest.mark.parametrize(
    ("reason", "text"), [(reason, text) for reason, texts in REFUSED.items() for text in texts]
)
def test_refused(reason: str, text: str) -> None:
    with pytest.raises(YamlScalarError, match=reason) as caught:
        resolve(text, plain=True)
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 200
    if reason != "a surrogate":
        assert resolve(text, plain=False) == text


@given(st.text("0123456789+-._:exobinfatruYNOl~ T", max_size=8))
def test_no_scalar_means_something_else_to_another_reader(text: str) -> None:
    plain = text.strip()
    try:
        ours = resolve(plain, plain=True)
    except YamlScalarError:
        return
    resolver: Any = yaml.SafeLoader("")
    tag = resolver.resolve(yaml.ScalarNode, plain, (True, False))
    theirs = yaml.SafeLoader.yaml_constructors[tag](resolver, yaml.ScalarNode(tag, plain))
    if isinstance(ours, float) and isinstance(theirs, str):
        return  # YAML 1.1 wants a dot and a sign in 1e3; nobody takes it for another number.
    assert ours == theirs
    assert type(ours) is type(theirs)
