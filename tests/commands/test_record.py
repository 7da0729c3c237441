"""`moedoctor record`: the command's exit code, its variables, and what is said at the end."""

import json
import lzma
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from moedoctor.cli import main
from moedoctor.commands.run import _name_capsules
from moedoctor.diagnose.autopsy import dump_request, replay_call
from moedoctor.diagnose.autopsy.known_tensors import read_record
from moedoctor.diagnose.capsule.replay import BackendReplay
from moedoctor.reporters.schemas import make_schema
from moedoctor.results import CaseResult, CaseVerdict, Tier
from moedoctor.trace.capsule import Capsule, save
from tests.capsules import make_capsule
from tests.diagnose.autopsy.test_autopsy import DUMPS

_SHOW = """
import os
from pathlib import Path
for name in ("RECORD", "RECORD_WHEN", "RECORD_SIZE"):
    print(os.environ[f"MOEDOCTOR_{name}"])
"""


def record(tmp_path: Path, *arguments: str) -> int:
    return main(["record", "-o", str(tmp_path / "capsules"), *arguments])


def test_the_command_gets_the_variables_and_keeps_its_options(tmp_path, capfd):
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


def test_what_was_recorded_is_named_and_the_exit_code_is_the_commands(tmp_path, capsys):
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
    up, before = tmp_path / "up", signal.getsignal(signal.SIGTERM)
    code = f"import time; open({str(up)!r}, 'w').close(); time.sleep(30)"

    def interrupt() -> None:
        """Send the signal once the command runs and `record` handles it, which else would end the tests."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if up.exists() and signal.getsignal(signal.SIGTERM) is not before:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.02)

    threading.Thread(target=interrupt).start()
    assert record(tmp_path, "--", sys.executable, "-c", code) == 128 + signal.SIGTERM


@pytest.mark.slow
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


_CRASH = """
import os, shutil, sys
from pathlib import Path
for name in ("ENABLE_COREDUMP_ON_EXCEPTION", "COREDUMP_GENERATION_FLAGS", "COREDUMP_FILE"):
    print(os.environ[f"CUDA_{name}"], flush=True)
assert int(Path("/proc/self/coredump_filter").read_text(), 16) == 0
dump, capsule = sys.argv[1:]
process = os.getpid()
shutil.copy(dump, os.environ["CUDA_COREDUMP_FILE"].replace("%p", str(process)))
shutil.copy(capsule, f"{os.environ['MOEDOCTOR_RECORD']}/layer-call3-{process}.moecapsule")
os.abort()
"""
"""The script of a process whose kernel faults, if CUDA was asked for a dump."""


@pytest.fixture
def crash(tmp_path: Path) -> list[str]:
    """Return a command that leaves a dump of a MoE kernel and a capsule of a call."""
    dump, file = tmp_path / "planted.core", tmp_path / "planted.moecapsule"
    dump.write_bytes(lzma.decompress((DUMPS / "vllm_topk.xz").read_bytes()))
    capsule = make_capsule("bf16", tokens=2)
    record = capsule.record.model_copy(update={"layer": "model.layers.1.mlp.experts", "call": 3})
    save(Capsule(record, capsule.tensors), file)
    return [sys.executable, "-c", _CRASH, str(dump), str(file)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_crash_is_named_and_its_call_is_computed_again(tmp_path, capfd, monkeypatch, crash, keep):
    folder, replayed = tmp_path / "capsules", list[str]()

    def compute(path: Path, find: Any, device: str, *, seconds: float) -> Any:
        record = read_record(path)
        stored = len(list(folder.glob("autopsy-*.json")))
        replayed.append(f"{stored} {record['layer']} {device} {len(find(record))}")
        failed = {"MARLIN": "AcceleratorError: CUDA error: an illegal memory access", "HPC": "no SM"}
        names = ("MARLIN", "TRITON", "HPC", "HUMMING")
        results = [BackendReplay(name, "bf16", "none", failed=failed.get(name)) for name in names]
        results[3] = replace(results[3], unavailable="no")
        return SimpleNamespace(backends=results)

    monkeypatch.setattr(replay_call, "replay", compute)
    monkeypatch.setattr(replay_call, "explain_missing_gpu", lambda facts: None)
    monkeypatch.setenv("CUDA_COREDUMP_GENERATION_FLAGS", "skip_global_memory")
    assert record(tmp_path, "--when", "crash", *["--keep"] * keep, "--", *crash) == 128 + signal.SIGABRT
    out, err = capfd.readouterr()
    enabled, flags, file = out.split()
    assert (enabled, flags, Path(file).name) == ("1", "skip_global_memory", "cuda.%p.core")
    assert replayed == ["1 model.layers.1.mlp.experts cuda:0 4"]  # an answer that a kill cannot lose
    answer = "vllm::moe::topkGating faulted (illegal address)"
    assert err.index(answer) < err.index("MARLIN faulted again on call 3 of model.layers.1.mlp.experts")
    (stored,) = folder.glob("autopsy-*.json")
    assert stored.stat().st_mode & 0o777 == 0o600
    document = json.loads(stored.read_text())
    jsonschema.validate(document, make_schema("autopsy"))
    found = [document["replay"][key] for key in ("faulted", "computed", "failed")]
    assert found == [["MARLIN"], ["TRITON"], ["HPC: no SM"]]
    assert not list(folder.glob("dumps-*"))
    dumps = list(folder.glob("cuda.*.core"))
    assert [dump.stat().st_mode & 0o777 for dump in dumps] == [0o600] * keep


def test_a_crash_is_named_though_the_command_waits_for_good(tmp_path, capfd, monkeypatch, crash):
    monkeypatch.setattr(dump_request, "PATIENCE", 0.5)
    code = """
import os, subprocess, sys, time
from pathlib import Path
engine = subprocess.Popen(sys.argv[1:])  # nobody waits for it
until = time.monotonic() + 30
while not list(Path(os.environ["MOEDOCTOR_RECORD"]).glob("autopsy-*.json")) and time.monotonic() < until:
    time.sleep(0.05)
sys.exit(5 if time.monotonic() < until else 6)
"""
    assert record(tmp_path, "--when", "crash", "--", sys.executable, "-c", code, *crash) == 5
    err = capfd.readouterr().err
    assert err.index("the command still runs") < err.index("vllm::moe::topkGating faulted")
    assert err.count("the command still runs") == 1
    assert len(list((tmp_path / "capsules").glob("autopsy-*.json"))) == 1


def test_a_users_own_place_for_dumps_is_used_and_left_alone(tmp_path, capfd, monkeypatch, crash):
    (tmp_path / "core.of.yesterday").write_bytes(b"")
    os.utime(tmp_path / "core.of.yesterday", (0, 0))
    monkeypatch.setenv("CUDA_COREDUMP_FILE", str(tmp_path / "core.of.%p"))
    assert record(tmp_path, "--when", "crash", "--", *crash) == 128 + signal.SIGABRT
    err = capfd.readouterr().err
    assert "vllm::moe::topkGating faulted" in err
    assert "Not computed again: call 3" in " ".join(err.split())
    assert len(list(tmp_path.glob("core.of.*"))) == 2
    assert "deleted" not in err
    assert "too short" not in err, "a dump of an earlier day is not read"


def test_a_user_who_asks_cuda_for_dumps_finds_them_where_cuda_puts_them(tmp_path):
    asked = dump_request.DumpRequest.make(tmp_path, {dump_request.ENABLE: "1"})
    assert (asked.variables[dump_request.FILE], asked.ours) == ("core_%t_%h_%p.nvcudmp", False)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_death_without_a_dump_blames_no_kernel(tmp_path, capfd, name):
    code = f"import os, signal; os.kill(os.getpid(), signal.{name})"
    number = signal.Signals[name].value
    assert record(tmp_path, "--when", "crash", "--", sys.executable, "-c", code) == 128 + number
    reason = f"CUDA wrote no core dump, and the command ended with {128 + number}"
    assert f"no kernel is known to have faulted: {reason}" in capfd.readouterr().err


def test_a_dump_that_is_too_large_is_emptied_while_it_grows(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(dump_request, "MOST_BYTES", 1000)
    code = """
import os, time
with open(os.environ["CUDA_COREDUMP_FILE"], "wb", buffering=0) as file:
    file.write(b"\\x7fELF" + bytes(2000))
    until = time.monotonic() + 20
    while os.fstat(file.fileno()).st_size and time.monotonic() < until:
        time.sleep(0.05)
print(os.stat(file.name).st_size)
os.abort()
"""
    assert record(tmp_path, "--when", "crash", "--", sys.executable, "-c", code) == 128 + signal.SIGABRT
    out, err = capfd.readouterr()
    assert out == "0\n"
    assert "it is too short for a core dump (a core dump of more than 1.0 kB is emptied)" in err
    assert "No kernel is known to have faulted" in err


def test_no_folder_for_dumps_is_left_if_the_command_cannot_be_run(tmp_path: Path) -> None:
    assert record(tmp_path, "--when", "crash", "--", str(tmp_path / "nothing")) == 2
    assert not list((tmp_path / "capsules").iterdir())
