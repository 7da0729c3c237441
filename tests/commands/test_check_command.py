"""`moedoctor check` as a command: exit codes, streams, files, time, and no changes to the machine."""

import json
import os
import socket
import subprocess
import sys
import venv
from pathlib import Path
from unittest import mock

import pytest
from processes_seen import run

from moedoctor.cli import main


def pretend(site: Path, name: str, version: str) -> None:
    """Write the metadata of a package that is not there."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_failure_that_affects_the_machine_gives_exit_code_1_and_nothing_is_written(tmp_path):
    site, home, work = (tmp_path / name for name in ("site", "home", "work"))
    site.mkdir()
    home.mkdir()
    work.mkdir(mode=0o500)
    pretend(site, "vllm", "0.18.0")
    pretend(site, "flashinfer-python", "0.6.6")
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "moedoctor", "check", "--format", "json"]
    ended = run(command, stdin=subprocess.DEVNULL, cwd=work, env=environ)
    assert ended.returncode == 1, ended.stderr
    assert list(home.rglob("*")) == []
    assert list(work.iterdir()) == []
    data = json.loads(ended.stdout)
    assert {"MD001"} <= {finding["id"] for finding in data["findings"]}
    assert data["environment"]["vllm"] == "0.18.0"
    # There is metadata but no package, so upstream's collector fails and the report says so.
    assert "No module named" in data["environment"]["collectors"]["vllm"]["error"]


def test_it_needs_no_home_and_starts_nothing_that_talks_to_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("offline")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with mock.patch.dict(os.environ, {"PATH": os.environ["PATH"]}, clear=True):
        assert main(["check"]) == 2


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return the interpreter of another environment, whose packages end the process that imports them."""
    venv.create(tmp_path / "other", with_pip=False)
    (site,) = (tmp_path / "other").glob("lib/python3*/site-packages")
    for name, version in (("vllm", "0.19.1"), ("torch", "2.10.0"), ("flashinfer-python", "0.6.6")):
        pretend(site, name, version)
    for name in ("vllm", "torch", "flashinfer"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("import os\nos._exit(5)\n")
    (site / "torch" / "version.py").write_text("cuda: Optional[str] = '12.9'\n")
    return tmp_path / "other" / "bin" / "python"


def test_another_python_is_asked_for_its_metadata_and_imports_nothing(other, capsys):
    assert main(["check", "--python", str(other), "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    facts = document["environment"]
    assert (facts["vllm"], facts["torch"], facts["torch_cuda"]) == ("0.19.1", "2.10.0", "12.9")
    assert {"MD001"} <= {finding["id"] for finding in document["findings"]}
    assert facts["collectors"] == {}
    assert document["target"].endswith("other/bin/python")
    assert any("only asked for its metadata" in note for note in document["not_looked_at"])
    assert any("whether torch can be loaded: only its files" in note for note in document["not_looked_at"])
    assert not list(other.parent.parent.rglob("*.pyc"))


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--release", "0.33.0", "--sm", "9.0"], set()),
        (["--release", "0.33.0", "--sm", "12.0"], set()),
        (["--release", "0.19.1", "--sm", "9.0"], {"MD001", "MD011"}),
        (["--release", "v0.33.0", "--sm", "9.0", "--wsl"], {"MD003", "MD005", "MD020"}),
    ],
)
def test_a_described_environment(options, ids, capsys):
    code = main(["check", *options, "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    assert {finding["id"] for finding in document["findings"]} == ids
    assert document["problems"] == []
    assert code == document["summary"]["exit_code"] == int(bool(ids))
    assert bool(document["summary"]["reasons"]) is bool(ids)
    assert any("only described" in note for note in document["not_looked_at"])
    assert not any("whether torch" in note for note in document["not_looked_at"])


def test_an_accepted_finding_does_not_fail_and_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["check", "--release", "0.33.0", "--sm", "9.0", "--wsl"]
    ignored = [f"--ignore={id}=no offload here until 2999-01-31" for id in ("MD003", "MD005", "MD020")]
    assert main([*named, *ignored]) == 0
    out = capsys.readouterr().out
    assert "MD003: illegal_access" not in out
    assert "no offload here (until 2999-01-31)" in out
    assert "3 ignored" in out
    assert main([*named, *ignored[:2], "--ignore=MD020=late until 2020-01-31"]) == 1
    printed = capsys.readouterr()
    assert "--ignore MD020: ended with 2020-01-31" in " ".join(printed.out.split())
    assert "exit code 1: MD020" in printed.err
    assert main([*named, "--ignore=MD099=x"]) == 2
    assert main([*named, "--fail-on", "error"]) == 0
    assert main([*named, "--fail-on", "never"]) == 0
    assert main(["check", "--release", "0.33.0", "--sm", "9.0", "--fail-on", "note"]) == 1


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("requirements.txt", "# vllm is here\nvllm-other==1\nvllm[audio]==0.33.0\n", 3),
        ("Dockerfile", "ARG A\nFROM vllm/vllm-openai:v0.33.0\n", 2),
        ("pyproject.toml", '[project]\ndependencies = [\n  "vllm>=0.33",\n]\n', 3),
        ("README.md", "vllm==0.33.0\n", None),
    ],
)
def test_an_annotation_is_at_the_line_that_pins_the_package(name, text, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    command = ["check", "--release", "0.33.0", "--sm", "9.0", "--wsl", "--format"]
    main([*command, "sarif"])
    results = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    places = [result["locations"][0]["physicalLocation"] for result in results]
    assert {place["artifactLocation"]["uri"] for place in places} == {name if line else "environment"}
    assert {place["region"]["startLine"] for place in places} == {line or 1}
    main([*command, "github"])
    (first, *_) = capsys.readouterr().out.splitlines()
    assert first.startswith(f"::warning file={name},line={line},title=" if line else "::warning title=")
