"""Says what a vLLM release changes for moedoctor and what needs a person: docs/releases.md is the checklist.

    python scripts/release.py 0.34.0 [--folder FOLDER]     fetch the wheel, read it, print what changed
    python scripts/release.py --answers FOLDER             write reports/sources/answers.json anew

FOLDER holds ``X.Y.Z/vllm``, the Python files of each release; by default .venv-releases/sources. Nothing of a
release is imported. Exit code 1 if something needs a person.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from moedoctor.diagnose.settings.tables import Settings, load_vllm_flags, load_vllm_variables
from moedoctor.entries import load_entries
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.plugin.extensions import FIXES, TRACES, Need
from moedoctor.plugin.known_code import find_difference
from moedoctor.upstream.releases.questions import Inquiry, load_answers
from moedoctor.upstream.releases.release_source import ReleaseSource

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "reports" / "sources" / "answers.json"
SOURCES = ROOT / ".venv-releases" / "sources"


def main() -> int:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", nargs="?", metavar="X.Y.Z")
    parser.add_argument("--folder", type=Path, default=SOURCES)
    parser.add_argument("--answers", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.answers:
        TABLE.write_text(ask_releases(options.answers), encoding="utf-8")
        return 0
    if not options.release:
        parser.error("expected a release such as 0.34.0, or --answers FOLDER")
    folder = options.folder / options.release
    if not (folder / "vllm").is_dir():
        fetch(options.release, folder)
    known = [release for release in load_releases() if release != options.release]
    lines = list(compare(known[-1], folder))
    print("\n".join(lines) or f"{options.release} is like {known[-1]} in everything that was read")
    return int(any(line.startswith("person") for line in lines))


def fetch(release: str, folder: Path) -> None:
    """Fetch the wheel of a release and unpack its Python files and metadata. Raises CalledProcessError."""
    wheels = folder.parent / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(wheels)]
    subprocess.run([*command, f"vllm=={release}"], check=True)
    (wheel,) = wheels.glob(f"vllm-{release}-*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if name.endswith((".py", "METADATA")) and ".." not in name]
        file.extractall(folder, names)


def ask_releases(folder: Path) -> str:
    """Return the answers of all known releases to all questions, as JSON with a line for each question."""
    answers: dict[str, dict[str, str]] = {}
    for release in load_releases():
        inquiry = Inquiry(ReleaseSource(folder / release))
        for entry in load_entries().values():
            for question in entry.questions:
                row = answers.setdefault(f"{entry.id}.{question.name}", {})
                row[release] = inquiry.answer(question).value
    rows = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in answers.items())
    return f'{{"releases": {json.dumps(list(load_releases()))},\n "answers": {{\n  {rows}\n }}}}\n'


def compare(before: str, folder: Path) -> Iterator[str]:
    """Yield a line for each difference of the release in `folder` from a known one; "person" needs one."""
    source = ReleaseSource(folder)
    inquiry, stored = Inquiry(source), load_answers()["answers"]
    for entry in load_entries().values():
        for question in entry.questions:
            answer, was = inquiry.answer(question), stored[f"{entry.id}.{question.name}"][before]
            if answer.value != was:
                who = "person" if answer.value == "unknown" else "entry"
                place = f"moedoctor/entries/{entry.id}.md, question {question.name}"
                yield f"{who}: {place}: {was} -> {answer.value}: {answer.where}"
    variables = inquiry.list_variables()
    if variables is None:
        yield "person: moedoctor/upstream/releases/questions.py: envs.py has its variables in another form"
    else:
        yield from list_names("variables", load_vllm_variables(), before, variables)
    yield from list_names("flags", load_vllm_flags(), before, inquiry.list_flags())
    for name, extension in {**FIXES, **TRACES}.items():
        if extension.need(before)[0] is Need.MADE_FOR:
            different = find_difference(name, before, source.read_text)
            if different:
                yield f"person: {extension.module.replace('.', '/')}.py: {different} is not that of {before}"


def list_names(kind: str, table: Settings, before: str, declared: frozenset[str]) -> Iterator[str]:
    """Yield the names that are new in the declaring files; what is read elsewhere is not compared."""
    new = sorted(declared - table.list_at(before).keys())
    if new:
        yield f"new {kind}: {', '.join(new)}"


if __name__ == "__main__":
    sys.exit(main())
