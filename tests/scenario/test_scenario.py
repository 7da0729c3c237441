"""Scenario files: what a good one becomes, what contradicts the catalogue, and what no input may do."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario_fakes import BASE, CLAIM, FAULTS, FULL, HEAD, load_text, subject_kind

from moedoctor.results import CaseVerdict, Tier
from moedoctor.scenario import file as module
from moedoctor.scenario.file import ScenarioError, load, schema

TESTS = Path(__file__).parent.parent


def test_a_full_file(tmp_path: Path) -> None:
    scenario = load_text(tmp_path, FULL)
    assert (scenario.id, scenario.name, scenario.title) == ("MD001", "nan_routing", "NaN router logits")
    assert (scenario.file, scenario.line) == (str(tmp_path / "a.yaml"), 3)
    assert scenario.subjects == ("faulty", "fixed", "vllm@0.19.1")
    assert scenario.tiers == (Tier.KERNEL, Tier.MODEL)
    assert scenario.timeout == 90.0
    assert len(scenario.points) == 6
    assert scenario.expect == {"faulty": CaseVerdict.REPRODUCED, "vllm@0.19.1": CaseVerdict.REPRODUCED}
    plain, share = scenario.claims
    assert (plain.key, plain.text, plain.source, plain.thresholds) == ("plain", "plain text", "somewhere", {})
    assert share.thresholds == {"min_share": 0.99, "max_rows": 3.0}
    assert (plain.line, share.line) == (17, 20)


def test_defaults(tmp_path: Path) -> None:
    scenario = load_text(tmp_path, BASE)
    assert scenario.subjects == ("faulty", "fixed", "installed")
    assert scenario.tiers == (Tier.MODEL, Tier.KERNEL)
    assert scenario.timeout == 60.0
    assert scenario.expect == {"faulty": CaseVerdict.REPRODUCED, "fixed": CaseVerdict.CLEAN}
    assert scenario.claims == ()


def test_a_scenario_is_frozen_and_travels_to_a_child(tmp_path: Path) -> None:
    scenario = load_text(tmp_path, FULL)
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    with pytest.raises(dataclasses.FrozenInstanceError):
        scenario.id = "MD002"  # type: ignore[misc]


def test_an_error_travels_too() -> None:
    error = pickle.loads(pickle.dumps(ScenarioError("a.yaml", 3, "text")))
    assert (str(error), error.file, error.line, error.message) == ("a.yaml:3: text", "a.yaml", 3, "text")


THRESHOLDS = BASE + CLAIM + "    thresholds:\n      min_share: 1\n"
PLAIN = "claims:\n- {key: plain, text: a, source: b}\n"

# What is wrong, the file, the line of the error, a part of the message.
BAD = [
    ("unknown id", BASE.replace("MD001", "MD03"), 1, "id: unknown id 'MD03', did you mean MD00"),
    ("id in lower case", BASE.replace("MD001", "md001"), 1, "unknown id 'md001', did you mean MD001?"),
    ("strange id", BASE.replace("MD001", "zz"), 1, "unknown id 'zz', expected one of MD001, MD002"),
    ("long id", BASE.replace("MD001", "M" * 90), 1, "M… (90 characters)'"),
    ("other name", BASE.replace("nan_routing", "nan"), 2, "name: 'nan' is not MD001, expected nan_routing"),
    (
        "name of another",
        BASE.replace("nan_routing", "unpinned_copy"),
        2,
        "is not MD001, expected nan_routing",
    ),
    ("subject", BASE + "subjects:\n- fixed\n- fauly\n", 7, "unknown subject 'fauly', did you mean faulty?"),
    ("subject of a plug-in", BASE + "subjects: [emulatr]\n", 5, "did you mean emulator?"),
    ("release", BASE + "subjects: [vllm@1.1.1]\n", 5, "'vllm@1.1.1', did you mean vllm@X.Y.Z?"),
    ("strange subject", BASE + "subjects: [zz]\n", 5, "expected one of faulty, fixed, installed, vllm@X.Y.Z"),
    (
        "subject twice",
        BASE + "subjects: [fixed, faulty,\n fixed]\n",
        6,
        "subjects[2]: 'fixed' is there twice",
    ),
    (
        "expected subject",
        BASE + "expect:\n  fixd: clean\n",
        6,
        "expect.fixd: unknown subject 'fixd', did you",
    ),
    ("tier", BASE + "tiers: [engine]\n", 5, "tiers[0]: MD001 has no tier engine, expected model, kernel"),
    ("tier twice", BASE + "tiers: [model, model]\n", 5, "tiers[1]: 'model' is there twice"),
    ("claim", BASE + CLAIM.replace("same_", "sane_"), 6, "'sane_expert', did you mean same_expert?"),
    ("claim twice", BASE + PLAIN + PLAIN.split("\n")[1], 7, "claims[1].key: 'plain' is there twice"),
    ("no thresholds", BASE + CLAIM, 6, "claims[0].thresholds.min_share: is missing, expected a number"),
    ("too few thresholds", THRESHOLDS, 9, "claims[0].thresholds.max_rows: is missing, expected a number"),
    ("other threshold", THRESHOLDS + "      max_row: 1\n", 11, "unknown threshold, did you mean max_rows?"),
    ("threshold unasked", BASE + PLAIN.replace("}", ", thresholds: {x: 1}}"), 6, "expected nothing here"),
    ("duplicate key", BASE + "timeout: 1\nid: MD002\n", 6, "duplicate key 'id', first on line 1"),
    ("no YAML", BASE + "a: [\n", 6, "not valid YAML"),
    ("empty", "", 1, "is empty"),
    ("shape", BASE + "subject: [faulty]\n", 5, "subject: unknown key, did you mean subjects?"),
    ("point", BASE + "matrix:\n- experts: 1\n", 6, "parameters.top_k: 2 is more than experts 1"),
]


@pytest.mark.parametrize(("text", "line", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD])
def test_bad_file(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_text(tmp_path, text)
    error = caught.value
    assert message in error.message
    assert error.line == line
    assert error.file == str(tmp_path / "a.yaml")
    assert str(error) == f"{error.file}:{line}: {error.message}"


def test_subjects_expected_but_not_listed_are_allowed(tmp_path: Path) -> None:
    # The command line adds releases; what is expected of them stands in the file all the same.
    scenario = load_text(tmp_path, BASE + "expect: {vllm@0.19.1: reproduced}\n")
    assert scenario.expect == {"vllm@0.19.1": CaseVerdict.REPRODUCED}


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    error = ScenarioError("a\nb\x1b[2J.yaml", 7, "line\r\nline \u202e " + "x" * 5000)
    assert str(error).startswith(r"a\nb\x1b[2J.yaml:7: line\r\nline \u202e xxx")
    assert str(error).isprintable()
    assert len(str(error)) < 500


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "new\nline\x1b.yaml", "no such file")):
        with pytest.raises(ScenarioError, match=message) as caught:
            load(path, faults=FAULTS, subject_kind=subject_kind)
        assert caught.value.line == 1
        assert caught.value.file == str(path)
        assert str(caught.value).isprintable()


def assert_scenario_or_error(folder: Path, data: bytes) -> None:
    try:
        scenario = load_text(folder, data)
    except ScenarioError as raised:
        error = raised
    else:
        assert scenario.points
        return
    assert str(error).isprintable()
    assert 1 <= error.line <= data.count(b"\n") + data.count(b"\r") + 1


@settings(max_examples=150)
@given(st.binary(max_size=4096) | st.text(max_size=500).map(str.encode))
def test_any_bytes_are_a_scenario_or_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    assert_scenario_or_error(tmp_path_factory.getbasetemp(), data)


DAMAGE = [
    *"[]{}:'\"\t\n#\0é0",
    "",
    "- ",
    "  ",
    "null",
    "1e999",
    "yes",
    "&a ",
    "*a",
    "!x ",
    "[[1]]",
    "{a: 1}",
    "-1",
]


@settings(max_examples=200)
@given(st.integers(0, len(FULL)), st.integers(0, 12), st.sampled_from(DAMAGE))
def test_a_damaged_file_is_a_scenario_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, cut: int, put: str
) -> None:
    assert_scenario_or_error(tmp_path_factory.getbasetemp(), (FULL[:at] + put + FULL[at + cut :]).encode())


WORST = {
    "unknown keys": BASE + "".join(f"key{i}: 1\n" for i in range(4900)),
    "subjects": BASE + f"subjects: [{'fixed, ' * 9000}]\n",
    "tiers": BASE + f"tiers: [{'model, ' * 9000}]\n",
    "bad tiers": BASE + f"tiers: [{'m, ' * 9000}]\n",
    "claims": BASE + "claims:\n" + "- {key: x, text: a, source: b}\n" * 1400,
    "empty claims": BASE + "claims: [" + "{}, " * 9000 + "]\n",
    "dimensions": BASE + f"matrix: [{{{', '.join(f'p{i}: [1, 2, 3]' for i in range(1900))}}}]\n",
    "blocks": BASE + "matrix: [" + "{}, " * 1999 + "{tokens: -1}]\n",
    "points": HEAD + f"parameters: {{tokens: [{'1, ' * 1999} -1]}}\n",
    "bad values": HEAD + f"parameters: {{tokens: [{'[1], ' * 4900}]}}\n",
    "long key": BASE + "k" * 120_000 + ": 1\n",
    "long text": BASE.replace("A title", "t" * 120_000),
    "long id": BASE.replace("MD001", "M" * 120_000),
}

CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from scenario_fakes import FAULTS, subject_kind
from moedoctor.scenario.file import ScenarioError, load
for path in map(Path, sys.argv[2:]):
    began = time.perf_counter()
    try:
        load(path, faults=FAULTS, subject_kind=subject_kind)
    except ScenarioError as error:
        print(round(time.perf_counter() - began, 3), path.name, error.message[:70])
assert "torch" not in sys.modules
# ru_maxrss would count the parent's peak too: Linux keeps it over fork and exec.
status = Path('/proc/self/status').read_text()
print(int(status.partition('VmHWM:')[2].split()[0]) // 1024)
"""


def test_the_worst_files_are_refused_within_a_second_and_200_mb(tmp_path: Path) -> None:
    for name, text in WORST.items():
        (tmp_path / name).write_text(text)
    files = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(TESTS), *map(str, files)],
        capture_output=True,
        text=True,
        check=True,
    )
    *times, megabytes = done.stdout.splitlines()
    assert len(times) == len(WORST), done.stdout
    assert max(float(line.split()[0]) for line in times) < 0.8, done.stdout
    assert int(megabytes) < 200


def test_the_schema_in_the_repository_is_up_to_date() -> None:
    assert module.main(["--check", str(TESTS.parent / "scenarios" / "schema.json")]) == 0


def test_schema_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    assert module.main(["--check", str(file)]) == 1
    assert module.main([str(file)]) == 0
    assert json.loads(file.read_text()) == schema()
    assert module.main(["--check", str(file)]) == 0
    assert capsys.readouterr().err.count("\n") == 1
    file.write_text(file.read_text().replace("MD001", "MD002"))
    assert module.main(["--check", str(file)]) == 1
    assert f"run: python -m moedoctor.scenario.file {file}" in capsys.readouterr().err
    assert module.main([]) == 2
    assert module.main(["a", "b"]) == 2
