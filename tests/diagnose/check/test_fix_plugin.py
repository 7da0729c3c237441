"""The conditions of a fix that would be applied: the variable, the plug-in and vLLM's own filter."""

from importlib.metadata import EntryPoint

import pytest

from moedoctor.diagnose.check import fix_plugin
from moedoctor.plugin.extensions import FIXES, TRACES

OURS = EntryPoint("moedoctor", "moedoctor.plugin.register:register", fix_plugin.GROUP)
ANYWAY = {"MOEDOCTOR_FIXES_OPTIONAL": "1"}
OTHERS = EntryPoint("lora", "somebody.plugin:register", fix_plugin.GROUP)


@pytest.mark.parametrize(
    ("environ", "registered", "active", "reason"),
    [
        ({}, (OURS,), False, "is not set"),
        ({"MOEDOCTOR_FIXES": ""}, (OURS,), False, "is not set"),
        ({"MOEDOCTOR_FIXES": ","}, (OURS,), False, "MOEDOCTOR_FIXES=, names no fix; expected backend,"),
        ({"MOEDOCTOR_FIXES": "nonsense"}, (OURS,), False, "vLLM does not start: MOEDOCTOR_FIXES names no"),
        ({"MOEDOCTOR_FIXES": "offload,xyz"}, (OURS,), False, "names no fix called xyz; expected backend,"),
        ({"MOEDOCTOR_TRACE": "xyz"}, (OURS,), False, "MOEDOCTOR_TRACE names no trace called xyz"),
        ({"MOEDOCTOR_FIXES": "offload,xyz", **ANYWAY}, (OURS,), True, "names offload, and vLLM loads the"),
        ({"MOEDOCTOR_FIXES": "offload,xyz", **ANYWAY}, (OURS,), True, "left out: MOEDOCTOR_FIXES names no"),
        ({"MOEDOCTOR_FIXES": " Offload "}, (OURS,), True, "names offload, and vLLM"),
        ({"MOEDOCTOR_FIXES": "all"}, (OURS,), True, "backend, expert_cache, offload, routing, and vLLM"),
        ({"MOEDOCTOR_FIXES": "backend"}, (OTHERS,), False, "registers no plug-in"),
        ({"MOEDOCTOR_FIXES": "backend"}, (OTHERS, OURS), True, "vLLM loads the plug-in moedoctor"),
        ({"MOEDOCTOR_FIXES": "backend", "VLLM_PLUGINS": "lora,moedoctor"}, (OURS,), True, "loads"),
        ({"MOEDOCTOR_FIXES": "backend", "VLLM_PLUGINS": "lora"}, (OURS,), False, "does not name moedoctor"),
    ],
)
def test_the_variable_the_entry_points_and_the_filter_decide(
    monkeypatch, environ, registered, active, reason
):
    monkeypatch.setattr(fix_plugin, "entry_points", lambda group: registered)
    state = fix_plugin.state(environ, "0.21.0+cu130")
    assert state["active"] is active
    assert reason in state["reason"]
    assert state["setting"] == environ.get("MOEDOCTOR_FIXES")
    assert state["plugin"] == ("moedoctor" if OURS in registered else None)


@pytest.mark.parametrize(
    ("vllm", "reason"),
    [(None, "vLLM is not installed here"), ("0.16.0", "none of the releases that the fixes know (0.17.1 to")],
)
def test_no_fix_is_active_with_an_unknown_vllm(monkeypatch, vllm, reason):
    monkeypatch.setattr(fix_plugin, "entry_points", lambda group: (OURS,))
    state = fix_plugin.state({"MOEDOCTOR_FIXES": "offload"}, vllm)
    assert (state["active"], state["fixes"]) == (False, ["offload"])
    assert reason in state["reason"]


@pytest.mark.parametrize(
    ("environ", "stops"),
    [
        ({"MOEDOCTOR_FIXES": "expert_cache"}, True),
        ({"MOEDOCTOR_FIXES": "expert_cache", **ANYWAY}, False),
        ({"MOEDOCTOR_FIXES": "all"}, False),
        ({"MOEDOCTOR_FIXES": "expert_cache", "VLLM_PLUGINS": "lora"}, False),
        ({"MOEDOCTOR_FIXES": "offload", "MOEDOCTOR_TRACE": "nan"}, True),
    ],
)
def test_a_fix_that_the_release_refuses_is_a_problem_if_it_stops_vllm(monkeypatch, environ, stops):
    monkeypatch.setattr(fix_plugin, "entry_points", lambda group: (OURS,))
    state = fix_plugin.state(environ, "0.19.1")
    assert (state["stops"] is not None) is stops
    problems = list(fix_plugin.find_plugin_problems(state))
    assert [problem.severity for problem in problems] == (["error"] if stops else [])
    assert all("is not applied to vLLM 0.19.1: " in problem.why for problem in problems)


def test_every_fix_and_trace_is_told_for_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fix_plugin.describe_extensions("0.21.0")
    assert list(known) == [*FIXES, *TRACES]
    assert known["offload"]["basis"] == "ran in an engine"
    assert "nvidia-h200/offload_table" in known["offload"]["reports"]
    assert known["routing"]["basis"] == "not needed"
    checked = {"basis": "source checked", "reports": [], "reason": ""}
    assert fix_plugin.describe_extensions("0.17.1")["offload"] == checked
    monkeypatch.setattr(fix_plugin, "load_evidence", dict)
    untried = fix_plugin.describe_extensions("0.18.1")
    assert (untried["offload"]["basis"], untried["nan"]["basis"]) == ("not tried", "refused")
    assert untried["nan"]["reason"]
