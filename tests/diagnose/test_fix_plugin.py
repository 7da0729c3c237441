"""Whether the fixes would be applied: the variable, the plug-in and vLLM's own filter."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from moedoctor.diagnose import fix_plugin

OURS = EntryPoint("moedoctor", "moedoctor.upstream.vllm_plugin:register", fix_plugin.GROUP)
OTHERS = EntryPoint("lora", "somebody.plugin:register", fix_plugin.GROUP)


@pytest.mark.parametrize(
    ("environ", "registered", "active", "said"),
    [
        ({}, (OURS,), False, "is not set"),
        ({"MOEDOCTOR_FIXES": ""}, (OURS,), False, "is not set"),
        ({"MOEDOCTOR_FIXES": "backend"}, (OTHERS,), False, "registers no plug-in"),
        ({"MOEDOCTOR_FIXES": "backend"}, (OTHERS, OURS), True, "vLLM loads the plug-in moedoctor"),
        ({"MOEDOCTOR_FIXES": "backend", "VLLM_PLUGINS": "lora,moedoctor"}, (OURS,), True, "loads"),
        ({"MOEDOCTOR_FIXES": "backend", "VLLM_PLUGINS": "lora"}, (OURS,), False, "does not name moedoctor"),
        ({"MOEDOCTOR_FIXES": "backend", "VLLM_PLUGINS": ""}, (OURS,), False, "does not name moedoctor"),
    ],
)
def test_state(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    registered: tuple[EntryPoint, ...],
    active: bool,
    said: str,
) -> None:
    monkeypatch.setattr(fix_plugin, "entry_points", lambda group: registered)
    state = fix_plugin.state(environ)
    assert state["active"] is active
    assert said in state["reason"]
    assert state["setting"] == environ.get("MOEDOCTOR_FIXES")
    assert state["plugin"] == ("moedoctor" if OURS in registered else None)
