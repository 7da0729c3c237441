"""Scenario files: what a good one becomes, what is refused in which words, and the schema for editors."""

import itertools
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes_seen import run
from scenario_fakes import BASE, CLAIM, FULL, HEAD, load_text

from moedoctor.results import CaseVerdict, ClaimVerdict, Scalar, Tier
from moedoctor.scenario import file as module
from moedoctor.text import MAX_YAML_BYTES

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


def test_the_figures_of_a_claim_stay_with_the_reason_why_it_is_untested() -> None:
    words = {"key": "a", "text": "b", "source": "c", "subject": "d", "conditions": "e"}
    figures = (ClaimVerdict.REFUTED, "+55 %")
    b200 = module.ClaimDocument(**words, gpu="B200")
    assert b200.qualify(*figures, "NVIDIA B200") == figures
    why = "the claim is about B200, and NVIDIA H200 was measured: +55 %"
    assert b200.qualify(*figures, "NVIDIA H200") == (ClaimVerdict.UNTESTED, why)
    untested = (ClaimVerdict.UNTESTED, "no engine ran")
    assert module.ClaimDocument(**words, stand_in="a toy").qualify(*untested, None) == untested


def test_defaults(tmp_path: Path) -> None:
    scenario = load_text(tmp_path, BASE)
    assert scenario.subjects == ("faulty", "fixed", "installed")
    assert scenario.tiers == (Tier.MODEL, Tier.KERNEL)
    assert scenario.timeout == 60.0
    assert scenario.expect == {"faulty": CaseVerdict.REPRODUCED, "fixed": CaseVerdict.CLEAN}
    assert scenario.claims == ()


def test_a_title_is_made_one_line_and_with_the_name_may_be_left_out(tmp_path: Path) -> None:
    scenario = load_text(tmp_path, "id: MD001\nparameters: {tokens: 4}\n")
    assert (scenario.name, scenario.title) == ("nan_routing", "A fake")
    assert load_text(tmp_path, BASE.replace("A title", ">\n  two\n  words")).title == "two words"


def points(folder: Path, text: str) -> list[dict[str, Scalar]]:
    return [dict(point) for point in load_text(folder, text).points]


def test_without_a_matrix_there_is_the_product_of_the_parameters(tmp_path: Path) -> None:
    expected = {"tokens": 4, "experts": 8, "top_k": 2, "router": "softmax", "scale": 1.0, "note": None}
    assert points(tmp_path, BASE) == [expected]
    several = points(tmp_path, HEAD + "parameters: {tokens: [3, 1, 2]}\n")
    assert [point["tokens"] for point in several] == [3, 1, 2]


VALUES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
BLOCK = st.dictionaries(st.sampled_from(["tokens", "experts", "scale"]), VALUES, max_size=3)


@given(st.lists(BLOCK, min_size=1, max_size=4))
@example([{}, {"scale": [1]}])  # a default that is written out
def test_each_block_is_merged_and_expanded_in_the_order_of_the_file(tmp_path_factory, blocks):
    shared = {"parameters": {"tokens": 5, "experts": 50, "top_k": 1}, "matrix": blocks}
    shown = points(tmp_path_factory.getbasetemp(), HEAD + yaml.safe_dump(shared, sort_keys=False))
    found = [(point["tokens"], point["experts"], point["scale"]) for point in shown]
    expected = []
    for block in blocks:
        merged = {"tokens": [5], "experts": [50]} | block
        for values in itertools.product(*merged.values()):
            point = {"scale": 1, **dict(zip(merged, values, strict=True))}
            expected.append((point["tokens"], point["experts"], point["scale"]))
    assert found == list(dict.fromkeys(expected))


LIST = "must be a list ([a, b]), not "
MAPPING = "must be a mapping (key: value), not "
TEXT = "must be text (quote it), not "

INTEGER = "parameters.tokens: must be a valid integer, not "
THRESHOLDS = BASE + CLAIM + "    thresholds:\n      min_share: 1\n"
PLAIN = "claims:\n- {key: plain, text: a, source: b}\n"

# The file, the line of the error, a part of the message.
BEYOND_SCHEMA = [  # what a JSON schema cannot say: text that is blank or not a single line
    (BASE.replace("A title", "'  '"), 3, "title: must not be empty"),
    (BASE.replace("A title", '"a\\nb"'), 3, "title: must be one line without control characters"),
]
BAD_SHAPE = [
    ("\nMD001\n", 2, MAPPING + "'MD001'"),
    ("title: A title\n", 1, "id: is missing, expected a value"),
    (BASE + "subject: [faulty]\n", 5, "subject: unknown key, did you mean subjects?"),
    (BASE.replace("title", "titel"), 3, "titel: unknown key, did you mean title?"),
    (BASE + "k" * 900 + ": 1\n", 5, "k" * 40 + "… (900 characters): unknown key"),
    (BASE.replace("MD001", "5"), 1, "id: " + TEXT + "5"),
    (BASE + "timeout: 0\n", 5, "timeout: must be greater than 0, not 0"),
    (BASE + "subjects: faulty\n", 5, "subjects: " + LIST + "'faulty'"),
    (BASE + f"subjects: [{'a, ' * 101}]\n", 5, "subjects: must have at most 100 items"),
    (BASE + "tiers: []\n", 5, "tiers: must not be empty"),
    (BASE + "tiers: [model, model]\n", 5, "tiers[1]: 'model' is there twice"),
    (BASE + "subjects: [fixed, faulty,\n fixed]\n", 6, "subjects[2]: 'fixed' is there twice"),
    (BASE + "tiers:\n- modle\n", 6, "tiers[0]: must be 'model', 'library', 'kernel' or 'engine', not"),
    (BASE + "expect:\n  faulty: x\n", 6, "expect.faulty: must be 'reproduced' or 'clean', not 'x'"),
    (HEAD + "parameters: {a: []}\n", 4, "parameters.a: must not be empty"),
    (BASE + "claims:\n- key: plain\n", 6, "claims[0].text: is missing, expected a value"),
    (BASE + CLAIM + "    thresholds: {a: b}\n", 9, "claims[0].thresholds.a: must be a valid n"),
]
BAD_VALUE = [
    (BASE.replace("MD001", "MD03"), 1, "id: unknown id 'MD03', expected one of MD00"),
    (BASE.replace("nan_routing", "nan"), 2, "name: 'nan' is not MD001, expected nan_routing"),
    (BASE + "subjects:\n- fixed\n- fauly\n", 7, "unknown subject 'fauly', did you mean faulty?"),
    (BASE + "tiers: [engine]\n", 5, "tiers[0]: MD001 has no tier engine, expected model, kernel"),
    (BASE + CLAIM.replace("same_", "sane_"), 6, "'sane_expert', did you mean same_expert?"),
    (BASE + PLAIN + PLAIN.split("\n")[1], 7, "claims[1].key: 'plain' is there twice"),
    (BASE + CLAIM, 6, "claims[0].thresholds.min_share: is missing, expected a number"),
    (THRESHOLDS, 9, "claims[0].thresholds.max_rows: is missing, expected a number"),
    (THRESHOLDS + "      max_row: 1\n", 11, "unknown threshold, did you mean max_rows?"),
    (BASE + PLAIN.replace("}", ", thresholds: {x: 1}}"), 6, "expected nothing here"),
    (BASE + "timeout: 1\nid: MD002\n", 6, "duplicate key 'id', first on line 1"),
]
BAD_POINT = [
    (HEAD, 1, "parameters.tokens: is missing, expected a value"),
    (HEAD + "matrix:\n- {tokens: 1}\n- {top_k: 1}\n", 6, "parameters.tokens: is missing"),
    (BASE + "matrix:\n- {}\n- {topk: 8}\n", 7, "parameters.topk: unknown key, did you mean top_k?"),
    (HEAD + "parameters: {tokens: '4'}\n", 4, INTEGER + "'4'"),
    (HEAD + "parameters:\n  tokens:\n  - 1\n  - -1\n", 7, "parameters.tokens: must be greater than or eq"),
    (BASE + "matrix: [{router: x}]\n", 5, "parameters.router: must be 'softmax' or 'sigmoid', not 'x'"),
    (BASE + "matrix: [{note: loud}]\n", 5, "parameters.note: must not be loud"),
    (BASE + "matrix:\n- top_k:\n  - 8\n  - 16\n", 8, "parameters.top_k: 16 is more than experts 8"),
    (HEAD + "parameters:\n  top_k: 9\n  tokens: 1\n", 5, "parameters.top_k: 9 is more than exp"),
    (BASE + "matrix:\n- {}\n- tokens: 13000\n", 7, "parameters: these values bring bad luck"),
]


BAD = [*BAD_SHAPE, *BEYOND_SCHEMA, *BAD_VALUE, *BAD_POINT]


@pytest.mark.parametrize(("text", "line", "message"), [pytest.param(*row, id=row[2]) for row in BAD])
def test_bad_file(tmp_path: Path, text: str, line: int, message: str) -> None:
    place, shown = refusal(tmp_path, text)
    assert message in shown
    assert place == line


def refusal(folder: Path, text: str) -> tuple[int, str]:
    """Return the line and the message of the error."""
    with pytest.raises(module.ScenarioError) as caught:
        load_text(folder, text)
    line, _, message = str(caught.value).removeprefix(f"{folder / 'a.yaml'}:").partition(": ")
    return int(line), message


def test_a_matrix_is_counted_before_it_is_expanded_and_the_limit_is_for_all_blocks(tmp_path: Path) -> None:
    block = ", ".join(f"p{index}: [1, 2, 3]" for index in range(1000))
    expected = "matrix: expands to over a billion points, expected at most 2000"
    assert refusal(tmp_path, BASE + f"matrix: [{{{block}}}]\n") == (5, expected)
    half = module.MAX_POINTS // 2
    blocks = [{"tokens": list(range(half))}, {"tokens": list(range(half, module.MAX_POINTS))}]
    assert len(points(tmp_path, BASE + yaml.safe_dump({"matrix": blocks}))) == module.MAX_POINTS
    line, message = refusal(tmp_path, BASE + yaml.safe_dump({"matrix": [*blocks, {"experts": 9}]}))
    assert (line, message) == (5, "matrix: expands to 2001 points, expected at most 2000")
    shared = "parameters: {tokens: [1, 2, 3], experts: [" + "8, " * 700 + "8]}\n"
    message = "parameters: expands to 2103 points, expected at most 2000"
    assert refusal(tmp_path, HEAD + shared) == (4, message)


def test_subjects_expected_but_not_listed_are_allowed(tmp_path: Path) -> None:
    # The command line adds releases; what is expected of them stands in the file all the same.
    scenario = load_text(tmp_path, BASE + "expect: {vllm@0.19.1: reproduced}\n")
    assert scenario.expect == {"vllm@0.19.1": CaseVerdict.REPRODUCED}


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    error = module.ScenarioError("a\nb\x1b[2J.yaml", 7, "line\r\nline \u202e " + "x" * 5000)
    assert str(error).startswith(r"a\nb\x1b[2J.yaml:7: line\r\nline \u202e xxx")
    assert str(error).isprintable()
    assert len(str(error)) < 500


def assert_scenario_or_error(folder: Path, data: bytes) -> None:
    try:
        scenario = load_text(folder, data)
    except module.ScenarioError as error:
        shown = str(error)
    else:
        assert scenario.points
        return
    assert shown.isprintable()
    line = int(shown.removeprefix(f"{folder / 'a.yaml'}:").partition(":")[0])
    assert 1 <= line <= len(data.decode("utf-8", "replace").splitlines()) + 1


PIECES = st.sampled_from([*"abcyn019.-_+:?,[]{}#&*!|>'\"%@`\\~=<x/ \t\n\r\ufeff\x85é", "\n  ", "- ", "---\n"])
TEXTS = st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=500)


@settings(max_examples=150)
@given(st.binary(max_size=4096) | TEXTS.map(str.encode))
def test_any_bytes_are_a_scenario_or_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    assert_scenario_or_error(tmp_path_factory.getbasetemp(), data)


DAMAGE = [*"[]{}:'\"\t\n#\0é0", "", "- ", "  "]
DAMAGE += ["null", "1e999", "yes", "&a ", "*a", "!x ", "[[1]]", "{a: 1}", "-1"]


@settings(max_examples=100)
@given(st.integers(0, len(FULL)), st.integers(0, 12), st.sampled_from(DAMAGE))
def test_a_damaged_file_is_a_scenario_or_an_error(tmp_path_factory, at, cut, put):
    assert_scenario_or_error(tmp_path_factory.getbasetemp(), (FULL[:at] + put + FULL[at + cut :]).encode())


WORST = {
    "unknown keys": BASE + "".join(f"key{i}: 1\n" for i in range(4900)),
    "subjects": BASE + f"subjects: [{'fixed, ' * 9000}]\n",
    "tiers": BASE + f"tiers: [{'model, ' * 9000}]\n",
    "claims": BASE + "claims:\n" + "- {key: x, text: a, source: b}\n" * 1400,
    "dimensions": BASE + f"matrix: [{{{', '.join(f'p{i}: [1, 2, 3]' for i in range(1900))}}}]\n",
    "blocks": BASE + "matrix: [" + "{}, " * 1999 + "{tokens: -1}]\n",
    "points": HEAD + f"parameters: {{tokens: [{'1, ' * 1999} -1]}}\n",
    "bad values": HEAD + f"parameters: {{tokens: [{'[1], ' * 4900}]}}\n",
    "long key": BASE + "k" * 120_000 + ": 1\n",
}
REPEATED = {  # files of the largest size that is read: a unit, what is before them and behind them
    "mapping": ("a: 1\n", "", ""),
    "complex keys": ("? ", "", ""),
    "braces": ("{", "", ""),
    "braces with keys": ("{a: ", "", ""),
    "shallow brackets": ("[" * 8 + "]" * 8 + ",", "[" * 8, ""),
    "escapes": (r"\x41", '"', '"'),
    "blank lines": ("\n", "", "a"),
    "text lines": ("a\n", "", ""),
    "block text": (" a\n", "|\n", ""),
    "directives": ("%A\n", "", "--- a"),
    "documents": ("---\n", "", ""),
    "comments": ("#\n", "", ""),
}

CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from scenario_fakes import FAULTS, subject_kind
from moedoctor.scenario.file import ScenarioError, load
for path in map(Path, sys.argv[3:]):
    seconds, message = 9.0, None
    for _ in range(3):  # a busy neighbor slows a try down
        began = time.process_time()
        try:
            load(path, faults=FAULTS, subject_kind=subject_kind)
        except ScenarioError as error:
            message = str(error)[-70:]
        seconds = min(seconds, time.process_time() - began)
        if seconds < float(sys.argv[2]):
            break
    if message is not None:
        print(round(seconds, 3), path.name, message)
assert "torch" not in sys.modules
# ru_maxrss would count the parent's peak too: Linux keeps it over fork and exec.
status = Path('/proc/self/status').read_text()
print(int(status.partition('VmHWM:')[2].split()[0]) // 1024)
"""


def work() -> float:
    started = time.process_time()
    sum(number * number for number in range(100_000))
    return time.process_time() - started


def slowness() -> float:
    """Return how many times longer Python takes than on an undisturbed AMD EPYC of 2.25 GHz, at least 1.

    Neighbors on the same processor take clock and caches, which processor time counts as ours.
    """
    return max(1.0, min(work() for _ in range(5)) / 0.0078)


@pytest.mark.slow
def test_the_worst_files_are_refused_within_a_second_and_200_mb(tmp_path: Path) -> None:
    for name, text in WORST.items():
        (tmp_path / name).write_text(text)
    for name, (unit, before, after) in REPEATED.items():
        room = MAX_YAML_BYTES - len(before) - len(after)
        (tmp_path / name).write_text(before + unit * (room // len(unit)) + after)
    files, limit = sorted(tmp_path.iterdir()), 0.8 * slowness()
    done = run([sys.executable, "-c", CHILD, str(TESTS), str(limit), *map(str, files)], check=True)
    *times, megabytes = done.stdout.splitlines()
    assert len(times) == len(WORST) + len(REPEATED), done.stdout
    assert max(float(line.split()[0]) for line in times) < max(limit, 0.8 * slowness()), done.stdout
    assert int(megabytes) < 200


def test_the_schema_is_closed_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(module.make_schema())
    assert module.make_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for part in (module.make_schema(), module.make_schema()["$defs"]["ClaimDocument"]):
        assert part["additionalProperties"] is False
        assert all(value.get("description") for value in part["properties"].values())
    assert set(module.make_schema()["properties"]) == set(module.ScenarioDocument.model_fields)


def test_editors_accept_what_the_loader_accepts(tmp_path: Path) -> None:
    for text in (
        FULL,
        BASE,
        BASE + "tiers: [model]\ntimeout: 0.5\nmatrix: [{scale: [1, 0.5], note: [x, null]}]\n",
    ):
        jsonschema.validate(yaml.safe_load(text), module.make_schema())
        load_text(tmp_path, text)


@pytest.mark.parametrize("text", [pytest.param(row[0], id=row[2]) for row in BAD_SHAPE])
def test_editors_refuse_what_the_loader_refuses(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), module.make_schema())
