"""Whether moedoctor's fixes would be applied to vLLM here: variable, plug-in, vLLM's filter and release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from moedoctor.upstream.plugin import register as vllm_plugin
from moedoctor.upstream.plugin.extensions import ALL, FIXES, chosen
from moedoctor.upstream.plugin.register import known_releases

VARIABLE = vllm_plugin.VARIABLE
FILTER = "VLLM_PLUGINS"
GROUP = "vllm.general_plugins"


def state(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return ``{"setting", "plugin", "fixes", "active", "reason"}``. Does not import vLLM.

    ``fixes`` are those that the plug-in reads from the variable. Each of them checks vLLM's code when it is
    applied, and may refuse.
    """
    setting = environ.get(VARIABLE)
    plugins = [point.name for point in entry_points(group=GROUP) if point.value.startswith("moedoctor.")]
    plugin = plugins[0] if plugins else None
    asked = chosen(setting or "")
    fixes, unknown = asked.names, asked.unknown
    reason = _why_not(setting, fixes, plugin, environ.get(FILTER))
    active = f"{VARIABLE} names {', '.join(fixes)}, and vLLM loads the plug-in {plugin}"
    left_out = f"; left out, for it names no fix: {', '.join(unknown)}" if fixes and unknown else ""
    return {
        "setting": setting,
        "plugin": plugin,
        "fixes": list(fixes),
        "active": reason is None,
        "reason": (reason or active) + left_out,
    }


def _why_not(
    setting: str | None, fixes: Sequence[str], plugin: str | None, allowed: str | None
) -> str | None:
    if not setting or not setting.strip():
        return f"{VARIABLE} is not set" if not setting else f"{VARIABLE} is set, and holds nothing but spaces"
    if not fixes:
        known = ", ".join((*FIXES, ALL))
        return f"{VARIABLE}={setting} names no fix; expected {known}"
    if plugin is None:
        return f"{VARIABLE} is set, but this moedoctor registers no plug-in under {GROUP}"
    if allowed is not None and plugin not in allowed.split(","):
        return f"{VARIABLE} is set, but {FILTER} does not name {plugin}"
    try:
        release = version("vllm").partition("+")[0]
    except PackageNotFoundError:
        return f"{VARIABLE} is set, but vLLM is not installed here"
    releases = known_releases()
    if release not in releases:
        span = f"{releases[0]} to {releases[-1]}"
        return f"{VARIABLE} is set, but vLLM {release} is none of the releases that the fixes know ({span})"
    return None
