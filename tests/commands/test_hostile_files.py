"""No command waits for a pipe, opens a device, or reads without a limit, wherever the file comes from."""

import os
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints_of_tests import modelopt
from hostile import make_socket

from moedoctor.cli import main

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")

MOST_SECONDS = 10


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o020666, os.makedev(1, 5))  # as /dev/zero
    except PermissionError:
        path.symlink_to("/dev/zero")


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.parent / "pipe")
    path.symlink_to("pipe")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 43)  # takes no space on the disk


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a pipe": link_to_a_pipe,
    "device": device,
    "socket": make_socket,
    "loop": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "folder": Path.mkdir,
    "huge": huge,
}
NAMED = [
    ("triage", "x.log"), ("show", "x.json"), ("compare", "x.json"), ("run", "x.yaml"),
    ("run --baseline", "x.json"),
    ("audit", "x.so"), ("audit", "x.cubin"), ("audit", "x.whl"), ("audit", "build.ninja"), ("lint", "x"),
    ("autopsy", "x.core"), ("conform", "x.py"),
    ("plan --model", "config.json"), ("bench --cache --trace", "x.safetensors"),
    ("run --vllm-kernels 0.21.0=", "x.so"), ("run --vllm-kernels 0.21.0=", "x.whl"),
    ("run --flashinfer 0.6.6=", "x.whl"),
]  # fmt: skip
IN_A_CHECKPOINT = ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
BELOW = ("x.cubin", "x.so", "x.whl", "build.ninja", "x.yaml")


@pytest.fixture(autouse=True)
def deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"no end after {MOST_SECONDS} s")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def ends(capsys: pytest.CaptureFixture[str], command: str, path: Path) -> tuple[int, str]:
    """Return the exit code of a command on `path`, and what it printed; check that this is one line."""
    words = command.split()
    words = [*words[:-1], f"{words[-1]}{path}"] if command.endswith("=") else [*words, str(path)]
    if command == "conform":
        words[-1] += ":fn"
    if command == "compare":
        words.append(str(path))
    signal.alarm(MOST_SECONDS)
    code = main(words)
    signal.alarm(0)
    out, err = capsys.readouterr()
    assert "Traceback" not in err, err
    assert code in (0, 1, 2), (words, code, err)
    assert code != 2 or (err.count("\n") == 1 and len(err) < 1000), err
    return code, out + err


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_named(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (command, name) in enumerate(NAMED):
        folder = tmp_path / str(number)
        folder.mkdir()
        KINDS[kind](folder / name)
        code, printed = ends(capsys, command, folder / name)
        # A folder is audited, and a library for cuobjdump may be large.
        assert code == 2 or (command == "audit" and kind in ("folder", "huge")), (command, name, printed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*IN_A_CHECKPOINT, "hf_quant_config.json"])
def test_a_file_of_a_checkpoint(kind, name, tmp_path, capsys):
    folder = modelopt(2).write(tmp_path / "checkpoint")
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    code, printed = ends(capsys, "lint", folder)
    # Links to nothing are absent files: one may lack the index or a shard, as a finding.
    assert code == 2 or kind == "link to nothing", printed
    ends(capsys, "plan --model", folder)


@pytest.mark.parametrize("kind", KINDS)
def test_files_below_a_folder(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in BELOW:
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        KINDS[kind](folder / "sub" / name)
        code, printed = ends(capsys, "audit", folder)
        assert code == 0, printed
        if name != "x.yaml" and kind != "folder":
            assert "skipped: " in printed, printed
    assert ends(capsys, "run", tmp_path / "x.yaml" / "sub")[0] == 2


def test_a_file_that_cannot_be_read_does_not_hide_its_neighbors(tmp_path, capsys):
    from cuda_fakes import fake_cubin

    os.mkfifo(tmp_path / "a.cubin")
    (tmp_path / "b.cubin").write_bytes(fake_cubin(120))
    (tmp_path / "bad.whl").write_bytes(b"PK")
    (tmp_path / "build.ninja").write_text("-gencode=arch=compute_90,code=sm_90")
    code, printed = ends(capsys, "audit --sm 12.0", tmp_path)
    assert code == 1
    assert "left out 1 of 2: a.cubin is a pipe" in " ".join(printed.split())
    assert "cannot be read as a wheel" in " ".join(printed.split())


def test_a_wheel_cannot_make_us_unpack_or_list_without_a_limit(tmp_path, capsys, monkeypatch):
    path = tmp_path / "bomb.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("a.cubin", bytes(70 << 20))  # more than a cubin may have
        wheel.writestr("b.so", bytes(1 << 20))
    _, printed = ends(capsys, "audit", path)
    assert "would unpack to 73400320 bytes" in " ".join(printed.split())
    monkeypatch.setattr("moedoctor.upstream.releases.wheel._MAX_READ", 90)
    code, printed = ends(capsys, "audit", path)
    assert (code, "its list of files is too large" in printed) == (2, True)


def test_a_damaged_member_of_a_wheel_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("a.cubin", b"\x7fELF" + os.urandom(1000))
    data = bytearray(path.read_bytes())
    data[37:60] = b"\xff" * 23
    path.write_bytes(data)
    assert ends(capsys, "audit", path)[0] == 2


def test_without_a_working_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    for command in ("run", "lint --fix y", "lint", "triage", "show", "audit", "plan --model"):
        code, printed = ends(capsys, command, Path("x.yaml"))
        assert code == 2, (command, printed)
    assert "working directory was removed" in ends(capsys, "run", Path("x.yaml"))[1]


def test_without_a_folder_for_temporary_files(capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setattr("moedoctor.runner.pool._server", None)
    code, printed = ends(capsys, "run", Path("MD012"))
    assert (code, "set TMPDIR" in printed) == (2, True)
