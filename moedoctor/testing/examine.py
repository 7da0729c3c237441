"""Asks an implementation every question of its kind in a child process, so that a crash is an answer.

The child announces each problem before it computes it. If it dies, the question that it was at is answered
by that, and another child goes on. TARGET is somebody's own code: only the child imports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moedoctor.processes import interrupts
from moedoctor.processes.ask import Ended, run_module
from moedoctor.processes.deaths import from_exit
from moedoctor.testing.questions import CHECKS, Answer, ConformReport, Sizes, Verdict, load_questions

_CHILD = "moedoctor.testing.child"
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_LONGEST = 3600.0
"""Seconds for all questions in one child."""


class TargetError(Exception):
    """A target that cannot be asked: it is not there, or its kind is not known. One line."""


def name_target(function: Any) -> str:
    """Return ``package.module:name`` of a function or class, for a child. Raises ValueError for others."""
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "<>")
    if "<" in name:
        raise ValueError(
            f"{function!r} is not at the top level of a module, so a child process cannot import it: "
            "give a function or class that is, or its name as text, 'package.module:name' or 'file.py:name'"
        )
    if module == "__main__":
        module = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")
        if not os.path.isfile(module):
            raise ValueError(f"{name} was typed in: put it into a file, and give 'file.py:{name}'")
    return f"{module}:{name}"


def examine(
    target: Any,
    kind: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    device: str = "cpu",
    only: Sequence[str] = (),
    sizes: Sizes | None = None,
    seed: int = 0,
    seconds: float = 60.0,
) -> ConformReport:
    """Ask `target` the questions of `kind`, or those named in `only`, on `device`.

    `options` that are not None take the place of those that the target declares in its attribute
    ``moedoctor``. `sizes` replace those of each question. A problem that takes more than `seconds` is a
    crash. Raises TargetError.
    """
    name = name_target(target)
    given = {key: value for key, value in options.items() if value is not None}
    request: dict[str, Any] = {"target": name, "kind": kind, "options": given, "device": device, "seed": seed}
    request |= {"only": list(only), "sizes": sizes, "seconds": seconds}
    answers: dict[tuple[str, str], Answer] = {}
    about: dict[str, Any] = {}
    going = True
    while going:
        with interrupts.hold_signals():
            try:
                asked = {**request, "done": [list(key) for key in answers]}
                child = run_module(_CHILD, asked, seconds=_LONGEST, caches=_CACHES)
            except interrupts.Interrupted as stop:
                child = stop.ended
        at: Mapping[str, Any] | None = None
        for event in child.answers:
            if event["event"] == "unusable":
                raise TargetError(f"{name}: {event['reason']}")
            if event["event"] == "target":
                about = event
            elif event["event"] == "begin":
                at = event
            else:
                at = None
                answers[event["variant"], event["question"]] = _make_answer(event, about, request)
        going = child.problem is not None and not child.interrupted
        if child.problem is not None and at is None:
            raise TargetError(f"{name}: {child.problem}")
        if at is not None:
            verdict = "skipped" if child.interrupted else "crashed"
            event = {**at, "verdict": verdict, "reason": _explain_death(child, seconds)}
            answer = _make_answer(event, about, request)
            # An interrupted examination is no pass.
            answers[at["variant"], at["question"]] = replace(
                answer, passes=answer.passes and not child.interrupted
            )
    facts = (about["kind"], about["package"], about["machine"], seed, about["options"])
    return ConformReport(name, *facts, tuple(answers.values()))


def _explain_death(child: Ended, seconds: float) -> str:
    if child.interrupted:
        return "interrupted, with the questions after it"
    late = child.code is None or "Timeout (" in child.log  # the text of faulthandler
    return f"no answer within {seconds:g} s" if late else from_exit(child.code or 0, child.log).message


def _make_answer(event: Mapping[str, Any], about: Mapping[str, Any], request: Mapping[str, Any]) -> Answer:
    question = load_questions(about["kind"])[event["question"]]
    verdict, variant = Verdict(event["verdict"]), event["variant"]
    undefined = about["undefined"].get(question.name)
    allowed = verdict is Verdict.REFUSED and (question.may_refuse or event.get("allowed", False))
    passes = verdict in (Verdict.RIGHT, Verdict.SKIPPED) or allowed or undefined is not None
    asked = verdict not in (Verdict.RIGHT, Verdict.SKIPPED)
    return Answer(
        question.name,
        variant,
        verdict,
        passes,
        event.get("reason"),
        question.entry if asked else None,
        event.get("sizes") if asked else None,
        _write_repeat(event, about, request) if asked else None,
        undefined if asked else None,
    )


def _write_repeat(event: Mapping[str, Any], about: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    check, device = CHECKS[about["kind"]], request["device"]
    words = [repr(request["target"])]
    words += [f"{key}={value!r}" for key, value in request["options"].items() if key != "formats"]
    words += [f"formats={(event['variant'].split()[0],)!r}"] if event["variant"] else []
    words += [f"device={device!r}"] if device != "cpu" else []
    words += [f"seed={request['seed']}"] if request["seed"] else []
    words += [f"only={(event['question'],)!r}", f"sizes={dict(event['sizes'])!r}"]
    return f"from moedoctor.testing import {check}; print({check}({', '.join(words)}))"
