"""Try whether pinned host memory works here. The child runs ``python -m`` this module.

vLLM decides by the name of the operating system and does not try. Pinning takes a CUDA context: about half a
gigabyte of GPU memory while the child runs. No kernel is launched.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moedoctor.processes.ask import CACHES, ChildError, answer, ask
from moedoctor.redaction import Redactor

SECONDS = 30.0
"""The time to import torch, make a CUDA context and pin."""
BYTES = 64 << 20


@dataclass(frozen=True)
class Pinning:
    tried: bool
    works: bool | None
    """None if it was not tried."""
    reason: str
    """The reason why it was not tried, the error, or how much was pinned how fast."""


def make_untried(reason: str) -> Pinning:
    """Return the result for a machine on which nothing can be pinned for a GPU."""
    return Pinning(tried=False, works=None, reason=reason)


def try_pinning(seconds: float = SECONDS) -> Pinning:
    """Pin 64 MiB in a child process, for `seconds` at most."""
    redact = Redactor.from_this_process().mask
    try:
        facts = ask("moedoctor.diagnose.check.pinning", seconds=seconds, caches=CACHES)
    except ChildError as error:
        return Pinning(tried=True, works=False, reason=redact(str(error)))
    if facts.get("cuda") is False:
        return make_untried("torch sees no GPU")
    if facts.get("pinned"):
        took = f"in {float(facts['seconds']) * 1e3:.0f} ms"
        return Pinning(tried=True, works=True, reason=f"{BYTES >> 20} MiB pinned {took}")
    return Pinning(tried=True, works=False, reason=redact(str(facts.get("error", "torch did not say why"))))


def _pin(request: None) -> Mapping[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"cuda": False}
    torch.empty(1, pin_memory=True)  # makes the context, which must not be timed
    started = time.monotonic()
    try:
        memory = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)  # [BYTES]
    except RuntimeError as error:
        return {"pinned": False, "error": " ".join(str(error).split())[:300]}
    return {"pinned": memory.is_pinned(), "seconds": time.monotonic() - started}


if __name__ == "__main__":
    answer(_pin)
