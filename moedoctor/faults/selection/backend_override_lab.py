"""The lab of MD010: what the selection of vLLM's releases, and ours, makes of a setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from moedoctor.diagnose.settings.flags import find_moe_backend
from moedoctor.diagnose.settings.settings import check_settings
from moedoctor.diagnose.settings.tables import load_vllm_variables
from moedoctor.faults.selection.backend_override import NEMOTRON, BackendOverrideParameters
from moedoctor.fixes import backends
from moedoctor.fixes.backends import requests
from moedoctor.results import Case, Evidence, UnavailableError
from moedoctor.upstream.selection.installed import InstalledSelection, Started, find_installed_release
from moedoctor.upstream.selection.oracle import Layer

Start = Callable[[Mapping[str, str], Sequence[str]], Started]
"""(variables, command line) -> what came of the start."""
_COMMAND = ("vllm", "serve", "MODEL")


def model(case: Case, parameters: BackendOverrideParameters, release: None) -> Evidence:
    """Observe vLLM's own selection as the tables have it, or ours."""
    start = start_upstream if case.subject == "faulty" else start_ours
    return observe(parameters, partial(start, parameters))


def library(case: Case, parameters: BackendOverrideParameters, release: None) -> Evidence:
    """Observe the installed vLLM. Raises UnavailableError if it is another release."""
    installed = InstalledSelection.from_this_environment(parameters.release)

    def start(environ: Mapping[str, str], command: Sequence[str]) -> Started:
        moe_backend = find_moe_backend(command, parameters.release)
        layer = Layer(parameters.scheme, parameters.activation, moe_backend=moe_backend)
        return installed.start(parameters.capability, layer, environ)

    return observe(parameters, start)


def observe(parameters: BackendOverrideParameters, start: Start) -> Evidence:
    """Start once with the setting and once without."""
    environ: dict[str, str] = {}
    command = list(_COMMAND)
    if parameters.setting.startswith("--"):
        command += parameters.setting.split()
    else:
        name, _, value = parameters.setting.partition("=")
        environ[name] = value
    return {**asdict(start(environ, command)), "without": start({}, _COMMAND).selected}


def start_upstream(
    parameters: BackendOverrideParameters, environ: Mapping[str, str], command: Sequence[str]
) -> Started:
    """Start as vLLM does: it passes over unknown settings, with one warning for ``VLLM_*`` names."""
    release = parameters.release
    selection = _select(parameters, environ, find_moe_backend(command, release))
    stopping = [finding.message for finding in check_settings(release, environ, command) if finding.stops]
    # vllm/envs.py, validate_environ: names that begin with VLLM_ in capitals and are not declared there.
    declared = {key for key, row in load_vllm_variables().list_at(release).items() if row.kind != "elsewhere"}
    unknown = [name for name in environ if name.startswith("VLLM_") and name not in declared]
    refused = stopping[0] if stopping else (selection.error or "")
    return Started(selection.chosen, refused, warned=bool(unknown))


def start_ours(
    parameters: BackendOverrideParameters, environ: Mapping[str, str], command: Sequence[str]
) -> Started:
    """Start as with our plug-in: `VLLM_NVFP4_MOE_BACKEND` is honored and every dead setting answered."""
    release, scheme = parameters.release, parameters.scheme
    moe_backend = find_moe_backend(command, release)
    wanted = requests.read_wanted_backend(environ, release) if scheme == "nvfp4" else None
    if moe_backend == backends.AUTO and wanted is not None and wanted.flag is not None:
        moe_backend = wanted.flag
    selection = _select(parameters, environ, moe_backend)
    if selection.chosen == parameters.wants:
        return Started(selection.chosen)
    how = requests.request(
        parameters.wants, parameters.capability, scheme, release=release, activation=parameters.activation
    ).how
    dead = check_settings(release, environ, command, scheme=scheme)
    warned = bool(dead) or bool(wanted and wanted.problem)
    return Started(selection.chosen, selection.error or "", warned, (how or "") if warned else "")


def ask_installed() -> dict[str, Any]:
    """Ask the installed vLLM what flags and variables do on SM120, or return why it was not asked."""
    try:
        selection = InstalledSelection.from_this_environment(find_installed_release())
    except UnavailableError as error:
        return {"not_asked": str(error)}
    return selection.list_overrides((12, 0), NEMOTRON)


def _select(
    parameters: BackendOverrideParameters, environ: Mapping[str, str], moe_backend: str
) -> backends.Selection:
    return backends.select(
        parameters.capability,
        parameters.scheme,
        release=parameters.release,
        activation=parameters.activation,
        moe_backend=moe_backend,
        environ=environ,
    )
