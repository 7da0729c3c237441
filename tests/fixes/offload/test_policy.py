"""Which tensors stay on the device, which names a pattern matches, and how layers are spread."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.fixes.offload.plan import find_rule, is_metadata_name, matches, spread

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
