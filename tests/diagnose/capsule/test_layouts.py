"""Tensors of a backend are recognized in their layout, and experts that differ are named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.capsule import layouts
from moedoctor.fixes.moe.weight_layout import put_up_first, tile_scales
from moedoctor.trace.capsule import Capsule
from tests.capsules import make_capsule

_FORMS = {
    layouts.AS_STORED: ("w13", lambda tensor: tensor),
    layouts.EXCHANGED: ("w13", put_up_first),
    layouts.TILED: ("w13_block_scales", tile_scales),
    f"{layouts.TILED}, {layouts.EXCHANGED}": ("w13_block_scales", lambda w: tile_scales(put_up_first(w))),
    layouts.REORDERED: ("w2", lambda tensor: tensor.flatten(1).flip(1)),
    layouts.REPACKED: ("w2", lambda tensor: (tensor >> 4 | tensor << 4).flatten(1).view(torch.int32)),
}


def _with(capsule: Capsule, name: str, tensor: torch.Tensor) -> Capsule:
    return Capsule(capsule.record, {**capsule.tensors, f"backend.{name}": tensor.contiguous()})


@given(st.sampled_from(sorted(_FORMS)), st.integers(0, 7), st.integers(1, 7))
@settings(max_examples=25, deadline=None)
def test_layouts_and_an_expert_in_the_place_of_another(form: str, place: int, step: int) -> None:
    capsule = make_capsule("nvfp4")
    source, change = _FORMS[form]
    tensor = change(capsule.tensors[source])  # [U, ...]
    (right,) = layouts.compare_backend_tensors(_with(capsule, f"{source[:3].rstrip('_')}_x", tensor))
    assert (right.of, right.form, right.odd) == (source, form, ())
    other = (place + step) % 8
    moved = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    moved = moved.clone()
    moved[place] = moved[other]
    changed = _with(capsule, f"{source[:3].rstrip('_')}_x", moved.view(tensor.dtype))
    (wrong,) = layouts.compare_backend_tensors(changed)
    assert (wrong.of, wrong.form) == (source, form)
    assert [(odd.expert, odd.form, odd.like) for odd in wrong.odd] == [(place, layouts.OTHER, other)]


def test_linear_scales_beside_tiled_ones_are_named() -> None:
    capsule = make_capsule("nvfp4")
    tiled = tile_scales(capsule.tensors["w13_block_scales"]).view(torch.uint8).clone()  # [U, 256, 16]
    tiled[5] = capsule.tensors["w13_block_scales"][5].view(torch.uint8)
    changed = _with(capsule, "w13_weight_scale", tiled.view(torch.float8_e4m3fn))
    (found,) = layouts.compare_backend_tensors(changed)
    assert found.form == layouts.TILED
    assert [(odd.expert, odd.form) for odd in found.odd] == [(5, layouts.AS_STORED)]


@pytest.mark.parametrize("common", [1.0, 2.0**119])
def test_a_scale_that_differs_from_the_others_is_named(common: float) -> None:
    capsule = make_capsule("nvfp4")
    scale = capsule.tensors["w13_scale"] * common  # [U]
    scale[3] *= 4
    (found,) = layouts.compare_backend_tensors(_with(capsule, "w13_weight_scale_2", scale))
    (odd,) = found.odd
    assert found.of == "w13_scale"
    assert odd.expert == 3
    assert odd.form.startswith(("4 times the others'", "times 4"))


def test_what_is_none_of_the_checkpoint_is_said_to_be_so() -> None:
    (found,) = layouts.compare_backend_tensors(_with(make_capsule("bf16"), "w13_map", torch.arange(8)))
    assert (found.of, found.form, found.odd) == (None, layouts.OTHER, ())
