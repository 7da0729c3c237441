"""The shape of a scenario file: what is refused and in which words, and the schema for editors."""

from __future__ import annotations

import jsonschema
import pytest
import yaml
from scenario_fakes import BASE, CLAIM, FULL, HEAD

from moedoctor.scenario.document import InvalidValueError, ScenarioDocument, read_document, schema
from moedoctor.text import parse


def test_a_full_document() -> None:
    document = read_document(parse(FULL))
    assert document.parameters == {"tokens": [96], "router": ["softmax", "sigmoid"]}
    assert document.matrix[0] == {"experts": [8], "top_k": [2]}
    assert document.timeout == 90.0


def test_text_is_made_one_line() -> None:
    assert read_document(parse(BASE.replace("A title", ">\n  two\n  words"))).title == "two words"


LIST = "must be a list ([a, b]), not "
MAPPING = "must be a mapping (key: value), not "
TEXT = "must be text (quote it), not "

# What is wrong, the file, the line of the error, the beginning of the message.
BAD = [
    ("a list", "- a\n", 1, MAPPING + "a list"),
    ("a text", "\nMD001\n", 2, MAPPING + "'MD001'"),
    ("null", "null\n", 1, MAPPING + "null"),
    ("no title", "id: MD001\nname: nan_routing\n", 1, "title: is missing, expected a value"),
    ("unknown key", BASE + "subject: [faulty]\n", 5, "subject: unknown key, did you mean subjects?"),
    ("misspelt title", BASE.replace("title", "titel"), 3, "titel: unknown key, did you mean title?"),
    ("strange key", BASE + "zzz: 1\n", 5, "zzz: unknown key, expected one of id, name, title, subjects"),
    ("empty key", BASE + "'': 1\n", 5, "unknown key"),
    ("key with escapes", BASE + '"a\\x1b[31m\\nb": 1\n', 5, r"a\x1b[31m\nb: unknown key"),
    ("long key", BASE + "k" * 900 + ": 1\n", 5, "k" * 40 + "… (900 characters): unknown key"),
    ("first of two", BASE + "yy: 1\nzz: 1\n", 5, "yy: unknown key"),
    ("number as id", BASE.replace("MD001", "5"), 1, "id: " + TEXT + "5"),
    ("null as id", BASE.replace("MD001", ""), 1, "id: " + TEXT + "null"),
    ("long id", BASE.replace("MD001", "M" * 101), 1, "id: must have at most 100 characters, not 'MMM"),
    ("boolean as title", BASE.replace("A title", "true"), 3, "title: " + TEXT + "true"),
    ("blank title", BASE.replace("A title", "'  '"), 3, "title: must not be empty"),
    ("empty title", BASE.replace("A title", "''"), 3, "title: must not be empty"),
    (
        "two lines",
        BASE.replace("A title", '"a\\nb"'),
        3,
        r"title: must be one line without control characters, n",
    ),
    ("escapes", BASE.replace("A title", r'"\x1b[31m"'), 3, "title: must be one line without control"),
    ("long title", BASE.replace("A title", "t" * 301), 3, "title: must have at most 300 characters"),
    ("timeout text", BASE + "timeout: '60'\n", 5, "timeout: must be a valid number, not '60'"),
    ("timeout true", BASE + "timeout: true\n", 5, "timeout: must be a valid number, not true"),
    ("timeout 0", BASE + "timeout: 0\n", 5, "timeout: must be greater than 0, not 0"),
    ("timeout long", BASE + "timeout: 3601\n", 5, "timeout: must be less than or equal to 3600, not 3601"),
    ("timeout null", BASE + "timeout:\n", 5, "timeout: must be a valid number, not null"),
    ("subjects text", BASE + "subjects: faulty\n", 5, "subjects: " + LIST + "'faulty'"),
    ("subjects null", BASE + "subjects:\n", 5, "subjects: " + LIST + "null"),
    ("subjects empty", BASE + "subjects: []\n", 5, "subjects: must not be empty"),
    ("subjects many", BASE + f"subjects: [{'a, ' * 101}]\n", 5, "subjects: must have at most 100 items"),
    ("subject 5", BASE + "subjects:\n- faulty\n- 5\n", 7, "subjects[1]: " + TEXT + "5"),
    ("tiers empty", BASE + "tiers: []\n", 5, "tiers: must not be empty"),
    (
        "tier",
        BASE + "tiers:\n- modle\n",
        6,
        "tiers[0]: must be 'model', 'library', 'kernel' or 'engine', not",
    ),
    ("expect list", BASE + "expect: [clean]\n", 5, "expect: " + MAPPING + "a list"),
    ("expect empty", BASE + "expect: {}\n", 5, "expect: must not be empty"),
    (
        "verdict",
        BASE + "expect:\n  faulty: x\n",
        6,
        "expect.faulty: must be 'reproduced' or 'clean', not 'x'",
    ),
    ("parameters list", HEAD + "parameters: [4]\n", 4, "parameters: " + MAPPING + "a list"),
    ("parameter empty", HEAD + "parameters: {a: []}\n", 4, "parameters.a: must not be empty"),
    (
        "parameter mapping",
        HEAD + "parameters:\n  a: {b: 1}\n",
        5,
        "parameters.a: must be text, a number, true, fa",
    ),
    (
        "parameter nested",
        HEAD + "parameters:\n  a:\n  - 1\n  - [2]\n",
        7,
        "parameters.a[1]: must be text, a number",
    ),
    ("matrix empty", BASE + "matrix: []\n", 5, "matrix: must not be empty"),
    ("matrix null", BASE + "matrix:\n", 5, "matrix: " + LIST + "null"),
    ("matrix mapping", BASE + "matrix: {a: 1}\n", 5, "matrix: " + LIST + "a mapping"),
    ("matrix of text", BASE + "matrix:\n- a\n", 6, "matrix[0]: " + MAPPING + "'a'"),
    ("claims mapping", BASE + "claims: {}\n", 5, "claims: " + LIST + "a mapping"),
    ("claim text", BASE + "claims: [a]\n", 5, "claims[0]: " + MAPPING + "'a'"),
    ("claim incomplete", BASE + "claims:\n- key: plain\n", 6, "claims[0].text: is missing, expected a value"),
    (
        "claim extra",
        BASE + CLAIM + "    sources: a\n",
        9,
        "claims[0].sources: unknown key, did you mean source?",
    ),
    (
        "threshold text",
        BASE + CLAIM + "    thresholds: {a: b}\n",
        9,
        "claims[0].thresholds.a: must be a valid n",
    ),
]


@pytest.mark.parametrize(("text", "line", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD])
def test_bad_shape(text: str, line: int, message: str) -> None:
    source = parse(text)
    with pytest.raises(InvalidValueError) as caught:
        read_document(source)
    assert caught.value.message.startswith(message)
    assert source.line(caught.value.path) == line


def test_the_schema_is_closed_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema() == schema()
    for part in (schema(), schema()["$defs"]["ClaimDocument"]):
        assert part["additionalProperties"] is False
        assert all(value.get("description") for value in part["properties"].values())
    assert set(schema()["properties"]) == set(ScenarioDocument.model_fields)


def test_editors_accept_what_the_loader_accepts() -> None:
    for text in (
        FULL,
        BASE,
        BASE + "tiers: [model]\ntimeout: 0.5\nmatrix: [{a: [1, x, null, true, 0.5], b: null}]\n",
    ):
        jsonschema.validate(yaml.safe_load(text), schema())
        read_document(parse(text))


# What a JSON schema cannot say: text that is blank or no single line.
BEYOND_SCHEMA = {"blank title", "two lines", "escapes"}


@pytest.mark.parametrize(
    "text", [pytest.param(row[1], id=row[0]) for row in BAD if row[0] not in BEYOND_SCHEMA]
)
def test_editors_refuse_what_the_loader_refuses(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), schema())


@pytest.mark.parametrize("key", ["subjects", "tiers"])
def test_editors_refuse_what_is_there_twice(key: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(BASE + f"{key}: [model, model]\n"), schema())
