"""Makes the reports of `promises.yaml` and `reports.yaml` where there is a GPU, and judges each promise.

    make evidence                          every promise beside the stored reports, without running anything
    make evidence NAMES="moe_speed_bf16"   run these commands here, store their reports, and judge them

A promise is kept, broken, or not run. Exit code 1 if one is broken, 2 for wrong usage. Commands and scripts
write their own reports. For pytest and `make test-upstream` a short one is made of their JUnit XML. `make
reports` makes the pages of what is stored.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shlex
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from moedoctor.models.presets import list_presets

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "evidence" / "promises.yaml"
REPORTS, TESTS = ROOT / "reports", ROOT / "evidence" / "tests"
_BOUND = re.compile(r"(>=|<=|==|has) (.+)")
_STEP = re.compile(r"(?P<key>\w+)(?P<selectors>(?:\[\w+=[^\]]*\])*)")
_PATH = re.compile(r"(?:…|\$\w+|/\w+)/")
"""The beginning of a path, which reports mask; `$SCRATCH` in a row."""
_SELECTOR = re.compile(r"\[(\w+)=([^\]]*)\]")


@dataclass(frozen=True)
class Report:
    """A stored report, and the command that makes it; the files in YAML explain the fields."""

    report: str
    command: str
    needs: str = field(default="", kw_only=True)
    first: str = field(default="", kw_only=True)
    took: str = field(default="", kw_only=True)

    @property
    def is_of_tests(self) -> bool:
        """Return True if the command runs tests and not moedoctor."""
        return self.command.startswith(("pytest ", "make "))

    @property
    def is_of_upstream(self) -> bool:
        """Return True for tests of vLLM releases, which need no GPU: their reports are of no machine."""
        return self.command.startswith("make ")

    def find_report(self, folder: Path) -> Path:
        """Return the file for the folder of a machine; a run of tests is no report of moedoctor."""
        tests = TESTS / folder.name if folder.resolve().parent == REPORTS else folder / "tests"
        return (tests if self.is_of_tests else folder) / f"{self.report}.json"


@dataclass(frozen=True)
class Promise(Report):
    """A statement about moedoctor that one of its commands measures."""

    words: str
    value: str
    """A place such as ``bench.engines.speeds[variant=moe][batch=8].ratio``, or one place over another."""
    bound: str
    """``>= 1.2``, ``<= 0.05``, ``== MARLIN`` or ``has a word``."""

    def judge(self, document: Any) -> tuple[str, Any]:
        """Return ``kept`` or ``broken`` with the value; a value that is missing keeps nothing.

        A report of another command is ``not run``: it says nothing about this one.
        """
        line = (document.get("origin") or {}).get("command_line") or ""
        if not set(split_command(self.command)) <= set(split_command(line)):
            return "not run", None
        places = [look_up(document, place) for place in self.value.split(" / ")]
        if any(place is None for place in places):
            return "broken", None
        value = places[0] if len(places) == 1 else float(places[0]) / float(places[1] or "nan")
        match = _BOUND.fullmatch(self.bound)
        if match is None:
            raise ValueError(f"{self.report}: bound is {self.bound!r}, expected {_BOUND.pattern}")
        kind, limit = match.groups()
        holds = {
            ">=": lambda: float(value) >= float(limit),
            "<=": lambda: float(value) <= float(limit),
            "==": lambda: str(value) == limit,
            "has": lambda: limit in str(value),
        }[kind]()
        return "kept" if holds else "broken", value


def load_reports() -> dict[str, Report]:
    """Return every report by its name."""
    rows = {
        name: {key: value for key, value in row.items() if key != "promises"}
        for file in (FILE, FILE.with_name("reports.yaml"))
        for name, row in yaml.safe_load(file.read_text(encoding="utf-8")).items()
    }
    return {
        name: Report(name, **{**row, "command": " ".join(row["command"].split())})
        for name, row in rows.items()
    }


def load_promises(file: Path = FILE) -> list[Promise]:
    """Return the promises in the order of the file. Raises ValueError for a report without them."""
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [
        Promise(name, " ".join(report["command"].split()), needs=report.get("needs", ""), **promise)
        for name, report in document.items()
        for promise in report["promises"]
    ]


def split_command(line: str) -> list[str]:
    """Return the words of a command without the beginnings of paths."""
    return [_PATH.sub("/", word) for word in shlex.split(line)]


def look_up(document: Any, place: str) -> Any:
    """Return the value at a place of a JSON document; None if there is none."""
    for step in re.split(r"\.(?![^\[]*\])", place.strip()):
        match = _STEP.fullmatch(step)
        if match is None:
            raise ValueError(f"{place}: {step!r} is no key with selectors")
        document = document.get(match["key"]) if isinstance(document, Mapping) else None
        selectors = _SELECTOR.findall(match["selectors"])
        if selectors and isinstance(document, Sequence):
            rows = [row for row in document if all(str(row.get(key)) == text for key, text in selectors)]
            document = rows[0] if len(rows) == 1 else None
    return document


def judge_folder(folder: Path, promises: Sequence[Promise]) -> Iterator[tuple[Promise, str, Any]]:
    """Yield each promise with its verdict beside the reports in `folder`, and the value."""
    for promise in promises:
        file = promise.find_report(folder)
        if not file.is_file():
            yield promise, "not run", None
            continue
        yield promise, *promise.judge(json.loads(file.read_text(encoding="utf-8")))


def folder_of_this_machine() -> Path:
    """Return the folder of reports for this GPU and vLLM. Raises SystemExit without a GPU or vLLM."""
    from moedoctor.environment import collect

    facts = collect()
    if not facts.get("gpus") or not facts.get("vllm"):
        raise SystemExit(
            "evidence: needs an NVIDIA GPU and an installed vLLM; give --folder to choose another place"
        )
    name = re.sub(r"[ -]\d*GB.*", "", str(facts["gpus"][0]["name"]))
    return REPORTS / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).lower()}-vllm-{facts['vllm']}"


def run_command(report: Report, folder: Path, limit: float | None) -> None:
    """Run the command of a report and store it; exit code 1 is a result, too.

    Raises SystemExit for a variable that the command names and that is not set.
    """
    file = report.find_report(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    print(f"evidence: {report.report}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as scratch:
        junit = Path(scratch) / "junit.xml"
        models = " ".join(f"--model {name}" for name in list_presets())
        own = {"OUT": str(folder), "SCRATCH": scratch, "MODELS": models, "PYTHON": sys.executable}
        environ = {"RAY": "local", **os.environ, **own}
        try:
            text = string.Template(report.command).substitute(environ)
        except KeyError as error:
            raise SystemExit(
                f"evidence: {report.report}: set {error.args[0]}, as reports.yaml says"
            ) from None
        words = [_find_file(word) for word in shlex.split(text)]
        if words[0] == "pytest":
            words = [sys.executable, "-m", *words, f"--junitxml={junit}"]
        elif words[0] == "make":
            words.append(f"ARGS=--junitxml={junit}")
        elif words[0] == "python":
            words[0] = sys.executable
        else:
            words = [sys.executable, "-m", "moedoctor", *words, "--format", "json", "-o", str(file)]
        if report.first:
            subprocess.run(["bash", "-c", report.first], env=environ, cwd=ROOT, check=False)
        # What is late gets SIGINT, so that it writes what finished.
        late = ["timeout", "--signal", "INT", "--kill-after", "20", str(limit)] if limit else []
        code = subprocess.run([*late, *words], env=environ, cwd=ROOT, check=False).returncode
        if report.is_of_tests and junit.is_file():
            file.write_text(json.dumps(summarize_tests(junit, report.command, code), indent=1) + "\n")
        elif code not in (0, 1):
            print(f"evidence: {report.report}: exit code {code}", file=sys.stderr)


def _find_file(word: str) -> str:
    """Return a word whose path ends with ``/*`` with the first file there; MoE kernels come before others."""
    name, equals, path = word.rpartition("=")
    found = glob.glob(path) if path.endswith("/*") else []
    found.sort(key=lambda file: ("moe_C" not in Path(file).name, file))
    return f"{name}{equals}{found[0]}" if found else word


def summarize_tests(junit: Path, command: str, code: int) -> dict[str, Any]:
    """Return the report of a run of tests; a run that was cut short has a failure more."""
    from moedoctor.environment import collect
    from moedoctor.origin import record_origin

    names: dict[str, list[str]] = {"failed": [], "skipped": [], "passed": []}
    outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    for case in ElementTree.parse(junit).iter("testcase"):
        outcome = next((outcomes[child.tag] for child in case if child.tag in outcomes), "passed")
        names[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    if code not in (0, 1):
        names["failed"].append(f"the tests were cut short: exit code {code}")
    counts = {outcome: len(cases) for outcome, cases in names.items()}
    facts = collect()
    return {
        "schema_version": 1,
        "origin": {**record_origin(), "command_line": command},
        "environment": {key: facts.get(key) for key in ("gpu", "capability", "torch", "vllm", "python")},
        "tests": {**counts, "decided": counts["passed"] + counts["failed"], "failures": names["failed"]},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make evidence", description=__doc__)
    parser.add_argument("names", nargs="*", help="reports to make; none only judges those that are stored")
    parser.add_argument(
        "--folder", type=Path, help="where reports are stored; default: that of this GPU and vLLM"
    )
    parser.add_argument("--limit", type=float, help="seconds that a command may take")
    given = parser.parse_args(arguments)
    promises, reports = load_promises(), load_reports()
    for name in given.names:
        if name not in reports:
            parser.error(f"no report is named {name!r}; expected some of {', '.join(reports)}")
    machines = [given.folder] if given.folder else sorted(REPORTS.glob("nvidia-*"))
    upstream = given.folder or REPORTS / "upstream"
    if given.names:
        promises = [promise for promise in promises if promise.report in given.names]
        chosen = [reports[name] for name in given.names]
        if not given.folder:
            machines = [] if all(each.is_of_upstream for each in chosen) else [folder_of_this_machine()]
        for report in chosen:
            run_command(report, upstream if report.is_of_upstream else machines[0], given.limit)
    broken, stored = 0, {file.stem for parent in (REPORTS, TESTS) for file in parent.glob("*/*.json")}
    for folder in dict.fromkeys([*machines, upstream]):
        here = [each for each in promises if given.folder or each.is_of_upstream == (folder == upstream)]
        for promise, verdict, value in judge_folder(folder, here):
            if verdict == "not run" and not (given.names or given.folder) and promise.report in stored:
                continue
            shown = f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)[:80]
            print(f"{folder.name}  {verdict:8} {promise.report}: {promise.words}: {shown} ({promise.bound})")
            broken += verdict == "broken"
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
