"""The stages of a start, without a vLLM."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedoctor.upstream.preflight import stages
from moedoctor.upstream.preflight import stages as loading
from moedoctor.upstream.preflight.child import fork_ranks
from moedoctor.upstream.preflight.meta import NewMemory, OnMeta
from moedoctor.upstream.preflight.names import list_tensors
from moedoctor.upstream.preflight.operators import define_operators, read_schemas
from moedoctor.upstream.preflight.substitutes import put


@pytest.mark.parametrize(
    ("speculative", "backend"),
    [
        (SimpleNamespace(moe_backend="triton"), "triton"),
        (SimpleNamespace(moe_backend=None), "marlin"),
        (SimpleNamespace(), "marlin"),  # up to 0.18.1
        (None, "marlin"),
    ],
)
def test_only_the_draft_gets_the_backend_of_the_draft(speculative, backend):
    target = SimpleNamespace(moe_backend="marlin")
    config = SimpleNamespace(speculative_config=speculative, kernel_config=target)
    with loading.use_draft_backend(config):
        assert target.moe_backend == backend
    assert target.moe_backend == "marlin"
    with pytest.raises(ValueError, match="refused"), loading.use_draft_backend(config):
        raise ValueError("refused")
    assert target.moe_backend == "marlin"


@pytest.mark.parametrize(
    ("gigabytes", "chosen", "v2", "fixes", "expected"),
    [
        (1, set(), False, "", ["mixer.conv_weights"]),
        (0, set(), False, "", []),
        (1, {"experts"}, False, "", []),
        (1, {"mixer"}, False, "", ["mixer.conv_weights"]),
        (1, set(), False, "moe,offload", []),
        (1, set(), True, "", []),  # without a vLLM there is no V2 runner that offloads
    ],
)
def test_buffers_of_weights_that_offload_moves_are_named(gigabytes, chosen, v2, fixes, expected, monkeypatch):
    monkeypatch.setenv("MOEDOCTOR_FIXES", fixes)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with torch.device("meta"):
        mixer, model = torch.nn.Linear(4, 6), torch.nn.Module()
        mixer.weight.data = mixer.weight.data.unsqueeze(1)
        mixer.register_buffer("conv_weights", mixer.weight.view(6, 4), persistent=False)
        mixer.register_buffer("own", torch.zeros(6, 4))
        model.mixer = mixer
    uva = SimpleNamespace(cpu_offload_gb=gigabytes, cpu_offload_params=chosen)
    config = SimpleNamespace(offload_config=SimpleNamespace(uva=uva), use_v2_model_runner=v2)
    assert loading.list_stale_buffers(model, config) == expected
    moved = {"mixer.weight", "mixer.bias"} if gigabytes and chosen != {"experts"} else set()
    assert set(stages.list_movable(model, uva)) == moved


@pytest.mark.parametrize(
    ("stored", "missing"),
    [
        (["a.0.experts.0.gate.weight", "embed.weight"], ["a.0.experts.1.gate.weight"]),
        (["a.0.experts.gate_stacked", "embed.weight"], [f"a.0.experts.{n}.gate.weight" for n in "01"]),
        (["a.0.experts.gate_stacked", "embed_tokens.weight"], []),  # the release's names are others
    ],
)
def test_tensors_that_are_looked_for_in_vain_are_named(stored, missing, monkeypatch):
    names = [*(f"a.0.experts.{n}.gate.weight" for n in "01"), "embed.weight"]
    monkeypatch.setattr(stages, "list_tensors", lambda model: ((name, "BF16", []) for name in names))
    holes = ["a.0.experts.routed_experts.w13_weight"]
    assert stages.list_missing(None, stored, holes) == missing
    assert stages.list_missing(None, names[:2], ["embed.weight"]) == names[2:]


def test_a_substitution_without_a_target_is_an_error() -> None:
    with pytest.raises(AttributeError, match="_node_count"):
        put(SimpleNamespace(), "_node_count", None)


def test_a_refused_adapter_names_its_module_and_not_those_of_the_model() -> None:
    error = ValueError(f"expected target modules in {set(range(2000))} but received ['m.linear_1'].")
    message = stages.describe_error("adapters", error)["message"]
    assert message == "expected target modules in {…} but received ['m.linear_1']."


def test_schemas_are_found_between_machine_code(tmp_path: Path) -> None:
    file = tmp_path / "_C.so"
    schemas = ["f(Tensor x) -> ()", "g.out(Tensor(a!) x, int n=1) -> Tensor"]
    noise = b"\x00\xff->\x00 ->\xfe" + b"->" * 3000 + b"\x00a line -> of text\x00"
    file.write_bytes(noise + b"\x90".join(each.encode() + b"\x00" for each in schemas) + noise + b"h() -> ()")
    assert [schema for _, schema in read_schemas(file)] == schemas


def test_shares_that_are_written_and_read_are_counted() -> None:
    headers = [("cut", "BF16", (8, 2)), ("looked at", "BF16", (4, 2)), ("whole", "BF16", (4, 2))]
    on_meta = OnMeta({"/f": headers})
    parameter = torch.empty(8, 2, dtype=torch.float16, device="meta")
    with on_meta, on_meta.watch():
        for name, tensor in on_meta.read_weights(["/f"]):
            if name == "cut":
                parameter[4:6].copy_(tensor.narrow(0, 0, 2))
            elif name == "whole":
                parameter.narrow(0, 0, 4).copy_(tensor)
                parameter.narrow(0, 0, 4).copy_(tensor)
            else:
                assert tensor.shape == (4, 2)
    assert on_meta.share_written(parameter) == 0.75
    shares = {name: (used, share) for name, (used, share, _) in on_meta.taken.items()}
    assert shares == {"cut": (True, 0.25), "looked at": (False, 0), "whole": (True, 1)}


def test_memory_that_repacking_takes_is_counted() -> None:
    layer = torch.nn.Linear(4, 8, bias=False, device="meta")  # 128 bytes
    with NewMemory(layer.parameters()) as memory:
        rows = [row.clone() for row in layer.weight]
        layer.weight = torch.nn.Parameter(torch.stack(rows).view(4, 8))
        del rows
        layer.register_buffer("scale", torch.zeros(2, device="meta"))
    assert memory.peak == 256
    assert memory.count_left([*layer.parameters(), *layer.buffers()]) == 8


def test_a_selection_by_a_mask_takes_its_places_and_at_most_all_values() -> None:
    """24 scales: a factor of those above 0 is computed, as `_nvfp4_compute_scale_factor` does."""
    scales = torch.empty(2, 3, 4, device="meta")
    with OnMeta({}), NewMemory([scales]) as memory:
        mask = scales > 0
        assert mask.any(), "a sound checkpoint has scales above 0"
        assert not (scales > 448).any()
        assert not (scales == 0).any()
        assert scales[mask].max().shape == ()
        assert scales[:, [0, 2]].shape == (2, 2, 4)
    assert memory.peak == 24 + 24 * 3 * 8 + 24 * 4


def test_the_first_rank_is_asked_here_and_the_others_in_forks() -> None:
    def run(rank: int) -> tuple[dict[str, int], dict[str, tuple[bool, float, list[int]]], bool]:
        if rank == 9 and os.getpid() != parent:
            os._exit(1)  # as if the system ended it
        return {"rank": rank, "process": os.getpid()}, {}, True

    parent = os.getpid()
    rows = [row for row, _, _ in fork_ranks(run, [0, 3, 7])]
    assert [row["rank"] for row in rows] == [0, 3, 7]
    assert [row["process"] == parent for row in rows] == [True, False, False]
    assert [row["process"] == parent for row, _, _ in fork_ranks(run, [0, 9])] == [True, True]


def test_errors_name_the_layer_or_the_tensor_that_was_read() -> None:
    def build(prefix: str) -> None:
        if prefix == "model.layers.0":
            raise ValueError("64 rows")
        build(prefix="model.layers.0")

    with pytest.raises(ValueError, match="64 rows") as raised:
        build("model")
    assert loading.find_module(raised.value) == "model.layers.0"
    on_meta = OnMeta({"/f": [("a", "BF16", [2]), ("b", "BF16", [2])]})
    assert [(name, on_meta.current) for name, _ in on_meta.read_weights(["/f"])] == [("a", "a"), ("b", "b")]
    assert on_meta.current == ""


@pytest.mark.parametrize(
    ("flag", "v2", "model", "expected"),
    [
        (True, False, SimpleNamespace(), "SimpleNamespace"),
        (True, False, SimpleNamespace(num_moe_layers=2), ""),
        (True, False, SimpleNamespace(get_language_model=lambda: SimpleNamespace(num_moe_layers=2)), ""),
        (True, True, SimpleNamespace(), ""),
        (False, False, SimpleNamespace(), ""),
    ],
)
def test_a_model_that_eplb_cannot_balance_is_named(flag, v2, model, expected, monkeypatch):
    interfaces = SimpleNamespace(is_mixture_of_experts=lambda model: hasattr(model, "num_moe_layers"))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.interfaces", interfaces)
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=flag), use_v2_model_runner=v2)
    assert loading.find_unbalanced(model, config) == expected


def test_a_library_that_the_release_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only modules of vLLM itself may be missing, in releases that have the parser elsewhere."""
    missing = {"vllm.entrypoints.common.cli_args": "vllm.entrypoints.common"}

    def load(name: str) -> None:
        missed = missing.get(name, "httpx")
        raise ModuleNotFoundError(f"No module named {missed!r}", name=missed)

    monkeypatch.setattr(stages.importlib, "import_module", load)
    with pytest.raises(ModuleNotFoundError, match="httpx"):
        stages._import_parser()


def make_parameter(*shape: int, dtype: torch.dtype = torch.bfloat16, **attributes: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    vars(parameter).update(attributes)
    return parameter


def make_module(attributes: dict[str, Any], **parameters: torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Module()
    vars(module).update(attributes)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    return module


def test_merged_layers_and_experts_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    model.embed = make_module({"org_vocab_size": 10}, weight=make_parameter(64, 4))
    model.qkv_proj = make_module(
        {"output_sizes": [384, 160]},
        weight=make_parameter(544, 4, dtype=torch.float8_e4m3fn, output_dim=0),
        weight_scale_inv=make_parameter(5, 1, dtype=torch.float32, output_dim=0),  # blocks of 128 rows
        input_scale=make_parameter(2, dtype=torch.float32),
    )
    model.experts = make_module(
        {"moe_config": SimpleNamespace(is_act_and_mul=True)},
        w13_weight=make_parameter(2, 12, 4),
        w13_scale=make_parameter(2, 2, dtype=torch.float32),
        w2_weight=make_parameter(2, 4, 6),
    )
    sides = {"gate": "w13_", "up": "w13_", "down": "w2_"}
    mapping = [
        (f"experts.routed_experts.{part}", f"experts.{expert}.{side}_proj.", expert, side)
        for expert in (0, 1)
        for side, part in sides.items()
    ]
    utils = SimpleNamespace(
        get_moe_expert_mapping=lambda model: mapping,
        get_packed_modules_mapping=lambda model: {"qkv_proj": ["q_proj", "kv_proj"]},
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.utils", utils)
    tensors = {name: (kind, tuple(shape)) for name, kind, shape in list_tensors(model)}
    each = {
        "gate_proj.weight": ("BF16", (6, 4)),
        "up_proj.weight": ("BF16", (6, 4)),
        "gate_proj.scale": ("F32", ()),
        "up_proj.scale": ("F32", ()),
        "down_proj.weight": ("BF16", (4, 6)),
    }
    assert tensors == {
        "embed.weight": ("BF16", (10, 4)),
        "q_proj.weight": ("F8_E4M3", (384, 4)),
        "kv_proj.weight": ("F8_E4M3", (160, 4)),
        "q_proj.weight_scale_inv": ("F32", (3, 1)),
        "kv_proj.weight_scale_inv": ("F32", (2, 1)),
        "q_proj.input_scale": ("F32", ()),
        "kv_proj.input_scale": ("F32", ()),
        **{f"experts.{expert}.{name}": entry for expert in (0, 1) for name, entry in each.items()},
    }
    mapping.clear()
    with pytest.raises(LookupError, match="does not have"):
        list(list_tensors(model))


register_fake = torch.library.register_fake


def refuse_second(operator: str) -> Callable[[Any], Any]:
    """Do as torch 2.11: newer ones take a fake beside an implementation."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator, "Meta"):
        raise RuntimeError(f"{operator} already has an implementation")
    return register_fake(operator)


def test_an_operator_that_is_there_takes_the_releases_own_fake(tmp_path, monkeypatch):
    schema = "moedoctor_probe.out(Tensor x, *, Tensor(a!) out) -> ()"
    (tmp_path / "_moe_C.abi3.so").write_bytes(b"\0" + schema.encode() + b"\0")
    loaded = torch.library.Library("_moe_C", "FRAGMENT")
    loaded.define(schema)
    monkeypatch.setattr(torch.library, "register_fake", refuse_second)
    assert define_operators(tmp_path, lambda name: True) == 0
    shapes, x = [], torch.empty(2, device="meta")
    torch.ops._moe_C.moedoctor_probe.out(x, out=x)  # does nothing
    torch.library.register_fake("_moe_C::moedoctor_probe.out")(lambda x, *, out: shapes.append(out.shape))
    torch.ops._moe_C.moedoctor_probe.out(x, out=x)
    assert shapes == [x.shape]
