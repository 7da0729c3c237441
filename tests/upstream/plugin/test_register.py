"""The plug-in itself: inactive by default, never raises, and changes all of a fix's functions or none."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile import problem
from vllm_stub import write

from moedoctor.upstream.plugin import register
from moedoctor.upstream.plugin.register import FixError, Patch, apply_patches

VICTIM = """
def function(x, y):
    return "right"


class Owner:
    def method(self):
        return "right"
"""


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "victim.py").write_text(VICTIM)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("victim")
    del sys.modules["victim"]


def wrapped(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *arguments: f"wrapped {original(*arguments)}"


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (Patch("no_such_module", "f", wrapped), "there is no no_such_module"),
        (Patch("victim:Nobody", "f", wrapped), "there is no victim:Nobody"),
        (Patch("victim:Owner", "f", wrapped), "there is no Owner.f"),
        (Patch("victim", "function", wrapped, "x z"), "victim.function takes no z; it takes x, y"),
        (Patch("victim", "function", wrapped, source=("right", "left")), "does not hold `left`"),
        (Patch("victim", "function", wrapped, once="n"), "holds `n` 3 times; expected it once"),
        (Patch("math", "sqrt", wrapped), "the source of math.sqrt cannot be read"),
    ],
)
def test_if_one_patch_does_not_fit_nothing_is_changed(victim: Any, patch: Patch, reason: str) -> None:
    fits = Patch("victim:Owner", "method", wrapped, "self", ("right",), once="return")
    with pytest.raises(FixError, match=re.escape(reason)):
        apply_patches("mine", "0.21.0", [fits, patch])
    assert victim.Owner().method() == "right"
    apply_patches("mine", "0.21.0", [fits, replace(patch, releases="<0.20.0")])
    assert victim.Owner().method() == "wrapped right"


def test_each_fix_wraps_a_function_once_and_looks_under_the_others(victim: Any) -> None:
    def adding(name: str) -> Callable[[Any], Any]:
        return lambda original: lambda *arguments: f"{name} {original(*arguments)}"

    for name in ("a", "b", "a"):
        apply_patches(name, "0.21.0", [Patch("victim", "function", adding(name), "x y", ("right",))])
    assert victim.function(1, 2) == "b a right"


@pytest.fixture
def fixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a stub of a release, and a fix `good`, a fix `bad` and a trace `look`; set the variables."""

    def refuse(version: str) -> str:
        raise FixError("not as expected")

    def install(version: str = "0.21.0", **variables: str) -> None:
        monkeypatch.syspath_prepend(str(write(tmp_path, version)))
        for name, apply in (("good", lambda version: f"for {version}"), ("bad", refuse)):
            monkeypatch.setitem(sys.modules, f"moedoctor_{name}", types.SimpleNamespace(apply=apply))
        tables = (
            (
                "MOEDOCTOR_FIXES",
                "fix",
                {"good": "moedoctor_good", "bad": "moedoctor_bad", "no": "moedoctor_no"},
            ),
            ("MOEDOCTOR_TRACE", "trace", {"look": "moedoctor_good"}),
        )
        monkeypatch.setattr(register, "_TABLES", tables)
        monkeypatch.setenv("MOEDOCTOR_STATUS", str(tmp_path / "active.json"))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return install


@pytest.mark.parametrize("value", ["", " , "])
def test_nothing_is_applied_by_default(
    fixes: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path, value: str
) -> None:
    fixes(MOEDOCTOR_FIXES=value)
    register.register()
    assert caplog.messages == []
    assert not (tmp_path / "active.json").exists()


def test_fixes_and_traces_are_applied_and_logged_once(
    fixes: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fixes(MOEDOCTOR_FIXES="GOOD,nonsense, good,bad,no", MOEDOCTOR_TRACE="all")
    for _ in range(3):
        register.register()
    refused = "is not applied to vLLM 0.21.0:"
    assert caplog.messages == [
        "moedoctor: MOEDOCTOR_FIXES names no fix called nonsense; expected good, bad, no, all",
        f"moedoctor: the fix bad {refused} not as expected",
        f"moedoctor: the fix no {refused} ModuleNotFoundError: No module named 'moedoctor_no'",
        "moedoctor: active in vLLM 0.21.0: good (for 0.21.0); look (for 0.21.0)",
    ]
    assert json.loads((tmp_path / "active.json").read_text()) == ["good (for 0.21.0)", "look (for 0.21.0)"]


def test_an_unknown_release_is_left_unchanged_with_a_warning(
    fixes: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    fixes("0.99.0", MOEDOCTOR_FIXES="all")
    register.register()
    assert caplog.messages == [
        "moedoctor: vLLM 0.99.0 is none of the releases that the fixes know (0.17.1 to 0.33.0); "
        "nothing is changed"
    ]


def test_it_never_raises(
    fixes: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> str:
        raise RuntimeError("no metadata")

    fixes(MOEDOCTOR_FIXES="good")
    monkeypatch.setattr(register, "installed_version", broken)
    register.register()
    assert caplog.messages == ["moedoctor: no fix is active: RuntimeError: no metadata"]


@pytest.mark.parametrize("module", [*register.FIXES.values(), *register.TRACES.values()])
def test_every_fix_and_trace_of_the_tables_can_be_applied(module: str) -> None:
    assert callable(importlib.import_module(module).apply)


def test_a_log_line_holds_nothing_that_a_terminal_acts_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(register.VARIABLE, "\x1b]0;title\x07\n::error::x\x9b" + "y" * 1000)
    register._register.cache_clear()
    register.register()
    (message,) = caplog.messages
    assert "names no fix called" in message
    assert not problem(message)
    assert "y" * 201 not in message
