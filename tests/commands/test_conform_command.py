"""`moedoctor conform`, and pytest's items of its questions."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from moedoctor.cli import main

ROOT = Path(__file__).resolve().parents[2]
PLANTED = str(ROOT / "tests" / "testing" / "planted.py")
WRONG = ["conform", f"{PLANTED}:route_one_expert_of_equals", "--kind", "router"]
FEW = ["--question", "ordinary,equal_logits,bias"]


def test_each_format_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WRONG, *FEW, "-o", str(tmp_path / "a.json")]) == 1
    assert "equal_logits: wrong: row 0: an expert is chosen twice" in capsys.readouterr().err
    report = json.loads((tmp_path / "a.json").read_text())
    assert [(each["question"], each["verdict"]) for each in report["answers"]] == [
        ("ordinary", "right"), ("equal_logits", "wrong"), ("bias", "skipped"),
    ]  # fmt: skip
    assert report["summary"]["failed"] == 1
    for suffix in ("md", "html", "xml", "sarif"):
        assert main(["show", str(tmp_path / "a.json"), "-o", str(tmp_path / f"a.{suffix}")]) == 0
    assert "moedoctor router: 1 of 2 right, 1 wrong" in (tmp_path / "a.md").read_text()
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    (failure,) = suite.iter("failure")
    assert "check_router(" in (failure.get("message") or "") + (failure.text or "")
    assert "equal_logits" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{PLANTED}:Cache", "--question", "groups"], ":Cache: it is a cache, which has no question groups"),
        ([f"{PLANTED}:Cache", "--question", "nothing"], "--question nothing: expected"),
        ([f"{PLANTED}:Cache", "--formats", "int3"], "--formats int3: expected"),
    ],
)
def test_wrong_usage_is_one_line(words, message, monkeypatch, capsys):
    """The child that knows what the target is has answered no question."""
    nothing = SimpleNamespace(answers=(), kind="cache")
    monkeypatch.setattr(
        import_module("moedoctor.testing.examine"), "examine", lambda *given, **options: nothing
    )
    assert main(["conform", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.slow
def test_pytest_has_an_item_for_each_question_that_a_project_can_mark(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        if item.name.endswith(' equal_logits'):\n"
        "            item.add_marker(pytest.mark.xfail(reason='known', strict=True))\n"
    )
    words = ["--moe-router", WRONG[1], "-k", "ordinary or equal_logits or bias"]
    pytest_here = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *words]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    ended = subprocess.run(
        pytest_here, cwd=tmp_path, capture_output=True, text=True, env=environ, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert "1 passed, 1 skipped, 16 deselected, 1 xfailed" in ended.stdout
