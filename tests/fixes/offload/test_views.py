"""Buffers that modules made of weights, in our own module and in vLLM's Mamba layer."""

import pytest
import torch
from torch import nn

from moedoctor.fixes.offload.views import fill_views, find_views
from tests.real_vllm import WITHOUT_GPU, ask_child


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
