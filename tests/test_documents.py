"""CONTRIBUTING's example runs, every printed command is real, and guides are short, without typed figures."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from every_command import explain_refusal

from moedoctor.cli import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def example(tmp_path: Path, find_plugins_in: Callable[[Path], None]) -> Path:
    """Write the files that CONTRIBUTING shows, with the entry point of an installed package."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", text, flags=re.DOTALL))
    package = {"my_failures/slow_sum.py", "my_failures/slow_sum_lab.py"}
    assert set(files) == {*package, "slow_sum.yaml", "test_slow_sum.py"}
    info = "my_failures-1.0.dist-info"
    (entry_point,) = re.findall(r"^slow_sum = \"(.*)\"$", text, flags=re.MULTILINE)
    files[f"{info}/METADATA"] = "Metadata-Version: 2.1\nName: my-failures\nVersion: 1.0\n"
    files[f"{info}/entry_points.txt"] = f"[moedoctor.faults]\nslow_sum = {entry_point}\n"
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    find_plugins_in(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_example_is_proved_and_its_claim_confirmed(example, monkeypatch, capsys):
    monkeypatch.chdir(example)
    assert main(["run", "slow_sum.yaml", "--format", "json"]) == 0
    (scenario,) = json.loads(capsys.readouterr().out)["scenarios"]
    assert (scenario["verdict"], scenario["claims"][0]["verdict"]) == ("proved", "confirmed")
    figures = [case["figure"] for case in scenario["cases"]]
    assert figures[:2] == ["4096 ones make 2048", "8192 ones make 2048"]
    assert main(["explain", "MD902"]) == 0
    assert "a sum in half precision" in capsys.readouterr().out


def test_only_install_lines_and_addresses_that_exist_are_printed() -> None:
    """Nothing is published: what will be is one list in CONTRIBUTING."""
    files = [ROOT / "mkdocs.yml", ROOT / "pyproject.toml", *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    files += [
        path for suffix in ("py", "md", "yaml", "html") for path in (ROOT / "moedoctor").rglob(f"*.{suffix}")
    ]
    unpublished = r"pip3? install(?:\s+-\S+)*\s+['\"]?moedoctor\b(?!-\d)|https?://[^\s)\"'`]*moedoctor"
    wrong = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.name == "CONTRIBUTING.md":
            text, section = re.subn(r"## On the day of publishing.*?(?=\n## )", "", text, flags=re.DOTALL)
            assert section == 1
        wrong += [f"{file.relative_to(ROOT)}: {match[0]}" for match in re.finditer(unpublished, text)]
    assert not wrong
    assert re.search(unpublished, "pip install -U 'moedoctor[torch]'")
    assert not re.search(unpublished, "pip install dist/moedoctor-0.1.0-py3-none-any.whl")


def test_every_link_leads_to_a_file_or_to_a_page_that_the_site_makes() -> None:
    made = re.compile(r"docs/(?:entries/\w+|symptoms|commands)\.md")
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "reports").rglob("*.md")]
    lost = []
    for file in files:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^()\s:#]+)(?:#[^()\s]*)?\)", text):
            place = os.path.normpath(file.parent.relative_to(ROOT) / target)
            if not (ROOT / place).exists() and not made.fullmatch(place):
                lost.append(f"{file.relative_to(ROOT)}: {target}")
    assert not lost


def printed_commands(text: str) -> Iterator[list[str]]:
    """Give the words of each command of moedoctor in blocks and in code, but not what it prints."""
    fence = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    lines = [line for block in fence.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", fence.sub("", text))
    for line in lines:
        match = re.search(r"(?:^|\s|(['\"]))moedoctor (?!\d)(.*)", line)
        if match is None or re.search(r"pip3? install|\[OPTIONS\]|--help|COMMAND \.\.\.|COMMAND$", line):
            continue
        words = shlex.split(match[2].partition(match[1])[0] if match[1] else match[2], comments=True)
        ends = [index for index, word in enumerate(words) if word in (">", "|", "&&", ";")]
        yield words[: min(ends, default=len(words))]


@pytest.mark.parametrize(
    "file",
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "moedoctor" / "entries").glob("*.md")),
    ],
    ids=lambda file: file.name,
)
def test_every_printed_command_is_one(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # options of a folder make it
    for words in printed_commands(file.read_text(encoding="utf-8")):
        assert explain_refusal(words) is None, words


def unknown_targets(text: str) -> set[str]:
    """Return the targets of `make` that `text` shows as code and the Makefile does not have."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*)\s*:(?!=)", makefile, re.MULTILINE))
    return set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE)) - targets


def test_every_printed_target_of_make_exists() -> None:
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "reports").rglob("README.md")]:
        assert not unknown_targets(file.read_text(encoding="utf-8")), file
    assert unknown_targets("`make setup` and `make tests`") == {"tests"}
    assert unknown_targets("```\nmake tests\n```") == {"tests"}


def test_guides_and_news_are_short() -> None:
    guides = [ROOT / "docs" / f"{name}.md" for name in ("expert-cache", "wsl", "plugin", "capsule")]
    texts = [guide.read_text(encoding="utf-8") for guide in guides]
    assert max(len(text.splitlines()) for text in texts) <= 100
    assert all({"## When to use it", "## When it fails"} <= set(text.splitlines()) for text in texts)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(re.split(r"^## ", changes, flags=re.MULTILINE)[1].splitlines()) <= 40
    for file in (ROOT / "moedoctor" / "entries").glob("*.md"):
        assert len(file.read_text(encoding="utf-8").split("\n---\n", 1)[1].split()) <= 450, file.name


def test_figures_of_guides_stand_in_made_blocks() -> None:
    measured = re.compile(r"\d (?:%|times|tokens/s|tokens per second|GiB|µs|ms)(?!\w)|\d%")
    for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        if file.name not in ("fleet.md", "ci.md"):  # settings of commands, not results
            made = re.compile(r"<!-- made: .*?<!-- made:end -->|```.*?```", re.DOTALL)
            assert measured.findall(made.sub("", file.read_text(encoding="utf-8"))) == [], file.name


@pytest.mark.parametrize(
    "text", ["`moedoctor chekc`", "`moedoctor check --smm 12.0`", "```\nmoedoctor lint a b --fixx c\n```\n"]
)
def test_a_command_that_does_not_exist_is_noticed(text: str) -> None:
    (words,) = printed_commands(text)
    assert explain_refusal(words)
