"""The MoE backend that a vLLM release selects for a GPU, and the reason against each other one.

Pure Python from the tables of `release_tables`: no GPU, no vLLM, no torch. The model is taken to
have 128 experts of 4096 x 2048 with renormalized top-8 softmax routing, no LoRA and no load balancing of
experts; experts and data together are split with ``allgather_reducescatter``, vLLM's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from moedoctor.fixes.backends.release_tables import (
    CAPABILITIES,
    SCHEMES,
    Flag,
    Kernel,
    Point,
    Rule,
    Tables,
    Values,
    load_releases,
    load_tables,
)

__all__ = ["AUTO", "CAPABILITIES", "SCHEMES", "Candidate", "Selection", "applies", "is_on", "select"]

AUTO = "auto"
_BATCHED = "the batched activation format"
_TRUE = frozenset(("1", "true"))


@dataclass(frozen=True)
class Candidate:
    """One backend, and whether it would run this layer on this GPU."""

    backend: str
    """Upstream's name, as its log prints it."""
    supported: bool
    chosen: bool
    reason: str
    """The reason that it is or is not chosen, in words."""
    flag: str | None
    """The value of --moe-backend that asks for it; None if this release has none."""
    automatic: bool
    """True if vLLM tries it without being asked."""
    kernels: tuple[str, ...]
    """Its kernel classes that fit."""
    source: str
    """Release, file and line that show it."""


@dataclass(frozen=True)
class Selection:
    """The selection of one release for one layer on one GPU."""

    release: str
    capability: str
    scheme: str
    parallel: str
    """tp, ep, dp or dp+ep."""
    activation: str
    candidates: tuple[Candidate, ...]
    """In the order in which vLLM tries them, those that it never tries by itself last."""
    chosen: str | None
    decided_by: str
    """``automatic``, ``--moe-backend marlin``, or the variable that decided."""
    error: str | None
    """The reason that vLLM does not start, if nothing is chosen."""
    source: str
    """The source of the order."""


def select(
    capability: str,
    scheme: str,
    *,
    release: str,
    ep: bool = False,
    dp: bool = False,
    activation: str = "silu",
    moe_backend: str = AUTO,
    environ: Mapping[str, str] | None = None,
    libraries: Mapping[str, bool] | None = None,
) -> Selection:
    """Return what vLLM `release` selects for a layer of this scheme on a GPU of this capability ("12.0").

    `moe_backend` is the value of --moe-backend, `environ` the variables that are set. `libraries` says which
    optional libraries are there; those not named are as the release itself brings them. Raises ValueError
    for what is not known.
    """
    _check(capability, scheme, release, activation)
    parallel = ("dp+ep" if ep else "dp") if dp else ("ep" if ep else "tp")
    point: Point = (capability, parallel, activation)
    table = load_tables(scheme, release)
    there = {**dict.fromkeys(load_releases()[release].provides, True), **(libraries or {})}
    order = _order(table, point, environ or {})
    full = table.order(point).backends
    value = moe_backend.lower().replace("-", "_")
    flag = table.flags.get(value)
    allowed = order.allowed
    if flag is not None:
        allowed |= {*flag.backends, *((_BATCHED,) if flag.batched else ())}
    names = dict.fromkeys((*order.backends, *(kernel.backend for kernel in table.kernels)))
    automatic = {*order.backends, *full}
    candidates = {
        name: _judge_backend(table, name, point, scheme, there, allowed, name in automatic) for name in names
    }
    for name in order.refused.keys() & candidates.keys():
        if candidates[name].supported:
            reason = order.refused[name]
            candidates[name] = replace(candidates[name], supported=False, kernels=(), reason=reason)
    refusal = None if value == AUTO else _explain_refusal(table, flag, value, scheme, release)
    tried, left_out, decided, forced = list(order.backends), order.removed, order.decided_by, order.forced
    if value != AUTO and flag is not None and flag.ignored and not refusal:
        tried, left_out, decided, forced = [name for name in names if name in full], {}, "automatic", False
    elif value != AUTO:
        decided, forced = f"--moe-backend {value}", True
        tried = [name for name in flag.backends if name in names] if flag and not refusal else []
        reason = "not what was asked for" if refusal else f"{decided} leaves it out"
        left_out = {name: reason for name in names if name not in tried}

    winner = next((name for name in tried if candidates[name].supported), None)
    error = refusal or "no backend fits this layer on this GPU"
    if tried and forced:
        error = f"{tried[0]} was asked for and {candidates[tried[0]].reason}"

    def explain(candidate: Candidate) -> Candidate:
        name = candidate.backend
        if name == winner:
            return replace(candidate, chosen=True, reason=f"chosen ({decided})")
        if not candidate.supported:
            return candidate
        asked = f": --moe-backend {candidate.flag}" if candidate.flag else ""
        other = f"{winner} comes before it" if name in tried else f"only on request{asked}"
        return replace(candidate, reason=f"would work; {left_out.get(name, other)}")

    return Selection(
        *(release, capability, scheme, parallel, activation),
        candidates=tuple(map(explain, candidates.values())),
        chosen=winner,
        decided_by=decided,
        error=None if winner else f"vLLM {release} does not start: {error}",
        source=order.source,
    )


def show_variables(rule: Rule, environ: Mapping[str, str]) -> str:
    """The variables of a rule as they are set, for messages."""
    return " ".join(f"{name}={environ[name]}" for name in rule.when if name in environ)


def _explain_refusal(table: Tables, flag: Flag | None, value: str, scheme: str, release: str) -> str | None:
    """Return the reason that vLLM does not take --moe-backend `value`; None if it does."""
    if value not in load_releases()[release].moe_backends:
        return f"--moe-backend {value} is not one of {', '.join(load_releases()[release].moe_backends)}"
    if flag is not None and not flag.refused:
        return None
    known = ", ".join(flag.value for flag in table.flags.values() if flag.backends)
    why = (flag and flag.refused) or f"it is not for {scheme}; expected one of {known}"
    return f"--moe-backend {value} is refused: {why}"


class _Order(NamedTuple):
    """The automatic order after the variables."""

    backends: tuple[str, ...]
    removed: Mapping[str, str]
    """Backend -> which variable leaves it out."""
    refused: Mapping[str, str]
    """The same for backends that vLLM refuses on request, too."""
    allowed: frozenset[str]
    """Backends that a variable allows."""
    decided_by: str
    forced: bool
    source: str


def _order(table: Tables, point: Point, environ: Mapping[str, str]) -> _Order:
    order = table.order(point)
    left, allowed, decided = list(order.backends), set[str](), "automatic"
    removed: dict[str, str] = {}
    refused: dict[str, str] = {}
    for override in table.overrides:
        rule = next((rule for rule in override.rules if applies(rule, point, environ)), None)
        if rule is None:
            continue
        shown = show_variables(rule, environ)
        if rule.effect == "allow":
            allowed.update(rule.backends)
            decided = shown
            continue
        if rule.effect == "refuse":
            refused |= dict.fromkeys(rule.backends, f"{shown} leaves it out")
        if rule.effect in ("remove", "refuse"):
            remaining = [backend for backend in left if backend not in rule.backends]
        else:
            known = {kernel.backend for kernel in table.kernels}
            remaining, left = [backend for backend in rule.backends if backend in known], [*order.backends]
        removed |= {backend: f"{shown} leaves it out" for backend in left if backend not in remaining}
        left = remaining
        if rule.effect in ("only", "force"):
            forced = rule.effect == "force"
            return _Order(tuple(left), removed, refused, frozenset(allowed), shown, forced, override.source)
        if removed and decided == "automatic":
            decided = shown
    return _Order(tuple(left), removed, refused, frozenset(allowed), decided, False, order.source)


def applies(rule: Rule, point: Point, environ: Mapping[str, str]) -> bool:
    """Return True if the variables are set as the rule needs them, on the GPU of `point`."""

    def fits(value: str | None, expected: bool | str | None) -> bool:
        if isinstance(expected, bool):
            return value is not None and is_on(value) is expected
        return value == expected

    on_gpu = rule.capabilities is None or point[0] in rule.capabilities
    return on_gpu and all(fits(environ.get(name), expected) for name, expected in rule.when.items())


def is_on(value: str) -> bool:
    """Return True if a switch is on, as vLLM reads it: a number other than 0, or true."""
    text = value.strip().lower()
    return text in _TRUE or (text.lstrip("+-").isdigit() and int(text) != 0)


def _judge_backend(
    table: Tables,
    backend: str,
    point: Point,
    scheme: str,
    there: Mapping[str, bool],
    allowed: frozenset[str],
    automatic: bool,
) -> Candidate:
    verdicts = [
        (kernel, *_judge_kernel(kernel, point, scheme, there, allowed))
        for kernel in table.kernels
        if kernel.backend == backend
    ]
    fits = tuple(kernel.name or backend for kernel, _, reason in verdicts if not reason)
    flag = next((flag.value for flag in table.flags.values() if backend in flag.backends), None)
    # The kernel that got furthest explains most: one for another GPU is no reason if one is for this GPU.
    kernel, _, reason = max(verdicts, key=lambda verdict: (not verdict[2], verdict[1]))
    return Candidate(backend, bool(fits), False, reason, flag, automatic, fits, kernel.source)


def _judge_kernel(
    kernel: Kernel, point: Point, scheme: str, there: Mapping[str, bool], allowed: frozenset[str]
) -> tuple[int, str]:
    """Return how many questions the kernel passed, and why it does not fit; empty if it does."""
    passed = 0
    for passed, reason in enumerate(_ask_kernel(kernel, point, scheme, there, allowed)):
        if reason:
            return passed, reason
    return passed, ""


def _ask_kernel(
    kernel: Kernel, point: Point, scheme: str, there: Mapping[str, bool], allowed: frozenset[str]
) -> Iterator[str]:
    """Give for each of vLLM's questions, in its order, why the kernel does not fit; empty if it does."""
    capability, parallel, activation = point
    yield _explain_device(kernel, capability) if _is_outside(capability, kernel.devices) else ""
    ungated = activation.endswith("_no_mul")
    yield f"takes no layers without a gate ({activation})" if ungated and not kernel.ungated else ""
    computed = ", ".join(sorted(kernel.activations or ()))
    wrong = _is_outside(activation, kernel.activations)
    yield f"does not compute {activation}, only {computed}" if wrong else ""
    yield _explain_scheme(kernel, scheme) if _is_outside(capability, kernel.scheme_devices) else ""
    yield f"does not work with {_SETTINGS[parallel]}" if _is_outside(parallel, kernel.parallel) else ""
    refused = [refusal.reason for refusal in kernel.then if refusal.contains(point)]
    if "format" in refused and _BATCHED not in allowed:
        yield f"needs {_BATCHED}, which comes with --all2all-backend deepep_low_latency"
    else:
        yield ""
    yield next((reason for reason in refused if reason != "format"), "")
    missing = " and ".join(library for library in kernel.needs if not there.get(library))
    yield f"needs the library {missing}, which is not there" if missing else ""
    asked = kernel.asked_with and kernel.backend not in allowed
    yield f"only with {kernel.asked_with}" if asked else ""


_ELSEWHERE = {"AITER": "ROCm", "ROCM": "ROCm", "CK": "ROCm", "XPU": "Intel GPUs", "CPU": "CPUs"}
"""The first words of names of backends for other platforms."""
_SETTINGS = {
    "tp": "tensor parallelism alone",
    "ep": "expert parallelism",
    "dp": "data parallelism",
    "dp+ep": "data and expert parallelism together",
}


def _is_outside(value: str, values: Values) -> bool:
    return values is not None and value not in values


def _explain_device(kernel: Kernel, capability: str) -> str:
    if kernel.devices:
        return (
            f"has no kernel for compute capability {capability}, only for {name_capabilities(kernel.devices)}"
        )
    name = kernel.backend.upper()
    platform = next((platform for mark, platform in _ELSEWHERE.items() if name.startswith(mark)), None)
    return f"for {platform} only" if platform else "has no kernel for any NVIDIA GPU here"


def _explain_scheme(kernel: Kernel, scheme: str) -> str:
    if not kernel.scheme_devices:
        return f"does not take {scheme}"
    return f"takes {scheme} on {name_capabilities(kernel.scheme_devices)} only"


def name_capabilities(capabilities: frozenset[str]) -> str:
    """Capabilities in words: ``10.0 to 10.7``, ``9.0 and 12.0``, ``7.5 and newer``."""
    known = [capability for capability in CAPABILITIES if capability in capabilities]
    if len(known) > 2 and known == list(CAPABILITIES[-len(known) :]):
        return f"{known[0]} and newer"
    runs: list[list[str]] = []
    for capability in known:
        if runs and CAPABILITIES.index(capability) == CAPABILITIES.index(runs[-1][-1]) + 1:
            runs[-1].append(capability)
        else:
            runs.append([capability])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(run) for run in runs)


def _check(capability: str, scheme: str, release: str, activation: str) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme}: expected one of {', '.join(SCHEMES)}")
    if capability not in CAPABILITIES:
        raise ValueError(f"capability {capability}: expected one of {', '.join(CAPABILITIES)}")
    if release not in load_releases():
        known = list(load_releases())
        raise ValueError(f"release {release}: the tables know {known[0]} to {known[-1]}: {', '.join(known)}")
    activations = load_releases()[release].activations
    if activation not in activations:
        raise ValueError(f"activation {activation}: vLLM {release} knows {', '.join(activations)}")
