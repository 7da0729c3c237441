"""`moedoctor record`: the command's exit code, its variables, and what is said at the end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moedoctor.cli import main
from moedoctor.commands.run import _name_capsules
from moedoctor.results import CaseResult, CaseVerdict, Tier
from moedoctor.trace.capsule import save
from tests.capsules import make_capsule
from tests.interpreted import ROOT

_SHOW = """
import os
from pathlib import Path
for name in ("RECORD", "RECORD_WHEN", "RECORD_SIZE"):
    print(os.environ[f"MOEDOCTOR_{name}"])
"""


def record(tmp_path: Path, *arguments: str) -> int:
    return main(["record", "-o", str(tmp_path / "capsules"), *arguments])


def test_the_command_gets_the_variables_and_keeps_its_options(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--when", "first", "--max-size", "1.5", "--")
    assert record(tmp_path, *options, sys.executable, "-c", _SHOW, "--when") == 2
    out, err = capfd.readouterr()
    assert out.split() == [str(tmp_path / "capsules"), "first", "1.5"]
    assert "no MoE layer was watched" in err


def test_only_a_watched_layer_gives_an_all_clear(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch = "import os, pathlib; pathlib.Path(os.environ['MOEDOCTOR_RECORD'], '7.watched').touch()"
    assert record(tmp_path, "--", sys.executable, "-c", watch) == 0
    assert "nothing was recorded" in capfd.readouterr().err
    assert not list((tmp_path / "capsules").iterdir())


def test_what_was_recorded_is_named_and_the_exit_code_is_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "capsules").mkdir()
    older, new = (tmp_path / "capsules" / f"{name}.moecapsule" for name in ("older", "new"))
    save(make_capsule("bf16", tokens=2), older)
    copy = f"import shutil; shutil.copy({str(older)!r}, {str(new)!r}); exit(7)"
    capsys.readouterr()  # what `save` said
    assert record(tmp_path, sys.executable, "-c", copy) == 7
    err = capsys.readouterr().err
    assert f"`moedoctor replay {new}`" in err
    assert "older" not in err


def test_a_signal_reaches_the_command_and_gives_its_code(tmp_path: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    arguments = ["record", "-o", str(tmp_path / "capsules"), "--", sys.executable, "-c", code]
    with subprocess.Popen(
        [sys.executable, "-m", "moedoctor", *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout.readline() == b"up\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_run_says_which_wrong_calls_it_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kept"
    asked = ["--only", "tier=model", "--only", "use=gather", "--keep-capsules", str(folder)]
    assert main(["run", "MD016", *asked]) == 0
    words = " ".join(capsys.readouterr().err.split())
    assert f"no wrong MoE call was found, so {folder} holds no new capsule; engines are watched" in words
    evidence = {"capsules": ["a.moecapsule", "not kept: full"]}
    case = CaseResult("installed", Tier.KERNEL, {}, CaseVerdict.REPRODUCED, evidence=evidence)
    _name_capsules(SimpleNamespace(scenarios=[SimpleNamespace(cases=[case])]), folder)  # type: ignore[arg-type]
    words = capsys.readouterr().err
    assert f"kept {folder / 'a.moecapsule'}\n" in words
    assert "a wrong call is not kept: full" in words
    assert "no new capsule" not in words
