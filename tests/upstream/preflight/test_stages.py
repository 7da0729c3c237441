"""The draft model is built with the MoE backend that it is given, the target with its own."""

from types import SimpleNamespace

import pytest

from moedoctor.upstream.preflight.stages import use_draft_backend


@pytest.mark.parametrize(
    ("speculative", "backend"),
    [
        (SimpleNamespace(moe_backend="triton"), "triton"),
        (SimpleNamespace(moe_backend=None), "marlin"),
        (SimpleNamespace(), "marlin"),  # up to 0.18.1
        (None, "marlin"),
    ],
)
def test_only_the_draft_gets_the_backend_of_the_draft(
    speculative: SimpleNamespace | None, backend: str
) -> None:
    config = SimpleNamespace(
        speculative_config=speculative, kernel_config=SimpleNamespace(moe_backend="marlin")
    )
    with use_draft_backend(config):
        assert config.kernel_config.moe_backend == backend
    assert config.kernel_config.moe_backend == "marlin"


def test_a_draft_that_is_refused_leaves_the_backend_of_the_target() -> None:
    own, target = SimpleNamespace(moe_backend="triton"), SimpleNamespace(moe_backend="marlin")
    config = SimpleNamespace(speculative_config=own, kernel_config=target)
    with pytest.raises(ValueError, match="refused"):
        _refuse(config)
    assert target.moe_backend == "marlin"


def _refuse(config: SimpleNamespace) -> None:
    with use_draft_backend(config):
        raise ValueError("refused")
