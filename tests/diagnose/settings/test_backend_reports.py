"""The stored selection reports are what the command writes, and agree with the tables."""

from pathlib import Path

import pytest

from moedoctor.commands import backends as command
from moedoctor.reporters.pages.backend_pages import FAMILIES

KEPT = Path(__file__).resolve().parents[3] / "reports" / "backends"


def test_the_stored_reports_are_what_the_command_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(tmp_path / "new")]) == 0
    fresh = {
        file.relative_to(tmp_path / "new"): file for file in (tmp_path / "new").rglob("*") if file.is_file()
    }
    kept = {file.relative_to(KEPT) for file in KEPT.rglob("*") if file.is_file()}
    assert set(fresh) == kept
    different = [str(name) for name, file in fresh.items() if file.read_bytes() != (KEPT / name).read_bytes()]
    assert different == [], "run: make backendreports"
    assert command.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_markdown_is_one_table_a_family() -> None:
    assert len(list(KEPT.rglob("*.md"))) == len(FAMILIES) + 1
    text = (KEPT / "sm120.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count(" | ") for line in rows}) == 1
    assert len(rows) == len(set(rows))
    first = next(line for line in rows if line.startswith("| nvfp4 | tp"))
    assert "0.17.1 to 0.19.1" in first
    assert "**FLASHINFER_CUTLASS** (flashinfer_cutlass)" in first
    index = (KEPT / "README.md").read_text(encoding="utf-8")
    assert all(f"(sm{family.replace('.', '')}.md)" in index for family in FAMILIES)
