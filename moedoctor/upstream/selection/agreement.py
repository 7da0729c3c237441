"""Compares the tables with the selection code of the installed vLLM, which runs in a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moedoctor.fixes.backends import Candidate, Selection
from moedoctor.processes.ask import ChildError, answer, ask
from moedoctor.upstream.selection.oracle import Layer, Oracle
from moedoctor.upstream.selection.substitute import SubstituteError

TIMEOUT = 180.0
"""Seconds. `import vllm` alone takes ten or more."""


class AgreementError(Exception):
    """The installed vLLM could not be asked; as text, why, in one line."""


@dataclass(frozen=True)
class Heard:
    """The installed vLLM's answer for one layer on one GPU."""

    chosen: str | None
    error: str | None
    supported: Mapping[str, bool]
    """Backend -> whether any of its kernels takes the layer, in the order in which vLLM asks."""
    notes: tuple[str, ...] = ()
    """Parts that were left out or answered in upstream's place."""
    libraries: Mapping[str, bool] = field(default_factory=dict)
    """Optional library -> whether vLLM finds it here."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Backend -> the first reason that vLLM gives against it."""


def ask_all(
    selections: Sequence[Selection],
    *,
    moe_backend: str = "auto",
    environ: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> tuple[Heard, ...]:
    """Put several questions to the vLLM of this environment, with `environ` set over its variables.

    Raises AgreementError if it does not answer.
    """
    questions = [_make_question(selection, moe_backend) for selection in selections]
    try:
        reply = ask("moedoctor.upstream.selection.agreement", questions, seconds=timeout, environ=environ)
    except ChildError as error:
        raise AgreementError(f"the installed vllm could not be asked: {error}") from None
    if "problem" in reply:
        raise AgreementError(reply["problem"])
    return tuple(Heard(**{**heard, "notes": tuple(heard["notes"])}) for heard in reply["heard"])


def list_disagreements(selection: Selection, heard: Heard) -> tuple[str, ...]:
    """Return the differences between the two, one line each; empty if they agree."""
    lines = []
    if selection.chosen != heard.chosen:
        lines.append(f"selected: {heard.chosen or heard.error}; the tables say {selection.chosen or 'none'}")
    known = {candidate.backend: candidate for candidate in selection.candidates}
    for backend, supported in heard.supported.items():
        if backend not in known:
            lines.append(f"{backend}: not in the tables")
        elif known[backend].supported != supported:
            verb = "takes this layer" if supported else "does not take this layer"
            lines.append(f"{backend}: {verb}; the tables say: {known[backend].reason}")
    return tuple(lines)


def adopt(selection: Selection, heard: Heard, build: str) -> Selection:
    """Return the selection of a build that the tables do not know, as it was heard from its own code.

    `selection` is that of the known release before it, whose flags are kept.
    """
    source = f"the code of vLLM {build}"
    flags = {each.backend: each.flag for each in selection.candidates}
    there = {**heard.supported, **({heard.chosen: True} if heard.chosen else {})}
    fitting = {
        name: "chosen" if name == heard.chosen else "would work" for name, fits in there.items() if fits
    }
    why = {**dict.fromkeys(there, "vLLM gives no reason"), **heard.refusals, **fitting}
    return replace(
        selection,
        release=build,
        candidates=tuple(
            Candidate(name, fits, name == heard.chosen, why[name], flags.get(name), True, (), source)
            for name, fits in there.items()
        ),
        chosen=heard.chosen,
        decided_by="its own code",
        error=None if heard.chosen else f"vLLM {build} does not start: {heard.error}",
        source=source,
    )


def _make_question(selection: Selection, moe_backend: str) -> dict[str, Any]:
    layer = Layer(
        selection.scheme,
        selection.activation,
        ep="ep" in selection.parallel,
        dp="dp" in selection.parallel,
        moe_backend=moe_backend,
    )
    return {"capability": selection.capability, "layer": asdict(layer)}


def _respond(questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answers of the child's vLLM, or why there are none."""
    try:
        oracle = Oracle()
        libraries = oracle.substitute.find_libraries()
        return {"heard": [_answer_question(oracle, question, libraries) for question in questions]}
    except SubstituteError as error:
        return {"problem": " ".join(str(error).split())}
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {"problem": f"the installed vllm could not be asked: {why}"}


def _answer_question(oracle: Oracle, question: Mapping[str, Any], libraries: Mapping[str, bool]) -> Heard:
    major, _, minor = question["capability"].partition(".")
    asked = oracle.ask((int(major), int(minor)), Layer(**question["layer"]))
    supported: dict[str, bool] = {}
    refusals: dict[str, str] = {}
    for kernel in asked.answers:
        if kernel.kernel:
            supported[kernel.backend] = supported.get(kernel.backend, False) or kernel.supported
            if kernel.reason:
                refusals.setdefault(kernel.backend, kernel.reason)
    return Heard(asked.chosen, asked.error, supported, oracle.substitute.notes, libraries, refusals)


if __name__ == "__main__":
    answer(_respond)
