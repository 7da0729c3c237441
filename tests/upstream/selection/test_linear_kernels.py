"""The reasons of linear kernels that are not used, with choosers in vLLM's place."""

import sys
from types import SimpleNamespace

import pytest

from moedoctor.upstream.selection.linear_kernels import CHOOSERS, Offers, explain_kernels, record_offers


class Kernel:
    refuses = ""

    def __init__(self, config: str = "layer") -> None:
        self.config = config

    @classmethod
    def is_supported(cls, capability: int) -> tuple[bool, str]:
        return capability >= 90, f"needs 90, has {capability}"

    @classmethod
    def can_implement(cls, config: str) -> tuple[bool, str]:
        return not cls.refuses, f"{cls.refuses} {config}"


class Small(Kernel):
    refuses = "too small:"


class Used(Kernel):
    pass


class Later(Kernel):
    pass


class Old:
    @classmethod
    def get_min_capability(cls) -> int:
        return 100


@pytest.mark.parametrize(
    ("capability", "disabled", "expected"),
    [
        (90, "", {"Small": "too small: layer", "Later": "", "Old": "requires capability 100"}),
        (80, "Later", {"Small": "needs 90", "Later": "disabled", "Old": "requires capability 100"}),
        (100, "", {"Small": "too small: layer", "Later": "", "Old": "cannot be asked here"}),
    ],
)
def test_the_others_of_the_table_that_was_gone_through_are_asked(capability, disabled, expected, monkeypatch):
    tables = {"cuda": [Small, Used, Later, Old]}
    platform = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(to_int=lambda: capability))
    choosers = SimpleNamespace(_POSSIBLE_KERNELS=tables, _POSSIBLE_OTHERS={"cuda": [Used]})
    monkeypatch.setitem(sys.modules, CHOOSERS, choosers)
    monkeypatch.setitem(sys.modules, "vllm.envs", SimpleNamespace(VLLM_DISABLED_KERNELS=[disabled]))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    offers: Offers = {}
    with record_offers(offers):
        assert next(kernel for kernel in tables["cuda"] if kernel is Used)
    reasons = dict(explain_kernels([None, Used(), Used()], offers))
    assert reasons.keys() == expected.keys()
    assert all(reasons[name].startswith(words) for name, words in expected.items())
    assert type(tables["cuda"]) is list
