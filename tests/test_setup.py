"""`scripts/setup.sh`, which `make` runs first: what it installs and when, with fake interpreters."""

import shutil
import subprocess
from pathlib import Path

import pytest
from processes_seen import run

ROOT = Path(__file__).resolve().parent.parent

# Answers the script like Python and notes each installation in $LOG.
INTERPRETER = r"""#!/bin/sh
release=%(release)s
case "$*" in
"-c import sys; sys.exit(sys.version_info[:2] < (3, 10))") [ "${release#3.}" -ge 10 ] ;;
'-c import sys; print("%%d.%%d" %% sys.version_info[:2])') echo "$release" ;;
'-c import sys; print("%%d.%%d.%%d" %% sys.version_info[:3])') echo "$release.1" ;;
"-c import ensurepip, venv") [ -z "${NO_ENSUREPIP:-}" ] ;;
"-c import sys; print(getattr(sys"*) echo "$0" ;;
"-m venv .venv")
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    touch .venv/pyvenv.cfg
    echo "venv $release" >>"$LOG" ;;
"-m pip --version" | "-c import torch") ;;
"-m pip install "*)
    echo "$*" >>"$LOG"
    [ -z "${FAIL_INSTALL:-}" ] ;;
*) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


class Clone:
    """A fresh clone; PATH has a folder of fake interpreters and the system's tools only."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.tools = folder / "tools"
        self.log = folder / "log"
        (self.root / "scripts").mkdir(parents=True)
        self.tools.mkdir()
        self.log.touch()
        shutil.copy(ROOT / "scripts" / "setup.sh", self.root / "scripts")
        (self.root / "pyproject.toml").write_text("[project]\n")
        for tool in ("sh", "cat", "cksum", "cp", "dirname", "mkdir", "rm", "touch"):
            (self.tools / tool).symlink_to(shutil.which(tool) or "")

    def add_python(self, name: str, release: str) -> None:
        path = self.tools / name
        path.write_text(INTERPRETER % {"release": release})
        path.chmod(0o755)

    def setup(self, **environ: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": str(self.tools), "LOG": str(self.log), "GOAL": "run", **environ}
        return run(["sh", str(self.root / "scripts" / "setup.sh")], env=environ, stdin=subprocess.DEVNULL)

    def notes(self) -> list[str]:
        """Return what was done since the last call: `venv RELEASE` and the installed packages."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        skipped = {"-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"}
        return [" ".join(word for word in line.split() if word not in skipped) for line in lines]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    fresh = Clone(tmp_path)
    fresh.add_python("python3", "3.11")
    return fresh


def test_a_fresh_clone_gets_a_venv_and_a_second_call_does_and_says_nothing(clone: Clone) -> None:
    first = clone.setup(TORCH="2.13.0")
    assert first.returncode == 0, first.stderr
    assert clone.notes() == ["venv 3.11", "--no-compile torch==2.13.0 --editable .[dev]"]
    second = clone.setup(TORCH="2.13.0")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert clone.notes() == []


REFUSED = "setup: moedoctor needs Python 3.10 or newer, and "


@pytest.mark.parametrize(
    ("pythons", "environ", "message"),
    [
        (
            {"python3": "3.9", "python3.12": "3.12"},
            {},
            f"{REFUSED}'python3' is Python 3.9.1; choose one that is: make run PYTHON=python3.12\n",
        ),
        ({"python3": "3.9"}, {}, "3.9.1; install one, or name it: make run PYTHON=/path/to/python3"),
        ({}, {}, "there is no working 'python3'; install one"),
        ({"python3": "3.11"}, {"NO_ENSUREPIP": "1"}, "apt-get install python3.11-venv"),
    ],
)
def test_a_python_that_does_not_do_is_refused_with_what_to_do(clone, pythons, environ, message):
    (clone.tools / "python3").unlink()
    for name, release in pythons.items():
        clone.add_python(name, release)
    refused = clone.setup(**environ)
    assert refused.returncode == 1
    assert message in refused.stderr
    assert clone.notes() == []
    assert not (clone.root / ".venv").exists()


def test_a_folder_that_is_no_venv_is_never_removed(clone: Clone) -> None:
    (clone.root / ".venv").mkdir()
    (clone.root / ".venv" / "thesis.tex").touch()
    refused = clone.setup()
    assert refused.returncode == 1
    assert "is no virtual environment; move it away" in refused.stderr
    assert (clone.root / ".venv" / "thesis.tex").exists()
