"""Which MoE backend a vLLM release selects for a GPU, and why it does not select each other one.

Pure Python from the tables of `release_tables`: no GPU, no vLLM, no torch. The model is taken to
have 128 experts of 4096 x 2048 with renormalised top-8 softmax routing, no LoRA and no load balancing of
experts; experts and data together are split with ``allgather_reducescatter``, vLLM's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moedoctor.fixes.backends.release_tables import (
    CAPABILITIES,
    SCHEMES,
    Kernel,
    Point,
    Rule,
    Tables,
    Values,
    releases,
    tables,
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
    """Why it is chosen or why not, in words."""
    flag: str | None
    """The value of --moe-backend that asks for it; None if this release has none."""
    automatic: bool
    """Whether vLLM tries it without being asked."""
    kernels: tuple[str, ...]
    """Its kernel classes that fit."""
    source: str
    """Release, file and line that show it."""


@dataclass(frozen=True)
class Selection:
    """What one release does with one layer on one GPU."""

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
    """Why vLLM does not start if nothing is chosen."""
    source: str
    """Where the order comes from."""


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
    """What vLLM `release` selects for an MoE layer of this scheme on a GPU of this capability ("12.0").

    `moe_backend` is the value of --moe-backend, `environ` the variables that are set. `libraries` says which
    optional libraries are there; those not named are as the release itself brings them. Raises ValueError
    for what is not known.
    """
    _check(capability, scheme, release, activation)
    parallel = ("dp+ep" if ep else "dp") if dp else ("ep" if ep else "tp")
    point: Point = (capability, parallel, activation)
    table = tables(scheme, release)
    there = {**dict.fromkeys(releases()[release].provides, True), **(libraries or {})}
    value = moe_backend.lower().replace("-", "_")
    order, allowed, decided = _order(table, point, environ or {})
    flag = table.flags.get(value)
    if flag is not None:
        allowed |= {*flag.backends, *((_BATCHED,) if flag.batched else ())}
    others = (kernel.backend for kernel in table.kernels if kernel.backend not in order.backends)
    candidates = [
        replace(
            _candidate(table, backend, point, scheme, there, allowed),
            automatic=backend in order.backends or backend in order.full,
        )
        for backend in (*order.backends, *dict.fromkeys(others))
    ]
    empty = Selection(
        release, *(capability, scheme, parallel, activation), (), None, decided, None, order.source
    )
    if value != AUTO:
        return _asked(empty, table, candidates, value)
    return _chosen(empty, candidates, candidates[: len(order.backends)], order.removed, forced=order.forced)


def shown_variables(rule: Rule, environ: Mapping[str, str]) -> str:
    """The variables of a rule as they are set, for messages."""
    return " ".join(f"{name}={environ[name]}" for name in rule.when if name in environ)


@dataclass(frozen=True)
class _Order:
    backends: tuple[str, ...]
    full: tuple[str, ...]
    """Before any variable removed a backend."""
    removed: Mapping[str, str]
    """Backend -> the variable that removed it."""
    forced: bool
    source: str


def _order(table: Tables, point: Point, environ: Mapping[str, str]) -> tuple[_Order, frozenset[str], str]:
    """The order after the variables, the backends that they allow, and the variables that decided."""
    order = table.order(point)
    left, removed, allowed, decided = list(order.backends), {}, set[str](), "automatic"
    for override in table.overrides:
        rule = next((rule for rule in override.rules if applies(rule, point, environ)), None)
        if rule is None:
            continue
        shown = shown_variables(rule, environ)
        if rule.effect == "allow":
            allowed.update(rule.backends)
            decided = shown
        elif rule.effect == "remove":
            removed.update({backend: shown for backend in left if backend in rule.backends})
            left = [backend for backend in left if backend not in rule.backends]
        else:
            known = {kernel.backend for kernel in table.kernels}
            left = [backend for backend in rule.backends if backend in known]
            removed.update({backend: shown for backend in order.backends if backend not in left})
            full = _Order(tuple(left), order.backends, removed, rule.effect == "force", override.source)
            return full, frozenset(allowed), shown
    if removed and decided == "automatic":
        decided = next(iter(removed.values()))
    return _Order(tuple(left), order.backends, removed, False, order.source), frozenset(allowed), decided


def applies(rule: Rule, point: Point, environ: Mapping[str, str]) -> bool:
    """Whether the variables are set as the rule needs them, on the GPU of `point`."""
    if rule.capabilities is not None and point[0] not in rule.capabilities:
        return False
    for name, expected in rule.when.items():
        value = environ.get(name)
        if isinstance(expected, bool):
            if value is None or is_on(value) is not expected:
                return False
        elif value != expected:
            return False
    return True


def is_on(value: str) -> bool:
    """Whether a switch is on, as vLLM reads it: a number other than 0, or true."""
    text = value.strip().lower()
    return text in _TRUE or (text.lstrip("+-").isdigit() and int(text) != 0)


def _candidate(
    table: Tables, backend: str, point: Point, scheme: str, there: Mapping[str, bool], allowed: frozenset[str]
) -> Candidate:
    verdicts = [
        (kernel, *_verdict(kernel, point, scheme, there, allowed))
        for kernel in table.kernels
        if kernel.backend == backend
    ]
    fits = tuple(kernel.name or backend for kernel, reason, _ in verdicts if not reason)
    flag = next((flag.value for flag in table.flags.values() if backend in flag.backends), None)
    # The kernel that got furthest explains most: one for another GPU is no reason if one is for this GPU.
    kernel, reason, _ = max(verdicts, key=lambda verdict: (not verdict[1], verdict[2]))
    return Candidate(backend, bool(fits), False, reason, flag, True, fits, kernel.source)


def _verdict(
    kernel: Kernel, point: Point, scheme: str, there: Mapping[str, bool], allowed: frozenset[str]
) -> tuple[str, int]:
    """(why the kernel does not fit, or empty; how many questions it passed), asked in vLLM's order."""
    capability, parallel, activation = point
    refused = [reason for reason, box in kernel.then if box.contains(point)]
    missing = [library for library in kernel.needs if not there.get(library)]
    questions: tuple[tuple[object, Callable[[], str]], ...] = (
        (_outside(capability, kernel.devices), lambda: _wrong_device(kernel, capability)),
        (
            activation.endswith("_no_mul") and not kernel.ungated,
            lambda: f"takes no layers without a gate ({activation})",
        ),
        (
            _outside(activation, kernel.activations),
            lambda: f"does not compute {activation}, only {', '.join(sorted(kernel.activations or ()))}",
        ),
        (_outside(capability, kernel.scheme_devices), lambda: _wrong_scheme(kernel, scheme)),
        (_outside(parallel, kernel.parallel), lambda: f"does not work with {_SETTINGS[parallel]}"),
        (
            _BATCHED not in allowed and "format" in refused,
            lambda: f"needs {_BATCHED}, which comes with --all2all-backend deepep_low_latency",
        ),
        (
            any(reason != "format" for reason in refused),
            lambda: next(reason for reason in refused if reason != "format"),
        ),
        (missing, lambda: f"needs the library {' and '.join(missing)}, which is not there"),
        (
            kernel.asked_with and kernel.backend not in allowed,
            lambda: f"only with {kernel.asked_with}",
        ),
    )
    for rank, (fails, reason) in enumerate(questions):
        if fails:
            return reason(), rank
    return "", len(questions)


_ELSEWHERE = {"AITER": "ROCm", "ROCM": "ROCm", "CK": "ROCm", "XPU": "Intel GPUs", "CPU": "CPUs"}
"""What the names of backends for other platforms begin with."""
_SETTINGS = {
    "tp": "tensor parallelism alone",
    "ep": "expert parallelism",
    "dp": "data parallelism",
    "dp+ep": "data and expert parallelism together",
}


def _outside(value: str, values: Values) -> bool:
    return values is not None and value not in values


def _wrong_device(kernel: Kernel, capability: str) -> str:
    if kernel.devices:
        return f"has no kernel for compute capability {capability}, only for {spoken(kernel.devices)}"
    name = kernel.backend.upper()
    platform = next((platform for mark, platform in _ELSEWHERE.items() if name.startswith(mark)), None)
    return f"for {platform} only" if platform else "has no kernel for any NVIDIA GPU here"


def _wrong_scheme(kernel: Kernel, scheme: str) -> str:
    if not kernel.scheme_devices:
        return f"does not take {scheme}"
    return f"takes {scheme} on {spoken(kernel.scheme_devices)} only"


def spoken(capabilities: Values) -> str:
    """Capabilities in words: ``10.0 to 10.7``, ``9.0 and 12.0``, ``7.5 and newer``."""
    if capabilities is None:
        return "every capability"
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


def _chosen(
    empty: Selection,
    candidates: Sequence[Candidate],
    tried: Sequence[Candidate],
    removed: Mapping[str, str],
    *,
    forced: bool,
) -> Selection:
    winner = next((candidate for candidate in tried if candidate.supported), None)

    def explained(candidate: Candidate) -> Candidate:
        if candidate is winner:
            return replace(candidate, chosen=True, reason=f"chosen ({empty.decided_by})")
        if not candidate.supported:
            return candidate
        if candidate.backend in removed:
            return replace(candidate, reason=f"would work; {removed[candidate.backend]} leaves it out")
        if candidate not in tried:
            asked = f": --moe-backend {candidate.flag}" if candidate.flag else ""
            return replace(candidate, reason=f"would work; only on request{asked}")
        return (
            replace(candidate, reason=f"would work; {winner.backend} comes before it")
            if winner
            else candidate
        )

    error = None
    if winner is None:
        problem = "no backend fits this layer on this GPU"
        if tried and forced:
            problem = f"{tried[0].backend} was asked for and {tried[0].reason}"
        error = f"vLLM {empty.release} does not start: {problem}"
    shown = tuple(map(explained, candidates))
    return replace(empty, candidates=shown, chosen=winner.backend if winner else None, error=error)


def _asked(empty: Selection, table: Tables, candidates: Sequence[Candidate], value: str) -> Selection:
    """With --moe-backend, vLLM takes the backend that the value names, or does not start."""
    shown = replace(empty, decided_by=f"--moe-backend {value}")
    flag = table.flags.get(value)
    if value not in releases()[empty.release].moe_backends:
        known = ", ".join(releases()[empty.release].moe_backends)
        return _refused(shown, candidates, f"--moe-backend {value} is not one of {known}")
    if flag is None or flag.refused:
        known = ", ".join(flag.value for flag in table.flags.values() if flag.backends)
        why = (flag and flag.refused) or f"it is not for {empty.scheme}; expected one of {known}"
        return _refused(shown, candidates, f"--moe-backend {value} is refused: {why}")
    if flag.ignored:
        order = table.order((empty.capability, empty.parallel, empty.activation)).backends
        tried = [candidate for candidate in candidates if candidate.backend in order]
        return _chosen(replace(empty, decided_by="automatic"), candidates, tried, {}, forced=False)
    tried = [candidate for name in flag.backends for candidate in candidates if candidate.backend == name]
    others = [candidate.backend for candidate in candidates if candidate not in tried]
    left_out = dict.fromkeys(others, f"--moe-backend {value}")
    return _chosen(shown, candidates, tried, left_out, forced=True)


def _refused(shown: Selection, candidates: Sequence[Candidate], why: str) -> Selection:
    left = tuple(
        replace(candidate, reason=candidate.reason or "would work; not what was asked for")
        for candidate in candidates
    )
    return replace(shown, candidates=left, error=f"vLLM {shown.release} does not start: {why}")


def _check(capability: str, scheme: str, release: str, activation: str) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme}: expected one of {', '.join(SCHEMES)}")
    if capability not in CAPABILITIES:
        raise ValueError(f"capability {capability}: expected one of {', '.join(CAPABILITIES)}")
    if release not in releases():
        known = list(releases())
        raise ValueError(f"release {release}: the tables know {known[0]} to {known[-1]}: {', '.join(known)}")
    activations = releases()[release].activations
    if activation not in activations:
        raise ValueError(f"activation {activation}: vLLM {release} knows {', '.join(activations)}")
