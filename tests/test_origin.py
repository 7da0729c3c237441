"""The origin of a report: date, commit, command line, and the lines that make it again."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.origin import ARGUMENTS, describe_checkout, record_origin, write_command_line

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "moedoctor").mkdir()
    (tmp_path / "moedoctor" / "a.py").write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


@needs_git
def test_a_checkout_has_a_commit_and_says_whether_its_code_was_changed(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert describe_checkout(repository) == (commit, False)
    (repository / "notes.txt").write_text("not code")
    assert describe_checkout(repository) == (commit, False)
    (repository / "moedoctor" / "new.py").write_text("2\n")
    assert describe_checkout(repository) == (commit, True)


@needs_git
def test_git_writes_nothing_and_runs_no_program_of_the_checkout(repository: Path, tmp_path: Path) -> None:
    hook, proof = repository / "hook.sh", repository / "proof"
    hook.write_text(f"#!/bin/sh\ntouch {proof}\n")
    hook.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(hook))
    before = (repository / ".git" / "index").read_bytes()
    (repository / "moedoctor" / "a.py").write_text("1\n")  # the same text at another time: git would note it
    assert describe_checkout(repository)[1] is False
    assert (repository / ".git" / "index").read_bytes() == before
    assert not proof.exists()


def test_an_installed_package_has_no_commit(tmp_path: Path) -> None:
    assert describe_checkout(tmp_path) == (None, None)


def test_the_lines_that_make_a_report_again_name_code_variables_and_command(monkeypatch):
    monkeypatch.setattr("moedoctor.origin.describe_checkout", lambda: ("0" * 40, True))
    variables = {"VLLM_A": "two words", "VLLM_KEY": "***", "CUDA_HOME": "/usr", "VLLM_PATH": "/a/b"}
    token = ARGUMENTS.set(("run", "MD001", "--only", "a b"))
    try:
        made = record_origin(variables=variables)
    finally:
        ARGUMENTS.reset(token)
    assert made["again"] == [
        f"git checkout {'0' * 40}  # and changes that are not committed",
        "VLLM_A='two words' moedoctor run MD001 --only 'a b'",
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", made["date"])
    assert record_origin()["command_line"] is None, "no command line called this"


@given(st.lists(st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True), min_size=1, max_size=5))
def test_no_folder_of_the_machine_is_in_a_command_line(parts: list[str]) -> None:
    path = "/srv/" + "/".join(parts)
    for argument in (path, f"0.19.1={path}", f"--model={path}", f"{path} and {path}"):
        line = write_command_line(["bench", argument])
        assert "/srv" not in line
        assert line.count("…/") == argument.count("/srv/")


def test_secrets_are_masked_and_relative_names_stay() -> None:
    line = write_command_line(["run", "scenarios/a.yaml", "--token", "hf_abcdefghijklmnopqrstuvwxyz0123"])
    assert line == "moedoctor run scenarios/a.yaml --token ***"
