"""Says if moedoctor's fixes would be applied to vLLM here: variables, plug-in, vLLM's filter and release."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any

from moedoctor.diagnose.check.records import Problem
from moedoctor.plugin import register as vllm_plugin
from moedoctor.plugin.extensions import ALL, FIXES, TRACES, Need, load_evidence, read_choice
from moedoctor.plugin.known_code import Read

VARIABLE, OPTIONAL = vllm_plugin.VARIABLE, vllm_plugin.OPTIONAL
FILTER = "VLLM_PLUGINS"
GROUP = "vllm.general_plugins"
_NOT_TRIED, _SAME_CODE = "not tried", "same code"


def state(
    environ: Mapping[str, str],
    vllm: str | None,
    read: Read | None = None,
    registered: Iterable[tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """Return ``{"setting", "plugin", "fixes", "active", "reason", "stops", "known"}``. Does not import vLLM.

    `vllm` is the release that is installed or described, None if there is none. ``fixes`` are those that the
    plug-in reads from the variable; each of them checks vLLM's code when it is applied, and may refuse.
    ``stops`` says why vLLM would not start, or is None. ``known`` tells for every fix and trace what is known
    of it in this release. `registered` are the plug-ins as (name, value), by default those of this Python;
    `read` gives vLLM's files, by default those of the installed vLLM.
    """
    setting, release = environ.get(VARIABLE), None if vllm is None else vllm.partition("+")[0]
    if registered is None:
        registered = [(point.name, point.value) for point in entry_points(group=GROUP)]
    plugin = next((name for name, value in registered if value.startswith("moedoctor.")), None)
    asked = read_choice(setting or "")
    reason = _explain_inactive(setting, asked.names, plugin, environ.get(FILTER), release)
    refused = (
        []
        if release is None or not _is_loaded(plugin, environ.get(FILTER))
        else _list_refused(environ, release, read)
    )
    stops = "; ".join(refused) if refused and environ.get(OPTIONAL, "").strip() != "1" else None
    active = f"{VARIABLE} names {', '.join(asked.names)}, and vLLM loads the plug-in {plugin}"
    if stops:
        reason = f"vLLM does not start: {stops}"
    return {
        "setting": setting,
        "plugin": plugin,
        "fixes": list(asked.names),
        "active": reason is None,
        "reason": reason or "; left out: ".join((active, *refused)),
        "stops": stops,
        "known": {} if release is None else describe_extensions(release, read),
    }


def describe_extensions(release: str, read: Read | None = None) -> dict[str, dict[str, Any]]:
    """Return for each fix and trace ``{"basis", "reports", "reason"}`` in a release of vLLM."""
    stored = load_evidence().get(release, {})
    rows = {}
    for name, extension in {**FIXES, **TRACES}.items():
        need, reason = vllm_plugin.need(name, extension, release, read)
        if name in stored:
            row = asdict(stored[name])
            rows[name] = {**row, "basis": stored[name].basis.value, "reports": list(row["reports"])}
        else:
            made_for = _SAME_CODE if reason else _NOT_TRIED
            basis = made_for if need is Need.MADE_FOR else need.value
            rows[name] = {"basis": basis, "reports": [], "reason": reason}
    return rows


def find_plugin_problems(plugin: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Give the problem of a setting that keeps vLLM from starting."""
    if plugin is not None and plugin["stops"]:
        yield Problem(
            what="a fix cannot be applied",
            severity="error",
            why=f"vLLM does not start: {plugin['stops']}",
            evidence={"variables": {VARIABLE: plugin["setting"]}},
            next_step=f"take it out of the variable, or set {OPTIONAL}=1 to start without it",
        )


def _is_loaded(plugin: str | None, allowed: str | None) -> bool:
    return plugin is not None and (allowed is None or plugin in allowed.split(","))


def _list_refused(environ: Mapping[str, str], release: str, read: Read | None) -> list[str]:
    """Return what was asked for by name and would stop this release, as far as is known before it starts."""
    problems = []
    for variable, kind, table in vllm_plugin.TABLES:
        asked = read_choice(environ.get(variable, ""), table)
        names = ", ".join((*table, ALL))
        problems += [f"{variable} names no {kind} called {name}; expected {names}" for name in asked.unknown]
        for name in asked.names:
            need, reason = vllm_plugin.need(name, table[name], release, read)
            if name in asked.required and need is Need.REFUSED:
                problems.append(f"the {kind} {name} is not applied to vLLM {release}: {reason}")
    return problems


def _explain_inactive(
    setting: str | None, fixes: Sequence[str], plugin: str | None, allowed: str | None, release: str | None
) -> str | None:
    if not setting or not setting.strip():
        return f"{VARIABLE} is not set" if not setting else f"{VARIABLE} is set, and holds nothing but spaces"
    if not fixes:
        return f"{VARIABLE}={setting} names no fix; expected {', '.join((*FIXES, ALL))}"
    if plugin is None:
        return f"{VARIABLE} is set, but this moedoctor registers no plug-in under {GROUP}"
    if not _is_loaded(plugin, allowed):
        return f"{VARIABLE} is set, but {FILTER} does not name {plugin}"
    if release is None:
        return f"{VARIABLE} is set, but vLLM is not installed here"
    if vllm_plugin.find_base(release) is None:
        releases = vllm_plugin.list_known_releases()
        span = f"{releases[0]} to {releases[-1]}"
        return f"{VARIABLE} is set, but vLLM {release} is none of the releases that the fixes know ({span})"
    return None
