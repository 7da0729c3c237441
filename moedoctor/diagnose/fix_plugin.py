"""Whether moedoctor's fixes would be applied to vLLM here: variable, plug-in, and vLLM's own filter."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

VARIABLE = "MOEDOCTOR_FIXES"
FILTER = "VLLM_PLUGINS"
GROUP = "vllm.general_plugins"


def state(environ: Mapping[str, str]) -> dict[str, Any]:
    """``{"setting", "plugin", "active", "reason"}``; vLLM itself is not asked."""
    setting = environ.get(VARIABLE)
    names = [one.name for one in entry_points(group=GROUP) if one.value.startswith("moedoctor.")]
    reason = _why_not(setting, names, environ.get(FILTER))
    return {
        "setting": setting,
        "plugin": names[0] if names else None,
        "active": reason is None,
        "reason": reason or f"{VARIABLE}={setting}, and vLLM loads the plug-in {names[0]}",
    }


def _why_not(setting: str | None, names: list[str], chosen: str | None) -> str | None:
    if not setting:
        return f"{VARIABLE} is not set"
    if not names:
        return f"{VARIABLE} is set, but this moedoctor registers no plug-in under {GROUP}"
    if chosen is not None and names[0] not in chosen.split(","):
        return f"{VARIABLE} is set, but {FILTER} does not name {names[0]}"
    return None
