"""Asks the source of a vLLM or FlashInfer what a known release's number would tell. Nothing is imported.

The questions are data of the entries. An answer is "clean" only if the source shows it: a place that is gone
or that holds none of the marks is unknown.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moedoctor.entries.entry import Entry, Evidence, Question
from moedoctor.plugin.known_code import is_docstring
from moedoctor.upstream.releases.release_source import ReleaseSource, SourceError, find_place

_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors that `ast` raises for text that is not Python, or that is nested on purpose."""
FLAGS = ("vllm/engine/arg_utils.py", "vllm/entrypoints", "vllm/utils/argparse_utils.py")
"""The files that declare the flags of vLLM's commands, and a folder of such files."""
_CHOICES = {
    "MoEBackend": ("--moe-backend", "vllm/config/kernel.py"),
    "LinearBackend": ("--linear-backend", "vllm/config/kernel.py"),
    "All2AllBackend": ("--all2all-backend", "vllm/config/parallel.py"),
}
"""The type that lists the values of a flag -> the flag, and the file."""
ENVS = "vllm/envs.py"
"""The file that declares the variables."""
_FLASHINFER_NAME = re.compile(r"\bFLASHINFER_[A-Z0-9_]+")
_TOKEN = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"|\w+|[^\w\s]', re.DOTALL)
"""A comment, a string, a word or a sign of CUDA code."""
_MAX_CUDA = 1 << 20
Value = Literal["affected", "clean", "unknown"]


@dataclass(frozen=True)
class Answer:
    value: Value
    where: str
    """``vllm/envs.py:12``; for an unknown answer, what was not found."""


@dataclass(frozen=True)
class Reading:
    """The answers of the source about one entry."""

    package: Literal["vllm", "flashinfer"]
    release: str | None
    """The newest known release whose source gives the same answers; None if there is none."""
    answers: Mapping[str, Answer]
    """Question -> answer, for those that decide."""

    @property
    def where(self) -> str:
        """The files and lines that were read, or the first thing that was not found."""
        unknown = [answer.where for answer in self.answers.values() if answer.value == "unknown"]
        if unknown or self.release is not None:
            return unknown[0] if unknown else ", ".join(each.where for each in self.answers.values())
        answers = ", ".join(f"{name} {answer.value}" for name, answer in self.answers.items())
        return f"no known release gives these answers together: {answers}"


@dataclass(frozen=True)
class Place:
    """A function, class or file that is read."""

    line: int
    find: Callable[[str], Sequence[int]]
    """Gives the lines on which code stands, in any layout."""
    strings: Sequence[tuple[int, str]]
    """Its strings, each with its line."""
    write: Callable[[], str]
    """Gives its code without comments."""


@dataclass
class Inquiry:
    """The source of one vLLM or FlashInfer, with the files that were parsed."""

    source: ReleaseSource
    trees: dict[str, ast.Module | str] = field(default_factory=dict)
    """File -> its syntax tree, or why there is none."""

    def answer(self, question: Question) -> Answer:
        """Return the answer to a question; never raises for the source."""
        try:
            place = self._find_place(question)
            if isinstance(place, str):
                return Answer("unknown", place)
            affected = self._find_evidence(question.file, question.affected, place)
            found = [self._find_evidence(question.file, each, place) for each in question.clean]
        except _UNREADABLE:
            return Answer("unknown", f"{question.file} is nested too deeply")
        clean = next((where for where in found if where), None)
        if affected and not clean:
            return Answer("affected", affected)
        if clean and not affected:
            return Answer("clean", clean)
        changed = f"{question.place} has" if question.place else "it has"
        return Answer("unknown", f"{question.file}:{place.line}: {changed} changed")

    def _find_place(self, question: Question) -> Place | str:
        """Return what a question reads, or one line that says why it is not there."""
        missing = f"there is no {question.place} in {question.file}"
        if question.file.endswith(".py"):
            tree = self.parse(question.file)
            if isinstance(tree, str):
                return tree
            node = find_place(tree, question.place)
            return missing if node is None else _read_python(node)
        try:
            text = self.source.read_text(question.file)
        except SourceError as error:
            return str(error)
        if len(text) > _MAX_CUDA:
            return f"{question.file} is larger than {_MAX_CUDA} characters"
        return _read_cuda(text, question.place) or missing

    def _find_evidence(self, file: str, evidence: Evidence, place: Place) -> str | None:
        """Return where the first mark is, ``vllm/envs.py:12``, or None if one does not hold."""
        lines = [place.find(code) for code in evidence.code]
        lines += [[line for line, string in place.strings if text in string] for text in evidence.text]
        if not all(lines):
            return None
        words = place.write().lower() if evidence.without else ""
        if any(word.lower() in words for word in evidence.without):
            return None
        if any(self.source.has_file(each) is not there for each, there in evidence.files.items()):
            return None
        alone = next((each for each, there in evidence.files.items() if there and not lines), None)
        return alone or f"{file}:{lines[0][0] if lines else place.line}"

    def parse(self, file: str) -> ast.Module | str:
        """Return the syntax tree of a file, or one line that says why there is none."""
        if file not in self.trees:
            try:
                self.trees[file] = ast.parse(self.source.read_text(file))
            except SourceError as error:
                self.trees[file] = str(error)
            except _UNREADABLE:
                self.trees[file] = f"{self.source.path.name}: {file} cannot be parsed"
        return self.trees[file]

    def list_variables(self) -> frozenset[str] | None:
        """Return the variables that envs.py declares; None if it declares them in another way."""
        tree = self.parse(ENVS)
        table = None if isinstance(tree, str) else find_place(tree, "environment_variables")
        if not isinstance(table, ast.Assign | ast.AnnAssign) or not isinstance(table.value, ast.Dict):
            return None
        keys = [key.value for key in table.value.keys if isinstance(key, ast.Constant)]
        return frozenset(key for key in keys if isinstance(key, str))

    def list_flashinfer_variables(self) -> frozenset[str]:
        """Return the variables that Python files of FlashInfer name, but for libraries in its data folder."""
        names: set[str] = set()
        files = self.source.list_files("flashinfer")
        for file in (each for each in files if not each.startswith("flashinfer/data/")):
            with contextlib.suppress(SourceError):
                names.update(_FLASHINFER_NAME.findall(self.source.read_text(file)))
        return frozenset(names)

    def list_choices(self) -> Mapping[str, tuple[str, ...]]:
        """Return the values of the flags that choose backends, for flags with a list of values."""
        choices: dict[str, tuple[str, ...]] = {}
        for name, (flag, file) in _CHOICES.items():
            tree = self.parse(file)
            table = None if isinstance(tree, str) else find_place(tree, name)
            if isinstance(table, ast.Assign) and isinstance(table.value, ast.Subscript):
                values = (node.value for node in ast.walk(table.value) if isinstance(node, ast.Constant))
                choices[flag] = tuple(value for value in values if isinstance(value, str))
        return choices

    def list_flags(self) -> Mapping[str, tuple[str, str]]:
        """Return the flags that the source declares: flag -> (``file:line``, its long form)."""
        flags: dict[str, tuple[str, str]] = {}
        for file in (file for each in FLAGS for file in self.source.list_files(each)):
            tree = self.parse(file)
            for node in ast.walk(tree) if isinstance(tree, ast.Module) else ():
                if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
                    words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                    names = [word for word in words if isinstance(word, str) and word.startswith("-")]
                    long = next((name for name in names if name.startswith("--")), "")
                    for name in names:
                        flags.setdefault(name, (f"{file}:{node.lineno}", long))
                elif isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
                    for part in node.body:
                        if isinstance(part, ast.AnnAssign):
                            name = f"--{ast.unparse(part.target).replace('_', '-')}"
                            flags.setdefault(name, (f"{file}:{part.lineno}", name))
        return flags

    def read(self, entry: Entry) -> Reading:
        """Return what the source says about an entry that has questions."""
        asked = [each for each in entry.questions if each.decides]
        answers = {each.name: self.answer(each) for each in asked}
        given = {name: answer.value for name, answer in answers.items()}
        stored = {name: load_answers()[f"{entry.id}.{name}"] for name in given}
        releases = list(next(iter(stored.values()), ()))
        same = [each for each in releases if {name: row[each] for name, row in stored.items()} == given]
        release = None if "unknown" in given.values() or not same else same[-1]
        return Reading(asked[0].package, release, answers)


@functools.cache
def load_answers() -> Mapping[str, Mapping[str, Value]]:
    """Return the answers of all known releases: question such as ``MD009.asserts`` -> release -> answer."""
    path = Path(__file__).parent / "answers.json"
    table: Mapping[str, Mapping[str, Value]] = json.loads(path.read_text(encoding="utf-8"))
    return table


def _read_python(node: ast.AST) -> Place:
    """Return a function, class or file of Python. Raises RecursionError."""
    nodes = _list_nodes(node)

    def find(code: str) -> list[int]:
        mark, dumped = _parse_mark(code)
        alike = (each for each in nodes if type(each) is type(mark) and ast.dump(each) == dumped)
        return [getattr(each, "lineno", 1) for each in alike]

    constants = [each for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    strings = [(each.lineno, str(each.value)) for each in constants]
    return Place(getattr(node, "lineno", 1), find, strings, lambda: ast.unparse(nodes[0]))


def _read_cuda(text: str, name: str) -> Place | None:
    """Return a function of CUDA code, or the whole text for an empty name; None if it is not there.

    Conditional compilation is not followed: what a place holds under ``#if 0`` counts.
    """
    ends = [match.start() for match in re.finditer("\n", text)]
    tokens = [match for match in _TOKEN.finditer(text) if not match[0].startswith(("//", "/*"))]
    words = [token[0] for token in tokens]
    start, end = _find_body(words, name) if name else (0, len(words))
    lines = [bisect.bisect(ends, token.start()) + 1 for token in tokens[start:end]]
    body = words[start:end]
    if not body:
        return None

    def find(code: str) -> list[int]:
        mark = _TOKEN.findall(code)
        return [line for place, line in enumerate(lines) if body[place : place + len(mark)] == mark]

    strings = [(line, word) for line, word in zip(lines, body, strict=True) if word.startswith('"')]
    return Place(lines[0], find, strings, lambda: " ".join(body))


def _find_body(words: Sequence[str], name: str) -> tuple[int, int]:
    """Return the places of the first body of a function, with its braces; (0, 0) if there is none."""
    ends: dict[int, int] = {}
    open_: list[int] = []
    for place, word in enumerate(words):
        if word in ("(", "{"):
            open_.append(place)
        elif word in (")", "}") and open_:
            ends[open_.pop()] = place + 1
    for place, word in enumerate(words):
        start = ends.get(place + 1, -1) if word == name and words[place + 1 : place + 2] == ["("] else -1
        if start in ends and words[start] == "{":
            return start, ends[start]
    return 0, 0


@functools.cache
def _parse_mark(code: str) -> tuple[ast.AST, str]:
    (statement,) = ast.parse(code).body
    mark = statement.value if isinstance(statement, ast.Expr) else statement
    return mark, ast.dump(mark)


def _list_nodes(place: ast.AST) -> list[ast.AST]:
    """Take the docstrings out of a place and return its nodes. Raises RecursionError."""
    nodes = [place]
    for node in nodes:
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not is_docstring(part)] or [ast.Pass()]  # type: ignore[attr-defined]
        nodes += ast.iter_child_nodes(node)
    return nodes
