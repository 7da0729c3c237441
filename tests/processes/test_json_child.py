"""Facts from child processes: an answer, or one line for every way of not giving one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moedoctor.processes.json_child import ChildError, ask

PRELUDE = "import os, signal, sys, time\nfrom moedoctor.processes.json_child import answer\n"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `child_module` that `ask` finds; the test writes it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "child_module.py"


def test_the_answer_comes_back_whatever_is_printed_beside_it(child: Path) -> None:
    child.write_text(
        PRELUDE + "def facts():\n"
        "    print('noise'); os.write(1, b'more noise'); sys.stderr.write('and here')\n"
        "    return {'a': [1, None], 'arguments': sys.argv[1:], 'path': sys.executable and 'ü'}\n"
        "answer(facts)\n"
    )
    assert ask("child_module", ("x",), seconds=30) == {"a": [1, None], "arguments": ["x"], "path": "ü"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('gone')", "exit status 1: KeyError: 'gone'"),
        ("os._exit(3)", "exit status 3: it said nothing"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV: it said nothing"),
        ("print('no json')", "its answer is no JSON"),
        ("os.write(1, b'[1]')", "its answer is no JSON object"),
    ],
)
def test_every_other_end_is_one_line(child: Path, body: str, said: str) -> None:
    child.write_text(PRELUDE + body)
    with pytest.raises(ChildError) as failed:
        ask("child_module", seconds=30)
    assert str(failed.value) == said


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ChildError, match="No module named no_such_module"):
        ask("no_such_module", seconds=30)


def test_a_child_that_hangs_is_killed_with_what_it_started(child: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child.write_text(
        PRELUDE
        + f"if os.fork() == 0:\n    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    started = time.monotonic()
    with pytest.raises(ChildError, match=r"no answer within 1\.5 s"):
        ask("child_module", seconds=1.5)
    assert time.monotonic() - started < 10
    assert not running(int(pid.read_text()))


def running(pid: int) -> bool:
    """Whether the process is there after a second, and not merely unburied."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.05)
    return True


def test_a_child_leaves_nothing_behind(child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    child.write_text(
        PRELUDE + "import pathlib, helper_module\n"
        "folder = pathlib.Path(os.environ['FLASHINFER_WORKSPACE_BASE'])\n"
        "(folder / 'cache').write_text('x')\n"
        "answer(lambda: {'folder': str(folder), 'cache': os.environ['XDG_CACHE_HOME']})\n"
    )
    (tmp_path / "helper_module.py").write_text("")
    facts = ask("child_module", seconds=30)
    assert facts["folder"] == facts["cache"]
    assert not Path(facts["folder"]).exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["child_module.py", "helper_module.py", "home"]
    assert list(home.iterdir()) == []
