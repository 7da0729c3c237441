"""Asking for a MoE backend: whether it would work, how a release is asked, and which settings have a say in
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moedoctor.fixes.backends import AUTO, Candidate, Selection, applies, is_on, select, shown_variables
from moedoctor.fixes.backends.release_tables import CAPABILITIES, releases, tables

NVFP4_VARIABLE = "VLLM_NVFP4_MOE_BACKEND"
"""What vllm-project/vllm#38971 asked for and no release has; moedoctor's plug-in honours it."""


@dataclass(frozen=True)
class Request:
    """Whether a backend that somebody wants would work, and how to ask for it."""

    backend: str
    works: bool
    reason: str
    how: str | None
    """The exact flag or variable for this release; None where there is no way to ask."""


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
    """Whether `backend` (upstream's name or a value of --moe-backend, in any case) would work, and how to
    ask for it.

    The arguments are those of `select`. Raises ValueError for a backend that the release does not have for
    the scheme.
    """
    options = {"release": release, "ep": ep, "dp": dp, "activation": activation, "libraries": libraries}
    selection = select(capability, scheme, environ=environ, **options)  # type: ignore[arg-type]
    table, wanted = tables(scheme, release), _named(backend)
    flag = table.flags.get(wanted.lower())
    if flag is not None and flag.refused:
        return Request(backend, False, f"--moe-backend {flag.value} is refused: {flag.refused}", None)
    names = flag.backends if flag and flag.backends else (wanted,)
    found = [one for one in selection.candidates if _named(one.backend) in map(_named, names)]
    if not found:
        known = ", ".join(_named(one.backend) for one in selection.candidates)
        raise ValueError(f"{backend}: no MoE backend of vLLM {release} for {scheme}; it has {known}")
    best = next((one for one in found if one.supported), found[0])
    if best.flag is not None:
        value = flag.value if flag and flag.backends else best.flag
        taken = _taken(select(capability, scheme, moe_backend=value, **options))  # type: ignore[arg-type]
        works = f"runs with {', '.join(taken.kernels)}" if taken else best.reason
        return Request((taken or best).backend, taken is not None, works, f"--moe-backend {value}")
    if best.chosen:
        return Request(best.backend, True, "chosen by itself, and there is no flag to ask for it", None)
    for rule in [one for override in table.overrides for one in override.rules]:
        variables = {name: _written(value) for name, value in rule.when.items() if value is not None}
        taken = _taken(select(capability, scheme, environ=variables, **options))  # type: ignore[arg-type]
        if taken is not None and taken.backend == best.backend:
            how = " ".join(f"{name}={value}" for name, value in variables.items())
            return Request(best.backend, True, f"runs with {', '.join(taken.kernels)}", how)
    said = f"vLLM {release} has no flag or variable for it" if best.supported else best.reason
    return Request(best.backend, False, said, None)


@dataclass(frozen=True)
class Wanted:
    """What `NVFP4_VARIABLE` asks for in a release."""

    flag: str | None
    """The value of --moe-backend that does it; None where there is none."""
    problem: str | None
    """Why it cannot be honoured, and what could be written instead."""


def wanted_backend(environ: Mapping[str, str], release: str) -> Wanted | None:
    """What `NVFP4_VARIABLE` asks for; None where it is not set, empty or auto. Any case, upstream's names or
    flags.

    Raises KeyError for a release that the tables do not know.
    """
    value = environ.get(NVFP4_VARIABLE, "").strip()
    if not value or value.lower() == AUTO:
        return None
    flags = tables("nvfp4", release).flags
    asked = _named(value)
    for flag in flags.values():
        if flag.backends and asked in (_named(flag.value), *map(_named, flag.backends)):
            return Wanted(flag.value, None)
    known = ", ".join(sorted(flag.value for flag in flags.values() if flag.backends))
    return Wanted(
        None, f"{NVFP4_VARIABLE}={value}: vLLM {release} has no such NVFP4 MoE backend; it has {known}"
    )


def governing_variables(scheme: str, release: str) -> Mapping[str, str]:
    """The variables that have a say in the MoE backend of a scheme -> where the release reads them."""
    found: dict[str, str] = {}
    for override in tables(scheme, release).overrides:
        for rule in override.rules:
            found.update({name: override.source for name in rule.when if name not in found})
    return found


def shadowed_variables(scheme: str, release: str, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Variables of `environ` that have a say in a scheme and still decide nothing, on any GPU -> what is in
    the way."""
    points = [(one, "tp", releases()[release].activations[0]) for one in CAPABILITIES]
    decisive: set[str] = set()
    ways: dict[str, str] = {}
    for point in points:
        ended = ""
        for override in tables(scheme, release).overrides:
            rule = next((one for one in override.rules if applies(one, point, environ)), None)
            for name in {name for one in override.rules for name in one.when if name in environ}:
                if ended:
                    ways.setdefault(name, f"{ended} comes before it")
                elif rule is not None and name in rule.when:
                    decisive.add(name)
                elif any(
                    is_on(environ[name]) is one.when.get(name) for one in override.rules if len(one.when) == 1
                ):
                    ways.setdefault(name, shown_variables(rule, environ) + " comes before it" if rule else "")
                else:
                    others = {one for other in override.rules if name in other.when for one in other.when} - {
                        name
                    }
                    unset = " or ".join(sorted(f"{one}=1" for one in others))
                    ways.setdefault(name, f"it is only looked at with {unset}" if unset else "")
            if rule is not None and rule.effect in ("only", "force") and not ended:
                ended = shown_variables(rule, environ)
    return {name: way for name, way in ways.items() if name not in decisive and way}


def way_to_ask(flag: str, scheme: str, release: str) -> str | None:
    """Another way to get what --moe-backend `flag` would ask for, in a release that ignores it there."""
    for capability in ("9.0", "10.0", "12.0"):
        try:
            wanted = request(flag, capability, scheme, release=release)
        except ValueError:
            return None
        if wanted.how is not None:
            return wanted.how
    return None


def _taken(selection: Selection) -> Candidate | None:
    return next((one for one in selection.candidates if one.chosen), None)


def _written(value: bool | str) -> str:
    return str(int(value)) if isinstance(value, bool) else value


def _named(backend: str) -> str:
    return backend.strip().upper().replace("-", "_").replace(" ", "_")
