"""`make release`: what a release changes for moedoctor, and the table of answers, byte for byte."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from vllm_sources import rename, write_source

from moedoctor.fixes.backends.release_tables import load_releases

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_answers_of_all_releases_come_back_byte_for_byte(release: ModuleType, tmp_path: Path) -> None:
    for name in load_releases():
        write_source(tmp_path / name, name)
    assert release.ask_releases(tmp_path) == release.TABLE.read_text(encoding="utf-8")


def test_what_begins_and_what_needs_a_person_is_named(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_source(tmp_path / "0.34.0", "0.33.0", changed={"MD009.asserts": "affected"})
    rename(folder, "vllm/model_executor/utils.py", "replace_parameter")
    monkeypatch.setattr("sys.argv", ["release.py", "0.34.0", "--folder", str(tmp_path)])
    assert release.main() == 1
    lines = capsys.readouterr().out.splitlines()
    runner = "vllm/v1/worker/gpu_model_runner.py"
    place = "moedoctor/entries/MD009.md, question asserts"
    assert any(line.startswith(f"entry: {place}: clean -> affected: {runner}:") for line in lines)
    gone = "affected -> unknown: there is no replace_parameter in vllm/model_executor/utils.py"
    assert f"person: moedoctor/entries/MD013.md, question repacked: {gone}" in lines
    assert any(line.startswith("person: moedoctor/plugin/offload_fix.py: ") for line in lines)
