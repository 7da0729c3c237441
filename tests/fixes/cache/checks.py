"""Weights of an expert cache, and checks of what the cache made of them."""

from collections.abc import Mapping

import torch

from moedoctor.fixes.expert_cache import CachedExperts, ExpertCache

EXPERTS = 10


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WEIGHTS = {
    "w13": torch.randn(EXPERTS, 6, 4, generator=_draw(0)),
    "w2": torch.randn(EXPERTS, 4, 3, generator=_draw(1)).bfloat16(),
    "w2_scale": torch.rand(EXPERTS, generator=_draw(2)),
    "w13_bias": torch.randint(0, 255, (EXPERTS, 5), generator=_draw(3)).to(torch.uint8),
}


def assert_holds(
    ids: torch.Tensor, held: CachedExperts, weights: Mapping[str, torch.Tensor] = WEIGHTS
) -> torch.Tensor:
    """Check that each slot in `held` has the bytes of its expert, and that a group lists its experts.

    Returns which ids have a slot, bool [T, K].
    """
    named = held.slot_ids >= 0  # [T, K]
    slots, experts = held.slot_ids[named].long(), ids.cpu()[named.cpu()].long()
    for name, tensor in weights.items():
        got = held.weights[name][slots].cpu()
        assert torch.equal(got.contiguous().view(torch.uint8), tensor[experts].view(torch.uint8)), name
    if held.experts is not None:
        assert torch.equal(held.experts[slots].cpu().long(), experts)
        assert int((held.experts >= 0).sum()) == len(set(experts.tolist()))
    return named


def assert_consistent(cache: ExpertCache, weights: Mapping[str, torch.Tensor] = WEIGHTS) -> None:
    """Check that mapping, slots and bytes agree."""
    mapping = cache.mapping.tolist()  # first: to ask for the residents mends what is torn
    held = cache.resident()
    assert mapping == [held.index(expert) if expert in held else -1 for expert in range(cache.num_experts)]
    for slot, expert in enumerate(held):
        for name, tensor in weights.items():
            assert expert < 0 or torch.equal(cache.weights[name][slot], tensor[expert]), (slot, expert)
