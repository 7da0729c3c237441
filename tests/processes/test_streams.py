"""Standard streams that are full, closed, slow or lack a character lose no report and show no traceback."""

import io
import json
import os
import select
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.processes.streams import report_loss, run_with_streams

ENCODINGS = st.sampled_from(["ascii", "latin-1", "cp437", "koi8-r", "gbk", "utf-8", "utf-16"])
TEXTS = st.text(st.characters(exclude_categories=()))


def printed(text: str, encoding: str) -> str:
    """Return what a stdout of this encoding shows of `text`."""
    raw = io.BytesIO()
    before, sys.stdout = sys.stdout, io.TextIOWrapper(raw, encoding, errors="strict", newline="")
    try:
        assert run_with_streams(lambda: sys.stdout.write(text) * 0) == 0
    finally:
        kept, sys.stdout = sys.stdout, before
    shown = raw.getvalue().decode(encoding)
    kept.detach()
    return shown


@given(text=TEXTS, encoding=ENCODINGS)
def test_any_text_can_be_printed_in_any_encoding(text: str, encoding: str) -> None:
    shown = printed(text, encoding)
    if encoding == "utf-8" and text.isprintable():
        assert shown == text


@given(value=st.dictionaries(TEXTS, TEXTS), encoding=ENCODINGS)
def test_json_keeps_its_value_in_any_encoding(value: dict[str, str], encoding: str) -> None:
    shown = printed(json.dumps(value, ensure_ascii=False), encoding)
    assert json.loads(shown) == json.loads(json.dumps(value))


def test_our_own_characters_become_plain_ones() -> None:
    assert printed("── … · ± ≤ 中", "ascii") == "-- ... * +- <= \\u4e2d"


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), None])
def test_only_what_is_lost_changes_the_code(error: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raw(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            if error is not None:
                raise error
            return len(data)  # type: ignore[arg-type]

    stream = io.TextIOWrapper(io.BufferedWriter(Raw()), "utf-8")
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stderr)
    code = run_with_streams(lambda: sys.stdout.write("x" * 100_000) and 1)
    full = error is not None and not isinstance(error, BrokenPipeError)
    assert code == (3 if full else 1)
    assert stderr.getvalue().count("\n") == (1 if full else 0)
    assert sys.stdout is stream
    stream.flush()  # nothing is left in it that could fail at the end of the interpreter


def test_streams_that_are_none_are_as_if_they_were_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert run_with_streams(lambda: 1) == 1
    assert run_with_streams(lambda: print("x", file=sys.stderr) or 1) == 1
    assert run_with_streams(lambda: print("x") or 1) == 3
    assert run_with_streams(lambda: report_loss("x") or 1) == 3
    assert run_with_streams(lambda: 1) == 1, "a loss is not remembered"


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_message_is_there_as_soon_as_it_is_printed(unbuffered: str) -> None:
    """A container sets PYTHONUNBUFFERED, and its log must show what a long command does."""
    program = (
        "import sys\n"
        "from moedoctor.processes.streams import run_with_streams\n"
        "from moedoctor.text import print_message\n"
        "run_with_streams(lambda: [print_message('begins'), sys.stdin.read(), 0][2])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            assert select.select([process.stderr], [], [], 20)[0], "it waits for its end"
            assert process.stderr.readline() == b"moedoctor: begins\n"
        finally:
            process.stdin.close()


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream(closed: str) -> None:
    program = (
        "import os, sys; from moedoctor.processes.streams import run_with_streams; "
        "sys.exit(run_with_streams(lambda: 10 + os.open(sys.argv[1], os.O_RDONLY)))"
    )
    command = ["bash", "-c", f'"$@" {closed}', "bash", sys.executable, "-c", program, os.devnull]
    assert subprocess.run(command, timeout=60, check=False).returncode > 12
