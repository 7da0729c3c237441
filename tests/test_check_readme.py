"""The checker of the documents finds each kind of error and accepts correct documents."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_readme.py"
HELPS = {(): "Usage: moedoctor\n --version --help", ("run",): "Usage: moedoctor run\n --format -o"}
FAILURES = "| id | failure |\n|---|---|\n| `MD001` | nan_routing |"
MARKS = (
    "<!-- help:begin -->\nold\n<!-- help:end -->\nbetween\n<!-- failures:begin -->\n<!-- failures:end -->\n"
)
TRUE = """# Title
Call `make test TORCH=2.11.0` or `moedoctor run --format json -o x.json`;
`moedoctor.fixes` and `moedoctor/` are no commands.
```sh
$ CUDA_VISIBLE_DEVICES=0 .venv/bin/moedoctor run MD001 | python -m moedoctor --version  # moedoctor nonsense
moedoctor 0.1.0
```
"""


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_readme", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "help_text", lambda *words: HELPS.get(words))
    monkeypatch.setattr(module, "failures", lambda: FAILURES)
    (tmp_path / "Makefile").write_text("BIN := x\n.PHONY: test\ntest: ## tests\n")
    return module


def write(checker: ModuleType, text: str) -> None:
    """Write a README with `text` and current blocks."""
    readme = checker.ROOT / "README.md"
    readme.write_text(f"{text}{MARKS}")
    checker.main(["--write"])


def test_a_correct_document_passes(checker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    write(checker, TRUE)
    assert checker.main([]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("`make tests`", "README.md:1: the Makefile has no target 'tests'"),
        ("\n`moedoctor cure`", "README.md:2: moedoctor has no command 'cure'"),
        ("```\nmoedoctor run --fromat json\n```\n", "README.md:2: 'moedoctor run' has no option --fromat"),
        ("```\n$ true && moedoctor --verion\n```\n", "README.md:2: 'moedoctor' has no option --verion"),
        ("`moedoctor run --form`", "README.md:1: 'moedoctor run' has no option --form"),
    ],
)
def test_a_wrong_command_is_reported_with_its_line(
    checker: ModuleType, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    write(checker, text + "\n")
    capsys.readouterr()
    assert checker.main([]) == 1
    assert capsys.readouterr().err.strip() == message


def test_contributing_is_read_too(checker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    write(checker, "")
    (checker.ROOT / "CONTRIBUTING.md").write_text("`make nothing`\n")
    assert checker.main([]) == 1
    assert "CONTRIBUTING.md:1" in capsys.readouterr().err


def test_outdated_blocks_are_reported_and_rewritten(
    checker: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = checker.ROOT / "README.md"
    readme.write_text(f"before\n{MARKS}after\n")
    assert checker.main([]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if "make readme" in line] == errors
    assert ["help" in line for line in errors] == [True, False]
    assert checker.main(["--write"]) == 0
    assert checker.main([]) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert "\nbetween\n" in text
    assert FAILURES in text
    assert text.endswith("\nafter\n")


def test_a_table_without_a_failure_is_reported(
    checker: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(checker, "")
    monkeypatch.setattr(checker, "failures", lambda: FAILURES + "\n| `MD002` | unpinned_copy |")
    assert checker.main([]) == 1
    assert capsys.readouterr().err.strip() == "README.md: the failures block is not the real one: make readme"


@pytest.mark.parametrize(
    "text",
    [
        "no marks",
        "<!-- help:begin -->",
        MARKS.replace("<!-- help:end -->", ""),
        MARKS.replace("<!-- failures:end -->", ""),
        MARKS.replace("help:begin", "help:x").replace("help:end", "help:begin").replace("help:x", "help:end"),
        MARKS + MARKS,
    ],
)
def test_a_document_without_its_marks_is_refused(
    checker: ModuleType, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checker.ROOT / "README.md").write_text(text)
    assert checker.main([]) == 2
    assert "mark the" in capsys.readouterr().err


def test_a_help_that_fails_is_reported(checker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    write(checker, "")
    monkeypatch.setattr(checker, "help_text", lambda *words: None)
    assert checker.main([]) == 2
