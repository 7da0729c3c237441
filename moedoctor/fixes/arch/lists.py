"""FLASHINFER_CUDA_ARCH_LIST and TORCH_CUDA_ARCH_LIST: what is wrong with a value, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moedoctor.fixes.arch.flashinfer import list_generations, predict_targets
from moedoctor.fixes.arch.resolve import ArchDecision, check_cuda, resolve_arch
from moedoctor.fixes.arch.targets import (
    OLDEST_CUDA,
    Capability,
    CudaVersion,
    Target,
    find_first_cuda,
    is_known_target,
    load_arch_data,
    loads_sass,
    parse_capability,
    parse_cuda,
    show,
)

FLASHINFER_LIST = "FLASHINFER_CUDA_ARCH_LIST"
TORCH_LIST = "TORCH_CUDA_ARCH_LIST"
VARIABLES = (FLASHINFER_LIST, TORCH_LIST)

_SEPARATORS = re.compile(r"[,;\s]+")
_DOTTED = re.compile(r"\d{1,2}\.\d[af]?")

_TORCH = "torch 2.13"


@dataclass(frozen=True)
class ListProblem:
    """One thing that is wrong with a list, and for which variable."""

    variable: str
    entry: str
    """The entry that it is about, or the whole text."""
    message: str


@dataclass(frozen=True)
class ListReading:
    """The targets that one reader of the variable makes of the text."""

    reader: str
    """``FlashInfer 0.5.0 to 0.6.6`` or ``torch 2.13``."""
    targets: tuple[str, ...]
    """``("120f",)``; PTX for later GPUs is ``compute_120``. Empty if there is an error or a note."""
    error: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class ArchListExplanation:
    """A list, its problems, its readings, and for each variable the value to set in its place."""

    text: str
    problems: tuple[ListProblem, ...]
    readings: tuple[ListReading, ...]
    suggestions: Mapping[str, str]
    """Variable -> the value to set, which every reader takes; without it if an entry cannot be built."""


def split_arch_list(text: str) -> list[str]:
    """The entries of a list, whatever separates them."""
    return [entry for entry in _SEPARATORS.split(text) if entry]


def explain_arch_list(
    text: str, *, variable: str | None = None, cuda: tuple[int, ...] | str = (13, 0)
) -> ArchListExplanation:
    """Return what is wrong with `text` as the value of `variable`, and what each release builds with it.

    `variable` is FLASHINFER_CUDA_ARCH_LIST, TORCH_CUDA_ARCH_LIST or None for both; `cuda` is the toolkit
    that will compile. Raises ValueError for another variable and for CUDA outside of 12.0 to 13.x.
    """
    if variable is not None and variable not in VARIABLES:
        raise ValueError(f"variable: {variable!r} is unknown; expected {' or '.join(VARIABLES)}")
    toolkit = check_cuda(parse_cuda(cuda))
    problems: list[ListProblem] = []
    readings: list[ListReading] = []
    suggestions: dict[str, str] = {}
    for name in VARIABLES if variable is None else (variable,):
        problems += [
            ListProblem(name, entry, message) for entry, message in _find_problems(name, text, toolkit)
        ]
        if name == TORCH_LIST:
            readings.append(_read_as_torch(text))
        for rules in list_generations() if name == FLASHINFER_LIST else ():
            read = predict_targets(rules.first, capability=(0, 0), cuda=toolkit, arch_list=text)
            readings.append(ListReading(f"FlashInfer {rules.name}", read.targets, read.error))
        suggestion = _suggest(name, text, toolkit)
        if suggestion:
            suggestions[name] = suggestion
    return ArchListExplanation(text, tuple(problems), tuple(readings), suggestions)


def resolve_arch_list(
    text: str | None, capability: Capability | str, cuda: tuple[int, ...] | str
) -> tuple[ArchDecision, ...]:
    """The targets that a list variable means for a build that must run on a GPU of `capability`.

    Reads what FlashInfer refuses (commas, semicolons, stray spaces, ``120f``, ``sm_120f``, ``+PTX``),
    gives every bare entry its suffix and replaces a suffix that this toolkit does not know. If no entry
    runs on the GPU, the target that does is added. None and an empty list mean the GPU alone. Raises
    ValueError for an entry that is not a target, and if nothing can be built for the GPU.
    """
    gpu, toolkit = parse_capability(capability), check_cuda(parse_cuda(cuda))
    own = resolve_arch(gpu, toolkit)
    decisions = _decide(text or "", toolkit)
    if not any(loads_sass(Target.parse(decision.target), gpu) for decision in decisions):
        why = f"nothing in {text!r} runs on a GPU of {show(gpu)}; " if decisions else ""
        decisions.append(ArchDecision(own.target, why + own.reason))
    return tuple(decisions)


def _decide(text: str, cuda: CudaVersion) -> list[ArchDecision]:
    """The target of each entry, without repeats."""
    decisions: dict[str, ArchDecision] = {}
    for entry in split_arch_list(text):
        target = Target.parse(entry.removesuffix("+PTX"))
        if target.suffix and is_known_target(target, cuda):
            decision = ArchDecision(str(target), f"{entry} names its suffix, which CUDA {show(cuda)} knows")
        else:
            decision = resolve_arch(target.capability, cuda)
        decisions.setdefault(decision.target, decision)
    return list(decisions.values())


def _read_as_torch(text: str) -> ListReading:
    """torch.utils.cpp_extension: entries separated by spaces or semicolons, each known by name."""
    if not text or text == "native":
        return ListReading(_TORCH, (), note="builds for the GPUs of this machine, and PTX for the newest")
    named = text.replace(" ", ";")
    for name, meaning in load_arch_data()["torch"]["names"].items():
        named = named.replace(name, meaning)
    targets: set[str] = set()
    for entry in named.split(";"):
        if not _is_known_to_torch(entry.removesuffix("+PTX")):
            return ListReading(_TORCH, (), f"ValueError: unknown entry {entry!r}")
        number = entry.removesuffix("+PTX").replace(".", "")
        targets |= {number, f"compute_{number}"} if entry.endswith("+PTX") else {number}
    return ListReading(_TORCH, tuple(sorted(targets, key=lambda name: (Target.parse(name), name))))


def _is_known_to_torch(entry: str) -> bool:
    if _DOTTED.fullmatch(entry) is None:
        return False
    target, table = Target.parse(entry), load_arch_data()["torch"]
    known = table["suffixed"] if target.suffix else [*table["suffixed"], *table["plain"]]
    return show(target.capability) in known and target.suffix != "f"


def _find_problems(variable: str, text: str, cuda: CudaVersion) -> Iterator[tuple[str, str]]:
    """(entry, message) for the separators, then for each entry."""
    flashinfer = variable == FLASHINFER_LIST
    entries = split_arch_list(text)
    if not entries:
        yield text, f"is empty{': the import of FlashInfer fails; unset it' if flashinfer else ''}"
        return
    wrong = [mark for mark in (",", *(";" if flashinfer else ())) if mark in text]
    if wrong:
        right = "single spaces" if flashinfer else "semicolons or spaces"
        yield text, f"{' and '.join(map(repr, wrong))} does not separate entries; expected {right}"
    blank = re.search(r"^\s|\s$|\s\s" if flashinfer else r"^[\s;]|[\s;]$|[\s;]{2}", text)
    if blank:
        where = "before the first entry" if blank.start() == 0 else "after the last entry or between two"
        yield text, f"a stray separator {where} makes an empty entry, which cannot be read"
    for entry in entries:
        yield from ((entry, message) for message in _find_entry_problems(entry, flashinfer, cuda))


def _find_entry_problems(entry: str, flashinfer: bool, cuda: CudaVersion) -> Iterator[str]:
    bare = entry.removesuffix("+PTX")
    if not flashinfer and bare in ("native", *load_arch_data()["torch"]["names"]):
        return
    try:
        target = Target.parse(bare)
    except ValueError:
        yield f"is not a target; expected one such as {'12.0f' if flashinfer else '12.0a'}"
        return
    right = _name_replacement(target, flashinfer, cuda)
    if entry != bare and flashinfer:
        yield "FlashInfer does not know +PTX and passes it to nvcc as part of the target"
    if _DOTTED.fullmatch(bare) is None:
        yield f"is not MAJOR.MINOR; expected {target.dotted}"
    if find_first_cuda(target) is None:
        yield f"no CUDA release from {show(OLDEST_CUDA)} on compiles for sm_{target}"
    elif not is_known_target(target, cuda):
        yield f"CUDA {show(cuda)} does not know sm_{target}; expected {right}"
    elif not flashinfer and target.suffix == "f":
        yield f"torch 2.13 takes no family targets; expected {right}"
    elif not target.suffix and target.major >= 9:
        plain = f"plain sm_{target}, without the instructions of MoE kernels; expected {right}"
        yield f"has no suffix: {'FlashInfer up to 0.6.6' if flashinfer else 'torch'} builds {plain}"


def _name_replacement(target: Target, flashinfer: bool, cuda: CudaVersion) -> str:
    try:
        decided = Target.parse(resolve_arch(target.capability, cuda).target)
    except ValueError as error:
        return f"another toolkit ({error})"
    return decided.dotted if flashinfer else _convert_for_torch(decided).dotted


def _convert_for_torch(target: Target) -> Target:
    """torch has no name for family targets; the architecture's own takes the same instructions."""
    return Target(*target.capability, "a") if target.suffix == "f" else target


def _suggest(variable: str, text: str, cuda: CudaVersion) -> str | None:
    try:
        targets = [Target.parse(decision.target) for decision in _decide(text, cuda)]
    except ValueError:
        return None
    if variable == FLASHINFER_LIST:
        return " ".join(target.dotted for target in targets)
    entries = [_convert_for_torch(target).dotted for target in targets]
    return ";".join(dict.fromkeys(entries)) if all(map(_is_known_to_torch, entries)) else None
