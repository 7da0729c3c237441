"""The pages of `moedoctor replay` and `moedoctor capsule show`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import moedoctor
from moedoctor.diagnose.capsule.mistakes import BY_NAME
from moedoctor.diagnose.capsule.replay import BackendReplay, CapsuleFacts, ReplayDocument
from moedoctor.reporters.json import to_document
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Span, Step, Table, show_table
from moedoctor.reporters.pages.machine import make_environment_table
from moedoctor.reporters.text import count_of
from moedoctor.results import SCHEMA_VERSION, from_json
from moedoctor.text import escape, format_size, join_some

_MOST_PLACES = 8
"""Experts, and tokens, of which the page has a row."""
_PLACES = {
    "row_unwritten": "rows that nobody wrote",
    "global_scale_wrong": "a wrong global scale",
    "expert_replaced": "another expert's weights",
    "expert_unknown": "weights that are not in this capsule",
}
_NEAREST = {"global_scale_wrong": "MD014"}
"""A mistake without an entry -> the entry about the same value."""


@dataclass(frozen=True)
class CapsuleDocument(CapsuleFacts):
    """The answer of `moedoctor capsule show` about a file."""

    command: ClassVar[str] = "capsule"
    file: str


def replay_document(document: ReplayDocument) -> dict[str, Any]:
    """Return a replay as part of the report of a run."""
    head = {"schema_version": SCHEMA_VERSION, "moedoctor": moedoctor.__version__}
    return {**head, **to_document(document), "summary": {"exit_code": document.exit_code}}


def replay_page(
    replayed: ReplayDocument | Mapping[str, Any], level: int = 1, *, full: bool = False
) -> list[Block]:
    """Return the answer first, then what explains it, then the backends. `full` adds the machine.

    The report of a run holds the replay as plain data.
    """
    document = from_json(ReplayDocument, replayed) if isinstance(replayed, Mapping) else replayed
    record, backends = document.capsule.record, document.backends
    page: list[Block] = [Heading(f"{escape(document.file)}: {escape(record['layer'])}", level)]
    word, tone = ("right:", "clean") if document.right else ("wrong:", "error")
    verdict = Span(word, tone) if document.judged else Span("not judged:", "note")
    page.append(Paragraph((verdict, f" {answer_of(document)}")))
    page += _show_explanations(document.diagnosis, level + 1)
    page += _show_backend_tensors(document.backend_tensors, level + 1)
    header = ("backend", "reference", "cosine", "norm ratio", "recorded output", "note")
    page += show_table("On this machine", header, list(map(_make_row, backends)), level=level + 1)
    page += [Heading("The call", level + 1), Bullets(_call(record, document.capsule))]
    if full and document.environment:
        page += make_environment_table(document.environment)
    return [*page, *map(Step, _suggest_steps(document))]


def _suggest_steps(document: ReplayDocument) -> list[str]:
    """Return what to do about a wrong output, or about one that cannot be judged."""
    if document.judged and document.right:
        return []
    mistakes = (document.diagnosis.get("explanation") or {}).get("mistakes", ())
    known = [BY_NAME[name].entry for name in mistakes if name in BY_NAME and BY_NAME[name].entry]
    steps = [f"`moedoctor explain {entry}` says what to do" for entry in dict.fromkeys(known)]
    if near := {_NEAREST[name]: None for name in mistakes if name in _NEAREST}:
        steps.append(
            f"no entry is exactly this failure; the nearest is {', '.join(near)}: "
            f"`moedoctor explain {next(iter(near))}`"
        )
    facts = document.capsule
    if facts.record["weights"] == "none":
        return steps
    if not document.backends:
        steps.append(f"`moedoctor replay {document.file} --backend all` runs backends on the same inputs")
    elif not facts.has_output and all(row.right is not False for row in document.backends):
        steps.append("`moedoctor triage LOG` reads the log of the process that died")
    copy = f"`moedoctor capsule copy {document.file} FILE --without-weights` makes a copy to share"
    return [*steps, copy]


def answer_of(document: ReplayDocument) -> str:
    """Return in one sentence what the recorded output is."""
    recorded = document.recorded
    if not document.judged:
        facts = document.capsule
        reason, weights = facts.record["reason"] or "the process died", facts.record["weights"]
        if facts.has_output:
            return f"the capsule's weights are {weights}, so its output cannot be compared with the reference"
        if weights == "none":
            return f"the capsule has inputs only, no output and no weights ({reason})"
        here = _describe_backends(document.backends) or "run backends on it with --backend all"
        return f"the call has no output to judge ({reason}); {here}"
    if document.right:
        return f"the recorded output agrees with the float32 reference (cosine {recorded['cosine']:.5f})"
    explanation = document.diagnosis.get("explanation")
    reason = recorded["reason"]
    if explanation is None:
        shared = recorded.get("nonfinite_experts", ())
        experts = f"expert{'s' * (len(shared) > 1)} {', '.join(map(str, shared))}"
        parts = (
            reason,
            f"all of them, and no finite token, use {experts}" if shared else "",
            "none of the known mistakes explains it",
            _describe_backends(document.backends),
        )
        return "; ".join(filter(None, parts))
    runner_up = document.diagnosis.get("runner_up")
    culprit = _find_culprit(document)
    beside = "" if runner_up is None else f", next best {runner_up['cosine']:.5f}"
    equal = "Its finite tokens equal" if recorded.get("nonfinite_tokens") else "The output equals"
    return (
        f"{reason}. {equal} the reference with {describe_explanation(explanation)} "
        f"(cosine {explanation['cosine']:.5f}{beside}){f'. {culprit}' if culprit else ''}"
    )


def _find_culprit(document: ReplayDocument) -> str:
    """Return which tensor of the backend holds the error that explains the output; empty if none shows it."""
    explanation = document.diagnosis["explanation"]
    experts, matrices = set(explanation["experts"] or ()), {step for step, _ in explanation["steps"]}
    for tensor in document.backend_tensors:
        odd = {each["expert"]: each["form"] for each in tensor["odd"]}
        if experts and experts <= odd.keys() and (tensor["of"] or "").partition("_")[0] in matrices:
            return (
                f"The backend's {escape(tensor['name'])} has it, and the checkpoint has not "
                f"({_list_values('expert', sorted(experts))}: {odd[min(experts)]}): "
                "loading or repacking the weights did it, not the kernel"
            )
    return ""


def _describe_backends(backends: Sequence[BackendReplay]) -> str:
    """Return what the backends computed here, such as "on this machine OURS is right; MARLIN did not run"."""
    kinds = {
        "right": [row.backend for row in backends if row.right],
        "wrong": [row.backend for row in backends if row.right is False],
        "broken off": [row.backend for row in backends if row.failed],
        "not available": [row.backend for row in backends if row.unavailable],
    }
    parts = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {word}"
        for word, found in kinds.items()
        if (names := list(dict.fromkeys(found)))
    ]
    return f"on this machine {'; '.join(parts)}" if parts else ""


def describe_explanation(explanation: Mapping[str, Any]) -> str:
    """Return the mistakes and their places in words, with their entries."""
    parts = []
    for name in explanation["mistakes"]:
        words = _PLACES.get(name) or BY_NAME[name].words
        entry = BY_NAME[name].entry if name in BY_NAME else None
        steps = [step for step, option in explanation["steps"] if option == name]
        several = name in BY_NAME and len(BY_NAME[name].steps) > 1  # else the words say where
        where = f" in {' and '.join(steps)}" if several else ""
        parts.append(f"{words}{where}{f' ({entry})' if entry else ''}")
    text = " and ".join(parts)
    if explanation["factor"] is not None:
        (step, name), factor = explanation["steps"][0], f"{explanation['factor']:.3g}"
        if name == "activation_clamped":
            text = f"an activation that is clamped at {factor}"
        else:
            text = f"the global scale of {step} {factor} times as large"
    if explanation["experts"]:
        text += f", {_list_values('expert', explanation['experts'])}"
    if explanation["tokens"]:
        text += f", {_list_values('token', explanation['tokens'])}"
    if explanation["taken"] is not None:
        text += f", those of expert {explanation['taken']}"
    return text


def _list_values(noun: str, values: Sequence[int]) -> str:
    return f"{noun if len(values) == 1 else f'{noun}s'} {join_some([str(value) for value in values])}"


def _show_explanations(diagnosis: Mapping[str, Any], level: int) -> list[Block]:
    if not diagnosis:
        return []
    best, runner_up = diagnosis["explanation"], diagnosis["runner_up"]
    others = [("explains it as well", other) for other in diagnosis["not_told_apart"]]
    rows = [
        [word, describe_explanation(found), f"{found['cosine']:.5f}", f"{found['share_explained']:.2%}"]
        for word, found in (("explains it", best), *others, ("next best", runner_up))
        if found
    ]
    if not rows:
        return []
    count = diagnosis["explanations_compared"]
    return [
        Heading("What explains it", level),
        Table(("answer", "the reference with", "cosine", "of the error"), rows),
        Paragraph(f"{count_of(count, 'explanation')} compared"),
        *_show_shares(best, runner_up, level),
    ]


def _show_shares(
    best: Mapping[str, Any] | None, runner_up: Mapping[str, Any] | None, level: int
) -> list[Block]:
    """Return what the first two explain of the wrong tokens: by expert, and token by token."""
    rows, hidden = [], 0
    for noun in ("expert", "token"):
        columns = [
            {row[noun]: f"{row['share_explained']:.2%}" for row in (found or {}).get(f"{noun}_shares", ())}
            for found in (best, runner_up)
        ]
        places = sorted({*columns[0], *columns[1]})
        hidden += len(places[_MOST_PLACES:])
        label = "tokens of expert" if noun == "expert" else noun
        for place in places[:_MOST_PLACES]:
            rows.append([f"{label} {place}", *(column.get(place, "") for column in columns)])
    more = [Paragraph(f"{hidden} more are in the JSON")] if hidden else []
    head = ("wrong tokens", "explained", "by the next best")
    return [*show_table("How much of each expert and token", head, rows, "lrr", level), *more]


def _show_backend_tensors(tensors: Sequence[Mapping[str, Any]], level: int) -> list[Block]:
    """Return what the backend got, and the experts in which that is not the checkpoint's."""
    rows = []
    for tensor in tensors:
        odd = [
            f"expert {each['expert']} {each['form']}"
            + ("" if each["like"] is None else f", those of expert {each['like']}")
            for each in tensor["odd"]
        ]
        rows.append([escape(tensor["name"]), tensor["of"] or "", tensor["form"], "; ".join(odd)])
    head = ("tensor", "of the checkpoint's", "how", "but")
    return show_table("What the backend got", head, rows, level=level)


def _make_row(backend: BackendReplay) -> list[str]:
    name = f"{backend.backend} {backend.quantization}"
    if backend.right is None:
        return [name, "not run", "", "", "", escape(backend.unavailable or backend.failed or "")]
    found = backend.against_reference or {}
    cosine, ratio = found.get("cosine"), found.get("norm_ratio")
    repeats = {None: "", True: "the same", False: "another"}[backend.repeats]
    note = "" if backend.deterministic else "three calls gave different bits"
    return [
        name,
        "right" if backend.right else f"wrong: {escape(str(found.get('reason')))}",
        "" if cosine is None else f"{cosine:.5f}",
        "" if ratio is None else f"{ratio:.4f}",
        repeats,
        note,
    ]


def make_capsule_page(facts: CapsuleDocument) -> list[Block]:
    file = facts.file
    rows = [[each.name, each.type, str(list(each.shape)), f"{each.bytes:,}"] for each in facts.tensors]
    judged = facts.has_output and facts.record["weights"] == "recorded"
    steps = [Step(f"`moedoctor replay {escape(file)}` judges the recorded output")] if judged else []
    if not facts.has_output and facts.record["weights"] != "none":
        steps = [Step(f"`moedoctor replay {escape(file)} --backend all` runs backends on the inputs")]
    return [
        Heading(f"{escape(file)}: {escape(facts.record['layer'])}", 1),
        Bullets(_call(facts.record, facts)),
        Table(("tensor", "type", "shape", "bytes"), [list(map(escape, row)) for row in rows], "lllr"),
        *steps,
    ]


def describe_capsule(facts: CapsuleFacts) -> str:
    """Return the layer and what was recorded of it, in one line."""
    return f"{count_of(len(facts.tensors), 'tensor')}: {'; '.join(_call(facts.record, facts)[:3])}"


def _call(record: Mapping[str, Any], facts: CapsuleFacts) -> list[str]:
    tokens = next(tensor.shape[0] for tensor in facts.tensors if tensor.name == "x")
    held = next(tensor.shape[0] for tensor in facts.tensors if tensor.name == "expert_ids")
    of = f" of {record['call_tokens']}" if record["call_tokens"] else ""
    lines = [
        f"{record['experts']} experts, top {record['top_k']}, hidden {record['hidden']}, intermediate "
        f"{record['intermediate']}, {record['activation']}",
        f"weights {record['quantization']} ({record['weights']}, {count_of(held, 'expert')}), activations "
        f"{record['activations']}, backend {record['backend']}",
        f"call {record['call']}, {count_of(tokens, 'token')}{of}, {format_size(facts.bytes)}",
    ]
    if record["reason"]:
        lines.append(f"kept because: {record['reason']}")
    for title in ("parallel", "kernel", "packages", "environment"):
        if record[title]:
            lines.append(f"{title}: " + ", ".join(f"{name} {value}" for name, value in record[title].items()))
    return [escape(line) for line in lines]
