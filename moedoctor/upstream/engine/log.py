"""What an engine's log says: which backends it chose, what it offloaded, which of our fixes are active."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moedoctor.processes.deaths import last_lines

_MOE = re.compile(r"Using '?(\w+)'? (?:backend for )?(\w+) MoE(?: backend)?")
_MOE_OLD = re.compile(r"Using '?(\w+)'? backend for (\w+) MoE")
_LINEAR = re.compile(r"Using (\w+) for (\w+) GEMM")
_OFFLOADED = re.compile(r"Total CPU offloaded parameters: ([\d.]+)")
_OFFLOADER = re.compile(r"Offloader set to (\w+)")
_FIXES = re.compile(r"moedoctor: active in vLLM \S+: (.+)")
_OURS = re.compile(r"moedoctor: offload: ([\d.]+ of [\d.]+ MiB on the host(?:, fetched [A-Za-z ]+)?)")
_REFUSED = re.compile(
    r"moedoctor: (?:the fix .+ is not applied|vLLM .+ is none of the releases|expert_cache is refused).+"
)


@dataclass(frozen=True)
class LogFacts:
    """Facts that vLLM only logs; None or empty where it did not."""

    moe_backend: str | None = None
    """As vLLM names it: ``MARLIN``, ``TRITON`` …"""
    moe_scheme: str | None = None
    """``NvFp4``, ``Fp8``, ``Unquantized`` …"""
    linear_backend: str | None = None
    """The kernel class of quantised linear layers."""
    offloader: str | None = None
    offloaded: str | None = None
    """GiB, as it is logged."""
    offloaded_by_us: str | None = None
    """What the fix `offload` says: ``1.5 of 1.6 MiB on the host, fetched inside the MoE operator``."""
    fixes: str | None = None
    """What the plug-in says is active."""
    refused: tuple[str, ...] = ()
    """What the plug-in refused, and why."""
    tail: tuple[str, ...] = ()
    """The last lines."""


def read_log(text: str) -> LogFacts:
    """The facts in the log `text`; of lines that are there several times the first counts."""
    moe = _MOE_OLD.search(text) or _MOE.search(text)
    linear, offloaded = _LINEAR.search(text), _OFFLOADED.search(text)
    offloader, fixes, ours = _OFFLOADER.search(text), _FIXES.search(text), _OURS.search(text)
    return LogFacts(
        moe_backend=moe and moe[1],
        moe_scheme=moe and moe[2],
        linear_backend=linear and linear[1],
        offloader=offloader and offloader[1],
        offloaded=offloaded and offloaded[1],
        offloaded_by_us=ours and ours[1],
        fixes=fixes and fixes[1].strip(),
        refused=tuple(dict.fromkeys(one[0] for one in _REFUSED.finditer(text))),
        tail=last_lines(text),
    )
