"""Each known failure is found in texts about it and not in texts that only resemble them."""

import io
import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.triage.signatures import Clue, find_clues, load_clues, load_data, load_signatures
from moedoctor.diagnose.triage.triage import triage
from moedoctor.entries import load_entries
from tests.diagnose.triage.threads_of_tests import Thread, threads

THREADS = tuple(threads())
POSITIVE = tuple(thread for thread in THREADS if thread.ids)
NEGATIVE = tuple(thread for thread in THREADS if not thread.ids)
LINES = sorted({line for thread in THREADS for line in thread.text.lower().splitlines()})
_GAP = re.compile(r"(?<!\\)(?:\.|\[\^[^\]]{1,6}\])\{\d+,\d+\}\??")
"""Any text between two words of a pattern."""
_WRITTEN = " abcdefghijklmnopqrstuvwxyz0123456789_-.,:;=<>/'\"`()[]{}|&*%!+"


@pytest.mark.parametrize(
    "thread", THREADS, ids=lambda thread: f"{'+'.join(sorted(thread.ids))} {thread.source}"
)
def test_a_text_shows_the_failures_that_it_is_about_and_no_other(thread: Thread) -> None:
    assert {finding.id for finding in triage(io.BytesIO(thread.text.encode())).findings} == thread.ids


def test_each_failure_has_texts_about_it_and_lookalikes() -> None:
    about = Counter(id for thread in POSITIVE for id in thread.ids)
    like = Counter(id for thread in NEGATIVE for id in thread.lookalike_of)
    assert {id: about[id] for id in load_entries() if about[id] < 3} == {}
    assert {id: like[id] for id in load_entries() if like[id] < 3} == {}
    assert sum("general" in thread.file for thread in NEGATIVE) >= 40


def test_each_failure_has_a_signature_a_name_and_a_next_step() -> None:
    ids = {signature.id for signature in load_signatures()}
    assert ids == set(load_entries())


def test_signatures_name_clues_that_exist_and_every_clue_is_used() -> None:
    groups = []
    for each in load_signatures():
        groups += [each.shows, each.unless, each.unless_near, *each.near, *each.needs, *each.anywhere]
        groups += [evidence.names for evidence in each.evidence]
    causes = load_data("causes.yaml")
    groups += [tuple(body.get("told", ())) for body in causes["classes"].values()]
    groups += [[*hint["if"].split("+"), hint.get("but", "vllm")] for hint in causes["hints"]]
    named = {name for group in groups for name in group}
    assert named - load_clues().keys() == set()
    elsewhere = {"foreign", "vllm", "proposal", "solved_told", "fine_here", "other_chip"}
    assert load_clues().keys() - named - elsewhere == set()


def test_confidences_are_shares_and_evidence_moves_them() -> None:
    assert all(0.05 < signature.confidence < 1 for signature in load_signatures())
    factors = [evidence.factor for signature in load_signatures() for evidence in signature.evidence]
    assert all(factor > 0 and factor != 1 for factor in factors)


def test_what_a_piece_of_evidence_says_is_a_clause() -> None:
    names = {
        name for signature in load_signatures() for evidence in signature.evidence for name in evidence.names
    }
    assert {name for name in names if not load_clues()[name].says} == set()


def test_repetitions_in_patterns_are_bounded() -> None:
    unbounded = re.compile(r"(?<!\\)(?:[*+]|\{\d+,\})(?![^\[]*\])")
    assert {clue.name: clue.pattern for clue in load_clues().values() if unbounded.search(clue.pattern)} == {}


@pytest.mark.parametrize("clue", load_clues().values(), ids=lambda clue: clue.name)
def test_needles_start_with_the_text_of_a_clue(clue: Clue) -> None:
    """In every line of the labeled texts, the index of words finds each clue that matches."""
    pattern = re.compile(clue.pattern)
    assert [line for line in LINES if pattern.search(line) and clue not in find_clues(line)] == []


@pytest.mark.slow
@pytest.mark.parametrize("clue", load_clues().values(), ids=lambda clue: clue.name)
def test_the_alternatives_of_a_pattern_have_needles(clue: Clue) -> None:
    """Of texts made from a pattern nearly all have a needle. Some join words that no text joins."""
    held: list[tuple[str, bool]] = []

    @settings(
        max_examples=30,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.from_regex(_GAP.sub(" ", clue.pattern), fullmatch=True, alphabet=_WRITTEN))
    def read(text: str) -> None:
        if re.search(clue.pattern, text):
            held.append((text, clue in find_clues(text)))

    read()
    without = [text for text, has_needle in held if not has_needle]
    assert held
    assert len(without) <= len(held) / 5, without[:5]
