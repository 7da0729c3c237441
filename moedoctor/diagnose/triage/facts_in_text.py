"""Facts in a text about its machine: releases, GPUs, MoE backends. Releases rule failures in or out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from moedoctor.diagnose.triage.cause import load_lines
from moedoctor.diagnose.triage.memory_in_text import Memory
from moedoctor.diagnose.triage.signatures import Signature, load_data
from moedoctor.entries.entry import PACKAGES, Entry
from moedoctor.fixes.backends.release_tables import list_backend_names

Release = tuple[int, int, int, int]
"""Major, minor, patch, and 0, or -1 for a build before that release."""
OLDEST: Release = (0, 17, 1, 0)
"""The oldest release of vLLM that was looked at."""

_MOST = 64
_CONTAINER = 20
"""A larger major version is the year of a container, as in nvcr.io/nvidia/vllm:25.11."""


@dataclass
class Facts:
    """The releases that a text is about. Filled line by line."""

    vllm: set[Release] = field(default_factory=set)
    other_vllm: set[Release] = field(default_factory=set)
    """Releases that the text names without saying that they failed: "fixed in", "upgrade to"."""
    flashinfer: set[Release] = field(default_factory=set)
    gpus: dict[str, None] = field(default_factory=dict)
    """GPUs and compute capabilities, as the text writes them, in order."""
    backends: dict[str, None] = field(default_factory=dict)
    """Words in the place of a MoE backend that was chosen or asked for, in order."""
    refused: tuple[str, str] | None = None
    """The first refusal for the GPU, as vLLM words it: scheme, and backend or no word for all of them."""
    memory: Memory = field(default_factory=Memory)
    several: bool = False
    """True if it speaks of several GPUs."""
    _after_name: bool = False
    """True if the line before is ``Name: vllm``, as pip shows it."""

    def read(self, line: str) -> None:
        """Take in one line, in lower case."""
        lines = load_lines()
        if self._after_name and line.startswith("version: "):
            line = line.replace("version:", "vllm", 1)
        self._after_name = line == "name: vllm"
        for product, pattern, releases in (
            ("vllm", lines["vllm"], self.vllm),
            ("flashinfer", lines["flashinfer"], self.flashinfer),
            ("0.", lines["bare_release"], self.vllm),
        ):
            if len(releases) >= _MOST or not any(word in line for word in (product, "version", "llm engine")):
                continue
            for match in pattern.finditer(line):
                text = next(filter(None, match.groups()))
                start = match.start(match.lastindex or 0) if product == "0." else match.start()
                around = f"{line[:start][-40:]}\0{line[match.end() :][:40]}"
                before = around.partition("\0")[0]
                works = lines["not_about"].search(before) or lines["works"].search(around)
                another = works and not lines["failed"].search(around)
                if (release := parse(text)) and not (another or lines["left"].search(around)):
                    releases.add(release)
                elif release and product != "flashinfer":
                    self.other_vllm.add(release)
        self._read_gpus(line)
        self.memory.read(line)
        self.several |= lines["several"].search(line) is not None
        if "experts" in line and (named := lines["experts"].search(line)):
            rows = load_data("facts.yaml")["experts"].items()
            self.backends.update({name: None for word, name in rows if named[1].startswith(word)})
        if "moe" in line and len(self.backends) < _MOST:
            for match in lines["moe_backend"].finditer(line):
                self.backends[next(filter(None, match.groups())).upper().replace(" ", "_")] = None
            if self.refused is None and (refusal := lines["refused"].search(line)):
                self.refused = refusal[1].replace("unquantized", "bf16"), (refusal[2] or "").upper()

    def _read_gpus(self, line: str) -> None:
        if len(self.gpus) >= _MOST or not any(digit in line for digit in "0123456789"):
            return
        for match in load_lines()["gpu"].finditer(line):
            self.gpus[match[0].upper()] = None
        for match in load_lines()["bare_gpu"].finditer(line):
            self.gpus[f"RTX {match[1].upper()}"] = None
        for match in load_lines()["capability"].finditer(line):
            self.gpus[f"SM {match[2] or f'{match[1][:-1]}.{match[1][-1]}'}"] = None

    def explain_exclusion(self, signature: Signature) -> str:
        """Return why the releases named leave no room for a signature, or an empty string.

        Unknown releases leave room.
        """
        if signature.needs_version and not self.vllm:
            return "the text does not say which release of vLLM failed"
        if signature.since and self.vllm and max(self.vllm) < read_boundary(signature.since):
            return f"the text names vLLM {show(max(self.vllm))}, and the failure came with {signature.since}"
        if signature.fixed and self.vllm and min(self.vllm) >= read_boundary(signature.fixed):
            return f"the text names vLLM {show(min(self.vllm))}, and {signature.fixed} fixed the failure"
        fixed = signature.flashinfer_fixed
        if fixed and self.flashinfer and min(self.flashinfer) >= read_boundary(fixed):
            return f"the text names FlashInfer {show(min(self.flashinfer))}, and the failure is older"
        return ""

    def list_backends(self) -> tuple[str, ...]:
        """Return the MoE backends that a release of vLLM knows, as the text writes them in capitals."""
        return tuple(name for name in self.backends if name in list_backend_names())

    def summarize(self) -> str:
        """Return the releases in a few words, or an empty string without any."""
        return " · ".join(
            f"{product} {_list(releases)}"
            for product, releases in (("vLLM", self.vllm), ("FlashInfer", self.flashinfer))
            if releases
        )

    def summarize_others(self) -> str:
        """Return the releases of vLLM that the text names as others than the one that failed."""
        others = self.other_vllm - self.vllm
        return f"vLLM {_list(others)}" if others else ""


def release_words(entry: Entry, facts: Facts) -> str:
    """Return in words if the releases in the text have a failure, and which release fixes it."""
    if entry.fixed == "no":
        sentences = ["no release is known here that mends all of it"]
    else:
        # The step that helps depends on the text: it stands in the finding.
        nothing = entry.fixed.startswith("nothing")
        sentences = [entry.fixed.partition(";")[0] if nothing else f"fixed: {entry.fixed}"]
    for package, named in (("vllm", facts.vllm), ("flashinfer", facts.flashinfer)):
        ranges = [affected for affected in entry.releases if affected.package == package]
        if not named or not ranges:
            continue
        release = max(named)
        shown = f"{PACKAGES[package]} {show(release)}"
        fits = [part for part in ranges if read_boundary(part.first) <= release <= read_boundary(part.last)]
        if fits:
            sentences.insert(0, f"{shown} has it ({fits[0].range})")
        elif release > max(read_boundary(part.last) for part in ranges):
            fixed = [part.fixed for part in ranges if part.fixed and read_boundary(part.fixed) <= release]
            words = f"has the fix of {fixed[-1]}" if fixed else "is newer than what was looked at"
            sentences.insert(0, f"{shown} {words}")
        elif package == "vllm" and release < OLDEST:
            sentences.insert(0, f"{shown} is older than what was looked at")
        else:
            sentences.insert(0, f"{shown} is not among those that are known to have it")
    return "; ".join(sentences)


def parse(text: str) -> Release | None:
    """Return a release, or None for what is not one: builds from a clone without tags are 0.1.dev1."""
    final = re.split(r"rc|dev|post|a|b", text, maxsplit=1)[0]
    numbers = [int(number) for number in re.findall(r"\d+", final)][:3]
    if len(numbers) < 2:
        return None
    early = any(mark in text for mark in ("rc", "dev", "a", "b"))
    if early and tuple(numbers[:2]) < (0, 4):
        return None
    major, minor, patch = [*numbers, 0][:3]
    if major >= _CONTAINER:
        return None
    return major, minor, patch, -1 if early else 0


def read_boundary(text: str) -> Release:
    """Return a release that one of our tables names. Raises ValueError if it is none."""
    release = parse(text)
    if release is None:
        raise ValueError(f"{text} is not a release")
    return release


def _list(releases: set[Release]) -> str:
    return ", ".join(map(show, sorted(releases)[:4]))


def show(release: Release) -> str:
    """Return a release as a text names it."""
    return ".".join(map(str, release[:3])) + ("-dev" if release[3] else "")
