"""The value of ``MOEDOCTOR_EXPERT_CACHE``: ``32``, or ``32:policy=lfru,packed=0`` with options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moedoctor.plugin.register import OptionError
from moedoctor.text import show

VARIABLE = "MOEDOCTOR_EXPERT_CACHE"
POLICIES = ("aging", "lfru", "lfu", "lru")
"""As `moedoctor.fixes.eviction.ONLINE_POLICIES`, which imports torch."""
ENGINES = ("auto", "device", "host")


@dataclass(frozen=True)
class CacheOptions:
    """The options of each MoE layer's cache."""

    slots: int
    """Experts of a layer that the GPU holds."""
    policy: str = "aging"
    """The order in which experts leave."""
    packed: bool = True
    """Keep BF16 experts on the host in some 69 % of their bytes, if memory can be pinned."""
    overlap: bool = True
    """Compute with the experts that are there while the others are copied, in two calls of the backend's
    kernel, which change no bit, if there are few pairs."""
    fill: bool = True
    """Begin with an expert in every slot; those that no call asked for leave first."""
    engine: str = "auto"
    """``device``: lookups and copies are kernels. ``host``: Python, without CUDA graphs. ``auto`` chooses."""
    pin: bool = True
    """Lock the host memory. Without it copies wait, and CUDA graphs are refused."""
    stream: int | None = None
    """Calls of at least so many tokens pass through two layer buffers instead of the slots; 0 for none. By
    default those in which each expert is asked for twice on average, if the buffers are at most a quarter of
    all experts."""
    cpu: float | None = 0.0
    """The share of a short call's missing experts that the CPU computes; None: measured at start."""
    workers: int | None = None
    """Threads that compute on the CPU; None: one for each core but two."""
    nodes: tuple[int, ...] = ()
    """The NUMA nodes of these threads; empty: the node of the GPU."""


_SWITCH = {"0": False, "1": True}
_OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "policy": (", ".join(POLICIES), {name: name for name in POLICIES}),
    "packed": ("0 or 1", _SWITCH),
    # ``backend`` is what 1 was called before.
    "overlap": ("0 or 1", {**_SWITCH, "backend": True}),
    "fill": ("0 or 1", _SWITCH),
    "engine": (", ".join(ENGINES), {name: name for name in ENGINES}),
    "pin": ("0 or 1", _SWITCH),
    "stream": ("a number of tokens", {}),
    "cpu": ("auto, or a share from 0 to 1", {"auto": None}),
    "workers": ("a number of threads from 1 to 64", {}),
    "nodes": ("numbers of NUMA nodes such as 0 or 0+1", {}),
}
"""Name of an option -> what is expected, and text -> value."""


_READERS: Mapping[str, Callable[[str], Any]] = {
    "stream": lambda text: int(text) if _is_number(text) else None,
    "cpu": lambda text: float(text) if _is_number(text.replace(".", "", 1)) and float(text) <= 1 else None,
    "workers": lambda text: int(text) if _is_number(text) and 1 <= int(text) <= 64 else None,
    "nodes": lambda text: tuple(map(int, text.split("+"))) if all(map(_is_number, text.split("+"))) else None,
}
"""Name of an option -> function that returns the value of any other text, or None."""


def read_options(text: str) -> CacheOptions:
    """Read the variable's value. Raises OptionError, one line."""
    slots, _, rest = text.strip().partition(":")
    if not _is_number(slots) or int(slots) < 1:
        raise OptionError(f"{VARIABLE} is {show(text)}; expected a number of slots, at least 1")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = (text.strip() for text in part.partition("="))
        if name not in _OPTIONS:
            raise _make_error(f"no option called {show(name)}", ", ".join(_OPTIONS))
        if name in options:
            raise _make_error(f"the option {name} twice", "each option once")
        expected, values = _OPTIONS[name]
        if value in values:
            options[name] = values[value]
            continue
        options[name] = _READERS[name](value) if name in _READERS else None
        if options[name] is None:
            raise _make_error(f"{name}={show(value)}", expected)
    return CacheOptions(int(slots), **options)


def _make_error(problem: str, expected: str) -> OptionError:
    return OptionError(f"{VARIABLE} has {problem}; expected {expected}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 8
