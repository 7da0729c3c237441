"""Judges what a release did with a command line: refused, starts and answers wrongly, starts, or cannot say.

A refusal is an exception of the release's own code in a stage that every start goes through. An error that
comes from a missing library, a substituted answer or moedoctor is no refusal: the answer is "cannot say".
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moedoctor.diagnose.plan.kv_cache import PlanError
from moedoctor.diagnose.plan.repacking import compute_host_peak, compute_repacking
from moedoctor.diagnose.plan.workspace import Workspace, compute_workspace
from moedoctor.diagnose.preflight.command import TRUST
from moedoctor.diagnose.preflight.records import (
    RULES,
    STAGES,
    LayerCount,
    PreflightFinding,
    StageAnswer,
    StartAnswer,
    Verdict,
)
from moedoctor.diagnose.settings.settings import check_settings
from moedoctor.diagnose.triage.triage import triage
from moedoctor.models.layer_shape import LayerShape
from moedoctor.models.tensor_names import OPTIONAL
from moedoctor.text import shorten

_LIBRARIES = frozenset(
    {"ImportError", "ModuleNotFoundError", "NotImplementedError", "MemoryError", "RecursionError"}
)
_DEVICE = re.compile(
    r"[Mm]eta(?: backend| tensor|\b.{0,200}device)|libcuda|NVML|CUDA (?:driver|error|runtime)|_OpNamespace|"
    r"_C_?\w* object|no kernel image|not compiled with CUDA|No module named|Triton is not installed|"
    r"Old-style modular kernel|must provide a moe_kernel",  # experts whose weights could not be prepared here
)
"""Messages of what a machine without the GPU cannot do."""
_QUOTED = re.compile(r"'(\w+(?:\.\w+)+)'")
"""A tensor or layer in an error message."""
_LIBRARY_CONFIG = re.compile(r"transformers|does not recognize this architecture|model type", re.IGNORECASE)
_LEFT_OUT = f"{TRUST} was left out"
_LEAST_BYTES = 1000
"""Scales of a KV cache are less, and nobody has to know."""
_GIVE_HEADERS = "Give the checkpoint, or its headers: `moedoctor preflight headers FOLDER`."
NOT_SEEN = (
    "kernels: nothing was compiled or run",
    "real memory: activations, CUDA graphs, the host while weights are loaded, and other processes",
    "values of the weights: NaN, wrong scales, damaged bytes",
    "downloads, and code that a checkpoint brings (trust_remote_code)",
)


def judge_start(
    reply: Mapping[str, Any],
    environment: Mapping[str, Any],
    words: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> StartAnswer:
    """Return the answer to one command line from what the child reported."""
    versions = environment.get("versions", {})
    release = versions.get("vllm", "unknown")
    ranks = reply.get("ranks", ())
    adapters = [each for row in ranks for each in row.get("adapters", {}).get("adapters", ())]
    errors = [reply.get("error"), *(row.get("error") for row in (*ranks, *adapters))]
    error = next(filter(None, errors), None)
    is_left_out = TRUST in words and TRUST not in reply.get("words", words)
    if error is not None and error["stage"] == "config" and is_left_out:
        error = {**error, "cause": _LEFT_OUT}
    rank = next((row["rank"] for row in ranks if "error" in row), None)
    quantization = str(reply.get("config", {}).get("quantization") or "")
    skipped = [each["pattern"] for each in reply.get("skipped", ())]
    unread = f"{release} reads nothing of {_join(skipped)}" if skipped else ""
    findings = [*_find_errors(error, rank, environment, quantization, unread)]
    findings += _find_holes(reply, release, skipped, unread)
    findings += [*_find_unbalanced(ranks), *_find_stale_buffers(ranks)]
    findings += [*_find_adapters(adapters, release), *_find_memory(ranks)]
    findings += _find_settings(release, words, variables or {})
    asked = {stage for row in ranks for stage in row["seconds"]} | set(reply.get("seconds", {}))
    verdict, reason, step = conclude(findings, release, asked)
    if "made" in reply and verdict is Verdict.STARTS and "load" in asked and not step:
        reason = f"{release} loads the tensors that its own mapping names; a checkpoint was not looked at"
        step = _GIVE_HEADERS
    config = reply.get("config", {})
    return StartAnswer(
        release=release,
        words=tuple(words),
        verdict=verdict,
        reason=reason,
        next_step=step,
        stages=tuple(_list_stages(reply, error, verdict)),
        findings=tuple(findings),
        layers=tuple(_count_layers(ranks)),
        config=config,
        ranks=tuple(row["rank"] for row in ranks),
        weight_bytes=tuple(
            row["bytes"] + row.get("draft", {}).get("bytes", 0) for row in ranks if "bytes" in row
        ),
        memory=tuple(_describe_memory(max(ranks, key=lambda row: row.get("bytes", 0), default={}), release)),
        kv_tokens=min(
            (row["kv"]["tokens"] for row in ranks if row.get("kv", {}).get("tokens")), default=None
        ),
        backends=tuple(_list_backends(ranks)),
        after=tuple(dict.fromkeys(_describe_after(ranks))) if reply.get("post") else (),
        notes=tuple(_list_notes(environment, reply)),
        versions=versions,
        import_seconds=environment.get("seconds", 0.0),
        seconds=reply.get("elapsed", 0.0),
        peak_memory=reply.get("peak_memory", 0),
    )


def answer_unasked(release: str, words: Sequence[str], why: str) -> StartAnswer:
    """Return the answer for a release that gave none."""
    step = "Run this in the environment of the server, or name it with --python."
    if why.startswith("no answer within"):
        step = "Give it more time: --timeout SECONDS."
    finding = _make("cannot-say", why, step)
    reason = f"{release} could not be asked: {why}"
    return StartAnswer(release, tuple(words), Verdict.CANNOT_SAY, reason, finding.next_step, (), (finding,))


def _make(rule: str, message: str, next_step: str, **more: Any) -> PreflightFinding:
    return PreflightFinding(rule, RULES[rule][0], message, next_step, **more)


def is_refusal(error: Mapping[str, Any], environment: Mapping[str, Any]) -> bool:
    """Return True if an exception is the release's own answer to the command line and checkpoint."""
    if error["stage"] not in STAGES or error["stage"] == "memory":
        return False
    if error["message"].startswith("EPLB is not supported"):
        return True
    if error["type"] in _LIBRARIES or error["last_module"] == "moedoctor" or not error["at"]:
        return (error["stage"], error["type"]) == ("arguments", "ValueError")
    if error["cause"] or _DEVICE.search(error["message"]):
        return False
    # Another transformers than the release asks for reads configurations differently; a newer one knows more.
    others = [each for each in environment.get("unsatisfied", ()) if each["name"] == "transformers"]
    unknown = "does not recognize this architecture" in error["message"]
    broken = any(not (unknown and each["newer"]) for each in others)
    return not (broken and error["stage"] == "config" and bool(_LIBRARY_CONFIG.search(error["message"])))


def _find_errors(
    error: Mapping[str, Any] | None,
    rank: int | None,
    environment: Mapping[str, Any],
    quantization: str,
    unread: str,
) -> Iterator[PreflightFinding]:
    """Yield the exception that ended the start, as a refusal or as what cannot be said."""
    if error is None:
        return
    message = clean_message(error["message"]) or error["line"]  # an assert without words
    text = message if error["stage"] == "arguments" else f"{error['type']}: {message}"
    text += f" ({error['cause']})" if error["cause"] else ""
    if error["last_module"] == "transformers":
        text += f" (raised by transformers {environment.get('versions', {}).get('transformers', '')})"
    named = _QUOTED.search(error["message"]) if error["stage"] in ("build", "load", "draft") else None
    tensor = error.get("tensor") or (named[1] if named is not None else "")
    where = {"rank": rank, "tensor": tensor, "source": "".join(error["at"][-1:])}
    if is_refusal(error, environment):
        text += f"; {unread}" if unread and "not initialized" in error["message"] else ""
        log = f"{text}\nMoE, quantization {quantization}\n{where['source']}"
        known = next((finding.id for finding in triage(io.BytesIO(log.encode())).findings), "")
        if error["stage"] == "adapters" and "expert" in error["message"]:  # its end is cut off
            known = "MD029"
        yield _make("refused", text, _advise(error), **where, id=known)
    else:
        lacks = "; ".join(f"{each['name']}{each['required']}" for each in environment.get("unsatisfied", ()))
        step = (
            f"Install what the release requires ({lacks})."
            if lacks
            else "Run this in the server's environment."
        )
        if error["cause"] == _LEFT_OUT:
            step = f"Give {TRUST} to preflight, too: it runs the checkpoint's own code here."
        yield _make("cannot-say", f"{STAGES.get(error['stage'], error['stage'])}: {text}", step, **where)


def clean_message(message: str) -> str:
    """Return a message without what pydantic writes around it."""
    message = re.sub(r"^\d+ validation errors? for \w+ (?:Value error, )?", "", message)
    return shorten(re.split(r" \[type=|, input_value=| For further information", message)[0], 600)


def _advise(error: Mapping[str, Any]) -> str:
    """Return what to do about a refusal of this stage."""
    if error["stage"] == "arguments":
        return "Correct the flag; `moedoctor backends -- vllm serve ...` names the settings of a release."
    if re.search(r"divisible|divide|partition|parallel", error["message"] or error["line"]):
        return "Choose other sizes: --sizes 8 shows which ones this model loads with."
    if error["stage"] in ("load", "draft") and error.get("tensor"):
        return (
            f"Compare {error['tensor']} with config.json (sizes, ignore list, quantization), or ask another "
            "release: --releases A,B."
        )
    return "Change what the message names, or ask another release: --releases A,B."


def _find_holes(
    reply: Mapping[str, Any], release: str, skipped: Sequence[str], unread: str
) -> Iterator[PreflightFinding]:
    """Yield parameters that were not wholly written, and tensors that were cut, converted or not read."""
    ranks = reply.get("ranks", ())
    if any("error" in row for row in ranks):
        return
    holes: dict[str, tuple[int, Mapping[str, Any]]] = {}
    casts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in ranks:
        for loaded in (row.get("loaded", {}), row.get("draft", {}).get("loaded", {})):
            for hole in loaded.get("holes", ()):
                if not (hole["padded"] or hole["unused"]) and not OPTIONAL.search(hole["pattern"]):
                    holes.setdefault(hole["pattern"], (row["rank"], hole))
            for name, stored, parameter in loaded.get("cast", ()):
                casts[stored, parameter].append(name)
    lists = (row.get("loaded", {}).get("missing") for row in ranks)
    missing = next(filter(None, lists), None)
    cause = unread
    if missing:
        cause = f"{unread}, and finds no " if unread else f"{release} finds no "
        cause += missing["first"] + (f" and {missing['count'] - 1} more" if missing["count"] > 1 else "")
    cause += ": " if cause else ""
    for is_empty in (True, False):
        rows = {pattern: row for pattern, row in holes.items() if (row[1]["written"] == 0) == is_empty}
        if rows:
            rank, hole = next(iter(rows.values()))
            extent = "never written" if is_empty else f"written in part, the first to {hole['written']:.1%}"
            count = sum(each["count"] for _, each in rows.values())
            message = f"{cause}{count} parameters are {extent} ({_join(list(rows))})"
            step = (
                "Rename the tensors as the release reads them, or ask another release: --releases A,B."
                if skipped
                else "The checkpoint lacks these tensors: export it again, or compare it with the original."
            )
            known = "MD021" if any("expert" in pattern for pattern in skipped) else ""
            yield _make("not-written", message, step, rank=rank, tensor=hole["example"], id=known)
    large = reply.get("too_large", ())
    if large:
        first = large[0]
        yield _make(
            "cut",
            f"{len(large)} tensors are larger than the model: {release} reads {first['read']:.0%} of "
            f"{first['tensor']} {first['shape']}",
            "Compare the sizes in config.json with the tensor: the release ignores the rest of it.",
            tensor=first["tensor"],
        )
    for (stored, parameter), names in casts.items():
        yield _make(
            "converted",
            f"{len(names)} tensors are stored as {stored} and copied into {parameter} without a scale",
            "Declare the quantization in config.json, and ignore only the layers that are not quantized.",
            tensor=names[0],
            id="MD023",
        )
    if skipped and not holes:
        yield _make("not-read", unread, "Check that these are meant to be unused.")


def _find_unbalanced(ranks: Sequence[Mapping[str, Any]]) -> Iterator[PreflightFinding]:
    """Yield a refusal if --enable-eplb is set for a model that the release does not balance."""
    name = next((row["unbalanced"] for row in ranks if row.get("unbalanced")), "")
    if name:
        message = f"--enable-eplb: {name} does not say which experts to move, and the first step asserts that"
        yield _make("refused", message, "Leave --enable-eplb out; it changes no answer.", id="MD038")


def _find_stale_buffers(ranks: Sequence[Mapping[str, Any]]) -> Iterator[PreflightFinding]:
    """Yield a finding if CPU offload moves weights of which the model made buffers."""
    stale: Sequence[str] = next((row["stale"] for row in ranks if row.get("stale")), ())
    if stale:
        message = (
            f"--cpu-offload-gb moves weights that buffers were made of: up to {len(stale)} are never loaded"
        )
        step = "Add --cpu-offload-params experts, or set MOEDOCTOR_FIXES=offload."
        yield _make("stale-buffer", f"{message} ({stale[0]})", step, tensor=stale[0], id="MD008")


def _find_adapters(adapters: Sequence[Mapping[str, Any]], release: str) -> Iterator[PreflightFinding]:
    """Yield a finding for each adapter with parts that no layer takes, or with those of another shape."""
    for misfits, name in {tuple(each.get("misfits", ())): each["name"] for each in adapters}.items():
        if misfits:
            message = f"{len(misfits)} tensors of the adapter {name} do not fit: {misfits[0]}"
            yield _make("adapter-shape", message, "Use an adapter of this model: vLLM compares no shapes.")
    for unplaced, name in {tuple(each["unplaced"]): each["name"] for each in adapters}.items():
        if unplaced:
            message = f"{release} applies nothing of {_join(unplaced)} of the adapter {name}"
            step = "Convert the adapter to the layout of this model, or merge it into the weights."
            known = "MD029" if any("expert" in part for part in unplaced) else ""
            yield _make("adapter-unused", message, step, id=known)


def _join(patterns: Sequence[str]) -> str:
    """Return names of tensors, each after the first one without the parts that it shares with that."""
    first = patterns[0].split(".")
    texts = [patterns[0]]
    for pattern in patterns[1:4]:
        parts = pattern.split(".")
        own = next((place for place, (a, b) in enumerate(zip(first, parts, strict=False)) if a != b), 0)
        texts.append(f"…{'.'.join(parts[own:])}" if own else pattern)
    more = f" and {len(patterns) - 4} more" if len(patterns) > 4 else ""
    return ", ".join(texts) + more


def _find_memory(ranks: Sequence[Mapping[str, Any]]) -> Iterator[PreflightFinding]:
    """Yield a warning if the weights do not fit, or if vLLM's own arithmetic finds no room for a request."""
    for row in ranks:
        kv = row.get("kv", {})
        if refused := kv.get("refused"):
            text = shorten(refused, 300)
            step = (
                "Lower --max-model-len, raise --gpu-memory-utilization or --cpu-offload-gb, or use more GPUs."
            )
            if kv["left"] < 0:
                usable = _format_gib(kv["left"] + kv["weights"])
                text = f"the weights take {_format_gib(kv['weights'])}, and vLLM may use {usable} of a GPU"
                step = "Use more GPUs, a quantized checkpoint or --cpu-offload-gb; ask `moedoctor plan`."
            yield _make("kv-cache", f"rank {row['rank']}: {text}", step, rank=row["rank"])
            return


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _find_settings(
    release: str, words: Sequence[str], variables: Mapping[str, str]
) -> Iterator[PreflightFinding]:
    """Yield flags and variables without effect, as the tables of `backends` know them."""
    try:
        settings = check_settings(release.partition("+")[0], variables, ("vllm", "serve", *words))
    except ValueError:  # a release that the tables do not know
        return
    for each in settings:
        if not each.takes_effect and not each.stops:
            step = (
                f"Use {each.instead}."
                if each.instead
                else "`moedoctor backends -- vllm serve ...` says more."
            )
            yield _make("setting", f"{each.setting}: {each.message}", step, source=each.source, id="MD010")


def conclude(findings: Sequence[PreflightFinding], release: str, asked: Any) -> tuple[Verdict, str, str]:
    """Return the verdict with its reason and next step."""
    by_rule = {finding.rule: finding for finding in reversed(findings)}  # the first of each rule
    if refused := by_rule.get("refused"):
        where = f", rank {refused.rank}" if refused.rank is not None else ""
        is_named = not refused.tensor or f"'{refused.tensor}'" in refused.message
        tensor = "" if is_named else f" ({refused.tensor})"
        return Verdict.REFUSED, f"{release} stops{where}: {refused.message}{tensor}", refused.next_step
    if unknown := by_rule.get("cannot-say"):
        reason = f"{release} was not asked to the end: {unknown.message}"
        return Verdict.CANNOT_SAY, reason, unknown.next_step
    for rule in ("not-written", "stale-buffer", "cut", "converted", "adapter-unused", "adapter-shape"):
        if wrong := by_rule.get(rule):
            return Verdict.WRONG, wrong.message, wrong.next_step
    if "load" not in asked:
        reason = f"{release} builds the model; its weights were not looked at"
        return Verdict.STARTS, reason, _GIVE_HEADERS
    if memory := by_rule.get("kv-cache"):
        return Verdict.STARTS, memory.message, memory.next_step
    return Verdict.STARTS, f"{release} finds the weights of every parameter", ""


def _list_stages(
    reply: Mapping[str, Any], error: Mapping[str, Any] | None, verdict: Verdict
) -> Iterator[StageAnswer]:
    """Yield each stage of the start with its outcome, and the time that it took over all ranks."""
    seconds: dict[str, float] = defaultdict(float)
    ranks = reply.get("ranks", ())
    for row in (reply, *ranks):
        for stage, took in row.get("seconds", {}).items():
            seconds[stage] += took
    for stage, words in STAGES.items():
        outcome = "passed" if stage in seconds else "not asked"
        if error is not None and error["stage"] == stage:
            outcome = "stopped" if verdict is Verdict.REFUSED else "cannot say"
        if stage == "memory" and any(row.get("kv", {}).get("refused") for row in ranks):
            outcome = "warning"
        if stage == "memory" and any("problem" in row.get("kv", {}) for row in ranks):
            outcome = "cannot say"
        if outcome != "not asked" or stage not in ("draft", "adapters"):
            yield StageAnswer(stage, outcome, words, round(seconds[stage], 1))
    if (
        reply.get("post") and "after" in seconds
    ):  # it never decides: what could not be done is listed beside it
        yield StageAnswer("after", "passed", "prepares the weights", round(seconds["after"], 1))


def _count_layers(ranks: Sequence[Mapping[str, Any]]) -> Iterator[LayerCount]:
    """Yield the layers of the first rank by kind, method and backend, then those of the draft."""
    for row in ranks[:1]:
        for layer in row.get("layers", ()):
            yield LayerCount(**layer)
        for layer in row.get("draft", {}).get("layers", ()):
            yield LayerCount(**{**layer, "kind": f"draft {layer['kind']}"})


def _list_backends(ranks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield (layers, backend or kernel, why it is not used) for the first rank, and for its draft."""
    for row in ranks[:1]:
        for draft, model in (("", row), ("draft ", row.get("draft", {}))):
            used = {_normalize(layer["backend"]) for layer in model.get("layers", ())}
            for kind, backend, reason in model.get("backends", ()):
                if _normalize(backend) not in used:
                    why = reason or "it takes this layer, and another one comes before it"
                    yield f"{draft}{kind}", backend, why


def _normalize(backend: str) -> str:
    return re.sub(r"[\W_]", "", backend).lower()


def _describe_after(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what repacking needs beside the loaded weights, and what could not be done with them here."""
    for row in ranks:
        for each in sorted(row.get("after", ()), key=lambda each: -each["new"]):
            if each["problem"]:
                yield f"{each['method']}: not done here: {each['problem']}"
            elif each["new"] >= _LEAST_BYTES:
                sizes = f"{_format_gib(each['new'])} beside the loaded weights of a layer meanwhile (MD026)"
                yield f"{each['method']}: {sizes}, {_format_gib(max(0, each['left']))} afterwards"


def _describe_memory(rank: Mapping[str, Any], release: str) -> Iterator[tuple[str, str]]:
    """Yield what a rank needs beside its weights: by the release's own code, and as `plan` computes it."""
    yield from _describe_experts(rank, release)
    kv = rank.get("kv", {})
    if "left" in kv:
        usable = _format_gib(max(0, kv["left"] + kv["weights"]))
        size = f"{_format_gib(max(0, kv['left']))} of {usable} that vLLM may use of a GPU"
        yield "left for the KV cache, if activations took nothing", size


def _describe_experts(rank: Mapping[str, Any], release: str) -> Iterator[tuple[str, str]]:
    """Yield where the weights of a rank with experts are, and what repacking and a call take beside them."""
    layer, rows = rank.get("experts") or {}, rank.get("after", ())
    used = next((row for row in rank.get("layers", ()) if row["kind"] == "experts"), None)
    if not layer or used is None:
        return
    if layer["host_bytes"]:
        host = min(layer["host_bytes"], rank["bytes"])
        yield "of these on the host, at most", _format_gib(host)
        peak = compute_host_peak(layer["moved"], layer["host_bytes"])
        yield "host memory while they are moved, at most", f"{_format_gib(peak)}, pinned as torch rounds it"
    elif "loaded" in rank:
        largest = f"{_format_gib(rank['loaded']['largest'])}: one tensor at a time, of mapped files"
        yield "host memory for weights while they are loaded, at most", largest
    backend, method = used["backend"].upper().replace(" ", "_"), used["method"].lower()
    scheme = next((name for name in ("nvfp4", "mxfp4", "fp8") if name in method), "bf16")
    activation = "silu" if layer["is_gated"] else "relu2"
    shape = LayerShape(layer["hidden"], layer["intermediate"], layer["experts"], 1, activation)
    if rows:
        yield from _describe_repacking(rank, compute_repacking(backend, scheme, shape).bytes)
    if not backend:
        return
    if backend == "MARLIN":  # its workspace is that of weights in any format
        scheme = "nvfp4"
    elif "int8" in method:  # activations of a byte
        scheme = "fp8"
    try:
        shape = replace(shape, top_k=layer["top_k"])
        space = compute_workspace(backend, scheme, shape, layer["tokens"], release)
    except (PlanError, ValueError):
        space = Workspace(None, f"{backend} was measured on no GPU yet, so nothing is computed for it;")
    known = _format_gib(space.bytes) if space.bytes is not None else "not known"
    why = "" if space.bytes is not None else f": {re.split('[:;]', space.how)[0]}"
    yield f"workspace of {backend} for {layer['tokens']:,} tokens", f"{known}{why}"


def _describe_repacking(rank: Mapping[str, Any], computed: int | None) -> Iterator[tuple[str, str]]:
    """Yield what repacking takes beside the weights; `computed` are the bytes if they were not counted."""
    rows, how = [dict(row) for row in rank["after"]], ""
    experts = [row for row in rows if row["kind"] == "experts"]
    if computed is not None and all(row["problem"] for row in experts):
        how = ", as `moedoctor plan` computes it"
        for row in experts:
            row |= {"new": computed, "problem": ""}
    if new := [row["new"] for row in experts if not row["problem"]]:
        yield "new tensors while a layer of experts is repacked (MD026)", _format_gib(max(new)) + how
    host = min(rank["experts"]["host_bytes"], rank["bytes"])
    left = sum(max(0, row["left"]) * row["count"] for row in rows)
    # Without UVA the old weights of an offloaded layer come to the GPU to be repacked.
    comes = host and not rank["experts"].get("has_uva")
    more = max(row["new"] + (row["size"] if comes else 0) for row in rows)
    peak, memory = rank["bytes"] - host + left + more, rank.get("kv", {}).get("memory")
    shown = _format_gib(peak) + (f"; the GPU has {_format_gib(memory)}" if memory is not None else "")
    problem = next((row["problem"] for row in rows if row["problem"]), "")
    yield "weights on the GPU while they are repacked", f"not known: {problem}" if problem else shown


def _list_notes(environment: Mapping[str, Any], reply: Mapping[str, Any]) -> Iterator[str]:
    if reply.get("made"):
        yield f"no checkpoint, and its names cannot be made, so loading was not asked: {reply['made']}"
    elif "made" in reply:
        yield "no checkpoint: names, types and shapes are those that the release's own mapping reads"
    yield from environment.get("answered", ())
    for target in environment.get("gone", ()):
        yield f"not in this release, so not answered in its place: {target}"
    for each in environment.get("unsatisfied", ()):
        name, version = each["name"], each["version"]
        here = f"{name} {version} is here" if version else f"{name} is not here"
        what = (
            "backends" if name in ("flashinfer-python", "humming-kernels") else "answers about configurations"
        )
        yield f"{here}, the release requires {each['required']}: {what} may differ from the server's"
    ranks = reply.get("ranks", ())
    for problem in dict.fromkeys(row["kv"]["problem"] for row in ranks if "problem" in row.get("kv", {})):
        yield f"KV cache was not planned: {problem}"
    questions = sum(row.get("questions", 0) for row in ranks)
    if questions:
        yield f"{questions} questions about values were answered as for a sound checkpoint"
