"""Questions to the source: right on changed sources, and never "clean" for code that has the failure."""

import ast
import copy
import random
import re
from importlib import metadata
from pathlib import Path

import pytest
from vllm_sources import FILLER, make_code

from moedoctor.entries import load_entries
from moedoctor.entries.entry import Evidence, Question
from moedoctor.plugin.known_code import list_names
from moedoctor.upstream.releases import questions
from moedoctor.upstream.releases.questions import Inquiry, load_answers
from moedoctor.upstream.releases.release_source import ReleaseSource

KEY = "VLLM_MOE_SKIP_PADDING"
ASKED = [
    pytest.param(question, id=f"{entry.id}-{question.name}")
    for entry in load_entries().values()
    for question in entry.questions
]
PYTHON = [each for each in ASKED if each.values[0].file.endswith(".py")]  # type: ignore[attr-defined]


def make(question: Question, *evidence: Evidence, declared: tuple[str, ...] = ()) -> str:
    return make_code(question.file, question.place, evidence, declared)


def ask(
    tmp_path: Path, question: Question, text: str | bytes | None, evidence: Evidence | None = None
) -> str:
    """Ask a made-up source that has `text`, and of other files those that `evidence` wants."""
    for name, there in evidence.files.items() if evidence else ():
        other = tmp_path / name
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("text" if there else "")
    file = tmp_path / question.file
    file.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    return Inquiry(ReleaseSource(tmp_path)).answer(question).value


@pytest.mark.parametrize("question", ASKED)
def test_the_marks_give_the_answers(question: Question, tmp_path: Path) -> None:
    affected = question.affected
    assert ask(tmp_path, question, make(question, affected), affected) == "affected"
    for evidence in question.clean:
        assert ask(tmp_path, question, make(question, evidence), evidence) == "clean"


@pytest.mark.parametrize("question", ASKED)
def test_a_place_that_is_gone_is_unknown(question: Question, tmp_path: Path) -> None:
    assert ask(tmp_path, question, None) == "unknown"
    text = make(question, question.affected)
    if question.place:
        renamed = text.replace(question.place.split(".")[-1], "renamed_place")
        assert ask(tmp_path, question, renamed) == "unknown"
        assert ask(tmp_path, question, "import elsewhere\n") == "unknown"


@pytest.mark.parametrize("question", ASKED)
def test_marks_in_comments_and_docstrings_do_not_count(question: Question, tmp_path: Path) -> None:
    marks = [*question.affected.code, *question.affected.text]
    if not marks or any("'" in mark for mark in marks):
        pytest.skip("this failure shows by what is not there")
    comments = "\n".join(f"# {mark}" for mark in marks)
    text = make(question) + comments + "\n"
    assert ask(tmp_path, question, text) != "affected"


def mutate(tree: ast.Module, chance: random.Random, number: int | None = None) -> None:
    """Change one thing in a file: a name, a constant, an operator, an order. No statement is removed.

    `number` is that of the node in the order of `ast.walk`; without it, one is drawn.
    """
    nodes = list(ast.walk(tree))
    some = [each for each in nodes if not isinstance(each, ast.expr_context | ast.Module)]
    node = chance.choice(some) if number is None else nodes[number]
    if isinstance(node, ast.Name):
        for each in nodes:
            if isinstance(each, ast.Name) and each.id == node.id:
                each.id = "changed"
    elif isinstance(node, ast.Attribute):
        node.attr = "changed"
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        node.name = "changed"
    elif isinstance(node, ast.Constant):
        node.value = "changed" if isinstance(node.value, str) else 7
    elif isinstance(node, ast.Compare):
        node.ops = [ast.NotEq()]
    elif isinstance(node, ast.BinOp):
        node.op = ast.Mult()
    elif isinstance(node, ast.keyword | ast.arg):
        node.arg = "changed"
    elif isinstance(getattr(node, "body", None), list):
        chance.shuffle(node.body)  # type: ignore[attr-defined]


@pytest.mark.parametrize("question", PYTHON)
def test_no_mutation_of_affected_code_is_clean(question: Question, tmp_path: Path) -> None:
    # Code with a failure names it more than once; one change does not hide it.
    words = [word for each in question.clean for word in each.without if word.isidentifier()]
    text = make(question, question.affected)
    if words and question.place != "environment_variables":
        text = text.replace(FILLER[0], "; ".join(f"self.{word}_buffer = 1" for word in words), 1)
    assert ask(tmp_path, question, text, question.affected) == "affected"
    tree, chance = ast.parse(text), random.Random(question.name)
    for _ in range(30):
        changed = copy.deepcopy(tree)
        mutate(changed, chance)
        text = ast.unparse(ast.fix_missing_locations(changed))
        assert ask(tmp_path, question, text) != "clean", text


@pytest.mark.parametrize("question", PYTHON)
def test_no_mutation_of_the_mark_of_a_fix_is_clean(question: Question, tmp_path: Path) -> None:
    for code in (code for evidence in question.clean for code in evidence.code):
        for number, _ in enumerate(ast.walk(ast.parse(code))):
            changed = ast.parse(code)
            mutate(changed, random.Random(number), number)
            mutated = ast.unparse(ast.fix_missing_locations(changed))
            if mutated != ast.unparse(ast.parse(code)):
                text = make(question, Evidence(code=(mutated,)), declared=(KEY,))
                assert ask(tmp_path, question, text) != "clean", text


@pytest.mark.upstream
@pytest.mark.parametrize("question", ASKED)
def test_a_real_source_answers_as_stored_and_no_mutation_of_it_is_clean(question, request):
    source = ReleaseSource.installed(question.package)
    package = "vllm" if question.package == "vllm" else "flashinfer-python"
    stored = load_answers()[request.node.callspec.id.replace("-", ".", 1)]
    answer = Inquiry(source).answer(question).value
    assert answer == stored[metadata.version(package).partition("+")[0]]
    if answer != "affected" or not question.clean:
        return
    own, scope = ast.parse(source.read_text(question.file)), []
    for name in question.place.split(".") if question.place else ():  # the place alone, as files are large
        own_body = (scope[-1] if scope else own).body  # type: ignore[attr-defined]
        own_body[:] = [node for node in own_body if name in list_names(node)]
        scope += own_body[-1:]
    chance = random.Random(question.name)
    for _ in range(100):
        changed = copy.deepcopy(own)
        mutate(changed, chance)
        ast.fix_missing_locations(changed)
        asked = Inquiry(source, {question.file: changed}).answer(question).value
        assert asked != "clean", ast.unparse(changed)


@pytest.mark.parametrize("question", [each for each in ASKED if each not in PYTHON])
def test_cuda_code_that_is_changed_is_unknown(question: Question, tmp_path: Path) -> None:
    text = make(question, question.affected)
    reindented = text.replace("{", "\n{\n").replace(";", "; // } as before\n  /* { */")
    assert ask(tmp_path, question, reindented) == "affected"
    (mark,) = question.affected.code
    for word in set(re.findall(r"\w+|==|\{|;", mark)):
        assert ask(tmp_path, question, text.replace(mark, mark.replace(word, "changed"))) == "unknown"
    for hostile in (text + "(" * 100_000, f"{question.place}(" * 60_000, '"' * 99_999, "/*" * 99_999):
        assert ask(tmp_path, question, hostile) in ("affected", "unknown")
    assert ask(tmp_path, question, text + " " * (1 << 20)) == "unknown"


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00",
        b"\x00" * 100,
        b"(" * 100_000,
        b"x = " + b"-" * 100_000 + b"1",
        b"x = " + b"a." * 20_000 + b"b",
        b"if a:\n" + b"".join(b" " * depth + b"if a:\n" for depth in range(1, 200)),
        b"def f(:\n",
    ],
)
def test_hostile_files_are_unknown(text: bytes, tmp_path: Path) -> None:
    for question in (each.values[0] for each in ASKED):
        assert ask(tmp_path, question, text) == "unknown"


def test_a_reading_is_that_of_the_newest_release_with_these_answers(tmp_path, monkeypatch):
    entry = load_entries()["MD009"]
    (question,) = entry.questions
    stored = {"1": "affected", "2": "clean", "3": "clean"}
    table = {"MD009.asserts": stored}
    monkeypatch.setattr(questions, "load_answers", lambda: table)
    for evidence, release in ((question.affected, "1"), (question.clean[0], "3"), (None, None)):
        text = make(question, evidence) if evidence else "x = 1\n"
        ask(tmp_path, question, text)
        assert Inquiry(ReleaseSource(tmp_path)).read(entry).release == release
