"""Small text files: what is read, and the error of everything that is none, without ever blocking."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moedoctor.text import TextFileError, check_printable, read_text

LIMIT = 4096


def file_error(path: Path) -> TextFileError:
    with pytest.raises(TextFileError) as caught:
        read_text(path, LIMIT)
    return caught.value


BAD_BYTES = [
    ("NUL bytes", b"a: 1\nb: \x00\n", 2, "binary"),
    ("PNG", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", 3, "binary"),
    ("Latin-1", b"a: 1\ntitle: caf\xe9\n", 2, "not UTF-8 text (byte 0xe9)"),
    ("Latin-1 behind a BOM", b"\xef\xbb\xbfa: 1\ntitle: caf\xe9\n", 2, "not UTF-8 text (byte 0xe9)"),
    ("line end behind a BOM", b"\xef\xbb\xbf\n\xe9", 2, "not UTF-8 text (byte 0xe9)"),
    ("UTF-16", "a: 1\n".encode("utf-16"), 1, "UTF-16"),
    ("UTF-16 without BOM", "a: 1\n".encode("utf-16-le"), 1, "binary"),
    ("UTF-32", "a: 1\n".encode("utf-32"), 1, "UTF-32"),
    ("one byte too many", b"#" * (LIMIT + 1), 1, "too large"),
]


@pytest.mark.parametrize(
    ("data", "line", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD_BYTES]
)
def test_bad_bytes(tmp_path: Path, data: bytes, line: int, message: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(data)
    error = file_error(file)
    assert message in error.message
    assert "expected" in error.message
    assert error.line == line


@pytest.mark.parametrize("data", [b"caf\xc3\xa9", b"\xef\xbb\xbfcaf\xc3\xa9"])
def test_utf8_with_and_without_byte_order_mark(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read_text(tmp_path / "a.txt", LIMIT) == "café"


def test_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"#" * LIMIT)
    assert read_text(tmp_path / "a.txt", LIMIT) == "#" * LIMIT


def test_folder_and_missing_file(tmp_path: Path) -> None:
    assert "is a folder" in file_error(tmp_path).message
    assert "no such file" in file_error(tmp_path / "none.yaml").message
    assert "too long" in file_error(tmp_path / ("a" * 5000)).message
    assert "no file name" in file_error(Path("a\0b")).message
    (tmp_path / "file").touch()
    assert "not a directory" in file_error(tmp_path / "file" / "a.yaml").message


def test_links(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert "cannot be read" in file_error(tmp_path / "loop.yaml").message
    (tmp_path / "real.yaml").write_text("a: 1")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real.yaml")
    assert read_text(tmp_path / "link.yaml", LIMIT) == "a: 1"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_pipes_and_devices_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/tty")):
        assert "pipe, socket or device" in file_error(path).message


def test_a_pipe_swapped_in_after_the_first_look_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    honest = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda path: honest)
    assert "pipe, socket or device" in file_error(tmp_path / "pipe").message


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_file_that_gives_more_than_its_size_says_is_cut_at_the_limit() -> None:
    # Files under /proc say that they hold nothing.
    with pytest.raises(TextFileError, match="too large"):
        read_text(Path("/proc/self/maps"), 10)


def test_unreadable_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1")
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("this user reads every file, whatever its mode")
    assert "permission denied" in file_error(file).message


def test_a_file_that_the_system_refuses_to_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert file_error(file).message == "cannot be read (permission denied), expected a text file"


def test_size_is_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(100 * 2**20)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file of this size must not be opened"))
    assert file_error(file).message == "is too large (100.0 MiB), expected at most 4 KiB"


@pytest.mark.parametrize("text", ["\x07", "\x7f", "\x85", "\u2028", "\u2029", "\ud800", "\uffff", "\0"])
def test_characters_that_no_text_needs(text: str) -> None:
    with pytest.raises(TextFileError, match=f"character U\\+{ord(text):04X} in the file, expected") as caught:
        check_printable(f"a\nb{text}\n")
    assert caught.value.line == 2


def test_printable_text() -> None:
    check_printable("a\tb\r\n é \xa0 \u202a 語 \U0001f600")
