"""The stored selection reports are what the script writes, and agree with the tables."""

from pathlib import Path

from scripts_of_tests import load_script

KEPT = Path(__file__).resolve().parents[3] / "reports" / "backends"


def test_the_stored_reports_are_what_the_script_writes(tmp_path, monkeypatch):
    families = load_script("backend_reports", monkeypatch).FAMILIES
    load_script("backend_reports", monkeypatch).write_reports(tmp_path / "new")
    fresh = {
        file.relative_to(tmp_path / "new"): file for file in (tmp_path / "new").rglob("*") if file.is_file()
    }
    kept = {file.relative_to(KEPT) for file in KEPT.rglob("sm*") if file.is_file()}
    assert set(fresh) == kept
    different = [str(name) for name, file in fresh.items() if file.read_bytes() != (KEPT / name).read_bytes()]
    assert different == [], "run: make backendreports"
    assert len(kept) == len(families)
    index = (KEPT / "README.md").read_text(encoding="utf-8")
    assert all(f"(sm{family.replace('.', '')}.md)" in index for family in families)
