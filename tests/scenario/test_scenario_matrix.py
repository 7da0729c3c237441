"""The points of a scenario: which there are, in which order, and which are refused on which line."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scenario_fakes import BASE, FULL, HEAD, FakeParameters

from moedoctor.results import Scalar
from moedoctor.scenario.document import InvalidValueError, read_document
from moedoctor.scenario.matrix import MAX_POINTS, expand
from moedoctor.text import parse


def points(text: str) -> list[dict[str, Scalar]]:
    return [dict(point) for point in expand(read_document(parse(text)), FakeParameters)]


def refusal(text: str) -> tuple[int, str]:
    source = parse(text)
    document = read_document(source)
    with pytest.raises(InvalidValueError) as caught:
        expand(document, FakeParameters)
    return source.line(caught.value.path), caught.value.message


def test_each_block_is_merged_and_expanded_in_the_order_of_the_file() -> None:
    found = points(FULL)
    assert [(point["router"], point["experts"], point["top_k"]) for point in found] == [
        ("softmax", 8, 2),
        ("sigmoid", 8, 2),
        ("softmax", 64, 6),
        ("softmax", 64, 8),
        ("softmax", 128, 6),
        ("softmax", 128, 8),
    ]
    assert all(point["tokens"] == 96 for point in found)


def test_without_a_matrix_there_is_the_product_of_the_parameters() -> None:
    assert points(BASE) == [
        {"tokens": 4, "experts": 8, "top_k": 2, "router": "softmax", "scale": 1.0, "note": None}
    ]
    assert [point["tokens"] for point in points(HEAD + "parameters: {tokens: [3, 1, 2]}\n")] == [3, 1, 2]


def test_points_that_are_the_same_are_there_once() -> None:
    found = points(BASE + "matrix:\n- {experts: [8, 16, 8]}\n- {top_k: 2}\n- {scale: 1}\n- {scale: 1.5}\n")
    assert [(point["experts"], point["scale"]) for point in found] == [(8, 1.0), (16, 1.0), (8, 1.5)]


VALUES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
BLOCK = st.dictionaries(st.sampled_from(["tokens", "experts", "scale"]), VALUES, max_size=3)


@given(st.lists(BLOCK, min_size=1, max_size=4))
def test_the_points_are_those_of_the_blocks(blocks: list[dict[str, list[int]]]) -> None:
    shared = yaml.safe_dump({"parameters": {"tokens": 5, "experts": 50, "top_k": 1}, "matrix": blocks})
    found = [(point["tokens"], point["experts"], point["scale"]) for point in points(HEAD + shared)]
    expected = {
        (tokens, experts, scale)
        for block in blocks
        for tokens in block.get("tokens", [5])
        for experts in block.get("experts", [50])
        for scale in block.get("scale", [1])
    }
    assert set(found) == expected
    assert len(found) == len(expected)


INTEGER = "parameters.tokens: must be a valid integer, not "

# What is wrong, the file, the line of the error, the beginning of the message.
BAD = [
    ("missing", HEAD, 1, "parameters.tokens: is missing, expected a value"),
    (
        "missing in a block",
        HEAD + "matrix:\n- {tokens: 1}\n- {top_k: 1}\n",
        6,
        "parameters.tokens: is missing",
    ),
    (
        "unknown",
        BASE + "matrix:\n- {}\n- {topk: 8}\n",
        7,
        "parameters.topk: unknown key, did you mean top_k?",
    ),
    (
        "unknown list",
        HEAD + "parameters:\n  tokens: 1\n  topk:\n  - 1\n",
        6,
        "parameters.topk: unknown key, did",
    ),
    (
        "unknown before missing",
        HEAD + "parameters:\n  token: 1\n",
        5,
        "parameters.token: unknown key, did you",
    ),
    ("text", HEAD + "parameters: {tokens: '4'}\n", 4, INTEGER + "'4'"),
    ("boolean", HEAD + "parameters: {tokens: true}\n", 4, INTEGER + "true"),
    ("fraction", HEAD + "parameters: {tokens: 4.0}\n", 4, INTEGER + "4.0"),
    ("null", HEAD + "parameters: {tokens: }\n", 4, INTEGER + "null"),
    (
        "range",
        HEAD + "parameters:\n  tokens:\n  - 1\n  - -1\n",
        7,
        "parameters.tokens: must be greater than or eq",
    ),
    (
        "literal",
        BASE + "matrix: [{router: x}]\n",
        5,
        "parameters.router: must be 'softmax' or 'sigmoid', not 'x'",
    ),
    ("field's own check", BASE + "matrix: [{note: loud}]\n", 5, "parameters.note: must not be loud"),
    ("top_k", BASE + "matrix:\n- top_k:\n  - 8\n  - 16\n", 8, "parameters.top_k: 16 is more than experts 8"),
    (
        "top_k, shared",
        HEAD + "parameters:\n  top_k: 9\n  tokens: 1\n",
        5,
        "parameters.top_k: 9 is more than exp",
    ),
    (
        "top_k by default",
        BASE + "matrix:\n- experts: 2\n- experts: 1\n",
        7,
        "parameters.top_k: 2 is more than e",
    ),
    (
        "block as a whole",
        BASE + "matrix:\n- {}\n- tokens: 13000\n",
        7,
        "parameters: these values bring bad luck",
    ),
    (
        "no matrix",
        HEAD + "timeout: 9\nparameters:\n  tokens: 13000\n",
        5,
        "parameters: these values bring bad luck",
    ),
]


@pytest.mark.parametrize(("text", "line", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD])
def test_bad_point(text: str, line: int, message: str) -> None:
    found_line, found = refusal(text)
    assert found.startswith(message)
    assert found_line == line


def test_a_matrix_is_counted_before_it_is_expanded() -> None:
    block = ", ".join(f"p{index}: [1, 2, 3]" for index in range(1000))
    expected = "matrix: expands to over a billion points, expected at most 2000"
    assert refusal(BASE + f"matrix: [{{{block}}}]\n") == (5, expected)


def test_the_limit_counts_all_blocks() -> None:
    half = MAX_POINTS // 2
    blocks = [{"tokens": list(range(half))}, {"tokens": list(range(half, MAX_POINTS))}]
    assert len(points(BASE + yaml.safe_dump({"matrix": blocks}))) == MAX_POINTS
    line, message = refusal(BASE + yaml.safe_dump({"matrix": [*blocks, {"experts": 9}]}))
    assert (line, message) == (5, "matrix: expands to 2001 points, expected at most 2000")
    shared = "parameters: {tokens: [1, 2, 3], experts: [" + "8, " * 700 + "8]}\n"
    assert refusal(HEAD + shared) == (4, "parameters: expands to 2103 points, expected at most 2000")
