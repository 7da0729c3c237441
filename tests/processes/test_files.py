"""Files are written whole or not at all, never in place of something else, and leave nothing beside them."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.processes import files
from moedoctor.processes.files import OutputError, append, check_writable, write


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root can make a device")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, make_socket, make_device])
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    "use", [check_writable, lambda path: write(path, "x"), lambda path: append(path, "x")]
)
def test_what_is_not_a_file_is_refused_and_stays(
    tmp_path: Path, make: Callable[[Path], None], linked: bool, use: Callable[[Path], None]
) -> None:
    node = tmp_path / "node"
    make(node)
    before = os.lstat(node)
    path = tmp_path / "link" if linked else node
    if linked:
        path.symlink_to("node")
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(
        OutputError, match="is a folder" if make == Path.mkdir else "is a device, pipe or socket"
    ):
        use(path)
    after = os.lstat(node)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(os.listdir(tmp_path)) == names


@given(
    text=st.text(st.characters(exclude_categories=()), max_size=50),
    old_mode=st.none() | st.integers(0, 0o777),
    umask=st.integers(0, 0o777),
    links=st.lists(st.booleans(), max_size=4),
)
def test_any_text_reaches_the_target_of_any_links_with_the_right_mode(
    text: str, old_mode: int | None, umask: int, links: list[bool]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = path = Path(folder, "target")
        if old_mode is not None:
            target.write_text("old")
            target.chmod(old_mode)
        for number, absolute in enumerate(links):
            link = Path(folder, f"link{number}")
            link.symlink_to(path if absolute else path.name)
            path = link
        before = os.umask(umask)
        try:
            check_writable(path)
            write(path, text)
        finally:
            os.umask(before)
        assert target.read_bytes() == text.encode("utf-8", "backslashreplace")
        assert stat.S_IMODE(target.lstat().st_mode) == (0o666 & ~umask if old_mode is None else old_mode)
        assert stat.S_ISREG(target.lstat().st_mode)
        assert len(os.listdir(folder)) == 1 + len(links)


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for use in (check_writable, lambda path: write(path, "x"), lambda path: append(path, "x")):
        with pytest.raises(OutputError, match="Too many levels of symbolic links"):
            use(tmp_path / "a")
    assert (tmp_path / "a").is_symlink()


def test_names_that_cannot_exist_are_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("n" * 300, "a/" * 3000 + "x", "file/x", "missing/x", "\0", "\ud800"):
        with pytest.raises(OutputError) as caught:
            check_writable(tmp_path / name)
        message = str(caught.value)
        assert len(message) < 300
        assert "\n" not in message
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["open", "chmod", "fdopen", "replace"])
def test_an_error_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    target = tmp_path / "report"
    target.write_text("old")

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        if call == "chmod":  # the mode is kept if it can be
            write(target, "old")
        else:
            with pytest.raises(OutputError, match=r"report: cannot be written: No space left on device"):
                write(target, "new")
    assert (os.listdir(tmp_path), target.read_text()) == (["report"], "old")


def test_a_stream_gets_all_also_if_it_does_not_block(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with ThreadPoolExecutor(1) as pool, os.fdopen(read, "rb") as stream:
        received = pool.submit(lambda: time.sleep(0.2) or len(stream.read()))
        write(Path(f"/dev/fd/{write_end}"), "x" * 300_000)
        os.close(write_end)
        assert received.result(30) == 300_000
    with pytest.raises(OutputError, match="Bad file descriptor"):
        check_writable(Path(f"/dev/fd/{write_end}"))


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDING = (*HANDLED, signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM)
SIGNALLED = """
import os, sys, threading, time
from moedoctor.processes import files, interrupts
interrupts.install()
number, call, path, threaded = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "threaded"
if threaded:  # takes the signal in place of the main thread
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
real = getattr(os, call)
def wrapped(*arguments, **options):
    result = real(*arguments, **options)
    os.kill(os.getpid(), number)
    time.sleep(0.2)
    return result
setattr(os, call, wrapped)
files.write(files.Path(path), "new")
"""


@pytest.mark.parametrize("threaded", ["alone", "threaded"])
def test_no_signal_leaves_a_temporary_file(tmp_path: Path, threaded: str) -> None:
    numbers = ENDING if threaded == "alone" else HANDLED
    for number in numbers:
        for call in ("open", "fdopen"):
            folder = tmp_path / f"{number}{call}"
            folder.mkdir()
            (folder / "report").write_text("old")
            program = [sys.executable, "-c", SIGNALLED, str(int(number)), call]
            ended = subprocess.run(
                [*program, str(folder / "report"), threaded],
                capture_output=True,
                text=True,
                timeout=60,
                cwd=tmp_path,
                check=False,
            )
            codes = {128 + number} if number in HANDLED else {-number}
            assert ended.returncode in codes, (number, call, ended.stderr)
            assert os.listdir(folder) == ["report"], (number, call)
            assert (folder / "report").read_text() in ("old", "new")
            assert "Traceback" not in ended.stderr
