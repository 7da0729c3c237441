"""What the tests of the plug-in share: a clean process before and after each test."""

import logging
from collections.abc import Iterator

import pytest
from vllm_stub import forget

from moedoctor.plugin import register


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Set none of the variables, and let the plug-in and `import vllm` begin anew."""
    for name in (
        *("MOEDOCTOR_FIXES", "MOEDOCTOR_FIXES_OPTIONAL", "MOEDOCTOR_TRACE", "VLLM_NVFP4_MOE_BACKEND"),
        "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA",
    ):
        monkeypatch.delenv(name, raising=False)
    register._register.cache_clear()
    with forget(), caplog.at_level(logging.INFO, "vllm.moedoctor"):
        yield
    register._register.cache_clear()
