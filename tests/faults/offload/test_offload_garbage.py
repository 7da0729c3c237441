"""MD008: a view without its memory, tiny engines, and two engines of the user's model. No engine runs."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_stub import answered, died, layer_outputs
from fault_cases import run
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from moedoctor.entries import load_entries
from moedoctor.faults.offload import offload_garbage as md008
from moedoctor.faults.offload.offload_garbage import OffloadGarbage, OffloadGarbageParameters
from moedoctor.faults.offload.offload_garbage_lab import compare, fit_together, own_model_trial
from moedoctor.fixes.backends.release_tables import load_releases as vllm_releases
from moedoctor.interfaces import Judgement
from moedoctor.results import CaseResult, CaseVerdict, Tier
from moedoctor.runner.plan import Options, plan
from moedoctor.scenario.targets import load_targets
from moedoctor.upstream.engine import engine as engine_module
from moedoctor.upstream.engine import offload_table, probes
from moedoctor.upstream.engine.engine import EngineResult, LogFacts
from moedoctor.upstream.engine.engine import _write_request as document_of
from moedoctor.upstream.engine.experiment import Ran

ROOT = Path(__file__).parents[3]


NOT_SEEN = "not reproduced on this GPU in any"
REPRODUCED, CLEAN, ERROR = CaseVerdict.REPRODUCED, CaseVerdict.CLEAN, CaseVerdict.ERROR


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"cells": 2, "same": 1, "other_tokens": 1}, "reproduced in 1 of 2 engines with offload: 1 give"),
        ({"cells": 3, "same": 2, "other_tokens": 0, "not_offloaded": 1}, f"{NOT_SEEN} of 2"),
        ({"cells": 2, "same": 0, "other_tokens": 0, "not_offloaded": 2}, None),
        ({"cells": 5, "same": 4, "other_tokens": 0, "moved_back": 1}, f"{NOT_SEEN} of 4"),
        ({"same_bits": True}, None),
    ],
)
def test_whether_garbage_was_seen(table: dict[str, Any], text: str | None) -> None:
    case = CaseResult("installed", Tier.ENGINE, {}, CLEAN, table)
    conclusions = OffloadGarbage().conclude([case])
    assert str(conclusions.get("garbage_of_vllm_38718", None)).startswith(str(text))


def test_a_run_of_the_restated_mechanism_says_that_the_cause_is_not_confirmed() -> None:
    restated = CaseResult("faulty", Tier.MODEL, {}, CLEAN, {"weights_changed": 0.0})
    assert "nobody upstream has confirmed a cause" in OffloadGarbage().conclude([restated])["unknown_cause"]
    assert OffloadGarbage().conclude([]) == {}


MINE = OffloadGarbageParameters(mode="eager", model="/models/mine", expected="Paris", moe_backend="marlin")


def changed(**values: Any) -> OffloadGarbageParameters:
    return MINE.model_copy(update=values)


def test_the_engines_of_the_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = changed(cpu_offload_gb=5.0, arguments='{"max_model_len": 512}', fixes="offload")
    control, request = (own_model_trial(mine, offload=offload).request for offload in (False, True))
    arguments = document_of(request)["arguments"]
    assert not {"kv_cache_memory_bytes", "attention_backend"} & set(arguments), "settings of the tiny ones"
    expected = {"model": "/models/mine", "skip_tokenizer_init": False, "moe_backend": "marlin"}
    expected |= {"max_model_len": 512, "cpu_offload_gb": 5.0}
    assert expected.items() <= arguments.items()
    assert "cpu_offload_gb" not in document_of(control)["arguments"]
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA" not in request.environ
    compiled = own_model_trial(changed(mode="compiled"), offload=True).request
    assert compiled.probe_options == {"calls": 0}
    for eager in (control, request):
        assert eager.environ["MOEDOCTOR_FIXES"] == "offload"
        assert str(eager.probe) == str(compiled.probe) == f"{probes.__name__}:record_layers_and_places"
        assert eager.probe_options["calls"] > mine.max_tokens
        assert (eager.probe_when, eager.logprobs) == ("before", 5)
    for offload in (False, True):
        copies = own_model_trial(changed(access="copies"), offload=offload).request.environ
        assert copies["VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"] == "1"
        assert copies["VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"] == "1"
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert own_model_trial(changed(model="mine"), offload=False).request.model == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("arguments", "together"),
    [
        ('{"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 1}', True),
        ('{"gpu_memory_utilization": 0.4}', False),
        ('{"gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 1}', False),
        ("{}", False),
    ],
)
def test_two_engines_run_together_only_if_both_fit(arguments: str, together: bool) -> None:
    assert fit_together(changed(arguments=arguments)) is together


def wrote(
    text: str, tokens: Sequence[int], evidence: Any = "probe", fixes: str | None = None
) -> EngineResult:
    """An engine that gives token 1 a logprob 0.25 above token 2 and 2 above token 3."""
    steps = tuple({"1": -0.5, "2": -0.75, "3": -2.5} for _ in tokens)
    outputs = layer_outputs(1.0, 2.0) if evidence == "probe" else evidence
    log = LogFacts(offloader="UVAOffloader")
    return answered(tokens, text, logprobs=(steps,), probe=outputs, fixes=fixes, log=log)


def judged(
    control: EngineResult, other: EngineResult, parameters: OffloadGarbageParameters = MINE
) -> Judgement:
    trial = own_model_trial(parameters, offload=True)
    return md008.judge_own_model(compare(Ran(trial, other, control), parameters))


PARIS = wrote("Paris", [1])
ROUNDED = layer_outputs(1.001, 2.0)
MEMORY = died("CUDA out of memory")
REFUSED = died("b_scales is not on GPU")
WITH_FIX = wrote("Paris", [1], fixes="offload (…)")


@pytest.mark.parametrize(
    ("control", "other", "verdict", "figure"),
    [
        (PARIS, PARIS, CLEAN, "the same tokens"),
        (PARIS, wrote("word", [2], layer_outputs(1.0, 9.0)), REPRODUCED, "on: 'Paris' is not in the answer"),
        (PARIS, wrote("Paris!", [2]), REPRODUCED, "what follows the layers differs"),
        (PARIS, wrote("Paris!", [2], ROUNDED), CLEAN, "from number 1 on, 0.25 apart"),
        (PARIS, wrote("Paris!", [3], ROUNDED), REPRODUCED, "2 less likely without"),
        (PARIS, wrote("Paris!", [4], ROUNDED), REPRODUCED, "not among the likely"),
        (wrote("Paris", [1, 1]), wrote("Paris!", [1, 2], ROUNDED), REPRODUCED, "differs was not seen"),
        (
            wrote("Paris", [1, 1], layer_outputs(1.0, later=(2.0,))),
            wrote("Paris!", [1, 2], layer_outputs(1.0, later=(9.0,))),
            REPRODUCED,
            "from number 2 on: the first layer that differs: layers.0, in call 2",
        ),
        (MEMORY, PARIS, CLEAN, "no run without offload"),
        (MEMORY, wrote("no", [1]), REPRODUCED, "not 'Paris' in the answer"),
        (wrote("Rome", [1]), wrote("Rome", [1]), ERROR, "the control is wrong"),
        (PARIS, REFUSED, REPRODUCED, "with offload: Runtime"),
        (MEMORY, REFUSED, REPRODUCED, "with offload: Runtime"),
        # Engines that differ from the request.
        (PARIS, wrote("Paris", [1], {"host_bytes": 0}), ERROR, "nothing was offloaded"),
        (PARIS, wrote("Paris", [1], None), ERROR, "nothing was offloaded"),
        (PARIS, died("2 workers", stage="probe"), ERROR, "the engine could not be looked into"),
        (WITH_FIX, WITH_FIX, CLEAN, "the same tokens"),
        (WITH_FIX, PARIS, ERROR, "the fix was not active"),
        (WITH_FIX, REFUSED, ERROR, "the fix was not active"),
        (WITH_FIX, replace(REFUSED, fixes="offload (…)"), REPRODUCED, "with offload: Runtime"),
    ],
)
def test_the_users_model(control, other, verdict, figure):
    """The fix is expected in the engine with offload if the control has it."""
    judgement = judged(control, other, changed(fixes="offload") if control.fixes else MINE)
    assert judgement.verdict is verdict
    assert figure in judgement.figure


def out_of_memory(asked: str, free: str, used: str) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 139.72 GiB of which"
        f" {free} is free. Including non-PyTorch memory, this process has {used} memory in use. Of the"
        f" allocated memory {used} is allocated by PyTorch, and {free} is reserved but unallocated"
    )


@pytest.mark.parametrize(
    ("without", "with_offload"),
    [
        ("no such model: /models/mime", "no such model: /models/mime"),
        (out_of_memory("9 GiB", "8 GiB", "131 GiB"), out_of_memory("768.00 MiB", "512.25 MiB", "138.6 GiB")),
        ("illegal access at 0x7f3a10", "illegal access at 0x55bc99ff"),
    ],
    ids=["missing folder", "too little memory", "addresses"],
)
@pytest.mark.parametrize("expected", ["Paris", None])
def test_two_engines_that_stop_with_the_same_error_are_not_judged(without, with_offload, expected):
    judgement = judged(died(without), died(with_offload), changed(expected=expected))
    assert (judgement.verdict, judgement.figure) == (ERROR, "no control")
    assert f"stops with the same error: RuntimeError: {without[:60]}" in (judgement.reason or "")


def test_without_expected_text() -> None:
    nothing = changed(expected=None)
    assert judged(MEMORY, PARIS, nothing).verdict is ERROR
    # Garbage after the prompt: weights that are overwritten after the first call.
    control = wrote("Paris", [1, 1], layer_outputs(1.0, later=(2.0, 2.0)))
    for later, layer in (((2.0, 2.0), "what follows the layers"), ((-2.0, 2.0), "layers.0, in call 2")):
        judgement = judged(control, wrote("zzz", [1, 2], layer_outputs(1.0, later=later)), nothing)
        assert judgement.verdict is REPRODUCED
        assert layer in judgement.figure


def test_backends_are_compared_without_offload() -> None:
    def case(backend: str, text: str, norms: Sequence[float], **values: Any) -> CaseResult:
        parameters = changed(moe_backend=backend, **values)
        control = wrote(text, [1], layer_outputs(*norms))
        evidence = compare(Ran(own_model_trial(parameters, offload=True), control, control), parameters)
        return CaseResult("installed", Tier.ENGINE, parameters.model_dump(), CLEAN, evidence)

    first = case("marlin", "Paris", (1.0, 2.0, 3.0))
    others = [
        case("cutlass", "Oslo", (5.0, 5.0, 5.0), access="copies"),
        case("humming", "Oslo", (5.0, 5.0, 5.0), fixes="offload"),
        case("humming", "Oslo", (5.0, 5.0, 5.0), prompt="another"),
        case("triton", "Paris", (1.0, 2.0, 3.0)),
        case("emulation", "Rome", (1.0, 9.0, 3.0)),
    ]
    (rows,) = md008.compare_backends_without_offload([first, *others]).values()
    table = [(row["backend"], row["beside"], row["same_answer"], row["first_layer"]) for row in rows]
    assert table == [("triton", "marlin", True, None), ("emulation", "marlin", False, "layers.1")]
    assert md008.compare_backends_without_offload([first]) == {}


@pytest.mark.parametrize(("fixes", "expected"), [("none", ""), ("offload", "offload")])
def test_the_engine_tier_runs_the_engines_that_a_point_names(monkeypatch, fixes, expected):
    labels: list[str] = []

    def run_engine(request: Any) -> EngineResult:
        assert request.environ["MOEDOCTOR_FIXES"] == expected
        labels.append(request.label)
        return replace(PARIS, fixes=expected or None)

    for module in (engine_module, offload_table):
        monkeypatch.setattr(module, "need_engine", lambda: None)
    monkeypatch.setattr(engine_module, "run_engine", run_engine)
    mine = {"mode": "eager", "model": "/m", "expected": "Paris", "fixes": fixes}
    own = run(OffloadGarbage(), "installed", Tier.ENGINE, **mine)
    assert (own.verdict, labels) == (CLEAN, ["/m without offload", "/m with offload"])
    tiny = run(OffloadGarbage(), "installed", Tier.ENGINE, mode="eager", fixes=fixes)
    assert tiny.verdict is CLEAN
    assert tiny.evidence["cells"] == 4


def test_the_scenarios_for_the_users_model_need_engines_and_a_control(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "wsl.md").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(guide.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    for file, engines in ((ROOT / "scenarios/engine/own_model.yaml", 3), (tmp_path / "mine.yaml", 8)):
        (scenario,) = load_targets((str(file),))
        cases = [planned.case for planned in plan([scenario], Options(), {})[0].cases]
        counts = Counter((case.subject, case.tier.value) for case in cases)
        assert counts == {("faulty", "model"): 1, ("fixed", "model"): 1, ("installed", "engine"): engines}
        points = [case.parameters for case in cases if case.tier is Tier.ENGINE]
        assert all(point["mode"] == "eager" and point["model"] for point in points)
        assert {"marlin"} < {point["moe_backend"] for point in points}
        ways = {(point["access"], point["fixes"]) for point in points}
        assert ways >= {("auto", "none"), ("copies", "offload")}


def test_the_guide_names_the_older_runner_for_the_releases_whose_v2_runner_does_not_start() -> None:
    guide = (ROOT / "docs" / "wsl.md").read_text(encoding="utf-8")
    (rule,) = (rule.when for rule in load_entries()["MD002"].affects if rule.severity == "error")
    ((older, value),) = rule.variables_not.items()
    affected = SpecifierSet(rule.packages["vllm"])
    releases_affected = [release for release in vllm_releases() if release in affected]
    listed = []
    for first, last, row in re.findall(r"^\| (0[\d.]+)(?: to (0[\d.]+))? \|(.*)\|$", guide, re.MULTILINE):
        bounds = Version(first), Version(last or first)
        releases = [name for name in vllm_releases() if bounds[0] <= Version(name) <= bounds[1]]
        listed += releases
        without, with_fix = row.split(" | ")
        for cell in (without, with_fix):
            assert (f"`{older}={value}`" in cell) == any(name in affected for name in releases), first
    assert listed == list(vllm_releases())
    assert f"{releases_affected[0]} to {releases_affected[-1]} stops at start" in guide
