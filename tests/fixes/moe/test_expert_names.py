"""Expert tensors get the names that releases read, with the same values; nothing is guessed."""

import pytest
import torch

from moedoctor.fixes.moe.expert_names import NAMES, rename_experts

LAYER = "model.layers.3.mlp.experts"
HIDDEN, WIDTH, EXPERTS = 8, 6, 3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("name", "other"), [(name, other) for name in NAMES for other in NAMES[name]])
def test_every_known_name_of_a_part_is_renamed(name: str, other: str) -> None:
    weight, scale = draw(4, 8), draw(4, 1)
    parts = {f"{LAYER}.2.{other}.weight": weight, f"{LAYER}.expert_1.{other}.weight_scale": scale}
    renamed = rename_experts(parts, HIDDEN)
    if name == "gate_up_proj":
        assert torch.equal(renamed[f"{LAYER}.2.gate_proj.weight"], weight[:2])
        assert torch.equal(renamed[f"{LAYER}.1.up_proj.weight_scale"], scale[2:])
    else:
        assert renamed.keys() == {f"{LAYER}.2.{name}.weight", f"{LAYER}.1.{name}.weight_scale"}
        assert renamed[f"{LAYER}.2.{name}.weight"] is weight


@pytest.mark.parametrize("transposed", [False, True])
def test_tensors_of_all_experts_are_split(transposed: bool) -> None:
    w13, w2 = draw(EXPERTS, 2 * WIDTH, HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)
    given = (each.transpose(1, 2) for each in (w13, w2)) if transposed else (w13, w2)
    names = (f"{LAYER}.gate_up_projection", f"{LAYER}.down_proj.weight")
    renamed = rename_experts(dict(zip(names, given, strict=True)), HIDDEN)
    assert len(renamed) == 3 * EXPERTS
    for expert in range(EXPERTS):
        gate, up, down = (renamed[f"{LAYER}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(torch.cat([gate, up]), w13[expert])
        assert torch.equal(down, w2[expert])


def test_other_tensors_stay() -> None:
    others = {"model.layers.3.mlp.gate.weight": draw(3, 8), "model.layers.3.mlp.shared_expert.w1": draw(2, 8)}
    assert rename_experts(others, HIDDEN) == others


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((f"{LAYER}.0.linear_7.weight",), "unknown part of an expert, expected one of"),
        ((f"{LAYER}.gate_up_proj.weight_scale",), "only weights of all experts can be split"),
        ((f"{LAYER}.0.w1.weight", f"{LAYER}.0.gate.weight"), "another tensor becomes"),
    ],
)
def test_what_is_not_known_is_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rename_experts({name: draw(4, 2 * WIDTH, HIDDEN) for name in names}, HIDDEN)
