"""The error that ended a server: its root among chains, ranks and wrappers, and its class."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.diagnose.triage.cause import Cause, Errors, load_rules
from moedoctor.diagnose.triage.log_text import Lines
from moedoctor.diagnose.triage.signatures import load_clues, load_data
from moedoctor.diagnose.triage.triage import triage
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.text import load_yaml

LOGS = Path(__file__).parent / "logs"
ENGINES = load_yaml("tests.diagnose.triage", "engines.yaml")
"""Name of a log in ``logs`` -> class and beginning of the root error."""


def find(text: str) -> Cause | None:
    errors = Errors()
    for lines, numbers, _ in Lines(io.BytesIO(text.encode())):
        errors.read(lines, numbers)
    return errors.find_cause()


def find_root(text: str) -> Cause:
    found = find(text)
    assert found is not None
    return found


@pytest.mark.parametrize("log", sorted(LOGS.glob("*/*.log")), ids=lambda log: f"{log.parent.name}-{log.stem}")
def test_the_root_and_class_of_each_engine(log: Path) -> None:
    text = log.read_text(encoding="utf-8")
    found = find(text)
    expected = next((value for name, value in ENGINES.items() if re.fullmatch(name, log.stem)), None)
    if expected is None:
        assert found is None
        assert not log.stem.startswith("healthy") or triage(io.BytesIO(text.encode())).error is None
        return
    assert found is not None
    assert [found.kind, found.excerpt[: len(expected[1])]] == expected
    assert expected[1] in text.splitlines()[found.line - 1]
    assert found.place or log.stem in ("no_folder",)


CRASHES: dict[str, dict[str, Any]] = json.loads((LOGS.parent / "crashes" / "labels.json").read_text("utf-8"))


@pytest.mark.parametrize("name", sorted(CRASHES))
def test_the_root_and_class_of_what_people_paste(name: str) -> None:
    """Texts and labels are by somebody who did not know the rules."""
    label = CRASHES[name]
    text = (LOGS.parent / "crashes" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    found = find("\n".join(text))
    if found is None:
        assert (label["kind"], label["root"]) == ("none", None)
        return
    assert found.kind in (label["kind"], *label["also"])
    shown = " ".join(text[found.line - 1 : found.line + 4])  # a message may go on in the next lines
    assert label["root"][:60] in shown


PREFIXES = (
    "",
    "(EngineCore pid=7) ERROR 11-28 10:00:00 [core.py:9] ",
    "vllm-1  | (Worker_TP1 pid=8) ",
    "[rank3]: ",
    "2026-11-28 10:00:00.123 | ERROR    | vllm.engine:run:10 - ",
    "ERROR:root:",
)
WRAPPERS = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
    "Exception: WorkerProc initialization failed due to an exception in a background process. See trace",
    "torch.distributed.DistBackendError: Connection closed by peer",
)
HEAD = "Traceback (most recent call last):"
CAUSE = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"
HOSTILE = (
    HEAD,
    '  File "x.py", line 1, in f',
    "ValueError: a",
    "(W pid={}) ValueError: b",
    f"(W pid={{}}) {HEAD}",
    f"{'9' * 179}{{}}x File 'x.py', line 1, in f".replace("'", '"'),
)
MESSAGES = st.sampled_from(
    [
        "KeyError: 'layers.0.experts.w2_weight'",
        "ValueError: no such thing",
        "AssertionError",
        "x.y.OddError: é",
    ]
)


def traceback(message: str, prefix: str = "", depth: int = 2) -> list[str]:
    frames = [
        line
        for at in range(depth)
        for line in (
            f'  File "/usr/lib/python3/site-packages/vllm/m{at}.py", line {at + 1}, in f{at}',
            "    raise ValueError(",
            "          ^^^^^^^^^^^",
        )
    ]
    return [prefix + line for line in (HEAD, *frames, message)]


@given(
    MESSAGES, st.sampled_from(PREFIXES), st.integers(1, 90), st.lists(st.sampled_from(WRAPPERS), max_size=3)
)
def test_wrappers_and_chains_lead_to_the_root(root, prefix, depth, wrappers):
    lines = ["INFO the server starts", *traceback(root, prefix, depth)]
    line = len(lines)
    lines += [prefix, prefix + CAUSE, prefix, *traceback("RuntimeError: loading failed", prefix)]
    for wrapper in wrappers:
        lines += ["INFO shutdown", *traceback(wrapper)]
    found = find_root("\n".join(lines))
    assert (found.line, found.excerpt) == (line, root)
    assert found.place == f"vllm/m{depth - 1}.py:{depth}, in f{depth - 1}"


@pytest.mark.parametrize("joint", ["\\n", " "])
def test_a_traceback_in_one_line_is_read(joint: str) -> None:
    found = find_root(joint.join(["{'log': 'ready", *traceback("ValueError: no such thing")]))
    assert (found.excerpt, found.place) == ("ValueError: no such thing", "vllm/m1.py:2, in f1")


def test_an_assertion_without_a_message_shows_the_statement_of_its_own_frame() -> None:
    begin, statement = traceback("AssertionError", depth=1)[:2], "    assert a.size == b.size"
    for inner, shown in ([], "AssertionError: assert a.size == b.size"), (begin[1:], "AssertionError"):
        found = find_root("\n".join([*begin, statement, *inner, "AssertionError"]))
        assert found.excerpt == shown


@given(st.randoms(use_true_random=False), st.integers(2, 5))
def test_ranks_that_write_at_once_are_told_apart(random: object, ranks: int) -> None:
    prefix = "(Worker_TP{0} pid={0}) ERROR 11-28 10:00:00 [a.py:1] "
    errors = [traceback(f"ValueError: rank {rank}", prefix.format(rank), 6) for rank in range(ranks)]
    lines = []
    while any(errors):
        rank = random.choice([at for at, left in enumerate(errors) if left])  # type: ignore[attr-defined]
        lines.append(errors[rank].pop(0))
    found = find_root("\n".join(lines))
    first = min(at for at, line in enumerate(lines, 1) if "ValueError: rank" in line)
    assert (found.line, found.place) == (first, "vllm/m5.py:6, in f5")


@pytest.mark.parametrize(
    ("link", "first", "root"),
    [
        (CAUSE, "KeyError: 'x'", "KeyError: 'x'"),
        (DURING, "KeyError: 'x'", "RuntimeError: second"),
        (DURING, "ValueError: first", "ValueError: first"),
    ],
)
def test_a_probe_is_no_root_of_what_was_raised_while_it_was_handled(link: str, first: str, root: str) -> None:
    text = "\n".join([*traceback(first), "", link, "", *traceback("RuntimeError: second")])
    assert find_root(text).excerpt == root


def test_what_did_not_end_the_server_is_no_cause() -> None:
    warned = traceback("ValueError: no tokenizer", "(Main pid=1) WARNING 11-28 10:00:00 [a.py:1] ")
    ignored = ["Exception ignored in: <function f>", *traceback("TypeError: 'NoneType'")]
    assert find("\n".join([*warned, *ignored, "INFO ready"])) is None
    early = [*traceback("ValueError: a bad request"), *["INFO step"] * 500]
    for prefix in ("", "ERROR:root:"):
        assert find_root("\n".join([*early, *traceback("MemoryError: the end", prefix)])).kind == "memory"


@pytest.mark.parametrize("blocking", [True, False])
def test_the_frame_of_a_fault_is_believed_only_if_launches_block(blocking: bool) -> None:
    fault = "RuntimeError: CUDA error: an illegal memory access was encountered"
    hint = "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    set_by = ["CUDA_LAUNCH_BLOCKING=1 vllm serve m"] if blocking else []
    assert bool(find_root("\n".join([*set_by, *traceback(fault), hint])).note) is not blocking


def test_a_rare_word_at_the_end_of_a_large_log_is_found() -> None:
    noise = "INFO 11-28 10:00:00 [loggers.py:259] Engine 000: Avg throughput: 5 tokens/s\n" * 20_000
    found = find_root(f"{noise}Killed\n")
    assert (found.line, found.kind) == (20_001, "killed")


@pytest.mark.parametrize("line", HOSTILE)
def test_hostile_repetition_is_read_in_bounded_memory(line: str) -> None:
    errors = Errors()
    for number in range(0, 10_000, 1_000):
        numbers = range(number, number + 1_000)
        errors.read([line.format(at).encode() for at in numbers], numbers)
    errors.find_cause()
    sizes = [len(value) for value in vars(errors).values() if hasattr(value, "__len__")]
    assert max(sizes) <= 257
    assert len(errors._found) <= 200 >= len(errors._latest)


def test_every_class_names_a_person_what_to_do_next() -> None:
    rules, owners = load_rules()
    assert len({rule.kind for rule in rules}) >= 12
    assert all(rule.step and rule.says and (rule.message or rule.frames) for rule in rules)
    assert owners


def test_the_cause_is_masked_and_bounded() -> None:
    secret = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7xY9zA1bC3d"
    found = triage(io.BytesIO(f"ValueError: token {secret} {'x' * 5_000}".encode())).error
    assert found is not None
    assert secret not in found.excerpt
    assert len(found.excerpt) < 400


TOLD = [*load_yaml("tests.diagnose.triage", "told.yaml")]
for thread in load_data("threads.yaml")["threads"]:
    step = thread.get("mends") or f"issues/{thread['thread'].partition('#')[2]} reports such a"
    TOLD += [pytest.param({**each, "try": step}, marks=pytest.mark.slow) for each in thread.get("like", ())]


@pytest.mark.parametrize("row", TOLD, ids=lambda row: row["text"][:40])
def test_what_a_text_tells_has_a_class_and_a_step_of_its_own(row: dict[str, str | None]) -> None:
    answer = triage(io.BytesIO(str(row["text"]).encode()))
    found = answer.error
    assert {row["id"]} <= {finding.id for finding in answer.findings} if "id" in row else True
    assert (found.kind if found else None) == row["kind"]
    assert not found or (row.get("try") or "") in found.next_step
    assert not found or (row.get("avoid") or "\0") not in found.next_step
    assert not found or (row.get("excerpt") or "") in found.excerpt


def test_threads_upstream_are_named_for_releases_that_may_have_the_error() -> None:
    rows = load_data("threads.yaml")["threads"]
    shown = {row["thread"] for row in rows if "like" in row}
    assert {row["thread"] for row in rows} - shown <= {"vllm#50454"}
    for row in load_data("threads.yaml")["threads"]:
        assert {row[key] for key in ("since", "fixed") if key in row} <= {*load_releases()}
        assert {*row.get("needs", "").split("+")} - {""} <= {*load_clues()}
    report = "After the upgrade to vLLM {} DeepSeek-V4 returns only repeated <|begin_of_sentence|> tokens"
    for release, named in (("0.27.1", False), ("0.28.0", True), ("0.33.0", True)):
        answer = triage(io.BytesIO(report.format(release).encode())).error
        assert answer is not None
        assert ("issues/55486" in answer.next_step) == named
