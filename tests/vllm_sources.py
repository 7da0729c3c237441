"""Made-up sources of vLLM that answer the questions of the entries as a known release does."""

import re
from collections.abc import Mapping
from pathlib import Path

from moedoctor.entries import load_entries
from moedoctor.entries.entry import Evidence, Question
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.upstream.releases.questions import load_answers

FILLER = ("first = second + 1", "if ready:\n    call(first, name='x')", "other = [item for item in items]")
_DOCSTRING = '    """Says offload, padding, offloader and .data = in words."""'


def make_place(place: str, evidence: tuple[Evidence, ...], declared: tuple[str, ...] = ()) -> str:
    """Return code in which a function, class or table holds this evidence and other code."""
    lines = [line for each in evidence for line in (*each.code, *(f"log({text!r})" for text in each.text))]
    *owners, last = place.split(".") if place else [""]
    if last == "environment_variables":
        known = "VLLM_MOE_SKIP_PADDING"
        items = [f"{known if known in line else 'OTHER'!r}: {line}" for line in lines]
        items += [f"{name!r}: 1" for name in declared]
        return f"environment_variables = {{'A': 1, {', '.join(items)}}}\n"
    body = "\n".join((*FILLER, *lines))
    for name in [last, *reversed(owners)]:
        if name:
            head = f"class {name}:" if name[0].isupper() else f"def {name}(self, layer):"
            body = "\n".join((head, _DOCSTRING, *(f"    {line}" for line in body.splitlines())))
    return body + "\n"


def make_code(file: str, place: str, evidence: tuple[Evidence, ...], declared: tuple[str, ...] = ()) -> str:
    """Return the text of a file, Python or CUDA, in which a place holds this evidence."""
    if file.endswith(".py"):
        return make_place(place, evidence, declared)
    lines = " ".join(line for each in evidence for line in each.code)
    comment = "// Says { if ( in words.\n/* and (\nmore */\n"
    return f"{comment}__global__ void {place}(int* ids) {{\n  int i = 0;\n  {lines}\n}}\n"


def write_source(
    folder: Path, release: str, *, changed: Mapping[str, str] | None = None, declared: tuple[str, ...] = ()
) -> Path:
    """Write a vLLM that answers as `release`, but for `changed` answers, by names such as MD009.asserts."""
    places: dict[tuple[str, str], list[Evidence]] = {}
    asked = [(each.file, each.place) for entry in load_entries().values() for each in entry.questions]
    for entry in load_entries().values():
        for question in entry.questions:
            name = f"{entry.id}.{question.name}"
            key = release if question.package == "vllm" else load_releases()[release].flashinfer
            value = (changed or {}).get(name) or load_answers()[name][key]
            inner = (place for file, place in asked if file == question.file)
            place = next((each for each in inner if each.startswith(f"{question.place}.")), question.place)
            places.setdefault((question.file, place), []).extend(_choose(question, value))
    given = (file for row in places.values() for each in row for file, there in each.files.items() if there)
    texts = dict.fromkeys(given, "#pragma once\n")
    for (file, place), evidence in places.items():
        texts[file] = texts.get(file, "") + make_code(file, place, tuple(evidence), declared)
    texts.setdefault("flashinfer/__init__.py", "__version__ = '0'\n")
    for file, text in texts.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _choose(question: Question, value: str) -> tuple[Evidence, ...]:
    """Return the evidence for an answer; none for an unknown one."""
    return {"affected": (question.affected,), "clean": question.clean[:1], "unknown": ()}[value]


def rename(folder: Path, file: str, name: str) -> None:
    """Rename a function everywhere in a file."""
    path = folder / file
    path.write_text(re.sub(rf"\b{name}\b", "renamed", path.read_text()))
