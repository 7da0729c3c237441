"""Makes the document of `moedoctor preflight` from the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from moedoctor.diagnose.preflight.ask import Question
from moedoctor.diagnose.preflight.judge import NOT_SEEN, conclude
from moedoctor.diagnose.preflight.records import PreflightDocument, PreflightSummary, StartAnswer, Verdict

_NAMES = {Verdict.REFUSED: "refused", Verdict.WRONG: "wrong", Verdict.CANNOT_SAY: "cannot-say"}


def drop_ignored(answer: StartAnswer, ignored: Sequence[str]) -> StartAnswer:
    """Return an answer without the findings whose rule or tensor contains one of the texts, judged anew."""
    kept = tuple(
        each
        for each in answer.findings
        if not any(text == each.rule or text in each.tensor for text in ignored)
    )
    if len(kept) == len(answer.findings):
        return answer
    asked = {row.stage for row in answer.stages if row.outcome != "not asked"}
    verdict, reason, step = conclude(kept, answer.release, asked)
    if verdict is Verdict.STARTS:
        reason = f"{answer.release}: nothing was found but what --ignore leaves out"
    note = f"findings that --ignore leaves out: {len(answer.findings) - len(kept)}"
    return replace(
        answer, findings=kept, verdict=verdict, reason=reason, next_step=step, notes=(*answer.notes, note)
    )


def _find_failure(answer: StartAnswer, fail_on: Sequence[str]) -> str:
    """Return why an answer fails; empty if it does not."""
    if _NAMES.get(answer.verdict) in fail_on:
        return answer.reason
    warnings = [each.message for each in answer.findings if each.rule in ("kv-cache", "setting")]
    return "; ".join(warnings) if "warning" in fail_on else ""


def make_document(
    model: str,
    question: Question,
    answers: Sequence[StartAnswer],
    notes: Sequence[str],
    *,
    fail_on: Sequence[str],
) -> PreflightDocument:
    """Return the document. The command line as it was given decides the exit code, in every release asked."""
    counts = Counter(answer.verdict for answer in answers)
    given = [answer for answer in answers if answer.words == answers[0].words]
    failed = {answer.release: reason for answer in given if (reason := _find_failure(answer, fail_on))}
    unknown = {each.release: each.reason for each in given if each.verdict is Verdict.CANNOT_SAY}
    code = 1 if failed else 2 if unknown else 0
    reasons = tuple(
        reason if reason.startswith(release) else f"{release}: {reason}"
        for release, reason in (failed or unknown).items()
    )
    major, minor = question.capability
    return PreflightDocument(
        model=model,
        gpu={
            "capability": f"{major}.{minor}",
            "memory_gib": round(question.memory / 2**30, 1),
            "count": question.gpus,
        },
        answers=tuple(answers),
        not_seen=NOT_SEEN,
        notes=tuple(notes),
        summary=PreflightSummary(
            counts[Verdict.STARTS],
            counts[Verdict.REFUSED],
            counts[Verdict.WRONG],
            counts[Verdict.CANNOT_SAY],
            code,
            reasons,
        ),
    )
