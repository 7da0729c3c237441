"""Tensors that stay on the device, names that a pattern matches, order of layers, and views of weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moedoctor.fixes.offload.plan import find_rule, is_metadata_name, matches, spread
from moedoctor.fixes.offload.views import fill_views, find_views
from tests.real_vllm import WITHOUT_GPU, ask_child

METADATA = """experts.w13_weight_scale w2_weight_scale_2 w13_input_scale weight_scale_inv
    w13_blockscale_swizzled w1_global_scale qzeros weight_zero_point w2_zp g_idx w13_g_idx
    w13_g_idx_sort_indices perm w2_perm g1_alphas absmax"""
WEIGHTS = "experts.w13_weight qweight weight scale_proj.weight permute_out w2_weight_packed globe"


def test_names_of_metadata() -> None:
    assert [name for name in METADATA.split() if not is_metadata_name(name)] == []
    assert [name for name in WEIGHTS.split() if is_metadata_name(name)] == []


def rule(name: str, tensor: torch.Tensor, *others: torch.Tensor, keep_below: int = 0) -> str | None:
    return find_rule(name, tensor, [tensor, *others], keep_below)


def test_metadata_needs_the_name_and_the_size() -> None:
    weight, scale = torch.empty(64, 64), torch.empty(64, 16)
    assert (rule("scale", scale, weight) or "").startswith("metadata by name, 25.0%")
    assert rule("scale", torch.empty(64, 64), torch.empty(64, 40)) is None, "the largest is the weight"
    assert rule("scale", torch.empty(64, 40), weight) is None, "more than half as large"
    assert rule("scale", scale) is None, "the only tensor is not metadata"


def test_type_and_size_decide_for_other_names() -> None:
    weight = torch.empty(64, 64, dtype=torch.uint8)
    assert "by type and size: float32, 25.0%" in str(rule("w13_s", torch.empty(64, 4), weight))
    assert rule("w13_s", torch.empty(64, 5), weight) is None, "over a quarter"
    assert rule("w13_s", torch.empty(64, 4, dtype=torch.uint8), weight) is None, "same type as the weight"


def test_vectors_and_small_tensors_stay_on_the_device() -> None:
    assert rule("weight", torch.empty(1 << 10)) == "vector"
    assert rule("weight", torch.empty(1 << 19)) is None
    assert rule("weight", torch.empty(8, 8), keep_below=257) == "fewer than 257 bytes"
    assert rule("weight", torch.empty(8, 8), keep_below=256) is None
    assert rule("weight", torch.empty(0, 8)) == "fewer than 1 bytes"


def test_a_sparse_tensor_stays_on_the_device() -> None:
    sparse = torch.nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False)
    assert "not plain memory" in (rule("weight", sparse) or "")


def test_a_pattern_matches_whole_parts_of_a_name() -> None:
    assert matches(["mlp.experts.w13_weight"], "experts")
    assert matches(["mlp.experts.w13_weight"], "experts.w13_weight")
    assert not matches(["mlp.experts.w13_weight_scale"], "w13_weight")
    assert not matches(["mlp.expert.w13_weight"], "experts")


@given(count=st.integers(0, 200))
def test_the_order_of_layers_is_a_permutation_and_its_first_half_is_spread(count: int) -> None:
    order = spread(count)
    assert sorted(order) == list(range(count))
    if count >= 4:
        half = sorted(order[: count // 2])
        assert max(second - first for first, second in zip([-1, *half], [*half, count], strict=True)) <= 5


def test_views_of_whole_weights_are_found_and_filled_once_the_weight_left_them() -> None:
    inner, weight = nn.Module(), nn.Parameter(torch.zeros(6, 1, 4), requires_grad=False)
    inner.weight, inner.bias = weight, nn.Parameter(torch.zeros(6), requires_grad=False)
    inner.register_buffer("rows", weight.view(6, 4))
    inner.register_buffer("part", weight.view(6, 4)[:2])
    inner.register_buffer("own", torch.zeros(6, 4))
    model = nn.ModuleDict({"mixer": inner})
    views = find_views(model)
    assert [view.name for view in views] == ["mixer.rows"]
    assert fill_views(views) == 0, "the weight is where it was"
    place = inner.rows.data_ptr()
    weight.data = torch.arange(24.0).view(6, 1, 4)
    assert fill_views(views) == 1
    assert torch.equal(inner.rows, torch.arange(24.0).view(6, 4))
    assert inner.rows.data_ptr() == place, "kernels and graphs may hold its address"
    assert not inner.own.any()
    weight.data = torch.zeros(6, 2)
    assert fill_views(views) == 0, "a repacked weight is another one"
    assert torch.equal(inner.rows, torch.arange(24.0).view(6, 4))


MIXER = (
    WITHOUT_GPU
    + """
import inspect
import json
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from moedoctor.fixes.offload.views import fill_views, find_views

given = dict(hidden_size=64, ssm_state_size=16, conv_kernel_size=4, intermediate_size=128, use_conv_bias=True)
given |= dict(use_bias=False, n_groups=1, num_heads=8, head_dim=16, prefix="mixer")
with set_current_vllm_config(VllmConfig()):
    mixer = MambaMixer2(**given)
views, weight = find_views(mixer), mixer.conv1d.weight
weight.data = weight.data.to("cpu", copy=True)  # UVAOffloader: p.data = p.data.to(device="cpu")
weight.data.fill_(2.0)  # what the checkpoint holds
stale = not bool((mixer.conv_weights == 2.0).any())
fill_views(views)
names = [view.name for view in views]
print("ANSWER " + json.dumps([names, stale, bool((mixer.conv_weights == 2.0).all())]))
"""
)


@pytest.mark.upstream
def test_the_installed_mamba_layer_reads_what_was_never_loaded_until_it_is_filled() -> None:
    assert ask_child(MIXER)[0] == [["conv_weights"], True, True]
