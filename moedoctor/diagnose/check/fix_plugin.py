"""Whether moedoctor's fixes would be applied to vLLM here: variable, plug-in, vLLM's filter and release."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from moedoctor.upstream.plugin import register as vllm_plugin
from moedoctor.upstream.plugin.fix_support import known_releases

VARIABLE = vllm_plugin.VARIABLE
FILTER = "VLLM_PLUGINS"
GROUP = "vllm.general_plugins"


def state(environ: Mapping[str, str]) -> dict[str, Any]:
    """``{"setting", "plugin", "fixes", "active", "reason"}``; vLLM itself is not asked.

    ``fixes`` are those that the plug-in reads out of the variable; each of them still looks at vLLM's code
    when it is applied, and may refuse.
    """
    setting = environ.get(VARIABLE)
    names = [one.name for one in entry_points(group=GROUP) if one.value.startswith("moedoctor.")]
    fixes, unknown = _read(setting or "")
    reason = _why_not(setting, fixes, names, environ.get(FILTER))
    active = f"{VARIABLE} names {', '.join(fixes)}, and vLLM loads the plug-in {names[0] if names else None}"
    left_out = f"; left out, for it names no fix: {', '.join(unknown)}" if fixes and unknown else ""
    return {
        "setting": setting,
        "plugin": names[0] if names else None,
        "fixes": list(fixes),
        "active": reason is None,
        "reason": (reason or active) + left_out,
    }


def _why_not(
    setting: str | None, fixes: Sequence[str], names: Sequence[str], chosen: str | None
) -> str | None:
    if not setting or not setting.strip():
        return f"{VARIABLE} is not set" if not setting else f"{VARIABLE} is set, and holds nothing but spaces"
    if not fixes:
        known = ", ".join((*vllm_plugin.FIXES, vllm_plugin.ALL))
        return f"{VARIABLE}={setting} names no fix; expected {known}"
    if not names:
        return f"{VARIABLE} is set, but this moedoctor registers no plug-in under {GROUP}"
    if chosen is not None and names[0] not in chosen.split(","):
        return f"{VARIABLE} is set, but {FILTER} does not name {names[0]}"
    try:
        release = version("vllm").partition("+")[0]
    except PackageNotFoundError:
        return f"{VARIABLE} is set, but vLLM is not installed here"
    releases = known_releases()
    if release not in releases:
        span = f"{releases[0]} to {releases[-1]}"
        return f"{VARIABLE} is set, but vLLM {release} is none of the releases that the fixes know ({span})"
    return None


def _read(setting: str) -> tuple[Sequence[str], Sequence[str]]:
    """The fixes that the plug-in finds in the value, and the parts in which it finds none."""
    parts = [one.strip() for one in setting.split(",") if one.strip()]
    with _quiet():
        return vllm_plugin.chosen(setting), [one for one in parts if not vllm_plugin.chosen(one)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the plug-in's warnings: what they say is in the reason."""
    before, vllm_plugin.logger.disabled = vllm_plugin.logger.disabled, True
    try:
        yield
    finally:
        vllm_plugin.logger.disabled = before
