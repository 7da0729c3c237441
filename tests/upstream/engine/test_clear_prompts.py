"""Answers of two engines on the prompts that one of them decides clearly."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.upstream.engine import clear_prompts
from moedoctor.upstream.engine.clear_prompts import Answers, compare, find_clear, make_prompts


def answers(leads: list[float], shift: int = 0, gap: float = 0.0) -> Answers:
    """One token for each lead over the second best; `shift` makes other tokens, `gap` other logprobs."""
    tokens = [[prompt + shift] for prompt in range(len(leads))]
    steps = [
        [{str(ids[0]): -0.1 - gap, str(ids[0] + 1000): -0.1 - gap - lead}]
        for ids, lead in zip(tokens, leads, strict=True)
    ]
    return Answers(tokens, steps)


def test_a_prompt_is_clear_if_its_best_token_leads_at_every_step() -> None:
    two = Answers(
        [[1, 2], [1, 2]],
        [
            [{"1": -0.1, "3": -0.1 - clear_prompts.CLEAR - 1e-6}, {"2": -0.1, "3": -0.9}],
            [{"1": -0.1, "3": -0.9}, {"2": -0.1, "3": -0.1 - clear_prompts.CLEAR / 2}],
        ],
    )
    assert find_clear(two) == [0]
    assert find_clear(Answers([[1]], [[{"1": 0.0}]])) == [], "one logprob says nothing about the second token"


@given(st.lists(st.floats(0, 2), min_size=1, max_size=40), st.integers(0, 40))
def test_only_clear_prompts_count_and_one_in_ten_may_differ(leads: list[float], wrong: int) -> None:
    reference, other = answers(leads), answers(leads)
    changed = Answers([[-1] if i < wrong else ids for i, ids in enumerate(other.tokens)], other.logprobs)
    result = compare(changed, reference)
    clear = find_clear(reference)
    assert result.clear == len(clear)
    assert result.same == sum(prompt >= wrong for prompt in clear)
    assert result.is_compared == (len(clear) >= clear_prompts.MIN_CLEAR)
    assert (result.problem is not None) == (
        result.is_compared and result.same < clear_prompts.MIN_SAME * len(clear)
    )


def test_the_distance_is_the_median_of_the_clear_prompts() -> None:
    leads = [1.0] * 8 + [0.1]
    assert compare(answers(leads, gap=0.25), answers(leads)).distance == pytest.approx(0.25)
    assert compare(answers(leads, shift=500), answers(leads)).distance == math.inf, "no token in common"
    assert compare(answers([0.1]), answers([0.1])).distance is None


def test_a_logprob_that_is_not_finite_is_wrong_also_as_text() -> None:
    broken = Answers([[0]] * 8, [[{"0": "nan", "1": -1.0}]] * 8)  # type: ignore[dict-item]
    assert compare(broken, answers([1.0] * 8)).problem == "a logprob is not finite"


def test_prompts_are_text_for_a_tokenizer_and_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    ids = make_prompts(tmp_path)
    assert ids == make_prompts(tmp_path)
    assert all(3 <= token < 100 for prompt in ids for token in prompt if isinstance(token, int))
    (tmp_path / "tokenizer.json").write_text("{}")
    texts = make_prompts(tmp_path)
    assert all(isinstance(prompt, str) for prompt in texts)
    assert len(texts) == len(set(map(str, texts))) > 50
