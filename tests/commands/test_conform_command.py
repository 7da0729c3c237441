"""Pytest's items of the questions of `moedoctor conform`."""

import os
import sys
from pathlib import Path

import pytest
from every_command import PLANTED
from processes_seen import run

ROOT = Path(__file__).resolve().parents[2]


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
