"""What runs in the child for MD010: the selection as the releases do it, ours, and what each makes of a
setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moedoctor.diagnose.settings.settings import check_settings, moe_backend_of
from moedoctor.diagnose.settings.tables import vllm_variables
from moedoctor.fixes import backends
from moedoctor.fixes.backends import requests as backend_requests
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.selection.backend_override import BackendOverrideParameters


@dataclass(frozen=True)
class Outcome:
    """What came of starting with a setting."""

    selected: str | None
    refused: str
    """Why the start was refused; empty where it was not."""
    warned: bool
    """A message names the setting, without saying what would do."""
    advice: str
    """What a message said to set instead; empty where none did."""


class BackendSelection(Protocol):
    """What is put to the test."""

    def start(
        self, question: BackendOverrideParameters, environ: Mapping[str, str], command: Sequence[str]
    ) -> Outcome:
        """Select a backend for the layer in question, with these variables and this command line."""


class UpstreamSelection:
    """vLLM's own, from the tables: what it does not know it passes over, with one warning for ``VLLM_*``
    names."""

    def start(
        self, question: BackendOverrideParameters, environ: Mapping[str, str], command: Sequence[str]
    ) -> Outcome:
        release = question.release
        chosen = _select(question, environ, moe_backend_of(command, release))
        stopped = [one for one in check_settings(release, environ, command) if one.stops]
        refused = stopped[0].message if stopped else (chosen.error or "")
        # vllm/envs.py, validate_environ: names that begin with VLLM_ in capitals and are not declared there.
        declared = {name for name, one in vllm_variables().at(release).items() if one.kind != "elsewhere"}
        unknown = [name for name in environ if name.startswith("VLLM_") and name not in declared]
        return Outcome(chosen.chosen, refused, bool(unknown), "")


class OurSelection:
    """Ours: `VLLM_NVFP4_MOE_BACKEND` is honoured as the plug-in does it, and every dead setting is
    answered."""

    def start(
        self, question: BackendOverrideParameters, environ: Mapping[str, str], command: Sequence[str]
    ) -> Outcome:
        release = question.release
        moe_backend = moe_backend_of(command, release)
        wanted = backend_requests.wanted_backend(environ, release) if question.scheme == "nvfp4" else None
        if moe_backend == backends.AUTO and wanted is not None and wanted.flag is not None:
            moe_backend = wanted.flag
        chosen = _select(question, environ, moe_backend)
        if chosen.chosen == question.wants:
            return Outcome(chosen.chosen, "", False, "")
        how = backend_requests.request(
            question.wants,
            question.capability,
            question.scheme,
            release=release,
            activation=question.activation,
        ).how
        dead = check_settings(release, environ, command, scheme=question.scheme)
        said = bool(dead) or bool(wanted and wanted.problem)
        return Outcome(chosen.chosen, chosen.error or "", said, (how or "") if said else "")


def observe(parameters: BackendOverrideParameters, implementation: BackendSelection) -> Observation:
    """Start once with the setting and once without, and write down what came of it."""
    environ: dict[str, str] = {}
    command = ["vllm", "serve", "MODEL"]
    if parameters.setting.startswith("--"):
        command += parameters.setting.split()
    else:
        name, _, value = parameters.setting.partition("=")
        environ[name] = value
    without = implementation.start(parameters, {}, ["vllm", "serve", "MODEL"])
    outcome = implementation.start(parameters, environ, command)
    return Observation(
        {
            "selected": outcome.selected,
            "without": without.selected,
            "refused": outcome.refused,
            "warned": outcome.warned,
            "advice": outcome.advice,
        }
    )


def _select(
    question: BackendOverrideParameters, environ: Mapping[str, str], moe_backend: str
) -> backends.Selection:
    return backends.select(
        question.capability,
        question.scheme,
        release=question.release,
        activation=question.activation,
        moe_backend=moe_backend,
        environ=environ,
    )
