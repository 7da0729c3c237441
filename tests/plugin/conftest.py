"""Shared by the tests of the plug-in: a clean process before and after each test."""

import logging
import weakref
from collections.abc import Iterator

import pytest
from vllm_stub import forget

from moedoctor.plugin import register, weight_reload


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Begin anew: no variables, no weights that another test holds, no plug-in and no imported vLLM."""
    for name in (
        *("MOEDOCTOR_FIXES", "MOEDOCTOR_FIXES_OPTIONAL", "MOEDOCTOR_TRACE", "VLLM_NVFP4_MOE_BACKEND"),
        "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(weight_reload, "_HOLDERS", weakref.WeakKeyDictionary())
    register._register.cache_clear()
    with forget(), caplog.at_level(logging.INFO, "vllm.moedoctor"):
        yield
    register._register.cache_clear()
