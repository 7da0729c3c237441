"""Versions and GPUs named in a text: what rules a known failure in or out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

Release = tuple[int, int, int, int]
"""Major, minor, patch, and -1 for what came before that release, 0 for the release itself."""

_NUMBER = r"v?(\d{1,2}\.\d{1,3}(?:\.\d{1,4})?(?:\.?(?:rc|dev|post|a|b)\d{1,9}){0,3})(?![\d.]*\d)"
_VLLM = (
    rf"vllm(?: api server)?[ _-]version\W{{0,40}}?{_NUMBER}"
    rf"|\bvllm(?:-openai)?(?:\W{{1,4}}(?:release|version|image)?\W{{0,4}}?){_NUMBER}"
    rf"|llm engine \({_NUMBER}\) with config|[█▄▀] {{1,3}}version {_NUMBER}"
    rf"|^version\W{{1,4}}{_NUMBER} .{{0,30}}vllm"
)
_FLASHINFER = rf"flashinfer(?:[-_](?:python|cubin))?(?: version)?\W{{1,30}}?{_NUMBER}"
_NOT_ABOUT = (
    r"deprecat|unmaintained|will be removed|removed in|(?:fixed|resolved|landed|merged|works|working|fine"
    r"|good|available) (?:in|on|with|since|by|as of)"
    r"|upgrad\w{2,4} (?:to|vllm)|updat\w{2,3} (?:to|vllm)|downgrad|requires? |needs? |at least|target"
)


@dataclass
class Facts:
    """What a text says that it is about. Filled line by line."""

    vllm: set[Release] = field(default_factory=set)
    flashinfer: set[Release] = field(default_factory=set)

    def read(self, line: str) -> None:
        """Take in one line, in lower case."""
        for product, pattern, found in (
            ("vllm", _VLLM, self.vllm),
            ("flashinfer", _FLASHINFER, self.flashinfer),
        ):
            if (product not in line and "version" not in line and "llm engine" not in line) or len(
                found
            ) >= 64:
                continue
            for match in _compiled(pattern).finditer(line):
                text = next(filter(None, match.groups()))
                if not _compiled(_NOT_ABOUT).search(line, max(0, match.start() - 40), match.start()) and (
                    release := parse(text)
                ):
                    found.add(release)

    def allows(
        self, since: str | None, fixed: str | None, flashinfer_fixed: str | None, needs_version: bool
    ) -> bool:
        """Whether a failure of these releases can be what the text is about."""
        if needs_version and not self.vllm:
            return False
        if since and self.vllm and all(one < _boundary(since) for one in self.vllm):
            return False
        if fixed and self.vllm and all(one >= _boundary(fixed) for one in self.vllm):
            return False
        return not (
            flashinfer_fixed
            and self.flashinfer
            and all(one >= _boundary(flashinfer_fixed) for one in self.flashinfer)
        )

    def summary(self) -> str:
        """The releases in a few words; an empty string where none was named."""
        named = [
            f"{product} {', '.join(_show(one) for one in sorted(found)[:4])}"
            for product, found in (("vLLM", self.vllm), ("FlashInfer", self.flashinfer))
            if found
        ]
        return " · ".join(named)


def parse(text: str) -> Release | None:
    """A release number; None for what is none: builds from a clone without tags call themselves 0.1.dev1."""
    numbers = [int(one) for one in re.findall(r"\d+", re.split(r"rc|dev|post|a|b", text, maxsplit=1)[0])][:3]
    if len(numbers) < 2:
        return None
    early = any(mark in text for mark in ("rc", "dev", "a", "b"))
    if early and tuple(numbers[:2]) < (0, 4):
        return None
    major, minor, patch = [*numbers, 0][:3]
    return major, minor, patch, -1 if early else 0


def _boundary(text: str) -> Release:
    release = parse(text)
    if release is None:
        raise ValueError(f"{text} is no release")
    return release


def _show(release: Release) -> str:
    return ".".join(map(str, release[:3])) + ("-dev" if release[3] else "")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
