"""The plug-in itself: inactive by default, stops vLLM if it cannot do what was asked."""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hostile import problem
from vllm_stub import write

from moedoctor.plugin import register
from moedoctor.plugin.extensions import Extension
from moedoctor.plugin.register import FixError, OptionError, Patch, apply_patches

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
    """Install a stub of a release, fixes that succeed and fail, and a trace; set variables."""

    def install(version: str = "0.21.0", **variables: str) -> None:
        monkeypatch.syspath_prepend(str(write(tmp_path, version)))
        applies = {
            "good": lambda version: f"for {version}",
            "bad": Mock(side_effect=FixError("not as expected")),
            "option": Mock(side_effect=OptionError("SLOTS is 'x'; expected a number")),
        }
        for name, apply in applies.items():
            monkeypatch.setitem(sys.modules, f"moedoctor_{name}", types.SimpleNamespace(apply=apply))
        offered = {name: Extension(f"moedoctor_{name}") for name in ("good", "bad", "no")}
        offered["old"] = Extension("moedoctor_good", releases="<0.20.0", refusal="made for old releases")
        offered["healed"] = Extension("moedoctor_bad", unneeded=">=0.20.0", reason_unneeded="it is right")
        if "option" in variables.get("MOEDOCTOR_FIXES", "") or "SLOTS" in variables:
            offered["option"] = Extension("moedoctor_option")
        traces = {"look": Extension("moedoctor_good")}
        tables = (("MOEDOCTOR_FIXES", "fix", offered), ("MOEDOCTOR_TRACE", "trace", traces))
        monkeypatch.setattr(register, "TABLES", tables)
        monkeypatch.setenv("MOEDOCTOR_STATUS", str(tmp_path / "active.json"))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return install


@pytest.mark.parametrize("value", ["", " , "])
def test_nothing_is_applied_by_default(fixes, caplog, tmp_path, value):
    fixes(MOEDOCTOR_FIXES=value)
    register.register()
    assert caplog.messages == []
    assert not (tmp_path / "active.json").exists()


def test_fixes_and_traces_are_applied_and_logged_once(fixes, caplog, tmp_path):
    fixes(MOEDOCTOR_FIXES="GOOD, good,healed", MOEDOCTOR_TRACE="all")
    for _ in range(3):
        register.register()
    assert caplog.messages == [
        "moedoctor: vLLM 0.21.0 does not need the fix healed: it is right",
        "moedoctor: active in vLLM 0.21.0: good (for 0.21.0); look (for 0.21.0)",
    ]
    assert json.loads((tmp_path / "active.json").read_text()) == ["good (for 0.21.0)", "look (for 0.21.0)"]


REFUSED = "is not applied to vLLM 0.21.0:"
PROBLEMS = {
    "bad": f"the fix bad {REFUSED} not as expected",
    "no": f"the fix no {REFUSED} ModuleNotFoundError: No module named 'moedoctor_no'",
    "old": f"the fix old {REFUSED} made for old releases",
    "option": f"the fix option {REFUSED} SLOTS is 'x'; expected a number",
    "nonsense": "MOEDOCTOR_FIXES names no fix called nonsense; expected good, bad, no, old, healed, ",
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("value", ["{}", "good,{}", "{},all"])
def test_what_was_asked_for_by_name_stops_the_engine_unless_it_is_optional(
    fixes, caplog, capfd, monkeypatch, tmp_path, name, value
):
    fixes(MOEDOCTOR_FIXES=value.format(name))
    plugins = types.SimpleNamespace(plugins_loaded=True)
    monkeypatch.setitem(sys.modules, "vllm.plugins", plugins)
    for _ in range(2):  # also when it is tried again
        with pytest.raises(SystemExit) as stopped:
            register.register()
        assert stopped.value.code == 1
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"moedoctor: vLLM is stopped: {PROBLEMS[name]}")
        assert line.endswith("(set MOEDOCTOR_FIXES_OPTIONAL=1 to start vLLM without it)")
    assert not plugins.plugins_loaded
    assert not (tmp_path / "active.json").exists()
    caplog.clear()
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    register.register()
    assert sum(PROBLEMS[name] in message for message in caplog.messages) == 1
    assert ("good (for 0.21.0)" in caplog.text) is ("," in value)


def test_all_leaves_out_what_cannot_be_applied(fixes, caplog):
    fixes(MOEDOCTOR_FIXES="all")
    register.register()
    assert caplog.messages == [
        *(f"moedoctor: left out: {PROBLEMS[name]}" for name in ("bad", "no", "old")),
        "moedoctor: vLLM 0.21.0 does not need the fix healed: it is right",
        "moedoctor: active in vLLM 0.21.0: good (for 0.21.0)",
    ]


def test_a_bad_value_of_an_option_stops_also_with_all(fixes: Callable[..., None]) -> None:
    fixes(MOEDOCTOR_FIXES="all", SLOTS="x")
    with pytest.raises(SystemExit, match="SLOTS is 'x'"):
        register.register()


@pytest.mark.parametrize(("value", "stops"), [("", True), ("0", True), ("yes", True), (" 1 ", False)])
def test_only_1_makes_fixes_optional(fixes: Callable[..., None], value: str, stops: bool) -> None:
    fixes(MOEDOCTOR_FIXES="bad", MOEDOCTOR_FIXES_OPTIONAL=value)
    if stops:
        with pytest.raises(SystemExit, match="MOEDOCTOR_FIXES_OPTIONAL"):
            register.register()
    else:
        register.register()


def test_an_unknown_release_is_left_unchanged(fixes, caplog, tmp_path):
    reason = "to vLLM 0.16.0: it is none of the releases that the fixes know (0.17.1 to 0.33.0)"
    fixes("0.16.0", MOEDOCTOR_FIXES="all")
    register.register()
    assert f"moedoctor: left out: the fix good is not applied {reason}" in caplog.messages
    assert not (tmp_path / "active.json").exists()
    fixes("0.16.0", MOEDOCTOR_FIXES="good")
    with pytest.raises(SystemExit, match=re.escape(reason)):
        register.register()


def test_a_release_that_cannot_be_read_stops_the_engine(fixes, monkeypatch):
    fixes(MOEDOCTOR_FIXES="good")
    monkeypatch.setattr(register, "read_vllm_version", Mock(side_effect=RuntimeError("no metadata")))
    with pytest.raises(SystemExit, match="RuntimeError: no metadata"):
        register.register()


IN_A_THREAD = """
import threading
from vllm.plugins import load_general_plugins
thread = threading.Thread(target=load_general_plugins)
thread.start()
thread.join()
"""


@pytest.mark.upstream
@pytest.mark.parametrize(("code", "exit_code"), [("import vllm; vllm.LLM('nothing')", 1), (IN_A_THREAD, 0)])
def test_the_real_vllm_does_not_start_an_engine(code: str, exit_code: int) -> None:
    environ = {**os.environ, "MOEDOCTOR_FIXES": "nonsense"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("moedoctor: vLLM is stopped: MOEDOCTOR_FIXES names no fix")
    assert "Traceback" not in done.stderr
    assert done.returncode == exit_code


@pytest.mark.parametrize("module", [*register.FIXES.values(), *register.TRACES.values()])
def test_every_fix_and_trace_of_the_tables_can_be_applied(module: Extension) -> None:
    assert callable(importlib.import_module(module.module).apply)


@pytest.mark.parametrize("optional", ["0", "1"])
def test_a_log_line_holds_nothing_that_a_terminal_acts_on(monkeypatch, caplog, capfd, optional):
    monkeypatch.setenv(register.VARIABLE, "\x1b]0;title\x07\n::error::x\x9b" + "y" * 1000)
    monkeypatch.setenv(register.OPTIONAL, optional)
    with contextlib.suppress(SystemExit):
        register.register()
    message = (*caplog.messages, *capfd.readouterr().err.splitlines())[0]
    assert "names no fix called" in message
    assert not problem(message)
    assert "y" * 201 not in message
