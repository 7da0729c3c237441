"""Which MoE backend a vLLM release selects for a GPU, and why it does not select each other one.

Pure Python from the tables of `release_tables`: no GPU, no vLLM, no torch. The model is taken to
have 128 experts of 4096 x 2048 with renormalised top-8 softmax routing, no LoRA and no load balancing of
experts; experts and data together are split with ``allgather_reducescatter``, vLLM's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moedoctor.fixes.backends.reasons import PREDICATES, explain
from moedoctor.fixes.backends.release_tables import (
    CAPABILITIES,
    SCHEMES,
    Kernel,
    Point,
    Rule,
    Tables,
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
    """The value of --moe-backend that asks for it; None where this release has none."""
    automatic: bool
    """Whether vLLM tries it without being asked."""
    kernels: tuple[str, ...]
    """Its kernel classes that fit."""
    source: str
    """Release, file and line that say so."""


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
    """Why vLLM does not start, where nothing is chosen."""
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
    candidates = [_candidate(table, one, point, scheme, there, allowed) for one in order.backends]
    automatic = [one.backend for one in candidates]
    for kernel in table.kernels:
        if kernel.backend not in automatic:
            automatic.append(kernel.backend)
            found = _candidate(table, kernel.backend, point, scheme, there, allowed)
            candidates.append(replace(found, automatic=kernel.backend in order.full))
    empty = Selection(
        release, *(capability, scheme, parallel, activation), (), None, decided, None, order.source
    )
    if value != AUTO:
        return _asked(empty, table, candidates, value)
    tried = candidates[: len(order.backends)]
    return _chosen(empty, candidates, tried, order.removed, forced=order.forced)


def shown_variables(rule: Rule, environ: Mapping[str, str]) -> str:
    """The variables of a rule as they are set, for messages."""
    return " ".join(f"{name}={environ[name]}" for name in rule.when if name in environ)


@dataclass(frozen=True)
class _Order:
    backends: tuple[str, ...]
    full: tuple[str, ...]
    """Before any variable took something out of it."""
    removed: Mapping[str, str]
    """Backend -> the variable that took it out."""
    forced: bool
    source: str


def _order(table: Tables, point: Point, environ: Mapping[str, str]) -> tuple[_Order, frozenset[str], str]:
    """The order after the variables, the backends that they allow, and which of them decided."""
    order = next(one for one in table.orders if one.box.contains(point))
    left, removed, allowed, decided = list(order.backends), {}, set[str](), "automatic"
    for override in table.overrides:
        rule = next((one for one in override.rules if applies(one, point, environ)), None)
        if rule is None:
            continue
        shown = shown_variables(rule, environ)
        if rule.effect == "allow":
            allowed.update(rule.backends)
            decided = shown
        elif rule.effect == "remove":
            removed.update({one: shown for one in left if one in rule.backends})
            left = [one for one in left if one not in rule.backends]
        else:
            known = {kernel.backend for kernel in table.kernels}
            left = [one for one in rule.backends if one in known]
            removed.update({one: shown for one in order.backends if one not in left})
            full = _Order(tuple(left), order.backends, removed, rule.effect == "force", override.source)
            return full, frozenset(allowed), shown
    if removed and decided == "automatic":
        decided = next(iter(removed.values()))
    return _Order(tuple(left), order.backends, removed, False, order.source), frozenset(allowed), decided


def applies(rule: Rule, point: Point, environ: Mapping[str, str]) -> bool:
    """Whether the variables are as the rule wants them, on the GPU of `point`."""
    if rule.capabilities is not None and point[0] not in rule.capabilities:
        return False
    for name, wanted in rule.when.items():
        value = environ.get(name)
        if isinstance(wanted, bool):
            if value is None or is_on(value) is not wanted:
                return False
        elif value != wanted:
            return False
    return True


def is_on(value: str) -> bool:
    """Whether a switch is on, as vLLM reads it: a number other than 0, or true."""
    text = value.strip().lower()
    return text in _TRUE or (text.lstrip("+-").isdigit() and int(text) != 0)


def _candidate(
    table: Tables, backend: str, point: Point, scheme: str, there: Mapping[str, bool], allowed: frozenset[str]
) -> Candidate:
    kernels = [one for one in table.kernels if one.backend == backend]
    verdicts = [(kernel, *_verdict(kernel, point, there, allowed)) for kernel in kernels]
    fits = tuple(kernel.name or backend for kernel, reason, _ in verdicts if not reason)
    flag = next((one.value for one in table.flags.values() if backend in one.backends), None)
    # What a backend got furthest with says most about it: a kernel for another GPU is no reason if one is
    # for this.
    kernel, reason, rank = max(verdicts, key=lambda verdict: (not verdict[1], verdict[2]))
    words = (
        "" if not reason else (reason if rank >= len(PREDICATES) else explain(reason, kernel, point, scheme))
    )
    return Candidate(backend, bool(fits), False, words, flag, True, fits, kernel.source)


def _verdict(
    kernel: Kernel, point: Point, there: Mapping[str, bool], allowed: frozenset[str]
) -> tuple[str, int]:
    """(reason, how far it got): the kind of the first predicate that fails, or a text; empty where it
    fits."""
    capability, parallel, activation = point
    failing = (
        kernel.devices is not None and capability not in kernel.devices,
        activation.endswith("_no_mul") and not kernel.ungated,
        kernel.activations is not None and activation not in kernel.activations,
        kernel.scheme_devices is not None and capability not in kernel.scheme_devices,
        kernel.parallel is not None and parallel not in kernel.parallel,
        _BATCHED not in allowed
        and any(reason == "format" and box.contains(point) for reason, box in kernel.then),
    )
    for rank, (fails, kind) in enumerate(zip(failing, PREDICATES, strict=True)):
        if fails:
            return kind, rank
    text = next((reason for reason, box in kernel.then if reason != "format" and box.contains(point)), "")
    if text:
        return text, len(PREDICATES)
    missing = [one for one in kernel.needs if not there.get(one)]
    if missing:
        return f"needs the library {' and '.join(missing)}, which is not there", len(PREDICATES) + 1
    if kernel.asked_with and kernel.backend not in allowed:
        return f"only with {kernel.asked_with}", len(PREDICATES) + 2
    return "", len(PREDICATES) + 3


def _chosen(
    empty: Selection,
    candidates: Sequence[Candidate],
    tried: Sequence[Candidate],
    removed: Mapping[str, str],
    *,
    forced: bool,
) -> Selection:
    winner = next((one for one in tried if one.supported), None)
    shown = []
    for one in candidates:
        if winner is not None and one is winner:
            one = replace(one, chosen=True, reason=f"chosen ({empty.decided_by})")
        elif one.supported and one.backend in removed:
            one = replace(one, reason=f"would work; {removed[one.backend]} leaves it out")
        elif one.supported and one not in tried:
            asked = f": --moe-backend {one.flag}" if one.flag else ""
            one = replace(one, reason=f"would work; only on request{asked}")
        elif one.supported and winner is not None:
            one = replace(one, reason=f"would work; {winner.backend} comes before it")
        shown.append(one)
    error = None
    if winner is None:
        first = tried[0] if tried and forced else None
        what = (
            f"{first.backend} was asked for and {first.reason}"
            if first
            else "no backend fits this layer on this GPU"
        )
        error = f"vLLM {empty.release} does not start: {what}"
    return replace(empty, candidates=tuple(shown), chosen=winner.backend if winner else None, error=error)


def _asked(empty: Selection, table: Tables, candidates: Sequence[Candidate], value: str) -> Selection:
    """With --moe-backend: what it names is taken, or vLLM does not start."""
    shown = replace(empty, decided_by=f"--moe-backend {value}")
    flag = table.flags.get(value)
    if value not in releases()[empty.release].moe_backends:
        known = ", ".join(releases()[empty.release].moe_backends)
        return _refused(shown, candidates, f"--moe-backend {value} is none of {known}")
    if flag is None or flag.refused:
        known = ", ".join(one.value for one in table.flags.values() if one.backends)
        said = flag.refused if flag else f"it is not for {empty.scheme}; expected one of {known}"
        return _refused(shown, candidates, f"--moe-backend {value} is refused: {said}")
    if flag.ignored:
        in_order = next(
            one
            for one in table.orders
            if one.box.contains((empty.capability, empty.parallel, empty.activation))
        )
        tried = [one for one in candidates if one.backend in in_order.backends]
        return _chosen(replace(empty, decided_by="automatic"), candidates, tried, {}, forced=False)
    tried = [one for name in flag.backends for one in candidates if one.backend == name]
    left_out = {one.backend: f"--moe-backend {value}" for one in candidates if one not in tried}
    return _chosen(shown, candidates, tried, left_out, forced=True)


def _refused(shown: Selection, candidates: Sequence[Candidate], why: str) -> Selection:
    left = tuple(
        replace(one, reason=one.reason or "would work; not what was asked for") for one in candidates
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
    known_activations = releases()[release].activations
    if activation not in known_activations:
        raise ValueError(f"activation {activation}: vLLM {release} knows {', '.join(known_activations)}")
