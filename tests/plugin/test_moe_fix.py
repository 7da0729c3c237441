"""What the fix `moe` refuses, and its variable; no vLLM is needed."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from moedoctor.plugin import moe_fix, moe_layer
from moedoctor.plugin.extensions import read_choice
from moedoctor.plugin.register import OptionError
from moedoctor.results import UnavailableError


class Fp8MoEMethod:
    """Named as vLLM's."""


class Mxfp4MoEMethod:
    """Not one that we know."""


class Fp8PerTensorOnlineMoEMethod:
    """Named as vLLM's."""


def layer(activation: str = "silu", **changes: Any) -> Any:
    parallel = {"use_ep": False, "enable_eplb": False, "dp_size": 1, "pcp_size": 1}
    moe = {
        "activation": types.SimpleNamespace(value=activation),
        "in_dtype": "torch.bfloat16",
        "is_lora_enabled": False,
        "swiglu_limit": None,
    }
    parallel |= {key: value for key, value in changes.items() if key in parallel}
    moe |= {key: value for key, value in changes.items() if key not in parallel}
    return types.SimpleNamespace(moe_parallel_config=types.SimpleNamespace(**parallel), **moe)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    platform = types.SimpleNamespace(is_cuda=lambda: True, capability=(9, 0))
    platform.get_device_capability = lambda: platform.capability
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(enforce_eager=False),
        load_config=types.SimpleNamespace(load_format="auto"),
    )
    repacked = {"is_weights_pre_processed": lambda: False}
    for name, content in (
        ("vllm.model_executor.utils", repacked),
        ("vllm.platforms", {"current_platform": platform}),
        ("vllm.config", {"get_current_vllm_config": lambda: config}),
    ):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.delenv("MOEDOCTOR_MOE", raising=False)
    return types.SimpleNamespace(platform=platform, model=config.model_config, load=config.load_config)


def test_a_layer_that_can_be_computed_is_not_refused() -> None:
    for activation in moe_fix.ACTIVATIONS:
        assert moe_fix.check_method(Fp8MoEMethod(), layer(activation)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_ep": True}, "expert parallel"),
        ({"enable_eplb": True}, "load balancing"),
        ({"is_sequence_parallel": True}, "sequence parallel"),
        ({"dp_size": 2}, "dp_size is 2"),
        ({"pcp_size": 2}, "pcp_size is 2"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"activation": "silu_no_mul"}, "the activation is silu_no_mul"),
        ({"in_dtype": "torch.float32"}, "activations are torch.float32"),
        ({"swiglu_limit": 7.0}, "clamps the activation"),
    ],
)
def test_a_layer_that_cannot_be_computed_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(moe_fix.check_method(Fp8MoEMethod(), layer(**changes)))


def test_an_unknown_method_or_machine_is_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Mxfp4MoEMethod holds its weights in another way" in str(
        moe_fix.check_method(Mxfp4MoEMethod(), layer())
    )
    online = str(moe_fix.check_method(Fp8PerTensorOnlineMoEMethod(), layer()))
    assert "quantizes while it loads; leave --quantization out" in online
    machine.platform.capability = (7, 5)
    assert "compute capability 7.5; expected 8.0" in str(moe_fix.check_method(Fp8MoEMethod(), layer()))
    machine.platform.capability = (12, 1)
    assert moe_fix.check_method(Fp8MoEMethod(), layer()) is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" in str(moe_fix.check_method(Fp8MoEMethod(), layer()))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    machine.platform.is_cuda = lambda: False
    assert "NVIDIA" in str(moe_fix.check_method(Fp8MoEMethod(), layer()))


def test_weights_of_a_weight_cache_are_refused(machine: Any) -> None:
    """Releases before 0.33.0 have none."""
    assert not moe_fix._are_repacked()
    del sys.modules["vllm.model_executor.utils"].is_weights_pre_processed
    assert not moe_fix._are_repacked()
    machine.load.load_format = "ipc_cache"
    reason = str(moe_fix.check_method(Fp8MoEMethod(), layer()))
    assert "a backend repacked them; expected --load-format auto" in reason


def test_the_reference_needs_an_eager_engine(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEDOCTOR_MOE", "reference")
    assert "needs --enforce-eager" in str(moe_fix.check_method(Fp8MoEMethod(), layer()))
    machine.model.enforce_eager = True
    assert moe_fix.check_method(Fp8MoEMethod(), layer()) is None


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_an_optional_fix_leaves_a_refused_layer_to_vllm(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """vLLM selects a backend right after the constructor that is wrapped."""
    monkeypatch.setenv("MOEDOCTOR_FIXES", "moe")
    machine.platform.capability = capability
    ours, done = capability >= moe_fix.LEAST_CAPABILITY, []
    monkeypatch.setattr(moe_fix, "make_experts_class", lambda: "ours")
    monkeypatch.setattr(moe_fix, "take_over", lambda *given, **options: done.append("ours"))
    form = next(form for form in moe_fix.FORMATS if form.method == "Fp8MoEMethod")
    select = moe_fix._wrap_select(lambda: ("theirs", "its experts"), form=form, stand_in="stand-in")
    process = moe_fix._wrap_process_weights(lambda self, layer: done.append("theirs"), form=form)
    construct = moe_fix._wrap_constructor(lambda self, moe: None)
    method = Fp8MoEMethod()
    if not ours:
        with pytest.raises(SystemExit, match=r"moe is refused: .* 7\.5; .*MOEDOCTOR_FIXES_OPTIONAL=1"):
            construct(method, layer())
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    construct(method, layer())
    assert select() == (("stand-in", "ours") if ours else ("theirs", "its experts"))
    process(method, types.SimpleNamespace())
    assert done == ["ours" if ours else "theirs"]


@pytest.mark.parametrize("reason", ["w2_weight holds NaN", "a backend repacked them"])
@pytest.mark.parametrize("selected", [("theirs", "its experts", "more"), None])
def test_weights_that_are_refused_once_loaded_are_left_to_vllm_if_the_fix_is_optional(
    monkeypatch: pytest.MonkeyPatch, selected: tuple[str, ...] | None, reason: str
) -> None:
    """A draft model's weights may come from a weight cache when those of the model do not."""
    monkeypatch.setenv("MOEDOCTOR_FIXES", "moe")
    monkeypatch.setattr(moe_fix, "make_experts_class", lambda: "ours")
    monkeypatch.setattr(moe_fix, "_find_stand_in", lambda form: "stand-in")

    def refused(*given: Any, **options: Any) -> None:
        raise UnavailableError("w2_weight holds NaN")

    def its_own() -> tuple[str, ...]:
        if selected is None:
            raise ValueError("no backend")
        return selected

    if "NaN" in reason:
        monkeypatch.setattr(moe_fix, "take_over", refused)
    else:
        monkeypatch.setattr(
            sys.modules["vllm.model_executor.utils"], "is_weights_pre_processed", lambda: True
        )
    form = next(form for form in moe_fix.FORMATS if form.method == "Fp8MoEMethod")
    select = moe_fix._wrap_select(its_own, form=form, stand_in="stand-in")
    left: list[Any] = []
    process = moe_fix._wrap_process_weights(lambda self, layer: left.append(vars(self).copy()), form=form)
    method = Fp8MoEMethod()
    moe_fix._wrap_constructor(lambda self, moe: None)(method, layer())
    vars(method)["fp8_backend"], vars(method)["experts_cls"] = select()
    assert vars(method)["experts_cls"] == "ours"
    with pytest.raises(SystemExit, match=rf"moe is refused: .*{reason}.* .*MOEDOCTOR_FIXES_OPTIONAL=1"):
        process(method, types.SimpleNamespace())
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    if selected is None:
        with pytest.raises(SystemExit, match=f"{reason}.*; vLLM has no backend for this layer either"):
            process(method, types.SimpleNamespace())
        return
    process(method, types.SimpleNamespace())
    assert left == [{"_moedoctor_computes": False, "fp8_backend": "theirs", "experts_cls": "its experts"}]


def test_a_model_that_adds_up_experts_itself_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "modular_kernel": {"FusedMoEExpertsModular": object, "FusedMoEActivationFormat": None},
        "topk_weight_and_reduce": {},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"{moe_layer.FUSED}.{name}", module)
    experts = moe_layer.make_experts_class.__wrapped__()()
    assert experts.post_gemm2_hook is None
    with pytest.raises(SystemExit, match=r"moe is refused: .* \(post_gemm2_hook\); leave moe out"):
        experts.post_gemm2_hook = print


def test_a_model_without_a_moe_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load_model = moe_fix._wrap_load_model(lambda self, vllm_config, model_config: "model")
    moe_fix._announce.cache_clear()
    monkeypatch.setenv("MOEDOCTOR_FIXES", "moe")
    with pytest.raises(SystemExit, match="moe is refused: the model has no MoE layer"):
        load_model(None, None, model_config=None)
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    assert load_model(None, None, model_config=None) == "model"
    monkeypatch.delenv("MOEDOCTOR_FIXES_OPTIONAL")
    moe_fix._announce("FP8", "kernels")
    assert load_model(None, None, model_config=None) == "model"
    moe_fix._announce.cache_clear()


def test_the_variable_and_that_all_leaves_the_fix_out_unless_it_is_named() -> None:
    assert moe_fix.read_computer({}) == moe_fix.read_computer({"MOEDOCTOR_MOE": " Kernels "}) == "kernels"
    with pytest.raises(OptionError, match="MOEDOCTOR_MOE is 'fast'; expected kernels or reference"):
        moe_fix.read_computer({"MOEDOCTOR_MOE": "fast"})
    assert "moe" not in read_choice("all").names
    assert "moe" in read_choice("all,moe").names
    assert read_choice("moe").required == {"moe"}
