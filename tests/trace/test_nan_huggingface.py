"""The NaN locator on a Hugging Face model: left padding, a dimension for heads, routers."""

from __future__ import annotations

import pytest
import torch

from moedoctor.trace import NanLocator
from moedoctor.trace.nan_report import NanReport
from tests.trace.moe_models import make_transformers_model

pytestmark = pytest.mark.upstream
PADDING = torch.zeros(2, 6, dtype=torch.bool)
PADDING[0, :3] = True  # left padding of the first of two sequences


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    made: torch.nn.Module = make_transformers_model()
    return made


def traced(model: torch.nn.Module, place: tuple[int, int] | None) -> NanReport:
    """Run one step with NaN in the embedding at `place`."""
    ids = torch.arange(12).reshape(2, 6) + 3
    with torch.no_grad(), NanLocator(model) as locator:
        embedded = model.get_input_embeddings()(ids).clone()
        if place is not None:
            embedded[place] = float("nan")
        locator.begin_step(padding=PADDING)
        model(inputs_embeds=embedded, attention_mask=(~PADDING).long())
        locator.end_step()
    return locator.report()


def test_nan_in_padding_is_found_in_padding(model: torch.nn.Module) -> None:
    report = traced(model, (0, 0))
    assert report.first_padding is not None
    assert report.first_padding.point == "model.layers.0.input_layernorm"
    counts = {point.point: point.nan_rows for point in report.points}
    assert counts["model.layers.0.self_attn.q_norm"] == (0, 4, 0)  # four heads of one token
    assert counts["model.layers.0.self_attn.k_norm"] == (0, 2, 0)
    # Attention gives padding the weight 0, but 0 times NaN is NaN, so it spreads to real rows.
    assert report.first_real is not None
    assert report.first_real.point == "model.layers.0.self_attn.o_proj"


def test_a_clean_model_has_no_findings_and_watched_routers(model: torch.nn.Module) -> None:
    report = traced(model, None)
    assert (report.points, report.routers, report.steps_with_padding) == ((), (), 1)
    assert report.pad_tokens == 3
    assert report.routers_watched in (0, 2)  # up to transformers 4 a router is a plain linear layer
    names = [name for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
    assert report.routers_watched == len(names)
    assert report.looked_at == report.watched
