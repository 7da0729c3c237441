"""No regular expression of the package is slow: each is measured with 100 kB of the worst text for it."""

import ast
import itertools
import re
import re._compiler as compiler
import re._constants as names
import re._parser as parser
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import moedoctor
from moedoctor.diagnose.triage.cause import load_lines, load_rules
from moedoctor.diagnose.triage.line_text import LINES
from moedoctor.diagnose.triage.signatures import load_data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(signal, "ITIMER_PROF"), reason="no timer of processor time"),
]

PACKAGE = Path(moedoctor.__file__).parent
FUNCTIONS = ("compile", "search", "match", "fullmatch", "finditer", "findall", "sub", "split")
SMALL, LARGE, MOST_SECONDS = 2_000, 100_000, 0.3
SHARES = 4
WHOLE_NAMES = ("_NEEDED", "_PARTS")
"""Passed to another module, which matches whole names with them."""
PIECES = (
    " ", "\n", "a", "1", "-", ".", "/", "=", "_", ":", "<", "'", '"', "[", "(", "\\", "\x1b[", "a-", "a.",
    "a/", "a:", "a@", "1.", "\n ", "x=", "--a ", "://",
)  # fmt: skip


class Expression(NamedTuple):
    """A regular expression of the package."""

    where: str
    pattern: str | bytes
    flags: int
    anchored: bool
    """Only matched from the start of a text."""


def constant(node: ast.expr, known: dict[str, Any]) -> str | bytes | None:
    """Return the text of an expression, with a word for what is only known when it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.JoinedStr):
        parts = (part if isinstance(part, ast.Constant) else part.value for part in node.values)  # type: ignore[attr-defined]
        return "".join(str(constant(part, known) or "word") for part in parts)
    return None


def expressions() -> Iterator[Expression]:
    rules = [(rule.kind, pattern) for rule in load_rules()[0] for pattern in (rule.message, rule.frames)]
    for name, pattern in (*rules, *load_lines().items(), *LINES.items()):
        if pattern:
            start = name in ("bare", "detail", "notebook_frame", "exception", "prefix")
            yield Expression(f"causes.yaml: {name}", pattern.pattern, pattern.flags, start)
    for row in load_data("threads.yaml")["threads"]:
        for pattern in row.get("all") or [row["match"]]:
            yield Expression(f"threads.yaml: {row['thread']}", pattern, re.IGNORECASE, False)
    for file in sorted(PACKAGE.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if "import re\n" not in source:
            continue
        known: dict[str, Any] = {}
        name = ""
        for statement in ast.parse(source).body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                name = getattr(target, "id", "")
                known[name] = constant(statement.value, known)
            for call in ast.walk(statement):
                if not (
                    isinstance(call, ast.Call) and call.args and ast.unparse(call.func).startswith("re.")
                ):
                    continue
                function = ast.unparse(call.func)[3:]
                if function not in FUNCTIONS or (pattern := constant(call.args[0], known)) is None:
                    continue
                used = {function}
                if function == "compile":
                    used = set(re.findall(rf"\b{name}\.({'|'.join(FUNCTIONS)})\b", source))
                words = re.findall(r"re\.([A-Z]+)", ast.unparse(call))
                flags = sum({getattr(re, word) for word in words})
                anchored = bool(used) and used <= {"match", "fullmatch"}
                where = f"{file.relative_to(PACKAGE)}:{call.lineno}"
                yield Expression(where, pattern, flags, anchored or name in WHOLE_NAMES)


def matching(tree: Any, repeat: bool) -> str:
    """Return a short text that nearly matches: with each repetition once, or as seldom as it may be."""
    text = ""
    for kind, value in tree:
        if kind is names.LITERAL:
            text += chr(value)
        elif kind in (names.ANY, names.NOT_LITERAL):
            text += "a"
        elif kind is names.IN:
            text += member(value)
        elif kind in (names.MAX_REPEAT, names.MIN_REPEAT):
            text += matching(value[2], repeat) * max(value[0], int(repeat))
        elif kind is names.SUBPATTERN:
            text += matching(value[3], repeat)
        elif kind is names.BRANCH:
            text += matching(value[1][0 if repeat else -1], repeat)
    return text


def member(choices: Any) -> str:
    """Return a character of a class such as ``[a-z_]``."""
    compiled: Any = compiler.compile(parser.SubPattern(parser.State(), [(names.IN, choices)]))
    letters = "a1 A_-./:=,@" + "".join(map(chr, range(0x20, 0x7F))) + "\n\x1b\x80\u2028\u202e"
    return next(filter(compiled.match, letters), "a")


def hostile(expression: Expression) -> dict[str, str]:
    """Return texts to repeat: pieces of what nearly matches, and the beginnings of a match before a run."""
    tree = parser.parse(expression.pattern, expression.flags)
    pieces = dict.fromkeys(PIECES, "")
    for text in (matching(tree, True), matching(tree, False)):
        for cut in range(1, min(len(text), 60) + 1):
            pieces[text[:cut]] = ""
        for cut, run in itertools.product(range(1, min(len(text), 60)), (" ", "a", "1")):
            pieces.setdefault(run, "")
            pieces[f"{text[:cut]}{run * 3}"] = text[:cut]
    return pieces


def seconds(expression: Expression, piece: str, head: str, size: int) -> float:
    """Return the time of one search of `size` characters; infinity after `MOST_SECONDS` of the processor."""
    repeated: Any = head + piece.removeprefix(head) * (size // len(piece) + 1)
    repeated = repeated.encode() if isinstance(expression.pattern, bytes) else repeated
    compiled: Any = re.compile(expression.pattern, expression.flags)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    # Processor time comes in ticks of up to 10 ms, which is too coarse to rank small searches.
    clock = time.perf_counter if size == SMALL else time.process_time
    started = clock()
    try:
        if expression.anchored:
            compiled.fullmatch(repeated)
        else:
            for _ in compiled.finditer(repeated):
                pass
    except TimeoutError:
        return float("inf")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return clock() - started


def late(*_: object) -> None:
    raise TimeoutError


def is_slow(expression: Expression) -> str | None:
    """Return the text that takes this expression too long, or None."""
    texts = hostile(expression)
    costs = {piece: seconds(expression, piece, head, SMALL) for piece, head in texts.items()}
    for piece in sorted(costs, key=lambda piece: -costs[piece])[:4]:
        # Half of the text takes a quarter of the time if that grows with the square; else the whole is quick.
        is_suspect = seconds(expression, piece, texts[piece], LARGE // 2) > MOST_SECONDS / 5
        if is_suspect and seconds(expression, piece, texts[piece], LARGE) > MOST_SECONDS:
            return f"{expression.where}: {expression.pattern!r} on {piece!r}, repeated"
    return None


@pytest.fixture
def timer() -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, late)
    yield
    signal.signal(signal.SIGPROF, before)


@pytest.mark.usefixtures("timer")
@pytest.mark.parametrize("share", range(SHARES))
def test_no_expression_is_slow_on_100_kilobytes(share: int) -> None:
    """Each share is a test of its own, so that several workers can measure."""
    all_of_them = list(expressions())
    assert len(all_of_them) > 60
    assert [slow for expression in all_of_them[share::SHARES] if (slow := is_slow(expression))] == []


@pytest.mark.usefixtures("timer")
@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        ("([a-z][a-z0-9+.-]*)://", 0),
        ("-x[= ]a=b_([^,]+),code=([^ ]+)", 0),
        (rb"^\s*\.target\s+sm", re.MULTILINE),
    ],
)
def test_a_slow_expression_is_found(pattern: str | bytes, flags: int) -> None:
    assert is_slow(Expression("", pattern, flags, False)) is not None
