"""Files are written whole or not at all, never in place of something else, and leave nothing beside them."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hostile import make_socket
from hypothesis import given
from hypothesis import strategies as st
from processes_seen import run

from moedoctor.processes import files
from moedoctor.processes.files import OutputError, append, check_writable, make_folder, write


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
def test_what_is_not_a_file_is_refused_and_stays(tmp_path, make, linked, use):
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
def test_any_text_reaches_the_target_of_any_links_with_the_right_mode(text, old_mode, umask, links):
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


@pytest.mark.parametrize("call", ["open", "fchmod", "fdopen", "replace"])
def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, call):
    target = tmp_path / "report"
    target.write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, Mock(side_effect=full))
        if call == "fchmod":  # the mode is kept if it can be
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


STRANGER = 4321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def give(path: Path, owner: int = STRANGER) -> Path:
    os.chown(path, owner, owner, follow_symlinks=False)
    return path


def make_folders(top: Path, mode: int, owner: int = 0) -> tuple[Path, Path]:
    """Return a folder with `mode`, and one with a file that nobody may write to through it."""
    shared, victim = top / "shared", top / "victim"
    shared.mkdir()
    shared.chmod(mode)
    victim.mkdir()
    (victim / "file").write_text("old")
    return give(shared, owner), victim


def plant(link: Path, target: Path | str) -> Path:
    """Make a link of another user's."""
    link.symlink_to(target)
    return give(link)


def link_to_folder(shared: Path, victim: Path) -> Path:
    return plant(shared / "name", victim) / "file"


def link_behind_our_link(shared: Path, victim: Path) -> Path:
    link_to_folder(shared, victim)
    (victim.parent / "ours").symlink_to("shared/name/file")
    return victim.parent / "ours"


def link_in_their_folder(shared: Path, victim: Path) -> Path:
    (shared / "theirs" / "deep").mkdir(parents=True)
    give(shared / "theirs" / "deep")
    give(shared / "theirs")
    return plant(shared / "theirs" / "deep" / "name", victim / "file")


def file_of_theirs(shared: Path, victim: Path) -> Path:
    (shared / "name").write_text("theirs")
    return give(shared / "name")


USES = {
    "check": check_writable,
    "write": lambda path: write(path, "new"),
    "private": lambda path: write(path, "new", private=True),
    "append": lambda path: append(path, "new"),
    "folder": lambda path: make_folder(path / "made" / "deep"),
}
TRAPS = {
    "link to a file": lambda shared, victim: plant(shared / "name", victim / "file"),
    "link to nothing": lambda shared, victim: plant(shared / "name", "../victim/new"),
    "link to a folder": link_to_folder,
    "link behind ours": link_behind_our_link,
    "link in a folder": link_in_their_folder,
    "file": file_of_theirs,
}


def tree(top: Path) -> dict[str, tuple[int, int, str]]:
    """Return owner, mode and content of everything in a folder."""
    found = {}
    for path in top.rglob("*"):
        info = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
        found[str(path)] = (info.st_uid, info.st_mode, content)
    return found


@needs_root
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("mode", [0o1777, 0o1770])
def test_what_another_user_put_into_a_shared_folder_is_refused(tmp_path, mode, trap, use):
    shared, victim = make_folders(tmp_path, mode)
    path = TRAPS[trap](shared, victim)
    before = tree(tmp_path)
    expected = "its folder does not exist" if (trap, use) == ("file", "folder") else f"user {STRANGER}"
    with pytest.raises(OutputError, match=expected) as caught:
        USES[use](path)
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == before


@needs_root
@pytest.mark.parametrize("use", ["write", "append"])
@pytest.mark.parametrize("link", ["of ours", "of the owner of the folder", "in a folder that is not shared"])
def test_links_that_the_kernel_would_follow_are_followed(tmp_path: Path, link: str, use: str) -> None:
    mode, owner = (0o1777, 0) if link == "of ours" else (0o1777, STRANGER) if "owner" in link else (0o777, 0)
    shared, victim = make_folders(tmp_path, mode, owner)
    path = link_to_folder(shared, victim)
    if link == "of ours":
        give(shared / "name", 0)
    USES[use](path)
    assert (victim / "file").read_text() == ("new" if use == "write" else "oldnew")


def test_a_file_of_ours_in_a_shared_folder_is_replaced(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for text in ("one", "two"):
        write(shared / "report", text)
    append(shared / "report", "three")
    assert [file.read_text() for file in shared.iterdir()] == ["twothree"]


def test_a_hard_link_reaches_no_other_file(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("old")
    os.link(victim, link)
    with pytest.raises(OutputError, match="is a hard link"):
        append(link, "new")
    write(link, "new")
    assert (victim.read_text(), link.read_text()) == ("old", "new")


@needs_root
def test_nothing_is_added_to_a_file_that_another_user_makes_in_between(tmp_path, monkeypatch):
    shared, victim = make_folders(tmp_path, 0o1777)
    real = os.open

    def make_first(name: str, *arguments: Any, **options: Any) -> int:
        if name == "name":
            file_of_theirs(shared, victim)
        return real(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "open", make_first)
        with pytest.raises(OutputError, match=f"user {STRANGER}"):
            append(shared / "name", "new")
    assert (shared / "name").read_text() == "theirs"


@pytest.mark.parametrize(("call", "argument"), [("open", "out"), ("open", ".moedoctor."), ("replace", "")])
def test_a_folder_that_is_exchanged_in_between_leads_nowhere(tmp_path, monkeypatch, call, argument):
    (tmp_path / "out").mkdir()
    (tmp_path / "victim").mkdir()
    real = getattr(os, call)

    def exchange_first(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith(argument):
            (tmp_path / "out").rename(tmp_path / "moved")
            (tmp_path / "out").symlink_to("victim")
        return real(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, exchange_first)
        with pytest.raises(OutputError) if argument == "out" else contextlib.nullcontext():
            write(tmp_path / "out" / "report", "new")
    assert os.listdir(tmp_path / "victim") == []
    written = [file.read_text() for file in (tmp_path / "moved").iterdir()]
    assert written == ([] if argument == "out" else ["new"])


def test_private_files_and_folders_are_for_one_user(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    before = os.umask(0)
    try:
        make_folder(folder)
        make_folder(folder)
        (folder / "old").touch(0o666)
        for name in ("old", "new"):
            write(folder / name, "x", private=True)
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    with pytest.raises(OutputError, match="its folder does not exist"):
        make_folder(folder / "old" / "c")


@needs_root
def test_a_private_file_takes_no_owner_over(tmp_path: Path) -> None:
    give(tmp_path)
    for private in (False, True):
        (tmp_path / "file").write_text("theirs")
        give(tmp_path / "file")
        write(tmp_path / "file", "new", private=private)
        assert (tmp_path / "file").stat().st_uid == (0 if private else STRANGER)


@needs_root
def test_the_root_of_another_process_is_reached(tmp_path: Path) -> None:
    """A container's /tmp is not ours, though /proc/PID/root is a link to / for both."""
    mount = 'mount -t tmpfs none "$0" && echo ready && read line; cat "$0/report"'
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", mount, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as other:
        assert other.stdout is not None
        if other.stdout.readline() != "ready\n":
            pytest.skip("nothing can be mounted here")
        write(Path(f"/proc/{other.pid}/root{tmp_path}/report"), "new")
        assert other.communicate("\n")[0] == "new"
    assert os.listdir(tmp_path) == []


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
            ended = run([*program, str(folder / "report"), threaded], cwd=tmp_path)
            codes = {128 + number} if number in HANDLED else {-number}
            assert ended.returncode in codes, (number, call, ended.stderr)
            assert os.listdir(folder) == ["report"], (number, call)
            assert (folder / "report").read_text() in ("old", "new")
            assert "Traceback" not in ended.stderr
