"""Whether the fixes would be applied: the variable, the plug-in and vLLM's own filter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest

from moedoctor.diagnose.check import fix_plugin

OURS = EntryPoint("moedoctor", "moedoctor.upstream.plugin.register:register", fix_plugin.GROUP)
OTHERS = EntryPoint("lora", "somebody.plugin:register", fix_plugin.GROUP)


@pytest.mark.parametrize(
    ("environ", "registered", "active", "reason"),
    [
        ({}, (OURS,), False, "is not set"),
        ({"MOEDOCTOR_FIXES": ""}, (OURS,), False, "is not set"),
        ({"MOEDOCTOR_FIXES": " "}, (OURS,), False, "holds nothing but spaces"),
        ({"MOEDOCTOR_FIXES": ","}, (OURS,), False, "MOEDOCTOR_FIXES=, names no fix; expected backend,"),
        ({"MOEDOCTOR_FIXES": "nonsense"}, (OURS,), False, "names no fix; expected backend, expert_cache,"),
        ({"MOEDOCTOR_FIXES": "offload,xyz"}, (OURS,), True, "names offload, and vLLM loads the plug-in"),
        ({"MOEDOCTOR_FIXES": "offload,xyz"}, (OURS,), True, "left out, for it names no fix: xyz"),
        ({"MOEDOCTOR_FIXES": " Offload "}, (OURS,), True, "names offload, and vLLM"),
        ({"MOEDOCTOR_FIXES": "all"}, (OURS,), True, "backend, expert_cache, offload, routing, and vLLM"),
        ({"MOEDOCTOR_FIXES": "backend"}, (OTHERS,), False, "registers no plug-in"),
        ({"MOEDOCTOR_FIXES": "backend"}, (OTHERS, OURS), True, "vLLM loads the plug-in moedoctor"),
        ({"MOEDOCTOR_FIXES": "backend", "VLLM_PLUGINS": "lora,moedoctor"}, (OURS,), True, "loads"),
        ({"MOEDOCTOR_FIXES": "backend", "VLLM_PLUGINS": "lora"}, (OURS,), False, "does not name moedoctor"),
        ({"MOEDOCTOR_FIXES": "backend", "VLLM_PLUGINS": ""}, (OURS,), False, "does not name moedoctor"),
    ],
)
def test_the_variable_the_entry_points_and_vllms_filter_decide(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    registered: tuple[EntryPoint, ...],
    active: bool,
    reason: str,
) -> None:
    monkeypatch.setattr(fix_plugin, "entry_points", lambda group: registered)
    monkeypatch.setattr(fix_plugin, "version", lambda name: "0.21.0+cu130")
    state = fix_plugin.state(environ)
    assert state["active"] is active
    assert reason in state["reason"]
    assert state["setting"] == environ.get("MOEDOCTOR_FIXES")
    assert state["plugin"] == ("moedoctor" if OURS in registered else None)


def without(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (without, "vLLM is not installed here"),
        (lambda name: "0.16.0", "vLLM 0.16.0 is none of the releases that the fixes know (0.17.1 to"),
    ],
)
def test_no_fix_is_active_with_an_unknown_vllm(
    monkeypatch: pytest.MonkeyPatch, installed: Callable[[str], str], reason: str
) -> None:
    monkeypatch.setattr(fix_plugin, "entry_points", lambda group: (OURS,))
    monkeypatch.setattr(fix_plugin, "version", installed)
    state = fix_plugin.state({"MOEDOCTOR_FIXES": "offload"})
    assert (state["active"], state["fixes"]) == (False, ["offload"])
    assert reason in state["reason"]


def test_it_prints_no_warning_and_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from moedoctor.diagnose.check import fix_plugin as f;"
        "f.state({'MOEDOCTOR_FIXES': 'nonsense,offload'});"
        "print(sorted({'torch', 'vllm'} & set(sys.modules)), f.vllm_plugin.logger.disabled)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[] False", "")
