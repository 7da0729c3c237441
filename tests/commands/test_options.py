"""Options that the commands share."""

from pathlib import Path

import pytest

from moedoctor.cli import main


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["-o", "a.md"], "# Known failures"),
        (["-o", "a.JSON"], "{"),
        (["-o", "a.txt"], "Known failures"),
        (["-o", "a.dat"], "Known failures"),
        (["-o", "a.md", "--format", "json"], "{"),
        (["-f", "table", "-o", "a.json"], "Known failures"),
    ],
)
def test_the_name_of_the_output_chooses_the_format_unless_one_is_given(
    arguments: list[str], begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list", *arguments]) == 0
    (file,) = tmp_path.iterdir()
    assert file.read_text(encoding="utf-8").startswith(begins)
