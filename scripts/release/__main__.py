"""Makes all tables anew with a vLLM release and says what it changes and what needs a person.

    python scripts/release 0.34.0

docs/releases.md is the checklist. The release and the libraries that it requires are fetched into
.venv-upstream/releases, whose environment asks it. Rows that begin in the known release after it name a place
in that source, so this one is asked too. Exit code 1 if something needs a person, 2 if the release cannot be
fetched, 3 if it cannot be read.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backends import RELEASES, list_differences, read_pins, write_backends
from packaging.version import Version
from patches import write_patches
from ranges import write_ranges
from settings import write_settings
from tables import ROOT, read_json, write_json

from moedoctor.diagnose.upgrade import compare_releases
from moedoctor.entries import load_entries
from moedoctor.entries.entry import Question
from moedoctor.fixes.backends import release_tables
from moedoctor.plugin.extensions import FIXES, TRACES, Need
from moedoctor.plugin.known_code import find_difference
from moedoctor.upstream.releases.questions import Inquiry, load_answers
from moedoctor.upstream.releases.release_source import ReleaseSource

HOME = ROOT / ".venv-upstream"
ANSWERS = ROOT / "moedoctor" / "upstream" / "releases" / "answers.json"
LISTED = ROOT / "scripts" / "releases.txt"
FETCH = '. scripts/environments.sh && upstream_environment && vllm_folder "$1"'


def main(release: str) -> int:
    """Make the tables and print the lines."""
    known = list(read_json(RELEASES)["releases"])
    releases = sorted({*known, release}, key=Version)
    place = releases.index(release)
    before, lines = releases[place - 1], []
    for name in releases[place : place + 2]:
        if subprocess.run(["sh", "-c", FETCH, "sh", name], cwd=ROOT, check=False).returncode:
            return 2
        if name == release:
            lines += compare(before, HOME / "releases" / name)
        lines += make_tables(HOME / "releases" / name, releases, names=name == release)
    add_to_list(release)
    lines += write_ranges(ROOT / "moedoctor" / "entries", read_json(ANSWERS))
    for capability in release_tables.CAPABILITIES:
        for sentences in compare_releases(before, release, capability, {}, ()).values():
            lines += sentences
    print("\n".join(dict.fromkeys(lines)) or f"{release} is like {before} in everything that was read")
    return int(any(line.startswith("person") for line in lines))


def make_tables(folder: Path, releases: Sequence[str], *, names: bool) -> Iterator[str]:
    """Put a release into all tables, with or without that of tensor names; yield what needs a person."""
    answers = ask(folder, "scripts/release/probe.py", VLLM_HAS_FLASHINFER_CUBIN="1")  # else nvcc is needed
    write_backends(folder, answers, releases)
    for cached in (release_tables.load_releases, release_tables.load_tables, release_tables._load_data):
        cached.cache_clear()
    if different := list_differences(folder.name, answers):
        place = "moedoctor/fixes/backends/data/handwritten.yaml"
        yield f"person: {place}: {len(different)} selections of {folder.name} differ, such as {different[0]}"
    pins = dict.fromkeys(row.flashinfer for row in release_tables.load_releases().values())
    write_settings(folder, read_pins(folder)["flashinfer-python"], releases, list(pins))
    write_json(ANSWERS, ask_questions(folder), levels=1)
    load_answers.cache_clear()
    try:
        write_patches(folder, ask(folder, "-m", "moedoctor.plugin.sources"), releases)
        if names:
            ask(folder, "scripts/release/names.py")
    except subprocess.CalledProcessError as error:
        yield f"person: {' '.join(error.cmd[1:])}: {error.stderr.strip().splitlines()[-1]}"


def ask(folder: Path, *command: str, **variables: str) -> Any:
    """Run a script in a child that can import the release; return the JSON that it prints after ANSWER."""
    names = [name for name in os.environ if not name.startswith(("VLLM_", "FLASHINFER_"))]
    environment = {**{name: os.environ[name] for name in names}, **variables}
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [str(HOME / "bin" / "python"), *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return json.loads(done.stdout.rpartition("ANSWER ")[2].partition("\n")[0] or "null")


def ask_questions(folder: Path) -> dict[str, dict[str, str]]:
    """Return the stored answers with those of the release in `folder`: question -> release -> answer.

    A question about FlashInfer is put to the FlashInfer in the folder.
    """
    inquiry, stored, flashinfer = (
        Inquiry(ReleaseSource(folder)),
        read_json(ANSWERS),
        read_pins(folder)["flashinfer-python"],
    )
    answers: dict[str, dict[str, str]] = {}
    for name, question in list_questions():
        release = folder.name if question.package == "vllm" else flashinfer
        row = {**stored.get(name, {}), release: inquiry.answer(question).value}
        answers[name] = dict(sorted(row.items(), key=lambda item: Version(item[0])))
    return answers


def list_questions() -> Iterator[tuple[str, Question]]:
    """Yield the questions of all entries, with names such as ``MD009.asserts``."""
    for entry in load_entries().values():
        yield from ((f"{entry.id}.{question.name}", question) for question in entry.questions)


def add_to_list(release: str) -> None:
    """Add a release to those that `make test-upstream` and `make releases` run."""
    head, *rest = re.split(r"(?m)^(?=vllm )", LISTED.read_text(encoding="utf-8"))
    *lines, tail = "".join(rest).partition("\n\n")
    names = sorted({release, *"".join(lines[:1]).replace("vllm ", "").split()}, key=Version)
    LISTED.write_text(head + "".join(f"vllm {name}\n" for name in names) + "\n" + tail, encoding="utf-8")


def compare(before: str, folder: Path) -> Iterator[str]:
    """Yield a line for each answer of the release in `folder` that differs; "person" needs one."""
    source = ReleaseSource(folder)
    inquiry, flashinfer = Inquiry(source), release_tables.load_releases()[before].flashinfer
    for name, question in list_questions():
        release = before if question.package == "vllm" else flashinfer
        answer, was = inquiry.answer(question), load_answers()[name][release]
        if answer.value != was:
            who = "person" if answer.value == "unknown" else "entry"
            place = f"moedoctor/entries/{name[:5]}.md, question {question.name}"
            yield f"{who}: {place}: {was} -> {answer.value}: {answer.where}"
    if inquiry.list_variables() is None:
        yield "person: moedoctor/upstream/releases/questions.py: envs.py has its variables in another form"
    for name, extension in {**FIXES, **TRACES}.items():
        if extension.need(before)[0] is Need.MADE_FOR:
            different = find_difference(name, before, source.read_text)
            if different:
                yield f"person: {extension.module.replace('.', '/')}.py: {different}"


if __name__ == "__main__":
    if not re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", "".join(sys.argv[1:])):
        print("release: expected one release of vLLM: make release V=0.34.0", file=sys.stderr)
        sys.exit(2)
    try:
        code = main(sys.argv[1])
    except Exception:
        traceback.print_exc()
        code = 3  # Python's own code, 1, would mean that only a person is needed
    sys.exit(code)
