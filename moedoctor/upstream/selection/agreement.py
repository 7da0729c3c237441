"""Compares the tables with the selection code of the installed vLLM, which runs in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moedoctor.fixes.backends import Selection

TIMEOUT = 180.0
"""Seconds. `import vllm` alone takes ten or more."""


class AgreementError(Exception):
    """The installed vLLM could not be asked; one line says why."""


@dataclass(frozen=True)
class Heard:
    """What the installed vLLM says of one layer on one GPU."""

    chosen: str | None
    error: str | None
    supported: Mapping[str, bool]
    """Backend -> whether any of its kernels takes the layer, in the order in which vLLM asks."""
    notes: tuple[str, ...] = ()
    """What was left out or answered in upstream's place."""
    libraries: Mapping[str, bool] = field(default_factory=dict)
    """The optional libraries that it finds here, or does not."""


def ask_installed(
    selection: Selection,
    *,
    moe_backend: str = "auto",
    environ: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    python: Sequence[str] = (sys.executable,),
) -> Heard:
    """Put the question of `selection` to the vLLM of this environment, with the variables of `environ` on top
    of those of this process. Raises AgreementError where it does not answer."""
    return ask_all([selection], moe_backend=moe_backend, environ=environ, timeout=timeout, python=python)[0]


def ask_all(
    selections: Sequence[Selection],
    *,
    moe_backend: str = "auto",
    environ: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    python: Sequence[str] = (sys.executable,),
) -> tuple[Heard, ...]:
    """The same for several questions, in one process."""
    questions = [_question(one, moe_backend) for one in selections]
    command = [*python, "-m", "moedoctor.upstream.selection.agreement"]
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(questions),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
            env={**os.environ, **(environ or {})},
        )
    except subprocess.TimeoutExpired:
        raise AgreementError(f"the installed vllm did not answer within {timeout:g} s") from None
    for line in reversed(ended.stdout.splitlines()):
        if line.startswith('{"moedoctor"'):
            answer = json.loads(line)
            if "problem" in answer:
                raise AgreementError(answer["problem"])
            return tuple(Heard(**{**heard, "notes": tuple(heard["notes"])}) for heard in answer["heard"])
    last = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    raise AgreementError(f"the installed vllm could not be asked: {last[0]}")


def _question(selection: Selection, moe_backend: str) -> dict[str, Any]:
    layer = {
        "scheme": selection.scheme,
        "activation": selection.activation,
        "ep": "ep" in selection.parallel,
        "dp": "dp" in selection.parallel,
        "moe_backend": moe_backend,
    }
    return {"capability": selection.capability, "layer": layer}


def disagreements(selection: Selection, heard: Heard) -> tuple[str, ...]:
    """Where the two differ, one line a difference; empty where they agree."""
    found = []
    if selection.chosen != heard.chosen:
        found.append(f"selected: {heard.chosen or heard.error}; the tables say {selection.chosen or 'none'}")
    known = {one.backend: one for one in selection.candidates}
    for backend, supported in heard.supported.items():
        if backend not in known:
            found.append(f"{backend}: not in the tables")
        elif known[backend].supported != supported:
            word = "takes this layer" if supported else "does not take this layer"
            found.append(f"{backend}: {word}; the tables say: {known[backend].reason}")
    return tuple(found)


def answers(questions: Sequence[Mapping[str, Any]]) -> list[Heard]:
    """The answers of the vLLM of this process; see `moedoctor.upstream.selection.oracle`."""
    from moedoctor.upstream.selection.oracle import Layer, Oracle

    oracle = Oracle()
    libraries = oracle.substitute.libraries()
    found = []
    for question in questions:
        major, _, minor = question["capability"].partition(".")
        asked = oracle.ask((int(major), int(minor)), Layer(**question["layer"]))
        supported: dict[str, bool] = {}
        for one in [one for one in asked.answers if one.kernel]:
            supported[one.backend] = supported.get(one.backend, False) or one.supported
        found.append(Heard(asked.chosen, asked.error, supported, oracle.substitute.notes, libraries))
    return found


def main(questions: str) -> None:
    """Answer on stdout as one line of JSON, whatever happens."""
    from moedoctor.upstream.selection.substitute import SubstituteError

    reply: dict[str, Any] = {"moedoctor": 1}
    try:
        reply["heard"] = [asdict(one) for one in answers(json.loads(questions))]
    except SubstituteError as error:
        reply["problem"] = " ".join(str(error).split())
    except Exception as error:
        reply["problem"] = (
            f"the installed vllm could not be asked: {type(error).__name__}: {' '.join(str(error).split())}"
        )
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(sys.stdin.read())
