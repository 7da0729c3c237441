"""`make release`: tables come back byte for byte; changes, and what needs a person, are named."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_vllm import read_release
from scripts_of_tests import load_script
from vllm_sources import rename, write_source

from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.upstream.releases.questions import load_answers

ROOT = Path(__file__).resolve().parent.parent
RELEASES = list(load_releases())
PINS = list(dict.fromkeys(release.flashinfer for release in load_releases().values()))
BACKENDS = "moedoctor/fixes/backends/data"
SETTINGS = "moedoctor/diagnose/settings/data"
NAMES = "moedoctor/diagnose/checkpoint/read_names.json"
LISTED = "scripts/releases.txt"
ENTRIES = "moedoctor/entries"
ROWS = [
    *(f"{BACKENDS}/{name}.json" for name in ("bf16", "fp8", "fp8-block", "mxfp4", "nvfp4", "nvfp4-w4a16")),
    *(
        f"{SETTINGS}/{name}.json"
        for name in ("vllm_flags", "vllm_values", "vllm_variables", "flashinfer_variables")
    ),
]
"""Tables in which a row holds for a run of releases."""
BY_RELEASE = [
    *(f"{BACKENDS}/releases.json", "moedoctor/plugin/known_code.json"),
    *("evidence/plugin_sources.json", "moedoctor/upstream/releases/answers.json"),
]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_script("release/tables", monkeypatch)


def list_releases(file: str) -> list[str]:
    return PINS if "flashinfer" in file else RELEASES


@pytest.mark.parametrize("file", ROWS)
def test_rows_that_are_taken_out_and_put_back_are_the_same(file: str, tables: Any, tmp_path: Path) -> None:
    stored, releases = tables.read_json(ROOT / file), list_releases(file)
    for rows in [rows for rows in stored.values() if isinstance(rows, list)]:
        for release in (releases[0], releases[-5], releases[-1]):
            own = tables.spread_rows(rows, releases)[release]
            kept = tables.replace_rows(rows, release, (), releases)
            again = tables.replace_rows(kept, release, own, releases)
            assert (kept != rows) == bool(own)
            assert sorted(again, key=lambda row: row.get("name", "")) == rows
    tables.write_json(tmp_path / "same.json", stored)
    assert (tmp_path / "same.json").read_bytes() == (ROOT / file).read_bytes()


def test_values_are_read_where_a_release_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "A = Literal['x', BTypes]\nBTypes = Literal['y']\nclass C(Enum):\n    D = 1\nE = {'f': 1}"
    read = load_script("release/settings", monkeypatch).list_values
    assert [name for place in "ACE" for name, _ in read(ast.parse(code), place)] == ["x", "y", "D", "f"]


def test_ranges_of_entries_are_made_from_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = load_script("release/ranges", monkeypatch)
    entries = shutil.copytree(ROOT / ENTRIES, tmp_path / "entries")
    answers = load_answers()
    assert not list(ranges.write_ranges(entries, answers))
    older = {name: {key: row[key] for key in row if key != RELEASES[-1]} for name, row in answers.items()}
    ended = list(ranges.write_ranges(entries, older))
    assert ended == ["person: moedoctor/entries/MD013.md: a range of question repacked ended"]
    edited = {file.name for file in list_entries() if file.read_bytes() != (entries / file.name).read_bytes()}
    assert {"MD002.md", "MD008.md"} <= edited
    assert not list(ranges.write_ranges(entries, answers))
    assert all(file.read_bytes() == (entries / file.name).read_bytes() for file in list_entries())


def list_entries() -> list[Path]:
    return sorted((ROOT / ENTRIES).glob("MD*.md"))


def remove_release(root: Path, tables: Any, ranges: Any, release: str) -> None:
    """Remove a release, and a FlashInfer that no other one requires, from all data below `root`.

    A row that began in it begins in the next release then, and nothing says at which line of that source.
    """

    def drop(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: drop(each) for key, each in value.items() if key != release}
        return value

    def cut(rows: Any, gone: str, known: list[str]) -> Any:
        if not isinstance(rows, list):
            return rows
        began = [row for row in rows if row["releases"].partition("-")[0] == gone]
        for row in began:
            row.update({key: "gone" for key in ("source", "moe") if key in row})
        given = tables.spread_rows(rows, known)
        del given[gone]
        return sorted(tables.merge_rows(given), key=lambda row: row.get("name", ""))

    for file in BY_RELEASE:
        levels = 1 if file.endswith("answers.json") else 2
        tables.write_json(root / file, drop(tables.read_json(root / file)), levels)
    list(ranges.write_ranges(root / ENTRIES, tables.read_json(root / BY_RELEASE[-1])))
    pin = load_releases()[release].flashinfer
    required = [each.flashinfer for name, each in load_releases().items() if name != release]
    for file in ROWS:
        gone = pin if "flashinfer" in file else release
        if gone not in required:
            table = tables.read_json(root / file)
            cleared = {key: cut(rows, gone, list_releases(file)) for key, rows in table.items()}
            tables.write_json(root / file, cleared)
    names = tables.read_json(root / NAMES)
    for row in names:
        row["releases"] = [name for name in row["releases"] if name != release]
    tables.write_json(root / NAMES, [row for row in names if row["releases"]], levels=1)
    listed = (root / LISTED).read_text(encoding="utf-8")
    (root / LISTED).write_text(listed.replace(f"vllm {release}\n", ""), encoding="utf-8")


@pytest.mark.upstream
def test_a_release_that_was_removed_everywhere_comes_back_byte_for_byte(tables, tmp_path, monkeypatch):
    release, home = read_release(), ROOT / ".venv-upstream"
    following = RELEASES[RELEASES.index(release) + 1 :][:1]
    if missing := [name for name in following if not (home / "releases" / name / ".complete").exists()]:
        pytest.skip(f"{missing[0]}, which follows {release}, was not fetched")
    for name in ("moedoctor", "scenarios", "scripts", "tests", "evidence"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".venv-upstream").symlink_to(home)
    functions = "upstream_environment() { :; }\nvllm_folder() { :; }\n"
    (tmp_path / "scripts" / "environments.sh").write_text(functions)
    remove_release(tmp_path, tables, load_script("release/ranges", monkeypatch), release)

    def list_changed() -> set[str]:
        entries = (f"{ENTRIES}/{file.name}" for file in list_entries())
        files = (*ROWS, *BY_RELEASE, NAMES, LISTED, *entries)
        return {file for file in files if (tmp_path / file).read_bytes() != (ROOT / file).read_bytes()}

    removed = list_changed()
    done = subprocess.run(
        [sys.executable, "scripts/release", release],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=False,
    )
    assert removed.issuperset(BY_RELEASE)
    assert done.returncode in (0, 1)
    assert not list_changed() & {*removed, *ROWS}


def test_what_begins_and_what_needs_a_person_is_named(tmp_path, monkeypatch):
    release = load_script("release/__main__", monkeypatch)
    folder = write_source(tmp_path / "0.34.0", "0.33.0", changed={"MD009.asserts": "affected"})
    rename(folder, "vllm/model_executor/utils.py", "replace_parameter")
    lines = list(release.compare("0.33.0", folder))
    runner = "vllm/v1/worker/gpu_model_runner.py"
    place = "moedoctor/entries/MD009.md, question asserts"
    assert any(line.startswith(f"entry: {place}: clean -> affected: {runner}:") for line in lines)
    gone = "affected -> unknown: there is no replace_parameter in vllm/model_executor/utils.py"
    assert f"person: moedoctor/entries/MD013.md, question repacked: {gone}" in lines
    assert any(line.startswith("person: moedoctor/plugin/offload_fix.py: ") for line in lines)
