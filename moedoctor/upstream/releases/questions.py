"""Asks the Python source of a vLLM what a known release's number would tell. Nothing of it is imported.

The questions are data of the entries. An answer is "clean" only if the source shows it: a place that is gone
or that holds none of the marks is unknown.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moedoctor.entries import find_reports_folder
from moedoctor.entries.entry import Entry, Evidence, Question
from moedoctor.plugin.known_code import find_name, is_docstring
from moedoctor.upstream.releases.release_source import ReleaseSource, SourceError

_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What `ast` raises for text that is not Python, or that is nested on purpose."""
FLAGS = ("vllm/engine/arg_utils.py", "vllm/entrypoints", "vllm/utils/argparse_utils.py")
"""The files that declare the flags of vLLM's commands, and a folder of such files."""
ENVS = "vllm/envs.py"
"""The file that declares the variables."""
Value = Literal["affected", "clean", "unknown"]


@dataclass(frozen=True)
class Answer:
    """The answer to one question."""

    value: Value
    where: str
    """``vllm/envs.py:12``; for an unknown answer, what was not found."""


@dataclass(frozen=True)
class Reading:
    """The answers of the source about one entry."""

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


@dataclass
class Inquiry:
    """One vLLM's source, with the files that were parsed."""

    source: ReleaseSource
    trees: dict[str, ast.Module | str] = field(default_factory=dict)
    """File -> its syntax tree, or why there is none."""

    def answer(self, question: Question) -> Answer:
        """Return the answer to a question; never raises for the source."""
        tree = self.parse(question.file)
        if isinstance(tree, str):
            return Answer("unknown", tree)
        place = find_place(tree, question.place)
        if place is None:
            return Answer("unknown", f"there is no {question.place} in {question.file}")
        try:
            nodes = _list_nodes(place)
            affected = _find_evidence(question.affected, nodes)
            clean = [line for each in question.clean if (line := _find_evidence(each, nodes)) is not None]
        except _UNREADABLE:
            return Answer("unknown", f"{question.file} is nested too deeply")
        if (affected is None) == (not clean):  # neither, or both
            changed = f"{question.place} has" if question.place else "it has"
            return Answer("unknown", f"{question.file}:{getattr(place, 'lineno', 1)}: {changed} changed")
        if affected is not None:
            return Answer("affected", f"{question.file}:{affected}")
        return Answer("clean", f"{question.file}:{clean[0]}")

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
        answers = {each.name: self.answer(each) for each in entry.questions if each.decides}
        given = {name: answer.value for name, answer in answers.items()}
        stored = {name: load_answers()[f"{entry.id}.{name}"] for name in given}
        releases = list(next(iter(stored.values()), ()))
        same = [each for each in releases if {name: row[each] for name, row in stored.items()} == given]
        return Reading(None if "unknown" in given.values() or not same else same[-1], answers)


@functools.cache
def load_answers() -> Mapping[str, Mapping[str, Value]]:
    """Return the answers of all known releases: question such as ``MD009.asserts`` -> release -> answer."""
    path = find_reports_folder() / "sources" / "answers.json"
    table: Mapping[str, Mapping[str, Value]] = json.loads(path.read_text(encoding="utf-8"))
    return table


def find_place(tree: ast.Module, path: str) -> ast.AST | None:
    """Return a function, class or assignment by its path, ``Class.method``; the file for an empty path."""
    place: ast.AST | None = tree
    for name in path.split(".") if path else ():
        place = None if place is None else find_name(place, name)
    return place


def _find_evidence(evidence: Evidence, nodes: Sequence[ast.AST]) -> int | None:
    """Return the line of the first mark in a place, the first of `nodes`, or None if one does not hold."""
    lines: list[list[int]] = []
    for code in evidence.code:
        mark, dumped = _parse_mark(code)
        alike = [node for node in nodes if type(node) is type(mark) and ast.dump(node) == dumped]
        lines.append([getattr(node, "lineno", 1) for node in alike])
    strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    lines += [[node.lineno for node in strings if text in str(node.value)] for text in evidence.text]
    if not all(lines):
        return None
    words = ast.unparse(nodes[0]).lower() if evidence.without else ""
    if any(word.lower() in words for word in evidence.without):
        return None
    return lines[0][0] if lines else getattr(nodes[0], "lineno", 1)


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
