"""Refusals of the fix `moe`, and its variable; no vLLM is needed."""

import sys
import types
from typing import Any
from unittest.mock import Mock

import pytest

from moedoctor.plugin import moe_fix, moe_layer
from moedoctor.plugin.extensions import read_choice
from moedoctor.plugin.register import OptionError
from moedoctor.results import UnavailableError

FP8 = next(form for form in moe_fix.FORMATS if form.method == "Fp8MoEMethod")


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


def method(name: str = "Fp8MoEMethod") -> Any:
    """Return an object whose class has the name of one of vLLM's methods."""
    return type(name, (), {})()


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Let `import` find a module that holds `content`."""
    module = types.ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of a machine and an engine that the fix can serve, in modules of vLLM."""
    made = types.SimpleNamespace(capability=(9, 0), is_cuda=True, enforce_eager=False, load_format="auto")
    platform = types.SimpleNamespace(
        is_cuda=lambda: made.is_cuda, get_device_capability=lambda: made.capability
    )
    config = types.SimpleNamespace(model_config=made, load_config=made)
    put_module(monkeypatch, "vllm")
    put_module(monkeypatch, "vllm.model_executor.utils", is_weights_pre_processed=lambda: False)
    put_module(monkeypatch, "vllm.platforms", current_platform=platform)
    put_module(monkeypatch, "vllm.config", get_current_vllm_config=lambda: config)
    monkeypatch.delenv("MOEDOCTOR_MOE", raising=False)
    return made


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"activation": name}, None) for name in moe_fix.ACTIVATIONS),
        ({"use_ep": True}, "expert parallel"),
        ({"enable_eplb": True}, "load balancing"),
        ({"is_sequence_parallel": True}, "sequence parallel"),
        ({"dp_size": 2}, "dp_size is 2"),
        ({"pcp_size": 2}, "pcp_size is 2"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"activation": "silu_no_mul"}, "the activation is silu_no_mul"),
        ({"in_dtype": "torch.float32"}, "activations are torch.float32"),
        ({"swiglu_limit": 7.0}, "clamps the activation"),
        ({"method": "Mxfp4MoEMethod"}, "Mxfp4MoEMethod holds its weights in another way"),
        ({"method": "Fp8PerTensorOnlineMoEMethod"}, "quantizes while it loads; leave --quantization out"),
        ({"capability": (7, 5)}, "compute capability 7.5; expected 8.0"),
        ({"capability": (12, 1)}, None),
        ({"is_cuda": False}, "NVIDIA"),
        ({"load_format": "ipc_cache"}, "a backend repacked them; expected --load-format auto"),
        ({"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT"),
        ({"VLLM_BATCH_INVARIANT": "0"}, None),
        ({"MOEDOCTOR_MOE": "reference"}, "needs --enforce-eager"),
        ({"MOEDOCTOR_MOE": "reference", "enforce_eager": True}, None),
    ],
)
def test_what_cannot_be_computed_is_refused(machine, monkeypatch, changes, reason):
    """Upper-case names are variables."""
    changes = dict(changes)
    made = method(changes.pop("method", "Fp8MoEMethod"))
    for name in [name for name in changes if name.isupper()]:
        monkeypatch.setenv(name, changes.pop(name))
    for name in [name for name in changes if hasattr(machine, name)]:
        setattr(machine, name, changes.pop(name))
    answer = moe_fix.check_method(made, layer(**changes))
    assert answer is None if reason is None else reason in str(answer)


def test_weights_of_a_weight_cache_are_known() -> None:
    """Releases before 0.33.0 have none."""
    assert not moe_fix._are_repacked()
    del sys.modules["vllm.model_executor.utils"].is_weights_pre_processed
    assert not moe_fix._are_repacked()


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's constructor, selection and processing of weights with the fix around them."""
    monkeypatch.setenv("MOEDOCTOR_FIXES", "moe")
    monkeypatch.setattr(moe_fix, "make_experts_class", lambda: "ours")
    monkeypatch.setattr(moe_fix, "_find_stand_in", lambda form: "stand-in")

    def wrap(select: Any, process: Any) -> tuple[Any, Any, Any]:
        return (
            moe_fix._wrap_constructor(lambda self, moe: None),
            moe_fix._wrap_select(select, form=FP8, stand_in="stand-in"),
            moe_fix._wrap_process_weights(process, form=FP8),
        )

    return wrap


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_an_optional_fix_leaves_a_refused_layer_to_vllm(machine, wrap, monkeypatch, capability):
    """vLLM selects a backend right after the constructor that is wrapped."""
    machine.capability = capability
    ours, done = capability >= moe_fix.LEAST_CAPABILITY, []
    monkeypatch.setattr(moe_fix, "take_over", lambda *given, **options: done.append("ours"))
    chosen = "theirs", "its experts"
    construct, select, process = wrap(lambda: chosen, lambda self, layer: done.append("theirs"))
    made = method()
    if not ours:
        with pytest.raises(SystemExit, match=r"moe is refused: .* 7\.5; .*MOEDOCTOR_FIXES_OPTIONAL=1"):
            construct(made, layer())
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    construct(made, layer())
    assert select() == (("stand-in", "ours") if ours else chosen)
    process(made, types.SimpleNamespace())
    assert done == ["ours" if ours else "theirs"]


@pytest.mark.parametrize("reason", ["w2_weight holds NaN", "a backend repacked them"])
@pytest.mark.parametrize("selected", [("theirs", "its experts", "more"), None])
def test_weights_that_are_refused_once_loaded_are_left_to_vllm_if_the_fix_is_optional(
    wrap: Any, monkeypatch: pytest.MonkeyPatch, selected: tuple[str, ...] | None, reason: str
) -> None:
    """A draft model's weights may come from a weight cache when those of the model do not."""
    select_its_own = Mock(side_effect=None if selected else ValueError("no backend"), return_value=selected)
    if "NaN" in reason:
        monkeypatch.setattr(moe_fix, "take_over", Mock(side_effect=UnavailableError("w2_weight holds NaN")))
    else:
        utils = sys.modules["vllm.model_executor.utils"]
        monkeypatch.setattr(utils, "is_weights_pre_processed", lambda: True)
    left: list[Any] = []
    construct, select, process = wrap(select_its_own, lambda self, layer: left.append(vars(self).copy()))
    made = method()
    construct(made, layer())
    made.fp8_backend, made.experts_cls = select()
    assert made.experts_cls == "ours"
    with pytest.raises(SystemExit, match=rf"moe is refused: .*{reason}.* .*MOEDOCTOR_FIXES_OPTIONAL=1"):
        process(made, types.SimpleNamespace())
    monkeypatch.setenv("MOEDOCTOR_FIXES_OPTIONAL", "1")
    if selected is None:
        with pytest.raises(SystemExit, match=f"{reason}.*; vLLM has no backend for this layer either"):
            process(made, types.SimpleNamespace())
        return
    process(made, types.SimpleNamespace())
    assert left == [{"_moedoctor_computes": False, "fp8_backend": "theirs", "experts_cls": "its experts"}]


def test_a_model_that_adds_up_experts_itself_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = {"FusedMoEExpertsModular": object, "FusedMoEActivationFormat": None}
    put_module(monkeypatch, f"{moe_layer.FUSED}.modular_kernel", **kernel)
    put_module(monkeypatch, f"{moe_layer.FUSED}.topk_weight_and_reduce")
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
