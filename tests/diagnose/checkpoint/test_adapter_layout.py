"""A LoRA adapter keeps what it does to each expert in either layout, with zeros for what it lacks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.checkpoint.adapter_layout import convert_adapter
from moedoctor.faults.loading.expert_lora import ExpertLoraParameters
from moedoctor.faults.loading.expert_lora_lab import compute_changes, make_adapter

LOST = st.sampled_from(["other_layout", "missing_expert", "missing_part"])


@settings(max_examples=20, deadline=None)
@given(experts=st.integers(2, 5), rank=st.integers(1, 5), lost=LOST)
def test_layouts_are_converted_into_each_other(experts: int, rank: int, lost: str) -> None:
    sizes = {"experts": experts, "rank": rank, "hidden": 64, "intermediate": 128, "mistake": lost}
    parameters = ExpertLoraParameters(reads="stacked" if lost == "other_layout" else "each", **sizes)
    each = make_adapter(parameters) | {"q_proj.lora_A.weight": torch.ones(1)}
    stacked = convert_adapter(each, "stacked", experts)
    again = convert_adapter(stacked, "each", experts)
    assert [len(tensors) for tensors in (stacked, again)] == [5, 6 * experts + 1]
    assert len({each.data_ptr() for each in again.values()}) == len(again), "safetensors shares nothing"
    meant = compute_changes(each, parameters)
    for tensors in (stacked, again):
        assert all(map(torch.allclose, compute_changes(tensors, parameters).values(), meant.values()))
