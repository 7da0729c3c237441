"""Fits what a person should do to what the text tells: its command line, release, GPU and model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moedoctor.diagnose.triage.cause import Cause, load_lines
from moedoctor.diagnose.triage.facts_in_text import Facts, show
from moedoctor.diagnose.triage.settings_in_text import Settings
from moedoctor.diagnose.triage.signatures import load_data

_SETTINGS_DECIDE = ("backend", "wrong_output", "kernel_fault", "compile", "speed", "hang", "arguments")
_MOST_FLAGS, _MOST_SETTINGS, _MOST_OTHERS = 12, 2, 4
_TIGHT = 0.8
"""Weights of a smaller part of the memory leave room for all else."""


@dataclass(frozen=True)
class Advice:
    """Says what follows from the facts of a text for its error, and puts them into the commands of steps."""

    facts: Facts
    settings: Settings = field(default_factory=Settings)
    """Without secrets."""

    def fit(self, step: str) -> str:
        """Return a step whose commands name the text's release, GPU and command line."""
        named = [("sm", self._capability), ("release", self._release)]
        options = "".join(f" --{name} {value}" for name, value in named if value)
        step = re.sub(r"(?<=`moedoctor backends)(?=`| -- )", options, step)
        if self.settings.model and "<" not in self.settings.model:
            step = step.replace("vllm serve ...", self._write_command())
        if memory := self._gpu[2]:
            step = step.replace("--gpu-memory GIB", f"--gpu-memory {memory}{self._write_sizes()}")
        if "--moe-backend marlin" in step and "MARLIN" in self.facts.list_backends():
            step += "; the text has MARLIN at work"
        return self.settings.explain_repetition(step)

    def explain(self, cause: Cause) -> Iterator[str]:
        """Yield what the text's own facts say of its error, in sentences."""
        if cause.kind in ("memory", "killed", "unknown"):
            yield from self._compare_memory(1 if cause.kind != "memory" else _TIGHT)
        if cause.kind == "installation":
            yield from self._name_release(cause.excerpt)
        if cause.kind in _SETTINGS_DECIDE:
            yield from self._list_ineffective()

    def name_backend(self, cause: Cause) -> Iterator[str]:
        """Yield the MoE backend that the release selects for the text's scheme and GPU."""
        from moedoctor.fixes.backends import select
        from moedoctor.fixes.backends.release_tables import load_releases

        model, scheme, known = self.settings.model.lower(), self._scheme.get("scheme"), [*load_releases()]
        rows = load_data("facts.yaml")["activations"]
        activation = next((rows[name] for name in rows if re.search(name, model)), "silu")
        release = self._release or known[-1]
        asked = cause.kind in ("backend", "wrong_output", "speed") and not self.facts.list_backends()
        if not (asked and scheme and self._capability and activation in load_releases()[release].activations):
            return
        chosen = select(self._capability, scheme, release=release, activation=activation)
        taken = [
            each.backend for each in chosen.candidates if each.supported and each.backend != chosen.chosen
        ]
        words = f"vLLM {release} selects {chosen.chosen or 'nothing'} by itself"
        rest = f", and takes {', '.join(taken[:_MOST_OTHERS])} if --moe-backend asks for it" if taken else ""
        yield f"for {scheme} experts on a GPU of {self._capability}, {words}{rest}"

    @cached_property
    def _release(self) -> str:
        """The newest release in the text that the tables know; an empty string for none."""
        from moedoctor.fixes.backends.release_tables import load_releases

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
        words = f"{self.settings.flags.get('quantization', '')} {self.settings.model}".lower()
        return next((row for row in load_data("facts.yaml")["schemes"] if re.search(row["name"], words)), {})

    def _write_command(self) -> str:
        """Return the text's command line, as far as it decides how experts are computed."""
        flags = [
            f"--{name} {'' if value.lower() == 'true' else shlex.quote(value)}".strip()
            for name, value in self.settings.flags.items()
            if not load_lines()["left_out"].search(name) and value not in ("False", "None", "false")
        ]
        return " ".join(("vllm serve", self.settings.model, *flags[:_MOST_FLAGS]))

    def _write_sizes(self) -> str:
        names = {"tensor-parallel-size": "tensor-parallel-size", "gpu-memory-utilization": "utilization"}
        given = {names[name]: self.settings.flags.get(name, "") for name in names}
        sizes = (f" --{name} {value}" for name, value in given.items() if re.fullmatch(r"[\d.]+", value))
        return "".join(sizes)

    def _compare_memory(self, least: float) -> Iterator[str]:
        """Yield the size of the weights by the model's name, if it is so large a part of the memory."""
        size = load_lines()["size"].search(self.settings.model)
        name, _, memory = self._gpu
        flags, bits = self.settings.flags, self._scheme.get("bits", 16)
        ranks = [flags.get(f"{kind}-parallel-size", "1") for kind in ("tensor", "pipeline")]
        if not (size and memory) or (self.facts.several and ranks == ["1", "1"]):
            return
        gpus = int(ranks[0]) * int(ranks[1]) if all(map(str.isdecimal, ranks)) else 1
        share = flags.get("gpu-memory-utilization", "0.9")
        room = gpus * memory * (float(share) if re.fullmatch(r"0?\.\d{1,4}", share) else 0.9)
        weights = float(size[1]) * 1e9 * bits / 8 / 2**30
        if weights > least * room:
            left = f"{room - weights:.0f} GiB are left" if weights < room else "too much without offload"
            yield (
                f"by its name {self.settings.model} has {size[1]} billion weights of about {bits:g} bits, "
                f"{weights:.0f} GiB; {share} of {gpus} x {memory} GB ({name}) is {room:.0f}: {left}; "
                f"take {'a smaller model' if bits < 5 else 'a 4-bit one (AWQ, GPTQ, NVFP4)'} or more GPUs"
            )

    def _name_release(self, message: str) -> Iterator[str]:
        """Yield the first release that has the model of which a message says that it is not known."""
        found = load_lines()["unknown_model"].search(message)
        name = re.sub(r"_|For(?:Causal|Conditional)\w*", "", found[1] or found[2]).lower() if found else None
        for releases, models in load_data("facts.yaml")["models"].items():
            if name in models.split():
                first, before = releases.split()
                yield (
                    f"vLLM {first} has this model, {before} does not: take {first} or later, with the "
                    "transformers that it requires (a new environment, or the official image)"
                )

    def _list_ineffective(self) -> Iterator[str]:
        """Yield the settings of the text that its release does not have; without a release, that none has."""
        from moedoctor.diagnose.settings.settings import check_settings
        from moedoctor.fixes.backends.release_tables import load_releases

        release = self._release or [*load_releases()][-1]
        findings = check_settings(release, self.settings.variables, self._write_command().split())
        known = bool(self._release)
        kept = [each for each in findings if not each.takes_effect and (known or each.problem == "unknown")]
        for finding in kept[:_MOST_SETTINGS]:
            instead = f"; instead: {finding.instead}" if finding.instead else ""
            yield f"{finding.setting}: {finding.message}{instead}"
