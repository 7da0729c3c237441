"""Every stored report is listed, agrees with its Markdown, and holds no path of the machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "nvidia-h200"
REPORTS = sorted(file.stem for file in FOLDER.glob("*.json"))
SCRIPT = ROOT / "scripts" / "evidence.sh"
_HOME = re.compile(r"(?<![\w.])/(work|root|home|tmp)/\w")


def test_the_index_lists_every_report_and_no_other() -> None:
    listed = re.findall(r"\]\((\w+)\.md\)", (FOLDER / "README.md").read_text())
    assert sorted(listed) == REPORTS


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_has_its_markdown_and_names_no_folder_of_the_machine(name: str) -> None:
    assert (FOLDER / f"{name}.md").exists()
    assert not _HOME.search((FOLDER / f"{name}.json").read_text())


def test_the_script_can_make_every_report() -> None:
    answer = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=True, timeout=30)
    makes = {line.split("\t")[0] for line in answer.stdout.splitlines()}
    bases = {re.sub(r"_(marlin|emulation)$", "", name) for name in REPORTS}
    assert bases <= makes


def test_the_script_refuses_a_name_that_it_does_not_know() -> None:
    answer = subprocess.run([str(SCRIPT), "nonsense"], capture_output=True, text=True, timeout=30)
    assert answer.returncode == 1
    assert "no report is named 'nonsense'" in answer.stderr
