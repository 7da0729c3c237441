"""`moedoctor conform`, and pytest's items of its questions."""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes_seen import run

from moedoctor.cli import main

ROOT = Path(__file__).resolve().parents[2]
PLANTED = str(ROOT / "tests" / "testing" / "planted.py")


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
    module = import_module("moedoctor.testing.examine")
    monkeypatch.setattr(module, "examine", lambda *given, **options: nothing)
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
    router, asked = f"{PLANTED}:route_one_expert_of_equals", "ordinary or equal_logits or bias"
    words = ["--moe-router", router, "-k", asked]
    pytest_here = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *words]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    ended = run(pytest_here, cwd=tmp_path, env=environ)
    assert ended.returncode == 0, ended.stdout
    assert "1 passed, 1 skipped, 16 deselected, 1 xfailed" in ended.stdout
