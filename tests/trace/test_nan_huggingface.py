"""The NaN locator on a Hugging Face model: left padding, a dimension for heads, routers."""

from __future__ import annotations

import pytest
import torch

from moedoctor.trace import NanLocator
from moedoctor.trace.nan_report import NanReport

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(
        not hasattr(transformers, "Qwen3MoeForCausalLM"), reason="needs a transformers with Qwen3-MoE"
    ),
]
PADDING = torch.zeros(2, 6, dtype=torch.bool)
PADDING[0, :3] = True  # left padding of the first of two sequences


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    made: torch.nn.Module = transformers.Qwen3MoeForCausalLM(config).eval()
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


def test_nan_in_a_real_row_is_found_only_there(model: torch.nn.Module) -> None:
    report = traced(model, (1, 5))
    assert report.first_real is not None
    assert report.first_real.point == "model.layers.0.input_layernorm"
    assert (report.first_padding, report.nan_in_padding) == (None, 0)
    counts = {point.point: point.nan_rows for point in report.points}
    assert counts["model.layers.0.self_attn.q_norm"] == (4, 0, 0)


def test_a_clean_model_has_no_findings_and_watched_routers(model: torch.nn.Module) -> None:
    report = traced(model, None)
    assert (report.points, report.routers, report.steps_with_padding) == ((), (), 1)
    assert report.pad_tokens == 3
    assert report.routers_watched in (0, 2)  # up to transformers 4 a router is a plain linear layer
    names = [name for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
    assert report.routers_watched == len(names)
    assert report.looked_at == report.watched


def test_a_compiled_model_is_not_reported_as_clean(model: torch.nn.Module) -> None:
    ids = torch.arange(12).reshape(2, 6) + 3
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(ids)
        with NanLocator(model) as locator:
            compiled(ids)
    report = locator.report()
    assert report.not_reached == report.watched - report.looked_at > 0
    assert f"{report.not_reached} of {report.watched} modules were never looked at" in report.to_text()


def test_token_ids_are_not_taken_for_expert_ids(model: torch.nn.Module) -> None:
    """The whole model has a number of experts too, but its token ids are larger."""
    assert model.num_experts == 8

    class Sampled(torch.nn.Module):
        num_experts = model.num_experts

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return model(ids).logits.argmax(-1)  # [batch, tokens]

    with torch.no_grad(), NanLocator(Sampled(), device="cpu") as locator:
        locator._model(torch.arange(12).reshape(2, 6) + 3)
    report = locator.report()
    assert (report.routers_watched, report.routers) == (0, ())
