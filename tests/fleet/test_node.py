"""A node's part, without Ray: a command with its limit and its last words, and checksums of caches."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes_seen import still_runs

from moedoctor.fleet import node


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module `command_of_tests`, which the child finds."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    # The variables of Ray's worker come from its parent; a test has none that it may change.
    monkeypatch.setattr(node, "_restore_environment", lambda reserved: dict(os.environ))
    return tmp_path / "command_of_tests.py"


def _texts(seconds: float = 20, *, gpus: int = 0, checksums: bool = False) -> Iterator[dict[str, Any]]:
    request = {"module": "command_of_tests", "arguments": ["a", "b"], "reserved": False}
    request |= {"seconds": seconds, "gpus": gpus, "checksums": checksums}
    return map(json.loads, node.answer(request))


def test_a_command_gets_its_arguments_and_a_gpu_each(module: Path) -> None:
    module.write_text("import os, sys\nprint(sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES'])\n")
    first, *others = _texts(gpus=2)
    answers = [text for text in others if "doing" not in text]
    assert first["worker_seconds"] >= 0
    shown = sorted((answer["gpu"], answer["report"]) for answer in answers)
    assert shown == [("0", "['a', 'b'] 0\n"), ("1", "['a', 'b'] 1\n")]


@pytest.mark.slow
def test_a_late_command_is_ended_and_its_last_line_is_kept(module: Path) -> None:
    module.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print('sleeping beside', child.pid, file=sys.stderr, flush=True)\n"
        "time.sleep(100)\n"
    )
    started = time.monotonic()
    texts = list(_texts(seconds=3))
    assert time.monotonic() - started < 15
    *_, doing, answer = texts
    assert doing["doing"].startswith("sleeping beside ")
    assert (answer["problem"], answer["report"]) == ("late", "")
    assert answer["log"].strip() == doing["doing"]
    if sys.platform == "linux":
        assert not still_runs(int(doing["doing"].split()[-1])), "what it started still runs"


def test_reading_what_a_child_writes_does_not_move_its_place(tmp_path: Path) -> None:
    """Both have one place in the file: a child would write where a reader went to."""
    with open(tmp_path / "log", "w+b") as file:
        os.write(file.fileno(), b"0123456789")
        os.lseek(file.fileno(), 4, os.SEEK_SET)
        assert node._read_end(file, 3) == "789"
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 4


def test_caches_of_kernels_have_checksums(module, tmp_path, monkeypatch):
    module.write_text("print('{}')\n")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR", raising=False)
    cache = tmp_path / ".cache" / "flashinfer"
    for name, content in (("0.6/90a/a.so", b"a"), ("0.6/90a/b.so", b"b"), ("cubins/c.cubin", b"a")):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(content)
    *_, answer = _texts(checksums=True)
    sums = {name: value for name, value in answer["checksums"].items() if "cache" in name}
    assert list(sums) == ["JIT cache 0.6/90a/a.so", "JIT cache 0.6/90a/b.so", "cubin cache c.cubin"]
    assert sums["JIT cache 0.6/90a/a.so"] == sums["cubin cache c.cubin"] != sums["JIT cache 0.6/90a/b.so"]
