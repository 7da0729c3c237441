"""Each question is answered rightly by a sound implementation and ours, and wrongly by a planted mistake."""

from typing import Any

import pytest

from moedoctor.fixes import routing
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.offloader import offload
from moedoctor.testing import load_questions
from moedoctor.testing.adapters import ours
from moedoctor.testing.questions import KINDS
from tests.testing.asking import ask
from tests.testing.planted import PLANTED, SOUND


def route_with_bias(logits: Any, top_k: int, bias: Any, **options: Any) -> Any:
    """Route as DeepSeek-V3 does: the bias has no default, and a group's score is the sum of its two best."""
    return routing.grouped_topk(logits, top_k, bias=bias, **options)


QUESTIONS = [(kind, name) for kind in KINDS for name in load_questions(kind)]
OPTIONS: dict[str, Any] = {"scores_of_zero": {"scoring": "sigmoid"}}
OURS = {
    "topk_softmax": ("router", routing.topk_softmax, {}),
    "topk_sigmoid": ("router", routing.topk_sigmoid, {"scoring": "sigmoid"}),
    "grouped_topk": ("router", routing.grouped_topk, {"scoring": "sigmoid"}),
    "grouped_topk with a bias": ("router", route_with_bias, {"scoring": "sigmoid"}),
    "cache": ("cache", ExpertCache, {}),
    "offloader": ("offloader", offload, {}),
    "grouped products": ("moe", ours.run_grouped, {}),
}
KERNELS = {
    "kernels": ("moe", ours.run_experts, {}),
    "slots": ("moe", ours.run_slots, {}),
    "host workers": ("moe", ours.run_host_workers, {}),
    "device cache": ("cache", ours.make_device_cache, {}),
}


@pytest.mark.parametrize(("kind", "name"), QUESTIONS)
def test_a_planted_mistake_is_wrong_and_a_sound_implementation_right(kind: str, name: str) -> None:
    options = OPTIONS.get(name, {})
    assert any(ask(kind, PLANTED[kind][name], options, [name]))
    assert options or not list(ask(kind, SOUND[kind], options, [name]))


@pytest.mark.parametrize("name", OURS)
def test_ours_are_right(name: str) -> None:
    kind, implementation, options = OURS[name]
    assert not list(ask(kind, implementation, options))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*OURS, *KERNELS])
def test_ours_are_right_on_a_gpu(name: str) -> None:
    kind, implementation, options = {**OURS, **KERNELS}[name]
    assert not list(ask(kind, implementation, options, device="cuda:0"))
