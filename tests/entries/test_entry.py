"""An entry file is read completely, or refused with the number of the wrong line."""

from pathlib import Path

import pytest

from moedoctor.entries import EntryError, load_entry
from moedoctor.entries.entry import Link, parse_entry
from moedoctor.text import TextFileError

WHOLE = """---
id: MD901
name: made_up
title: "a failure: made up"
family: routing
where: nowhere
fixed: "no"
next: look twice
affects:
  - severity: error
    confidence: 0.5
    when:
      packages: {vllm: ">=0.17.1,<0.20.0", vllm-gguf-plugin: ">=0"}
      capability: ">=9.0"
    needs: "--cpu-offload-gb"
    why: because
---
## What happens
One
line, and another.

## Who is affected
Nobody.

## How to see it
Not at all.

## Fix
None.

## Links
- https://example.org/1 the report
- https://example.org/2 closed: the fix
"""


def test_a_whole_entry_is_read() -> None:
    entry = parse_entry(WHOLE)
    assert (entry.id, entry.name, entry.title) == ("MD901", "made_up", "a failure: made up")
    assert (entry.where, entry.fixed, entry.next) == ("nowhere", "no", "look twice")
    assert entry.mechanism == "One\nline, and another."
    assert (entry.affected, entry.detection, entry.fix) == ("Nobody.", "Not at all.", "None.")
    texts = ("the report", "closed: the fix")
    assert entry.links == tuple(Link(f"https://example.org/{n}", text) for n, text in enumerate(texts, 1))
    (rule,) = entry.affects
    assert (rule.severity, rule.confidence, rule.needs) == ("error", 0.5, "--cpu-offload-gb")
    assert rule.when.packages == {"vllm": ">=0.17.1,<0.20.0", "vllm-gguf-plugin": ">=0"}
    assert rule.next == "look twice"


def test_a_rule_can_have_its_own_next_step() -> None:
    entry = parse_entry(WHOLE.replace("    why: because\n", "    why: because\n    next: do this\n"))
    assert (entry.next, entry.affects[0].next) == ("look twice", "do this")


PACKAGES = '      packages: {vllm: ">=0.17.1,<0.20.0", vllm-gguf-plugin: ">=0"}\n'


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("---\nid", "id", 1, "has no head"),
        ("id: MD901", "id: MD1", 2, "id: must match pattern"),
        ("name: made_up\n", "", 2, "name: is missing"),
        ("where: nowhere", "wehre: nowhere", 6, "wehre: unknown key, did you mean where?"),
        ('title: "a failure: made up"', "title: ", 4, "title: must be text"),
        ("<0.20.0", "<the next", 13, "is not a version range"),
        (">=0.17.1,<0.20.0", ">=0.17.1 || 1", 13, "is not a version range"),
        ("    why: because\n", "", 10, "affects[0].why: is missing"),
        (PACKAGES, "", 12, "must name packages"),
        ("## Fix\n", "", 18, "How to see it, Links, expected What happens, Who"),
        ("Nobody.", "", 22, "the section Who is affected is empty"),
        ("---\n## What", "---\nwords\n## What", 18, "has text before its first section"),
        ("- https://example.org/2", "- http://example.org/2", 33, "expected '- https://… what is there'"),
        ("/1 the report", "/1", 32, "expected '- https://… what is there'"),
    ],
)
def test_an_error_has_its_line(old: str, new: str, line: int, message: str) -> None:
    assert old in WHOLE
    with pytest.raises(TextFileError) as refused:
        parse_entry(WHOLE.replace(old, new, 1))
    assert message in refused.value.message
    assert refused.value.line == line


def test_a_file_must_have_the_name_of_its_id(tmp_path: Path) -> None:
    right, wrong = tmp_path / "MD901.md", tmp_path / "MD902.md"
    for file in (right, wrong):
        file.write_text(WHOLE)
    assert load_entry(right).id == "MD901"
    with pytest.raises(EntryError, match=r"entries/MD902.md:2: id MD901, expected MD902"):
        load_entry(wrong)
