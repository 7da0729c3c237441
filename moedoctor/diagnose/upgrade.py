"""The changes of another vLLM release for one GPU and command line: backends, settings, known failures.

Everything comes from the tables and from the entries' rules; nothing is installed or run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from moedoctor.diagnose.check.check import check
from moedoctor.diagnose.check.records import Finding
from moedoctor.diagnose.check.target import add_gpu, describe_release
from moedoctor.diagnose.ignores import SEVERITIES
from moedoctor.diagnose.settings.flags import find_moe_backend, read_flags, read_parallelism, split_command
from moedoctor.diagnose.settings.scheme import find_scheme
from moedoctor.diagnose.settings.settings import check_settings
from moedoctor.diagnose.settings.tables import (
    list_new_defaults,
    load_vllm_flags,
    load_vllm_values,
    load_vllm_variables,
)
from moedoctor.fixes.backends import SCHEMES, Selection, select
from moedoctor.text import join_some

Change = tuple[str, str]
"""``regressions``, ``improvements`` or ``notes``, and a sentence."""
_SHOWN = 12
_FLAG = re.compile(r"--[a-z0-9]+(?:-[a-z0-9]+)*")


def compare_releases(
    before: str, after: str, capability: str | None, environ: Mapping[str, str], command: Sequence[str]
) -> Mapping[str, tuple[str, ...]]:
    """Return the changes from one known release to another, as sentences by group.

    `environ` are the ``VLLM_*`` and ``FLASHINFER_*`` variables, `command` may be empty. Without a
    `capability` no backends are compared.
    """
    served = split_command(command)
    variables = {**environ, **served.settings}
    changes = [
        *_compare_failures(before, after, capability, served.command),
        *_compare_settings(before, after, variables, served.command),
        *_compare_names(before, after),
        *_compare_defaults(before, after, " ".join((*variables, *served.command))),
    ]
    if capability is None:
        changes.append(("notes", "backends were not compared: no GPU is visible here; name one: --sm 12.0"))
    else:
        changes = [*_compare_backends(before, after, capability, variables, served.command), *changes]
    groups = ("regressions", "improvements", "notes")
    return {group: tuple(text for each, text in changes if each == group) for group in groups}


def _compare_backends(
    before: str, after: str, capability: str, variables: Mapping[str, str], command: Sequence[str]
) -> Iterator[Change]:
    found = find_scheme(command, after) if command else None
    for scheme in found.schemes if found else SCHEMES:
        old, new = (_select(each, scheme, capability, variables, command) for each in (before, after))
        what = f"{scheme} experts on compute capability {capability}: {old.chosen or 'no backend'} -> "
        if old.chosen and not new.chosen:
            yield "regressions", f"{what}no backend: {new.error}"
        elif new.chosen and not old.chosen:
            yield "improvements", f"{what}{new.chosen}"
        elif old.chosen != new.chosen:
            yield "notes", f"{what}{new.chosen} ({new.decided_by})"


def _select(
    release: str, scheme: str, capability: str, variables: Mapping[str, str], command: Sequence[str]
) -> Selection:
    ep, dp = read_parallelism(command, release)
    flag = find_moe_backend(command, release)
    return select(capability, scheme, release=release, ep=ep, dp=dp, moe_backend=flag, environ=variables)


def _compare_settings(
    before: str, after: str, variables: Mapping[str, str], command: Sequence[str]
) -> Iterator[Change]:
    """Yield settings of this environment and command line that lose or gain their effect."""
    old, new = (
        {each.setting: each for each in check_settings(release, variables, command) if not each.takes_effect}
        for release in (before, after)
    )
    for setting in sorted(new.keys() - old.keys()):
        instead = f"; use {new[setting].instead}" if new[setting].instead else ""
        yield "regressions", f"{setting} has no effect any more: {new[setting].message}{instead}"
    for setting in sorted(old.keys() - new.keys()):
        yield "improvements", f"{setting} takes effect; before: {old[setting].message}"
    was, now = (load_vllm_values().list_at(release) for release in (before, after))
    given = {f"{flag.name} {flag.value}" for flag in read_flags(command, before)}
    for value in sorted(given & was.keys() - now.keys()):
        yield "regressions", f"{value} is gone: vLLM {after} does not have it"


def _compare_names(before: str, after: str) -> Iterator[Change]:
    """Yield the flags, variables and values of flags that come and go, used or not."""
    tables = {"flags": load_vllm_flags(), "variables": load_vllm_variables(), "values": load_vllm_values()}
    for kind, table in tables.items():
        old, new = table.list_at(before).keys(), table.list_at(after).keys()
        for verb, names in (("gone", old - new), ("new", new - old)):
            if names:
                yield "notes", f"{len(names)} {kind} are {verb}: {join_some(sorted(names), _SHOWN)}"


def _compare_defaults(before: str, after: str, words: str) -> Iterator[Change]:
    """Yield what changes by itself: first what matters to MoE models, then the other variables."""
    defaults = [*list_new_defaults(before, after, words)]
    for new in defaults:
        yield "notes", f"new default since {new.since}: {new.says}; {new.back} takes the old one back"
    listed = {new.back.partition("=")[0] for new in defaults}
    old, now = (load_vllm_variables().list_at(release) for release in (before, after))
    values = (
        (name, old[name].default, now[name].default) for name in sorted(old.keys() & now.keys() - listed)
    )
    changed = [f"{name} {was} -> {value}" for name, was, value in values if was and value and was != value]
    if changed:
        yield "notes", f"other variables with another default: {join_some(changed, _SHOWN)}"


def _compare_failures(
    before: str, after: str, capability: str | None, command: Sequence[str]
) -> Iterator[Change]:
    old, new = (_list_failures(release, capability) for release in (before, after))
    given = {flag.name for flag in read_flags(command, after)}
    for id in sorted(old.keys() | new.keys()):
        was, now = old.get(id), new.get(id)
        if was and now:
            if was.severity != now.severity:
                better = SEVERITIES.index(now.severity) > SEVERITIES.index(was.severity)
                group = "improvements" if better else "regressions"
                yield group, f"{id} {now.name}: {was.severity} -> {now.severity}: {now.why}"
            elif was.why != now.why:
                yield "notes", f"{id} {now.name} has another cause: {now.why}{_explain_needs(now)}"
        elif now:
            # A note is a failure that takes a flag; with the flag on the command line it may strike.
            flags = [flag for flag in _FLAG.findall(now.needs or "") if flag in given]
            group = "notes" if now.severity == "note" and not flags else "regressions"
            has = f", and this command line has {', '.join(flags)}" if flags else ""
            yield group, f"{id} {now.name} begins ({now.severity}): {now.why}{_explain_needs(now)}{has}"
        elif was:
            yield "improvements", f"{id} {was.name} ends ({was.severity}): {was.why}"


def _explain_needs(finding: Finding) -> str:
    return f"; needs {finding.needs}" if finding.needs else ""


def _list_failures(release: str, capability: str | None) -> Mapping[str, Finding]:
    target = describe_release(release)
    result = check(target=add_gpu(target, capability) if capability else target)
    return {each.id: each for each in (*result.findings, *result.conditional)}
