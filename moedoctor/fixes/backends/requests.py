"""Asking for a MoE backend: whether it would work, how a release is asked, and which settings have a say."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.fixes.backends import AUTO, Candidate, Selection, applies, is_on, select, show_variables
from moedoctor.fixes.backends.release_tables import CAPABILITIES, Rule, load_releases, load_tables

NVFP4_VARIABLE = "VLLM_NVFP4_MOE_BACKEND"
"""vllm-project/vllm#38971 asked for it and no release has it; moedoctor's plug-in honors it."""


@dataclass(frozen=True)
class Request:
    """Says if a backend that a user wants would work, and how to ask for it."""

    backend: str
    works: bool
    reason: str
    how: str | None
    """The exact flag or variable for this release; None if there is no way to ask."""


def request(
    backend: str,
    capability: str,
    scheme: str,
    *,
    release: str,
    ep: bool = False,
    dp: bool = False,
    activation: str = "silu",
    environ: Mapping[str, str] | None = None,
    libraries: Mapping[str, bool] | None = None,
) -> Request:
    """Say if a backend works, and how to ask for it.

    `backend` is upstream's name or a value of --moe-backend, in any case; the other arguments are those of
    `select`. Raises ValueError for a backend that the release does not have for the scheme.
    """

    ask: Callable[..., Selection] = functools.partial(
        select, capability, scheme, release=release, ep=ep, dp=dp, activation=activation, libraries=libraries
    )
    candidates = ask(environ=environ).candidates
    table, wanted = load_tables(scheme, release), _normalize(backend)
    flag = table.flags.get(wanted.lower())
    if flag is not None and flag.refused:
        return Request(backend, False, f"--moe-backend {flag.value} is refused: {flag.refused}", None)
    named = flag.backends if flag else ()
    names = set(map(_normalize, named or (wanted,)))
    matching = [candidate for candidate in candidates if _normalize(candidate.backend) in names]
    if not matching:
        known = ", ".join(_normalize(candidate.backend) for candidate in candidates)
        raise ValueError(f"{backend}: not a MoE backend of vLLM {release} for {scheme}; it has {known}")
    best = next((candidate for candidate in matching if candidate.supported), matching[0])
    if best.flag is not None:
        value = flag.value if flag and named else best.flag
        taken = _find_chosen(ask(moe_backend=value))
        reason = f"runs with {', '.join(taken.kernels)}" if taken else best.reason
        return Request((taken or best).backend, taken is not None, reason, f"--moe-backend {value}")
    if best.chosen:
        return Request(best.backend, True, "chosen by itself, and there is no flag to ask for it", None)
    for rule in (rule for override in table.overrides for rule in override.rules):
        variables = {
            name: str(int(value)) if isinstance(value, bool) else value
            for name, value in rule.when.items()
            if value is not None
        }
        taken = _find_chosen(ask(environ=variables))
        if taken is not None and taken.backend == best.backend:
            how = " ".join(f"{name}={value}" for name, value in variables.items())
            return Request(best.backend, True, f"runs with {', '.join(taken.kernels)}", how)
    reason = f"vLLM {release} has no flag or variable for it" if best.supported else best.reason
    return Request(best.backend, False, reason, None)


@dataclass(frozen=True)
class Wanted:
    """Return what `NVFP4_VARIABLE` asks for in a release."""

    flag: str | None
    """The value of --moe-backend that does it; None if there is none."""
    problem: str | None
    """The reason that it cannot be honored, and what could be written instead."""


def read_wanted_backend(environ: Mapping[str, str], release: str) -> Wanted | None:
    """Return what `NVFP4_VARIABLE` asks for, in upstream's names or flags and in any case.

    None if it is not set, empty or auto. Raises KeyError for a release that the tables do not know.
    """
    value = environ.get(NVFP4_VARIABLE, "").strip()
    if not value or value.lower() == AUTO:
        return None
    flags = [flag for flag in load_tables("nvfp4", release).flags.values() if flag.backends]
    for flag in flags:
        if _normalize(value) in map(_normalize, (flag.value, *flag.backends)):
            return Wanted(flag.value, None)
    known = ", ".join(sorted(flag.value for flag in flags))
    problem = f"{NVFP4_VARIABLE}={value}: vLLM {release} has no such NVFP4 MoE backend; it has {known}"
    return Wanted(None, problem)


def find_governing_variables(scheme: str, release: str) -> Mapping[str, str]:
    """The variables that have a say in the MoE backend of a scheme -> where the release reads them."""
    overrides = reversed(load_tables(scheme, release).overrides)  # the first that reads a variable counts
    return {name: override.source for override in overrides for rule in override.rules for name in rule.when}


def find_shadowed_variables(scheme: str, release: str, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Variables of `environ` that have a say in a scheme but decide nothing, on any GPU -> why not."""
    reasons: dict[str, str] = {}
    decisive: set[str] = set()
    for capability in CAPABILITIES:
        point = (capability, "tp", load_releases()[release].activations[0])
        ended = ""
        for override in load_tables(scheme, release).overrides:
            rule = next((rule for rule in override.rules if applies(rule, point, environ)), None)
            for name in {name for rule in override.rules for name in rule.when if name in environ}:
                if ended:
                    reasons.setdefault(name, f"{ended} comes before it")
                elif rule is not None and name in rule.when:
                    decisive.add(name)
                else:
                    reasons.setdefault(name, _explain_shadow(name, override.rules, rule, environ))
            if rule is not None and rule.effect in ("only", "force") and not ended:
                ended = show_variables(rule, environ)
    return {name: reason for name, reason in reasons.items() if name not in decisive and reason}


def _explain_shadow(
    name: str, rules: tuple[Rule, ...], applied: Rule | None, environ: Mapping[str, str]
) -> str:
    """Return why `name` decides nothing though `applied` of these rules applies; empty if not known."""
    if any(len(rule.when) == 1 and is_on(environ[name]) is rule.when.get(name) for rule in rules):
        return show_variables(applied, environ) + " comes before it" if applied else ""
    others = {other for rule in rules if name in rule.when for other in rule.when} - {name}
    unset = " or ".join(sorted(f"{other}=1" for other in others))
    return f"it is only looked at with {unset}" if unset else ""


def works(backend: str, schemes: Sequence[str], **question: Any) -> bool:
    """Return True if `request` says that the backend works for one of the schemes."""
    for scheme in schemes:
        with contextlib.suppress(ValueError):
            if request(backend, **{**question, "scheme": scheme}).works:
                return True
    return False


def find_way_to_ask(flag: str, scheme: str, release: str) -> str | None:
    """Another way to get what --moe-backend `flag` would ask for, in a release that ignores it there."""
    try:
        ways = [request(flag, gpu, scheme, release=release).how for gpu in ("9.0", "10.0", "12.0")]
    except ValueError:
        return None
    return next(filter(None, ways), None)


def _find_chosen(selection: Selection) -> Candidate | None:
    return next((candidate for candidate in selection.candidates if candidate.chosen), None)


def _normalize(backend: str) -> str:
    return backend.strip().upper().replace("-", "_").replace(" ", "_")
