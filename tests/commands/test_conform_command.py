"""`moedoctor conform`, and pytest's items of its questions."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moedoctor.cli import main

PLANTED = str(Path(__file__).parents[1] / "testing" / "planted.py")
WRONG = ["conform", f"{PLANTED}:route_one_expert_of_equals", "--kind", "router"]
FEW = ["--question", "ordinary,equal_logits,bias"]


def test_each_format_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("json", "md", "html", "xml", "sarif"):
        assert main([*WRONG, *FEW, "-o", str(tmp_path / f"a.{suffix}")]) == 1
    assert "equal_logits: wrong: row 0: an expert is chosen twice" in capsys.readouterr().err
    report = json.loads((tmp_path / "a.json").read_text())
    assert [(each["question"], each["verdict"]) for each in report["answers"]] == [
        ("ordinary", "right"), ("equal_logits", "wrong"), ("bias", "skipped"),
    ]  # fmt: skip
    assert report["summary"]["failed"] == 1
    assert "moedoctor router: 1 of 2 right, 1 wrong" in (tmp_path / "a.md").read_text()
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert [suite.find(".//testsuite", {}) is None or True] == [True]
    (failure,) = suite.iter("failure")
    assert "check_router(" in (failure.get("message") or "") + (failure.text or "")
    assert "equal_logits" in (tmp_path / "a.html").read_text()
    assert main(["show", str(tmp_path / "a.json")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{PLANTED}:NAN"], "TypeError"),
        (["nowhere:fn"], "No module named 'nowhere'"),
        ([f"{PLANTED}:Cache", "--question", "groups"], "it is a cache, which has no question groups"),
        ([f"{PLANTED}:Cache", "--question", "nothing"], "--question nothing: expected"),
        ([f"{PLANTED}:Cache", "--formats", "int3"], "--formats int3: expected"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
