"""Compares the tables with the selection code of the installed vLLM, which runs in a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moedoctor.fixes.backends import Candidate, Selection
from moedoctor.fixes.backends.requests import Request
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
    refusals: Mapping[str, str]
    """Backend -> why none of its kernels takes the layer, empty if one does; in the order of vLLM."""
    notes: tuple[str, ...] = ()
    """Parts that were left out or answered in upstream's place."""
    libraries: Mapping[str, bool] = field(default_factory=dict)
    """Optional library -> whether vLLM finds it here."""


def ask_all(
    selections: Sequence[Selection], *, moe_backend: str = "auto", environ: Mapping[str, str] | None = None
) -> tuple[Heard, ...]:
    """Put several questions to the vLLM of this environment, with `environ` set over its variables.

    Raises AgreementError if it does not answer.
    """
    questions = [_make_question(selection, moe_backend) for selection in selections]
    try:
        reply = ask("moedoctor.upstream.selection.agreement", questions, seconds=TIMEOUT, environ=environ)
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
    for backend, refusal in heard.refusals.items():
        if backend not in known:
            lines.append(f"{backend}: not in the tables")
        elif known[backend].supported is bool(refusal):
            verb = "does not take this layer" if refusal else "takes this layer"
            lines.append(f"{backend}: {verb}; the tables say: {known[backend].reason}")
    return tuple(lines)


def adopt(selection: Selection, heard: Heard, build: str, values: Sequence[str] = ()) -> Selection:
    """Return the selection of a build that the tables do not know, as it was heard from its own code.

    `selection` is that of the known release before it, whose flags are kept; `values` are those that the
    build's --moe-backend takes.
    """
    source = f"the code of vLLM {build}"
    flags: dict[str, str | None] = {name: name.lower() for name in heard.refusals if name.lower() in values}
    flags |= {each.backend: each.flag for each in selection.candidates if each.flag}
    refusals = {**heard.refusals, **({heard.chosen: ""} if heard.chosen else {})}
    candidates = []
    for name, refusal in refusals.items():
        chosen = name == heard.chosen
        why = refusal or ("chosen" if chosen else "would work")
        candidates.append(Candidate(name, not refusal, chosen, why, flags.get(name), True, (), source))
    return replace(
        selection,
        release=build,
        candidates=tuple(candidates),
        chosen=heard.chosen,
        decided_by="its own code",
        error=None if heard.chosen else f"vLLM {build} does not start: {heard.error}",
        source=source,
    )


def request_from_build(
    backend: str, selection: Selection, values: Sequence[str], environ: Mapping[str, str]
) -> Request:
    """Say if a backend works in a build whose `selection` was adopted, and how to ask for it.

    A value of its --moe-backend is put to its own code. Raises ValueError if it does not have the backend or
    does not answer.
    """
    wanted = backend.strip().lower().replace("-", "_")
    if wanted in values:
        try:
            (own,) = ask_all([selection], moe_backend=wanted, environ=environ)
        except AgreementError as error:
            raise ValueError(str(error)) from None
        reason = own.error or f"its own code selects {own.chosen}"
        return Request(own.chosen or backend, own.chosen is not None, reason, f"--moe-backend {wanted}")
    for each in selection.candidates:
        if each.backend.lower().replace(" ", "_") == wanted:
            how = f"--moe-backend {each.flag}" if each.flag else None
            return Request(each.backend, each.supported, each.reason, how)
    known = ", ".join(each.backend for each in selection.candidates)
    raise ValueError(
        f"{backend}: not a MoE backend of vLLM {selection.release} for {selection.scheme}; it has {known}"
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
    refusals: dict[str, str] = {}
    for kernel in asked.answers:
        if kernel.kernel:
            refusal = "" if kernel.supported else kernel.reason or "vLLM gives no reason"
            refusals[kernel.backend] = refusal and refusals.get(kernel.backend, refusal)
    return Heard(asked.chosen, asked.error, refusals, oracle.substitute.notes, libraries)


if __name__ == "__main__":
    answer(_respond)
