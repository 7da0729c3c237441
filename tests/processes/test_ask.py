"""A module in a child process: its answers, or an error of one line."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes_seen import still_runs

from moedoctor.processes.ask import CACHES, ChildError, ask, run_module

PRELUDE = "import os, signal, sys, time\nfrom moedoctor.processes.ask import answer\n"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `child_module` that `ask` finds; the test writes it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "child_module.py"


def test_the_answer_comes_back_whatever_is_printed_beside_it(child: Path) -> None:
    child.write_text(
        PRELUDE + "def facts(request):\n"
        "    print('noise'); os.write(1, b'more noise'); sys.stderr.write('and here')\n"
        "    return {'a': [1, float('nan')], 'request': request, 'set': os.environ['SET'], 'path': 'ü'}\n"
        "answer(facts)\n"
    )
    found = ask("child_module", {"x": (1,)}, seconds=30, environ={"SET": "yes"})
    assert found == {"a": [1, "nan"], "request": {"x": [1]}, "set": "yes", "path": "ü"}


def test_a_childs_child_knows_where_moedoctor_was_called(child, tmp_path, monkeypatch):
    """Children work in folders of their own, and a relative path of the user's is of none of these."""
    child.write_text(
        PRELUDE + "from moedoctor.processes.ask import ask, find_working_folder\n"
        "def folders(deeper):\n"
        "    below = ask('child_module', deeper - 1, seconds=30) if deeper else {}\n"
        "    return {**below, os.getcwd(): find_working_folder()}\n"
        "answer(folders)\n"
    )
    called = tmp_path / "called"
    called.mkdir()
    monkeypatch.chdir(called)
    found = ask("child_module", 1, seconds=30)
    assert len(found) == 2
    assert str(called) not in found
    assert set(found.values()) == {str(called)}
    monkeypatch.chdir(tmp_path)
    assert list(ask("child_module", 0, seconds=30).values()) == [str(tmp_path)]


def test_each_answer_is_watched_as_it_comes_and_none_is_lost(child: Path, tmp_path: Path) -> None:
    """The child waits for what the parent does with its first answer."""
    sign = tmp_path / "sign"
    child.write_text(
        PRELUDE + "import time\n"
        "def count(request):\n"
        "    yield {'at': 0}\n"
        "    while not os.path.exists(request): time.sleep(0.01)\n"
        "    yield {'at': 1}\n"
        "    time.sleep(0.5)\n"
        "answer(count)\n"
    )
    watched: list[object] = []

    def watch(answer: object) -> None:
        watched.append(answer)
        sign.touch()

    ended = run_module("child_module", str(sign), seconds=30, watch=watch)
    assert list(ended.answers) == watched == [{"at": 0}, {"at": 1}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('gone')", "exit status 1: KeyError: 'gone'"),
        ("answer(lambda request: request['no key'])", "exit status 1: TypeError: "),
        ("os._exit(3)", "exit status 3: it printed nothing"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV: it printed nothing"),
        ("print('no answer')", "its answer is not one JSON object"),
        ("answer(lambda request: [1])", "its answer is not one JSON object"),
        ("os.write(int(sys.argv[2]), b'{')", "its answer is not one JSON object"),
    ],
)
def test_every_failure_gives_one_line(child: Path, body: str, message: str) -> None:
    child.write_text(PRELUDE + body)
    with pytest.raises(ChildError) as failed:
        ask("child_module", seconds=30)
    assert str(failed.value).startswith(message)
    assert "\n" not in str(failed.value)


FORKS = (
    "def answers(request):\n"
    "    if os.fork() == 0:\n"
    "        open(request, 'w').write(str(os.getpid()))\n"
    "        time.sleep(600)\n"
    "    time.sleep(600)\n"
    "answer(answers)\n"
)


def test_a_child_that_hangs_is_killed_with_what_it_started(child: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child.write_text(PRELUDE + FORKS)
    started = time.monotonic()
    with pytest.raises(ChildError, match=r"no answer within 1\.5 s"):
        ask("child_module", str(pid), seconds=1.5)
    assert time.monotonic() - started < 10
    assert not still_runs(int(pid.read_text()))


def test_a_child_does_not_outlive_its_parent(child: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child.write_text(PRELUDE + FORKS)
    code = f"from moedoctor.processes.ask import ask; ask('child_module', {str(pid)!r}, seconds=60)"
    search = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": search})
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert not still_runs(int(pid.read_text()))


def test_a_child_leaves_nothing_behind(child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    child.write_text(
        PRELUDE + "import pathlib, helper_module\n"
        "folder = pathlib.Path(os.environ['FLASHINFER_WORKSPACE_BASE'])\n"
        "(folder / 'cache').write_text('x')\n"
        "pathlib.Path('beside').write_text('x')\n"
        "answer(lambda request: {'folder': str(folder), 'cache': os.environ['XDG_CACHE_HOME']})\n"
    )
    (tmp_path / "helper_module.py").write_text("")
    facts = ask("child_module", seconds=30, caches=CACHES)
    assert facts["folder"] == facts["cache"]
    assert not Path(facts["folder"]).parent.exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["child_module.py", "helper_module.py", "home"]
    assert list(home.iterdir()) == []
