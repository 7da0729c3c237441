"""The packaging: a complete wheel, and a package in it that finds its own files."""

import json
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from processes_seen import run

import moedoctor
from moedoctor.reporters.json import load_documents

ROOT = Path(__file__).resolve().parent.parent


def scenario_names() -> set[str]:
    folder = ROOT / "scenarios"
    found = [path for path in folder.rglob("*") if path.suffix in {".yaml", ".json"}]
    return {path.relative_to(folder).as_posix() for path in found}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hatchling.builders.sdist import SdistBuilder

    folder = tmp_path_factory.mktemp("sdist")
    return Path(next(SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Build the wheel from the source distribution, as for a package index."""
    from hatchling.builders.wheel import WheelBuilder

    folder = sdist.parent / "unpacked"
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (source,) = folder.iterdir()
    return Path(next(WheelBuilder(str(source)).build(directory=str(sdist.parent), versions=["standard"])))


def test_the_wheel_holds_the_package_its_scenarios_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    info = f"moedoctor-{moedoctor.__version__}.dist-info/"
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "moedoctor").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "moedoctor/py.typed" in names
    entries = {path.relative_to(ROOT).as_posix() for path in (ROOT / "moedoctor" / "entries").glob("*.md")}
    assert entries
    assert entries <= names
    prefix = "moedoctor/_scenarios/"
    assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == scenario_names()
    assert f"{info}licenses/LICENSE" in names
    assert all(name.startswith(("moedoctor/", info)) for name in names)


def test_the_wheel_holds_no_report_that_no_command_reads(wheel: Path) -> None:
    """`explain` reads runs with claims that scenarios still ask, and `bench` and `plan` take a trace."""
    prefix = "moedoctor/_reports/"
    with zipfile.ZipFile(wheel) as archive:
        names = [each for each in archive.namelist() if each.startswith(prefix) and "/traces/" not in each]
        reports = [json.loads(archive.read(name))["scenarios"] for name in names]
    scenarios = [yaml.safe_load(file.read_bytes()) for file in (ROOT / "scenarios").rglob("*.yaml")]
    asked = {claim["text"] for scenario in scenarios for claim in scenario.get("claims") or ()}
    assert all(asked & {claim["text"] for row in rows for claim in row["claims"]} for rows in reports)


@pytest.mark.slow
def test_the_package_of_the_wheel_finds_its_own_scenarios_evidence_and_schemas(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    package = (tmp_path / "moedoctor").resolve()
    code = (
        "from moedoctor.entries import find_builtin_folder as scenarios, find_reports_folder as reports; "
        "print(scenarios(), reports(), sep='\\n')"
    )
    answer = run([sys.executable, "-c", code], cwd=tmp_path)
    assert answer.stdout.split() == [str(package / "_scenarios"), str(package / "_reports")], answer.stderr
    ask = """
import sys
import moedoctor.cli as cli
for name in sys.argv[1:]:
    cli.main(["schema", name])
    print(f"\\0torch {'torch' in sys.modules}\\0")
"""
    asked = run([sys.executable, "-c", ask, *load_documents(), "scenario"], cwd=tmp_path)
    answers = asked.stdout.split("\0")
    schemas, loaded = answers[:-1:2], answers[1::2]
    assert len(schemas) == len(load_documents()) + 1
    assert all(json.loads(schema)["title"] for schema in schemas)
    assert set(loaded) == {"torch False"}


def test_the_source_distribution_holds_what_tests_and_builds_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "Makefile", "scripts/setup.sh", "README.md", "LICENSE", "CHANGELOG.md"}
    assert wanted <= names
    assert {f"scenarios/{name}" for name in scenario_names()} <= names
    assert "tests/test_project.py" in names
    assert not [name for name in names if name.startswith((".venv", ".gpu", "out/")) or "__pycache__" in name]


def test_the_metadata_of_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode("utf-8"))
    assert metadata["Version"] == moedoctor.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    always = {need.name.lower() for need in needs if not (need.marker and "extra" in str(need.marker))}
    assert " ".join(sorted(always)) == "jinja2 nvidia-ml-py packaging pydantic pyyaml rich safetensors typer"
    assert {str(need.marker) for need in needs if need.name == "ray"} >= {'extra == "fleet"'}
    # Installing moedoctor must not change the torch that it examines.
    torches = [need for need in needs if need.name == "torch"]
    assert {str(need.marker) for need in torches} == {'extra == "torch"', 'extra == "dev"'}
    assert all({bound.operator for bound in need.specifier} == {">="} for need in torches)


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 3_000_000
