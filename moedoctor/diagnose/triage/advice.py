"""Fits what a person should do to what the text tells: its command line, release, GPU and model."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import itemgetter
from typing import Any

from moedoctor.diagnose.settings.settings import check_settings
from moedoctor.diagnose.settings.tables import (
    list_new_defaults,
    list_spans,
    load_vllm_flags,
    load_vllm_values,
)
from moedoctor.diagnose.triage.alike import find_alike
from moedoctor.diagnose.triage.cause import Cause, list_steps, load_lines
from moedoctor.diagnose.triage.facts_in_text import OLDEST, Facts, read_boundary, show
from moedoctor.diagnose.triage.settings_in_text import Settings, list_settings
from moedoctor.diagnose.triage.signatures import load_data
from moedoctor.fixes.backends import Selection, select
from moedoctor.fixes.backends.release_tables import CAPABILITIES, load_releases
from moedoctor.text import escape, find_closest, suggest_names

_COMMON_GPUS = ("8.9", "9.0", "10.0", "12.0")
_SETTINGS_DECIDE = ("backend", "wrong_output", "kernel_fault", "compile", "speed", "hang", "arguments")
_RELEASE_DECIDES = (
    *("unknown", "backend", "kernel_fault", "compile", "quantization", "loading_names"),
    *("loading_shapes", "wrong_output", "hang", "collective", "question"),
)
_ANY_FLAG = ("unknown", "kernel_fault", "wrong_output", "hang", "collective", "compile", "killed", "draft")
"""Errors that any flag may bring."""
_MOST_FLAGS, _MOST_SETTINGS, _MOST_OTHERS, _MOST_DEFAULTS, _MOST_THREADS, _MOST_CHANGES = 12, 2, 4, 3, 3, 2
NO_HELP = " did not help"
"""The end of a step whose settings the text has tried."""
NO_OLDER = " is no older than that"
"""The end of a step that names a release which the text has, or a later one."""
_compile = cache(re.compile)  # `re` itself keeps 512 patterns, and threads have more
_CLUE = 20
"""Characters of a pattern that make a row of a thread as particular as one more clue does."""
_NO_SIZES = "no figures: "
"""The start of a line of a step that sizes in the text replace."""
_SHARES = ((0, 20, 0, 0), 0.9, 0.92)
"""A release, and --gpu-memory-utilization without the flag before it and since."""
_MOST_SHARE = (0.97, 0.88)
"""The largest share that leaves enough: of a GPU's own memory, and of one that the host uses, too."""
_TIGHT = 0.8
"""Weights of a smaller part of the memory leave room for all else."""


@dataclass(frozen=True)
class Advice:
    """Says what follows from the facts of a text for its error, and puts them into the commands of steps."""

    facts: Facts
    settings: Settings = field(default_factory=Settings)
    """Without secrets."""
    clues: Set[str] = frozenset()
    """The names of those that the text has."""
    attempts: Set[str] = frozenset()
    """Settings that change nothing, by the text, as `list_settings` names it."""

    def fit(self, step: str) -> str:
        """Return a step that names the text's release, GPU and command line, and flags that are too new."""
        named = [("sm", self._capability), ("release", self._release)]
        options = "".join(f" --{name} {value}" for name, value in named if value)
        step = re.sub(r"(?<=`moedoctor backends)(?=`| -- )", options, step)
        if self.settings.model and "<" not in self.settings.model:
            step = step.replace("vllm serve ...", self._write_command())
        if self._named[1:]:
            step = step.replace("--release OLD NEW", f"--release {self._named[0]} {self._named[-1]}")
        if self._scheme.get("scheme") == "nvfp4" and "BF16 experts" not in step:  # TRITON computes no FP4
            other = "flashinfer_cutlass" if "MARLIN" in self.facts.list_backends() else "marlin"
            step = step.replace("triton, or marlin for FP4 weights", other)
            step = step.replace("--moe-backend triton", f"--moe-backend {other}")
        if "{takes}" in step:
            step = step.replace("{takes}", self._explain_refusal())
        if memory := self._gpu[2]:
            step = step.replace("--gpu-memory GIB", f"--gpu-memory {memory}{self._write_sizes()}")
        if "--moe-backend" in step and "marlin" in step and "MARLIN" in self.facts.list_backends():
            step += "; the text has MARLIN at work"
        newest = max(self.facts.vllm, default=None)
        for flag, last in load_data("facts.yaml")["flags"].items():
            asked = re.search(rf"(?<!leave out )(?<!without )(?<!no )--{flag}\b", step)
            if asked and newest and newest <= read_boundary(last):
                step += f"; {show(newest)} has no --{flag} yet: upgrade before"
        first = re.search(r"\btake (0\.\d{1,3}\.\d{1,3}) or later", step)
        if first and newest and newest >= read_boundary(first[1]):
            step += f"; {show(newest)}{NO_OLDER}"
        proposed = list_settings(re.sub(r"`moedoctor [^`]*`", "", step))  # without command lines of the text
        again = [name for name in dict.fromkeys(proposed) if name in self.attempts]
        if not again:
            return self.settings.explain_repetition(step)
        alone = "" if {*proposed} <= self.attempts else " alone"
        return f"{step}; the text says that {' and '.join(again)}{NO_HELP}{alone}"

    def list_facts(self, cause: Cause, words: str, body: str = "") -> Iterator[str]:
        """Yield what follows from the text's own facts for its error.

        `words` are lines without secrets: the headline, the first line, the error, the model, the flags, all
        that the error says, and its frames. `body` is the beginning of a report in words.
        """
        yield from self._count_memory(cause)
        if not body and (request := load_lines()["request"].search(cause.excerpt)):
            yield f"the message itself asks for it: {escape(request[1])}"
        yield from self._find_value(words)
        around = "\n".join((*words.split("\n")[:2], self._write_command()))
        for row in [row for row in self._find_rows(words, body) if "try" in row][:_MOST_THREADS]:
            joint = row["match"].startswith(r"\A")  # words that may be far from the error
            unsure = body or (joint and _compile(row["match"], re.I).search(around))
            such = "a case, which may be yours" if unsure else "an error"
            yield self.fit(f"{_link(row)} reports such {such}: {_quote(row)}")
        if cause.kind == "installation":
            yield from map(self.fit, self._name_release(cause.excerpt))
        if cause.kind in _SETTINGS_DECIDE:
            yield from self._list_ineffective()
        if "regression" in self.clues:
            yield from self._compare_releases(cause.kind)

    def list_steps(self, cause: Cause) -> Iterator[str]:
        """Yield what helps errors of a class."""
        clues = self.clues - {"aiter"} if self._gpu[1] else self.clues  # no GPU of NVIDIA runs AITER
        lines = [self.fit(line) for step in list_steps(cause, clues) for line in step.split("\n")]
        sizes = any(True for _ in self._count_memory(cause))
        steps = [line.removeprefix(_NO_SIZES) for line in lines if not (sizes and line.startswith(_NO_SIZES))]
        if "other_chip" in self.clues:
            steps = [line for line in steps if not load_lines()["gpu_step"].search(line)]
        compared = "regression" in self.clues and any(self._compare_backends())
        chosen = () if compared else self.name_backend(cause)
        upgrade, is_old = self._compare_to_known(cause.kind)
        steps = [*steps[:-1], *chosen, *self._list_optional(cause.kind, steps), *steps[-1:]]
        yield from (*upgrade, *steps) if is_old else (*steps, *upgrade)

    def _compare_to_known(self, kind: str) -> tuple[tuple[str, ...], bool]:
        """Return what another release may do for errors of a class, and True if that comes first."""
        if not self.facts.vllm or kind not in _RELEASE_DECIDES:
            return (), False
        used, newest = max(self.facts.vllm), [*load_releases()][-1]
        newer = read_boundary(self._release or newest) == used < read_boundary(newest)
        row = "old" if used < OLDEST else "newer" if newer else None
        says = load_data("facts.yaml")["says"]
        lines = (self.fit(says[row].format(used=show(used), newest=newest)),) if row else ()
        return lines, row == "old"

    def _list_optional(self, kind: str, steps: Sequence[str]) -> Iterator[str]:
        """Yield what the text sets and a server does without, but for what its steps name."""
        plain, optional = ("auto", "false", "0"), load_data("facts.yaml")["optional"]
        given = [name for name in optional if self.settings.flags.get(name, "auto").lower() not in plain]
        set_to = [name for name in self.settings.variables if load_lines()["optional_variable"].match(name)]
        flags = [*(f"--{name}" for name in given), *set_to]
        flags = [name for name in flags if name not in " ".join((*steps, *self.attempts))]
        if flags and kind in _ANY_FLAG:
            yield f"start once without what is set here, one at a time: {', '.join(flags)}"

    def name_backend(self, cause: Cause) -> Iterator[str]:
        """Yield the MoE backend that the release selects for the text's scheme and GPU."""
        release = self._release or [*load_releases()][-1]
        asked = (
            cause.kind in ("backend", "wrong_output", "speed", "question") and not self.facts.list_backends()
        )
        chosen = self._select(release, self._capability) if asked else None
        if chosen is None:
            return
        others = (each for each in chosen.candidates if each.backend != chosen.chosen)
        taken = [each.backend for each in others if each.supported]
        words = f"vLLM {release} selects {chosen.chosen or 'nothing'} by itself"
        rest = f", and takes {', '.join(taken[:_MOST_OTHERS])} if --moe-backend asks for it" if taken else ""
        yield f"for {self._scheme['scheme']} experts on a GPU of {self._capability}, {words}{rest}"

    def _select(self, release: str, capability: str, scheme: str = "") -> Selection | None:
        """Return what a release selects for the text's model; None if its scheme or activation is unknown."""
        rows, model = load_data("facts.yaml")["activations"], self.settings.model.lower()
        activation = next((rows[name] for name in rows if re.search(name, model)), "silu")
        scheme = scheme or self._scheme.get("scheme", "")
        if not (scheme and capability in CAPABILITIES and activation in load_releases()[release].activations):
            return None
        return select(capability, scheme, release=release, activation=activation)

    def _explain_refusal(self) -> str:
        """Return which releases take what the text's one refuses for the GPU, if that can be told."""
        word, backend = self.facts.refused or ("", "")
        scheme = self._scheme.get("scheme", "") if word == "fp8" else word
        releases = [*load_releases()]
        answers = [self._select(each, self._capability, scheme) if scheme else None for each in releases]
        if not any(answers):
            return ""  # no refusal, or the tables do not have this GPU or activation
        takes = [self._find_backend(backend, answer) for answer in answers]
        whose = " of this model" if self.settings.model else ""
        what = f"{scheme} experts{whose} on a GPU of {self._capability}"
        if not any(takes):
            return f"; no release up to {releases[-1]} has {backend or 'a backend'} for {what}"
        last = max(place for place, taken in enumerate(takes) if taken)
        first = max((place for place in range(last) if not takes[place]), default=-1) + 1
        if self._release in releases[first : last + 1]:
            return ""  # it is refused for another reason
        return f"; vLLM {releases[first]} to {releases[last]} have {takes[last]} for {what}"

    @staticmethod
    def _find_backend(name: str, answer: Selection | None) -> str | None:
        """Return the backend if a release takes it, the one that it selects if none is named, or None."""
        if answer is None or not name:
            return answer.chosen if answer else None
        return name if name in [each.backend for each in answer.candidates if each.supported] else None

    @cached_property
    def _release(self) -> str:
        """The newest release in the text that the tables know; an empty string for none."""
        named = map(show, sorted(self.facts.vllm, reverse=True))
        return next((release for release in named if release in load_releases()), "")

    @cached_property
    def _gpu(self) -> tuple[str, float, int]:
        """The first GPU whose name is known: name, capability, GiB."""
        rows = load_data("facts.yaml")["gpus"]
        found = ((name, *rows[name]) for gpu in self.facts.gpus for name in rows if name in gpu)
        return next(found, ("", 0.0, 0))

    @cached_property
    def _capability(self) -> str:
        written = [gpu[3:] for gpu in self.facts.gpus if gpu.startswith("SM ")]
        return str(self._gpu[1] or next(iter(written), ""))

    @cached_property
    def _scheme(self) -> dict[str, Any]:
        """The row of `schemes` for the model; empty if nothing says how it is quantized."""
        flags, model = self.settings.flags, self.settings.model or "nvfp4" * ("nvfp4" in self.clues)
        words = f"{flags.get('quantization', '')} {model}".lower()
        rows = load_data("facts.yaml")["schemes"]
        plain = "quantised" not in self.clues  # the name may leave out a format that the text names
        return next(
            (row for row in rows if (plain or "plain" not in row) and re.search(row["name"], words)), {}
        )

    def _write_command(self) -> str:
        """Return the text's command line, as far as it decides how experts are computed."""
        flags = [
            f"--{name} {'' if value.lower() in ('', 'true') else shlex.quote(value)}".strip()
            for name, value in self.settings.flags.items()
            if not load_lines()["left_out"].search(name)
            if value not in ("False", "None", "false") and "…" not in value
        ]
        return " ".join(("vllm serve", self.settings.model, *flags[:_MOST_FLAGS]))

    def _write_sizes(self) -> str:
        names = (("tensor-parallel-size", "tensor-parallel-size"), ("gpu-memory-utilization", "utilization"))
        given = ((ours, self.settings.flags.get(name, "")) for name, ours in names)
        return "".join(f" --{ours} {value}" for ours, value in given if re.fullmatch(r"[\d.]{1,9}", value))

    def _count_memory(self, cause: Cause) -> Iterator[str]:
        """Yield what the sizes in the text say; without any, the size of the weights by the model."""
        most = _MOST_SHARE["unified_memory" in self.clues]
        given = (cause, self.settings.flags, self._share, self._gpu[2], most)
        placed = "load_oom" not in self.clues or not cause.says.endswith("ran out")
        sentences = [*self.facts.memory.advise(*given)] if cause.kind == "memory" and placed else []
        yield from sentences
        known = placed and (bool(self._scheme) or "quantised" not in self.clues)  # the bits of a weight
        if known and cause.kind in ("memory", "killed", "unknown") and not sentences:
            yield from self._compare_memory(1 if cause.kind != "memory" else _TIGHT)

    @cached_property
    def _share(self) -> float | None:
        """The share of the GPU's memory for the server; None if the text does not show its start."""
        text = self.settings.flags.get("gpu-memory-utilization", "")
        since, before, after = _SHARES
        default = before if self.facts.vllm and max(self.facts.vllm) < since else after
        share = float(text) if load_lines()["share"].fullmatch(text) else default
        return share if text or self.settings.shown else None

    def _compare_memory(self, least: float) -> Iterator[str]:
        """Yield the size of the weights by the model's name, if it is so large a part of the memory."""
        size = load_lines()["size"].search(self.settings.model)
        name, _, memory = self._gpu
        flags, bits = self.settings.flags, self._scheme.get("bits", 16)
        ranks = [flags.get(f"{kind}-parallel-size", "1") for kind in ("tensor", "pipeline")]
        if not (size and memory) or (self.facts.several and ranks == ["1", "1"]):
            return
        gpus = math.prod(int(rank) if re.fullmatch(r"\d{1,4}", rank) else 1 for rank in ranks)
        share = self._share or _SHARES[1]
        room = gpus * memory * share
        weights = float(size[1]) * 1e9 * bits / 8 / 2**30
        if weights > least * room:
            left = f"{room - weights:.0f} GiB are left" if weights < room else "too much without offload"
            yield (
                f"by its name {self.settings.model} has {size[1]} billion weights of about {bits:g} bits, "
                f"{weights:.0f} GiB; {share:g} of {gpus} x {memory} GB ({name}) is {room:.0f}: {left}; "
                f"take {'a smaller model' if bits < 5 else 'a 4-bit one (AWQ, GPTQ, NVFP4)'} or more GPUs"
            )

    def _name_release(self, message: str) -> Iterator[str]:
        """Yield the first release that has the model of which a message says that it is not known."""
        found = load_lines()["unknown_model"].search(message)
        whole = (found[1] or found[2]).replace("_", "").lower() if found else ""
        names = {whole, re.sub(r"for(?:causal|conditional)\w*", "", whole)}
        for releases, models in load_data("facts.yaml")["models"].items():
            if names & {*models.split()}:
                first, before = releases.split()
                if found and found[1] and self.facts.vllm and max(self.facts.vllm) >= read_boundary(first):
                    yield load_data("facts.yaml")["says"]["old_transformers"].format(first=first)
                    return
                yield (
                    f"vLLM {first} has this model, {before} does not: take {first} or later, with the "
                    "transformers that it requires (a new environment, or the official image)"
                )
                return

    def _find_value(self, message: str) -> Iterator[str]:
        """Yield which releases have the flag, or the value of a flag, that a message refuses."""
        match = load_lines()["refused_value"].search(message)
        found = {name: text for name, text in match.groupdict().items() if text} if match else {}
        flag = found.pop("of", "")
        for name, value in found.items():
            if name.startswith("flag"):
                yield from self._tell_span(value.replace("_", "-"), "", load_vllm_flags().rows)
            elif name == "any":
                named = [row for row in load_vllm_values().rows if row.endswith(f" {value}")]
                yield from self._tell_span(named[0].split()[0], value, named) if len(named) == 1 else ()
            else:
                flag = flag or f"--{name.replace('_', '-')}"
                listed = [row for row in load_vllm_values().rows if row.startswith(f"{flag} ")]
                chosen = {choice for span in load_vllm_flags().rows.get(flag, ()) for choice in span.choices}
                if listed or chosen:  # other flags take numbers, or any word
                    lower = value.lower() if value.lower() in chosen else value
                    yield from self._tell_span(flag, lower, [*listed, *(f"{flag} {each}" for each in chosen)])

    def name_likely(self, words: str, body: str, kind: str) -> Iterator[str]:
        """Yield changes of later releases that may be about an error, or the thread that it is most like.

        `kind` is its class. There is nothing for a text that does not speak of vLLM.
        """
        if self.clues.isdisjoint(("vllm", "vllm_log")):
            return
        rows = self._find_rows(words, body)
        changes = [row for row in rows if "mends" in row and "fork" not in self.clues]
        for row in changes[:_MOST_CHANGES]:
            yield f"vLLM {row['fixed']} mends {row['mends']} ({_link(row)}): take it if that is what you see"
        if not rows and (row := find_alike(f"{words}\n{body}", kind, self._threads)):
            yield self.fit(f"{_link(row)} looks alike, compare them first: {_quote(row)}")

    def _find_rows(self, words: str, body: str) -> list[Any]:
        """Return the rows about the same error, those of threads that ask for most first.

        Those that put words together look for them in `words` alone.
        """
        fits = []
        for row in self._threads:
            asked = {*row.get("needs", "").split("+")} - {""}
            patterns = row["all"] if "mends" in row else [row["match"]]
            text = words if patterns[0].startswith(r"\A") else f"{words}\n{body}"
            if self.clues >= asked and all(_compile(each, re.I).search(text) for each in patterns):
                fits.append(("mends" in row, -_CLUE * len(asked) - len("".join(patterns)), row))
        best: dict[str, Any] = {}
        for *_, row in sorted(fits, key=itemgetter(0, 1)):
            best.setdefault(row["thread"], row)
        return [*best.values()]

    @cached_property
    def _threads(self) -> list[Any]:
        """The rows of `threads.yaml` that the text's release and GPU may be about."""
        used, not_here = max(self.facts.vllm, default=None), load_lines()["not_here"]
        rows = [row for row in load_data("threads.yaml")["threads"] if used is None or _is_about(row, used)]
        gpu = "" if "aiter" in self.clues else self._gpu[1]
        return [row for row in rows if not (gpu and not_here.search(f"{gpu} {_quote(row)}"))]

    def _tell_span(self, flag: str, value: str, known: Iterable[str]) -> Iterator[str]:
        releases, name = [*load_releases()], f"{flag} {value}".rstrip()
        span = [releases.index(release) for release in list_spans(flag, value)]
        if not span:
            meant = suggest_names(
                find_closest(name, (row for row in known if row.startswith(flag[:4])), misspelt=True)
            )
            yield f"no vLLM from {releases[0]} to {releases[-1]} has {name}{meant and f': {meant}'}"
        elif self._release and releases.index(self._release) < span[0]:
            yield f"vLLM {releases[span[0]]} is the first that has {name}: upgrade, or leave it out"
        elif self._release and releases.index(self._release) > span[1]:
            yield f"vLLM {releases[span[1]]} is the last that has {name}: leave it out"
        elif not self._release:
            yield f"vLLM {releases[span[0]]} to {releases[span[1]]} have {name}"

    def _compare_releases(self, kind: str) -> Iterator[str]:
        """Yield what two releases in the text do differently; of a single one, what is new in it."""
        if self._pair is None:
            return
        old, new = self._pair
        if kind in _SETTINGS_DECIDE:
            yield from self._compare_backends()
        flags = (f"--{name}" for name in self.settings.flags)
        words = (*self.facts.gpus, self.settings.model, *self.settings.variables, *flags)
        changed = list_new_defaults(old, new, " ".join(words))
        if rows := [
            f"{each.back} ({each.says}, since {each.since})" for each in changed if kind in each.kinds
        ]:
            yield (
                f"vLLM {new} has new defaults since {old}; undo them one at a time: "
                f"{', '.join(rows[:_MOST_DEFAULTS])}"
            )

    @cached_property
    def _pair(self) -> tuple[str, str] | None:
        """The release that failed, after the one that it is compared with: it works, or is the one before."""
        known, new = [*load_releases()], self._release
        if not new or not known.index(new):
            return None
        works = {show(each) for each in self.facts.other_vllm}
        older = self._named[: self._named.index(new)]
        good = [release for release in older if release in works]
        if self._named[1:] and not older:
            return None  # only newer ones are named beside it
        return (*good[-1:], *older[:1], known[known.index(new) - 1])[0], new

    @cached_property
    def _named(self) -> list[str]:
        """The releases in the text that the tables know, oldest first."""
        named = {show(each) for each in self.facts.vllm | self.facts.other_vllm}
        return [release for release in load_releases() if release in named]

    def _compare_backends(self) -> Iterator[str]:
        """Yield the MoE backends of two releases in the text, where they select different ones."""
        if self._pair is None or self._pair[0] not in self._named:
            return
        before, after = self._pair
        for capability in [self._capability] if self._capability else _COMMON_GPUS:
            old, new = (self._select(release, capability) for release in (before, after))
            if old and new and old.chosen and new.chosen and old.chosen != new.chosen:
                same = (each for each in new.candidates if each.backend == old.chosen and each.supported)
                flags = [f": try --moe-backend {each.flag}" for each in same if each.flag]
                yield (
                    f"for {self._scheme['scheme']} experts on a GPU of {capability}, vLLM {before} selects "
                    f"{old.chosen} and {after} {new.chosen}{''.join(flags)}"
                )

    def _list_ineffective(self) -> Iterator[str]:
        """Yield the settings of the text that its release does not have; without a release, that none has."""
        if self.facts.vllm and not self._release:
            return  # it may have what the known releases have not
        release = self._release or [*load_releases()][-1]
        findings = check_settings(release, self.settings.variables, self._write_command().split())
        known = bool(self._release)
        # A flag that no release has is another program's, such as docker's, unless vLLM refused it.
        kept = [
            each
            for each in findings
            if not each.takes_effect and (known or each.problem == "unknown")
            if not (each.problem == "unknown" and each.name.startswith("-"))
        ]
        for finding in kept[:_MOST_SETTINGS]:
            instead = f"; instead: {finding.instead}" if finding.instead else ""
            yield f"{finding.setting}: {finding.message}{instead}"


def _is_about(row: Any, used: Any) -> bool:
    since, fixed = (read_boundary(row[key]) if key in row else None for key in ("since", "fixed"))
    latest = (used[0], used[1] + (used[2] > 0), 0, 0) if used[3] else used  # 0.21.1rc1 comes before 0.22.0
    return not ((since and latest < since) or (fixed and used >= fixed))


def _link(row: Any) -> str:
    project, number = row["thread"].split("#")
    return f"https://github.com/{load_data('threads.yaml')['projects'][project]}/issues/{number}"


def _quote(row: Any) -> str:
    mended = f"vLLM {row['fixed']} fixes it; " if "fixed" in row else ""
    return f"{mended}{row.get('try') or row['mends']}"
