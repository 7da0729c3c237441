"""Settings of a vLLM server that do not do what they seem to: variables and flags, judged for one release.

Nothing is changed or imported: the environment and the command line are only read, and compared with what the
release knows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from moedoctor.diagnose.settings.advice import COMPILED, OTHER_LAYERS, instead
from moedoctor.diagnose.settings.flags import flag_findings, given_flags, moe_backend_of
from moedoctor.diagnose.settings.records import SettingFinding
from moedoctor.diagnose.settings.tables import Setting, Settings, flashinfer_variables, vllm_variables
from moedoctor.fixes import backends
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.fixes.backends import requests as backend_requests

__all__ = ["SettingFinding", "check_flashinfer", "check_settings", "moe_backend_of"]

_KUBERNETES = re.compile(r"VLLM(_\w+)?_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
"""What Kubernetes sets in every pod for a service whose name begins with vllm."""
_OFF = frozenset(("0", "false", "no", "off", "", "none", "n", "f"))


def check_settings(
    release: str,
    environ: Mapping[str, str],
    command: Sequence[str] = (),
    *,
    flashinfer: str | None = None,
    scheme: str | None = None,
) -> tuple[SettingFinding, ...]:
    """What is wrong with the ``VLLM_*`` and ``FLASHINFER_*`` variables of `environ` and the flags of
    `command`.

    `release` is a vLLM release of the tables, `command` a command line such as ``["vllm", "serve", "m",
    "--moe-backend", "marlin"]``, `flashinfer` a version of flashinfer-python (None: the one that the release
    requires). With a `scheme` of `moedoctor.fixes.backends`, settings are also judged by whether they have a
    say for it. The settings that do not take effect come first. Raises ValueError for a release that the
    tables do not know.
    """
    variables = vllm_variables()
    if release not in variables.releases:
        raise ValueError(
            f"release {release}: the tables know {variables.releases[0]} to {variables.releases[-1]}"
        )
    found: list[SettingFinding] = []
    for name in sorted(environ):
        if name.upper().startswith("VLLM_"):
            found += _variable(name, environ[name], variables, release)
    found += check_flashinfer(flashinfer or backend_tables.releases()[release].flashinfer or "", environ)
    flags = given_flags(command, release)
    found += flag_findings(flags, release, scheme)
    done = {one.setting.partition("=")[0] for one in found if not one.takes_effect}
    found += [
        one
        for one in _without_a_say(release, environ, scheme, moe_backend_of(command, release))
        if one.setting.partition("=")[0] not in done
    ]
    return tuple(sorted(found, key=lambda one: one.takes_effect))


def check_flashinfer(version: str, environ: Mapping[str, str]) -> tuple[SettingFinding, ...]:
    """The same for the ``FLASHINFER_*`` variables alone, for a version of flashinfer-python; nothing for one
    that is older than the tables."""
    known = flashinfer_variables()
    release = known.at_or_before(version)
    if release is None:
        return ()
    names = sorted(name for name in environ if name.upper().startswith("FLASHINFER_"))
    return tuple(one for name in names for one in _variable(name, environ[name], known, release))


def _variable(name: str, value: str, known: Settings, release: str) -> Iterator[SettingFinding]:
    here = known.at(release)
    product = "vLLM" if known is vllm_variables() else "FlashInfer"
    if name in here:
        yield from _value(here[name], value, product, release)
        return
    if name in COMPILED or (product == "vLLM" and _KUBERNETES.fullmatch(name)):
        return
    setting = f"{name}={value}"
    spans = known.rows.get(name)
    if spans:
        newer = known.releases.index(spans[0].first) > known.releases.index(release)
        if newer:
            said = f"{product} {release} does not have it yet: it came with {spans[0].first}"
            yield SettingFinding(setting, "not_yet", said, None, spans[0].source)
        else:
            gone = known.after(spans[-1].last)
            said = f"removed in {product} {gone}; {release} ignores it"
            yield SettingFinding(setting, "removed", said, instead(name, value, release), spans[-1].source)
        return
    if name.upper() in here:
        said = f"names of variables are case sensitive: {product} reads {name.upper()}"
        yield SettingFinding(
            setting, "wrong_case", said, f"{name.upper()}={value}", here[name.upper()].source
        )
        return
    if name != name.upper():
        return  # somebody's own
    wanted = instead(name, value, release)
    if wanted is not None:
        yield SettingFinding(setting, "unknown", f"no release of {product} reads it", wanted, "")
        return
    close = difflib.get_close_matches(name, here, n=1, cutoff=0.85)
    if close:
        said = f"{product} {release} does not know it; {close[0]} is near"
        yield SettingFinding(setting, "misspelt", said, f"{close[0]}={value}", here[close[0]].source)
        return
    yield SettingFinding(
        setting, "unknown", f"{product} {release} does not read it, nor does any other release", None, ""
    )


def _value(setting: Setting, value: str, product: str, release: str) -> Iterator[SettingFinding]:
    """What is wrong with the value, and a word on variables that are about to go."""
    problem = _invalid(setting, value)
    shown = f"{setting.name}={value}"
    if problem is not None:
        kind, said, better = problem
        better = f"{setting.name}={better}" if better is not None else None
        stops = kind != "silently_off"
        yield SettingFinding(shown, kind, said, better, setting.source, stops=stops)
        return
    if setting.deprecated:
        said = f"still works in {product} {release}, which warns that it will be removed"
        yield SettingFinding(
            shown, "deprecated", said, instead(setting.name, value, release), setting.source, True
        )
    if setting.name in OTHER_LAYERS:
        yield SettingFinding(shown, "other_layers", OTHER_LAYERS[setting.name], None, setting.source, True)


def _invalid(setting: Setting, value: str) -> tuple[str, str, str | None] | None:
    """(problem, message, a value that would do), or None."""
    stops = "vLLM stops with a ValueError where it reads it"
    if setting.kind in ("switch", "number") and not _is_integer(value):
        if setting.name == "VLLM_PORT" and "://" in value:
            return (
                "invalid",
                "set by Kubernetes for a service named vllm, not by you; rename the service",
                None,
            )
        word = {"true": "1", "yes": "1", "on": "1"}.get(value.lower(), "0" if value.lower() in _OFF else None)
        expected = "0 or 1" if setting.kind == "switch" else "a whole number"
        return "invalid", f"expected {expected}; {stops}", word if setting.kind == "switch" else None
    if setting.kind == "decimal" and not _is_number(value):
        return "invalid", f"expected a number; {stops}", None
    if setting.kind in ("choice", "choices"):
        given = (
            [value]
            if setting.kind == "choice"
            else [part.strip() for part in value.split(",") if part.strip()]
        )
        return next((found for found in (_choice(setting, one) for one in given) if found), None)
    if (
        setting.kind == "words"
        and setting.on
        and not _counts_as_on(setting, value)
        and value.lower() not in _OFF
    ):
        listed = " or ".join(dict.fromkeys(word.lower() for word in setting.on))
        return "silently_off", f"counts as off, without a word; on is {listed}", setting.on[0]
    return None


def _counts_as_on(setting: Setting, value: str) -> bool:
    any_case = {"true", "True"} <= set(setting.on)
    return value in setting.on or (
        any_case and value.strip().lower() in {word.lower() for word in setting.on}
    )


def _choice(setting: Setting, value: str) -> tuple[str, str, str | None] | None:
    if value in setting.choices:
        return None
    same = next((one for one in setting.choices if one.lower() == value.lower()), None)
    if same is not None:
        said = "the choices are case sensitive; vLLM stops with a ValueError where it reads it"
        return ("wrong_case", said, same) if setting.case_sensitive else None
    close = difflib.get_close_matches(value.lower().replace("_", "-"), setting.choices, n=1)
    listed = ", ".join(setting.choices)
    said = f"expected one of {listed}; vLLM stops with a ValueError where it reads it"
    return "invalid", said, close[0] if close else None


def _without_a_say(
    release: str, environ: Mapping[str, str], scheme: str | None, moe_backend: str
) -> Iterator[SettingFinding]:
    """Variables that are valid and still decide nothing about the MoE backend, because others come before
    them."""
    schemes = [scheme] if scheme else list(backends.SCHEMES)
    governing = {one: backend_requests.governing_variables(one, release) for one in backends.SCHEMES}
    for name in sorted(environ):
        mine = [one for one in schemes if name in governing[one]]
        flagged = [one for one in mine if _decides(moe_backend, one, release)]
        anywhere = [one for one in backends.SCHEMES if name in governing[one]]
        setting = f"{name}={environ[name]}"
        if not anywhere:
            continue
        if not mine:
            said = f"decides {', '.join(anywhere)} layers only, not {scheme}"
            yield SettingFinding(setting, "other_layers", said, None, governing[anywhere[0]][name], True)
        elif flagged == mine:
            said = f"has no say in the MoE backend: --moe-backend {moe_backend} comes before it"
            yield SettingFinding(setting, "shadowed", said, None, governing[mine[0]][name])
        elif all(name in backend_requests.shadowed_variables(one, release, environ) for one in mine):
            by = backend_requests.shadowed_variables(mine[0], release, environ)[name]
            said = f"has no effect: {by}"
            yield SettingFinding(setting, "shadowed", said, None, governing[mine[0]][name])


def _decides(moe_backend: str, scheme: str, release: str) -> bool:
    """Whether the flag is what decides for this scheme; some releases ignore it for some schemes."""
    flag = backend_tables.tables(scheme, release).flags.get(moe_backend)
    return (
        moe_backend in backend_tables.releases()[release].moe_backends
        and moe_backend != backends.AUTO
        and not (flag is not None and flag.ignored)
    )


def _is_integer(value: str) -> bool:
    try:
        int(value)
    except ValueError:
        return False
    return True


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
