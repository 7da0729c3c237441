"""A LoRA adapter keeps what it does to each expert in either layout, with zeros for what it lacks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.checkpoint.adapter_layout import convert_adapter, split_experts
from moedoctor.faults.loading.expert_lora import ExpertLoraParameters
from moedoctor.faults.loading.expert_lora_lab import compute_changes, make_adapter


@settings(max_examples=20, deadline=None)
@given(
    experts=st.integers(2, 5),
    rank=st.integers(1, 5),
    lost=st.sampled_from(["none", "missing_expert", "missing_part"]),
)
def test_layouts_are_converted_into_each_other(experts: int, rank: int, lost: str) -> None:
    sizes = {"experts": experts, "rank": rank, "hidden": 64, "intermediate": 128}
    mistake = "other_layout" if lost == "none" else lost
    parameters = ExpertLoraParameters(reads="stacked" if lost == "none" else "each", mistake=mistake, **sizes)
    each = make_adapter(parameters) | {"q_proj.lora_A.weight": torch.ones(1)}
    stacked = convert_adapter(each, "stacked", experts)
    again = convert_adapter(stacked, "each", experts)
    assert [len(tensors) for tensors in (stacked, again)] == [5, 6 * experts + 1]
    meant = compute_changes(each, parameters)
    for tensors in (stacked, again):
        assert not split_experts(tensors, experts).keys() - split_experts(each, experts).keys()
        assert all(map(torch.allclose, compute_changes(tensors, parameters).values(), meant.values()))
