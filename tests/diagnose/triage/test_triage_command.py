"""`moedoctor triage` as a command: exit codes, formats, bad input, and a quick start."""

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pytest

from moedoctor.commands import triage as command
from moedoctor.commands.options import InputError
from moedoctor.commands.triage import triage as triage_command
from moedoctor.diagnose.triage import triage as reading

REPORT = "WSL2, vLLM 0.18.0\nRuntimeError: b_scales is not on GPU | <b>x</b> in marlin, --cpu-offload-gb 4\n"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    file = tmp_path / "report.log"
    file.write_text(REPORT)
    return file


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    file = tmp_path / "healthy.log"
    file.write_text("INFO: Application startup complete.\n")
    return file


def test_a_finding_gives_exit_code_1_and_json(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert triage_command([str(report)], "json", None) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found) == [
        *("schema_version", "moedoctor", "command", "origin"),
        *("findings", "possible", "near_misses", "looked_at", "summary"),
    ]
    assert found["summary"]["exit_code"] == 1
    assert err == "".join(f"moedoctor: exit code 1: {reason}\n" for reason in found["summary"]["reasons"])
    assert f"{report}, line 2: MD003 is certain: " in err
    assert found["schema_version"] == 1
    assert [list(finding) for finding in found["findings"]] == [
        [*("id", "line", "excerpt", "confidence", "next_step"), *("grade", "why", "missing", "releases")]
    ]
    assert found["findings"][0]["grade"] == "certain"
    assert found["looked_at"][0]["releases"] == "vLLM 0.18.0"
    assert (found["findings"][0]["id"], found["findings"][0]["line"]) == ("MD003", 2)


def test_no_finding_gives_exit_code_0(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert triage_command([str(healthy)], "json", None) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["findings"], found["possible"], found["near_misses"]) == ([], [], [])


def test_the_text_cannot_add_markdown(report, healthy, capsys):
    assert triage_command([str(report)], "markdown", None) == 1
    out = capsys.readouterr().out
    assert all(part in out for part in ("\\| x in marlin", "given a tensor that lies on the host"))
    assert "<b>" not in out
    assert triage_command([str(healthy)], "markdown", None) == 0
    assert "No known failure" in capsys.readouterr().out


def test_stdin_of_the_most_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "MOST_BYTES", len(REPORT))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(REPORT.encode())))
    assert triage_command(["-"], "json", None) == 1
    assert "MD003" in capsys.readouterr().out


def refusal(path: str, format: str = "json", output: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        triage_command([path], format, output)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_input_is_one_line(tmp_path: Path, report: Path) -> None:
    assert refusal(str(tmp_path / "none.log")).endswith("expected a log or report, or - for stdin")
    assert "is a folder" in refusal(str(tmp_path))
    assert "not a file name" in refusal("a\x00b")
    assert "cannot be read" in refusal("x" * 5000)
    assert "also the output" in refusal(str(report), output=report)
    os.mkfifo(tmp_path / "pipe")
    assert "or - for stdin" in refusal(str(tmp_path / "pipe"))
    assert report.read_text() == REPORT


def test_more_than_200_megabytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large.log"
    with file.open("wb") as large:
        large.truncate(command.MOST_BYTES + 1)
    with monkeypatch.context() as patch:
        patch.setattr(reading, "triage", None)  # it is not even read
        assert "at most 200 MB" in refusal(str(file))
    monkeypatch.setattr(command, "MOST_BYTES", 100)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 101)))
    assert "stdin: is too large" in refusal("-")


def test_a_file_that_cannot_be_read_midway(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(stream: object, redactor: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reading, "triage", fails)
    assert "cannot be read (input/output error)" in refusal(str(report))


def test_several_files_and_one_that_is_none(report, healthy, tmp_path, capsys):
    missing = tmp_path / "missing.log"
    assert triage_command([str(healthy), str(report), str(missing)], "json", None) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [(finding["id"], finding["file"]) for finding in found["findings"]] == [("MD003", str(report))]
    assert [row["file"] for row in found["looked_at"]] == [str(healthy), str(report)]
    assert "missing.log" in printed.err
    assert triage_command([str(healthy), str(missing)], "table", None) == 2


def test_a_gz_file_is_read(report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "report.log.gz"
    packed.write_bytes(gzip.compress(report.read_bytes()))
    assert triage_command([str(packed)], "json", None) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["line"] == 2


def test_a_gz_file_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MOST_BYTES", 1_000_000)
    packed = tmp_path / "bomb.gz"
    packed.write_bytes(gzip.compress(b"x" * 50_000_000))
    assert "is too large" in refusal(str(packed))
    packed.write_bytes(gzip.compress(os.urandom(9_000).hex().encode())[:-2_000])
    assert "ends early" in refusal(str(packed))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"\x7fELF" + bytes(range(256)) * 20, "is binary"),
        (b"PK\x03\x04 zip", "is a zip archive"),
        (b"\xfd7zXZ\x00 xz", "is compressed with xz"),
        (gzip.compress(b"\x7fELF" + bytes(range(256)) * 20, mtime=0), "is binary"),
    ],
)
def test_what_is_no_text_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert reason in refusal(str(file))


def test_a_log_with_colors_and_a_few_zeros_is_a_text(tmp_path: Path) -> None:
    file = tmp_path / "colors.log"
    file.write_bytes(b"\x1b[31m" + REPORT.encode() + b"\x00\x00\x1b[0m\n" + b"fine\r\n" * 20)
    assert triage_command([str(file)], "json", None) == 1


def test_what_is_only_possible_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "crash.log"
    file.write_text("RuntimeError: CUDA error: an illegal memory access was encountered\n")
    assert triage_command([str(file)], "table", None) == 0
    out = capsys.readouterr().out
    assert "The text is not enough to tell." in out
    assert "likely if: " in out
    assert "to be sure, paste more" in out
    assert out.splitlines()[-1] == "0 known failures found, 1 possible."


def test_a_release_that_has_the_fix_is_a_near_miss(tmp_path, capsys):
    file = tmp_path / "old.log"
    message = "Cannot re-initialize the input batch when CPU weight offloading is enabled"
    file.write_text(f"vLLM Version : {{}}\nAssertionError: {message}\n".format("0.33.0"))
    assert triage_command([str(file)], "json", None) == 0
    miss = json.loads(capsys.readouterr().out)["near_misses"][0]
    assert (miss["id"], miss["line"]) == ("MD009", 2)
    assert miss["reason"] == "the text names vLLM 0.33.0, and 0.20.0 fixed the failure"
    file.write_text(f"vLLM Version : 0.19.1\nAssertionError: {message}\n")
    assert triage_command([str(file)], "json", None) == 1
    finding = json.loads(capsys.readouterr().out)["findings"][0]
    assert finding["releases"] == (
        "vLLM 0.19.1 has it (vLLM 0.17.1 to 0.19.1, hybrid models with CPU offload); fixed: vLLM 0.20.0"
    )
