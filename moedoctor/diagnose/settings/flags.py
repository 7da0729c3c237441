"""The flags of a `vllm serve` command line, judged for one release."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moedoctor.diagnose.settings.records import SettingFinding
from moedoctor.diagnose.settings.tables import Setting, vllm_flags
from moedoctor.fixes import backends
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.fixes.backends import requests as backend_requests

MOE_BACKEND = "--moe-backend"
KERNEL_CONFIG = "--kernel-config"
_OPPOSITES = (
    ("--no-", "--"),
    ("--no-", "--enable-"),
    ("--disable-", "--enable-"),
    ("--enable-", "--disable-"),
)
"""(how the opposite of a switch begins, how the switch itself does)."""


@dataclass(frozen=True)
class GivenFlag:
    """One flag of the command line."""

    written: str
    """As it was given, without its value."""
    name: str | None
    """The flag that vLLM takes it for; None for one that it does not know."""
    value: str | None
    key: str = ""
    """For ``--kernel-config.moe_backend``: what comes after the dot."""


def given_flags(command: Sequence[str], release: str) -> tuple[GivenFlag, ...]:
    """The long flags of a command line, as vLLM's parser reads them: ``_`` for ``-``, and any unique
    beginning."""
    known = vllm_flags().at(release)
    found = []
    words = list(command)
    for place, word in enumerate(words):
        if word == "--":
            break
        if not word.startswith("--") or word.startswith("--help"):  # --help=Section, too
            continue
        written, equals, value = word.partition("=")
        following = words[place + 1] if place + 1 < len(words) else None
        given = (
            value
            if equals
            else (following if following is not None and not following.startswith("--") else None)
        )
        name, dot, key = written.partition(".")
        found.append(GivenFlag(written, _meant(name.replace("_", "-"), known), given, key if dot else ""))
    return tuple(found)


def moe_backend_of(command: Sequence[str], release: str) -> str:
    """The MoE backend that a command line asks for, ``auto`` where it asks for none."""
    flags = given_flags(command, release)
    asked = [one.value or "" for one in flags if one.name == MOE_BACKEND]
    configured = _configured(flags)
    chosen = _normal(asked[-1]) if asked else backends.AUTO
    return chosen if chosen != backends.AUTO or configured is None else _normal(configured)


def flag_findings(flags: Sequence[GivenFlag], release: str, scheme: str | None) -> Iterator[SettingFinding]:
    """What is wrong with the flags of a command line."""
    known = vllm_flags().at(release)
    for flag in flags:
        if flag.name is None:
            yield _unknown(flag, known, release)
        elif flag.key and "-" in flag.key and flag.name == KERNEL_CONFIG:
            better = f"{flag.written.partition('.')[0]}.{flag.key.replace('-', '_')}={flag.value}"
            said = "keys after the dot are field names: written with _, not -"
            yield SettingFinding(_shown(flag), "invalid", said, better, known[flag.name].source, stops=True)
        elif flag.name != MOE_BACKEND and known[flag.name].choices:
            yield from _choice(flag, known[flag.name], release)
    asked = [one for one in flags if one.name == MOE_BACKEND]
    for overruled in asked[:-1]:
        said = f"given more than once: the last one, {asked[-1].value}, counts"
        yield SettingFinding(_shown(overruled), "shadowed", said, None, known[MOE_BACKEND].source)
    for last in asked[-1:]:
        yield from _choice(last, known[MOE_BACKEND], release)
    configured = _configured(flags)
    if (
        asked
        and configured is not None
        and _normal(asked[-1].value or "") not in (backends.AUTO, _normal(configured))
    ):
        said = f"{MOE_BACKEND} {asked[-1].value} comes before it"
        setting = f"{KERNEL_CONFIG} moe_backend={configured}"
        yield SettingFinding(setting, "shadowed", said, None, known[KERNEL_CONFIG].source)
    value = (
        _normal(asked[-1].value or "") if asked else (_normal(configured) if configured else backends.AUTO)
    )
    if scheme is not None and value != backends.AUTO:
        yield from _for_scheme(value, scheme, release)


def _for_scheme(value: str, scheme: str, release: str) -> Iterator[SettingFinding]:
    """A value that is valid, but not for layers of this scheme."""
    flag = backend_tables.tables(scheme, release).flags.get(value)
    if value not in backend_tables.releases()[release].moe_backends:
        return
    valid = [one.value for one in backend_tables.tables(scheme, release).flags.values() if one.backends]
    shown = f"{MOE_BACKEND} {value}"
    if flag is None:
        said = f"not for {scheme}: vLLM {release} stops; it takes {', '.join(valid)}"
        yield SettingFinding(shown, "invalid", said, None, f"vLLM {release}", stops=True)
    elif flag.refused:
        said = f"vLLM {release} refuses it for {scheme}: {flag.refused}"
        yield SettingFinding(shown, "invalid", said, None, flag.source, stops=True)
    elif flag.ignored:
        said = f"vLLM {release} ignores it for {scheme} layers, without a word"
        other = backend_requests.way_to_ask(value, scheme, release)
        wanted = other if other and not other.startswith("--") else None
        yield SettingFinding(shown, "ignored", said, wanted, flag.source)


def _unknown(flag: GivenFlag, known: Mapping[str, Setting], release: str) -> SettingFinding:
    name = flag.written.partition(".")[0].replace("_", "-")
    spans = vllm_flags().rows.get(name)
    if spans:
        table = vllm_flags()
        newer = table.releases.index(spans[0].first) > table.releases.index(release)
        when = f"it came with {spans[0].first}" if newer else f"it went with {table.after(spans[-1].last)}"
        said = f"vLLM {release} does not have it and stops: {when}"
        problem = "not_yet" if newer else "removed"
        return SettingFinding(_shown(flag), problem, said, None, spans[0].source, stops=True)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    better = (f"{close[0]} {flag.value}" if flag.value is not None else close[0]) if close else None
    said = f"vLLM {release} does not know it and stops"
    return SettingFinding(_shown(flag), "misspelt" if close else "unknown", said, better, "", stops=True)


def _choice(flag: GivenFlag, setting: Setting, release: str) -> Iterator[SettingFinding]:
    value = flag.value or ""
    # --moe-backend and --linear-backend are read in any case and with - for _; --all2all-backend is not.
    read = value if flag.name == "--all2all-backend" else _normal(value)
    if read in setting.choices:
        return
    close = difflib.get_close_matches(_normal(value), setting.choices, n=1)
    said = f"vLLM {release} takes {', '.join(setting.choices)}, and stops"
    problem = "wrong_case" if _normal(value) in setting.choices else "invalid"
    better = f"{setting.name} {close[0]}" if close else None
    yield SettingFinding(_shown(flag), problem, said, better, setting.source, stops=True)


def _configured(flags: Sequence[GivenFlag]) -> str | None:
    """The moe_backend that --kernel-config gives, as JSON or by its dotted key."""
    found = None
    for flag in [one for one in flags if one.name == KERNEL_CONFIG]:
        if flag.key:
            found = flag.value if flag.key == "moe_backend" else found
            continue
        try:
            config = json.loads(flag.value or "")
        except ValueError:
            continue
        value = config.get("moe_backend") if isinstance(config, dict) else None
        found = value if isinstance(value, str) else found
    return found


def _meant(name: str, known: Mapping[str, Setting]) -> str | None:
    if name in known:
        return name
    for opposite, switch in _OPPOSITES:
        if name.startswith(opposite) and switch + name.removeprefix(opposite) in known:
            return switch + name.removeprefix(opposite)
    beginnings = [one for one in known if one.startswith(name)] if len(name) > 3 else []
    return beginnings[0] if len(beginnings) == 1 else None


def _normal(value: str) -> str:
    return value.strip().lower().replace("-", "_")


def _shown(flag: GivenFlag) -> str:
    return flag.written if flag.value is None else f"{flag.written} {flag.value}"
