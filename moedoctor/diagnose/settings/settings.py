"""Settings of a vLLM server that do not do what they seem to: variables and flags, judged for one release.

Nothing is changed or imported: the environment and the command line are only compared with the settings that
the release has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from packaging.version import Version

from moedoctor.diagnose.settings.flags import (
    EXPERT_PARALLEL,
    KERNEL_CONFIG,
    MOE_BACKEND,
    GivenFlag,
    asks_for_experts,
    check_flags,
    find_moe_backend,
    read_flags,
    read_parallelism,
    split_command,
)
from moedoctor.diagnose.settings.tables import (
    Setting,
    SettingFinding,
    Settings,
    load_flashinfer_variables,
    load_replacements,
    load_vllm_flags,
    load_vllm_variables,
)
from moedoctor.fixes import backends
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.fixes.backends import requests as backend_requests
from moedoctor.text import find_closest
from moedoctor.upstream.releases.questions import ENVS

_KUBERNETES = re.compile(r"VLLM(_\w+)?_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
"""Variables that Kubernetes sets in every pod for a service whose name begins with vllm."""
_ABSENT = frozenset(("unknown", "misspelt", "wrong_case", "removed", "not_yet"))
"""Problems of a setting that a release does not have."""
_OFF = frozenset(("0", "false", "no", "off", "", "none", "n", "f"))
_STOPS = "vLLM stops with a ValueError where it reads it"
_SIZES = ("--tensor-parallel-size", "--data-parallel-size")
_CONSIDERED = {MOE_BACKEND, KERNEL_CONFIG, EXPERT_PARALLEL, "--quantization", "--model", *_SIZES}


def check_settings(
    release: str,
    environ: Mapping[str, str],
    command: Sequence[str] = (),
    *,
    flashinfer: str | None = None,
    scheme: str | None = None,
    takes: Callable[[str], bool] | None = None,
) -> tuple[SettingFinding, ...]:
    """Return what is wrong with ``VLLM_*`` and ``FLASHINFER_*`` variables and the flags of a command line.

    `release` is a vLLM release of the tables, `command` a command line such as ``["vllm", "serve", "m",
    "--moe-backend", "marlin"]``, `flashinfer` a version of flashinfer-python (None: the one that the release
    requires). With a `scheme` of `moedoctor.fixes.backends`, settings that decide nothing for it are found
    too. Settings without effect come first. `takes` says if a value of --moe-backend would work; no other is
    advised. Raises ValueError for a release that the tables do not know.
    """
    variables = load_vllm_variables()
    if release not in variables.releases:
        raise ValueError(
            f"release {release}: the tables know {variables.releases[0]} to {variables.releases[-1]}"
        )
    findings: list[SettingFinding] = []
    command = split_command(command).command
    for name in sorted(environ):
        if name.upper().startswith("VLLM_"):
            findings += _check_variable(name, environ[name], variables, release)
    findings += check_flashinfer(
        flashinfer or backend_tables.load_releases()[release].flashinfer or "", environ
    )
    findings += check_flags(read_flags(command, release), release, scheme)
    without_effect = {finding.name for finding in findings if not finding.takes_effect}
    findings += [
        finding
        for finding in _find_undecisive(release, environ, scheme, find_moe_backend(command, release))
        if finding.name not in without_effect
    ]
    if takes is not None:
        findings = [_drop_refused(finding, takes) for finding in findings]
    return tuple(sorted(findings, key=lambda finding: finding.takes_effect))


def correct_variables(
    findings: Sequence[SettingFinding],
    environ: Mapping[str, str],
    known: Settings,
    version: str,
    declared: frozenset[str] | None,
) -> tuple[SettingFinding, ...]:
    """Correct the findings about variables by those that a build like release `version` declares itself.

    `known` are all variables of the package; `declared` is None if those of the build are not known.
    """
    is_vllm = known is load_vllm_variables()
    prefix, source = ("VLLM_", f"{ENVS} of this vLLM") if is_vllm else ("FLASHINFER_", "this FlashInfer")
    kept = []
    for finding in findings:
        if not finding.name.startswith(prefix):
            kept.append(finding)
        elif declared is not None and finding.problem == "unknown" and finding.name not in declared:
            message = f"neither a known release nor {source} declares it"
            kept.append(replace(finding, message=message))
        elif declared is None:  # a near name or a removed one is still worth a look, a new one is not
            kept += [finding] if finding.problem not in ("unknown", "not_yet") else []
        elif (finding.name in declared) is (finding.problem not in _ABSENT):
            kept.append(finding)
    here, message = known.list_at(version), f"{source} does not declare it"
    gone = sorted(environ.keys() & here.keys() - declared) if declared is not None else ()
    kept += [
        SettingFinding(f"{name}={environ[name]}", "removed", message, None, ENVS if is_vllm else "flashinfer")
        for name in gone
        if here[name].kind != "elsewhere" and here[name].source.partition(":")[0].endswith(".py")
    ]
    return tuple(kept)


def correct_flags(
    findings: Sequence[SettingFinding],
    command: Sequence[str],
    release: str,
    flags: Container[str],
    choices: Mapping[str, Sequence[str]],
) -> tuple[SettingFinding, ...]:
    """Correct the findings about flags by those that a build like `release` declares in its own parser.

    `choices` are the values that it declares for the flags that choose backends.
    """
    given = [flag for flag in read_flags(command, release) if flag.name in choices]
    taken = {str(flag): (flag.value or "").strip().lower().replace("-", "_") for flag in given}
    kept = []
    for finding in findings:
        listed = choices.get(finding.name, ())
        is_new = finding.problem in ("invalid", "wrong_case") and taken.get(finding.setting) in listed
        if not is_new and (finding.problem not in _ABSENT or finding.name.partition(".")[0] not in flags):
            kept.append(finding)
    refused = {finding.setting for finding in kept if finding.stops}
    for flag in given:
        listed = choices[flag.name or ""]
        if taken[str(flag)] not in listed and str(flag) not in refused:
            message = f"this vLLM takes {', '.join(listed)}, and stops"
            kept.append(SettingFinding(str(flag), "invalid", message, None, "vllm/config", stops=True))
    return tuple(kept)


def check_flashinfer(version: str, environ: Mapping[str, str]) -> tuple[SettingFinding, ...]:
    """Check the ``FLASHINFER_*`` variables for a version of flashinfer-python.

    Return nothing for a version that is older than the tables.
    """
    known = load_flashinfer_variables()
    release = known.find_release(version)
    if release is None:
        return ()
    names = sorted(name for name in environ if name.upper().startswith("FLASHINFER_"))
    return tuple(each for name in names for each in _check_variable(name, environ[name], known, release))


def _check_variable(name: str, value: str, known: Settings, release: str) -> Iterator[SettingFinding]:
    here = known.list_at(release)
    product = "vLLM" if known is load_vllm_variables() else "FlashInfer"
    if name in here:
        yield from _check_value(here[name], value, product, release)
        return
    compiled = name in load_replacements()["compiled"]["names"]
    if compiled or (product == "vLLM" and _KUBERNETES.fullmatch(name)):
        return
    if name != name.upper() and name.upper() not in here and name not in known.rows:
        return  # a variable of another program
    yield _report_absent(name, value, known, release, product)


def _report_absent(name: str, value: str, known: Settings, release: str, product: str) -> SettingFinding:
    here, setting, better = known.list_at(release), f"{name}={value}", _find_replacement(name, value, release)
    if absence := known.explain_absence(name, release):
        problem, other, source = absence
        if problem == "not_yet":
            message = f"{product} {release} does not have it yet: it came with {other}"
            return SettingFinding(setting, problem, message, None, source)
        message = f"removed in {product} {other}; {release} ignores it"
        return SettingFinding(setting, problem, message, better, source)
    if name.upper() in here:
        right = name.upper()
        message = f"names of variables are case sensitive: {product} reads {right}"
        return SettingFinding(setting, "wrong_case", message, f"{right}={value}", here[right].source)
    if better is not None:
        return SettingFinding(setting, "unknown", f"no release of {product} reads it", better, "")
    close = find_closest(name, here, most=1, misspelt=True)
    if close:
        message = f"{product} {release} does not know it; {close[0]} is near"
        return SettingFinding(setting, "misspelt", message, f"{close[0]}={value}", here[close[0]].source)
    message = f"{product} {release} does not read it, nor does any other known release"
    return SettingFinding(setting, "unknown", message, None, "")


def _find_replacement(name: str, value: str, release: str) -> str | None:
    """Return what does in `release` what the variable did, or was meant to do, or None."""
    table, word = load_replacements(), value.strip().lower().replace("-", "_")
    for group in (table["wishes"], table["linear"]):
        if name in group["names"] and Version(release) >= Version(group.get("since", "0")):
            return f"{group['flag']} {group.get('spelling', {}).get(word, word)}"
    row: Mapping[str, list[str]] = table["instead"].get(name, {})
    return _name_values(row.get(value) or row.get("off" if word in ("0", "false", "") else "on") or [])


def _name_values(values: Sequence[str]) -> str | None:
    others = f" (or {', '.join(values[1:])})" if values[1:] else ""
    return f"{MOE_BACKEND} {values[0]}{others}" if values else None


def _drop_refused(finding: SettingFinding, takes: Callable[[str], bool]) -> SettingFinding:
    """Advise no value of --moe-backend that would not work here."""
    flag, _, listed = (finding.instead or "").partition(" ")
    if flag != MOE_BACKEND:
        return finding
    values = [word for word in re.findall(r"\w+", listed) if word != "or"]
    fitting = [value for value in values if takes(value)]
    if fitting == values:
        return finding
    refused = ", ".join(value for value in values if value not in fitting)
    message = f"{finding.message}; {MOE_BACKEND} {refused} would not work here"
    return replace(finding, message=message, instead=_name_values(fitting))


def _check_value(setting: Setting, value: str, product: str, release: str) -> Iterator[SettingFinding]:
    """Yield what is wrong with the value of a known variable, or with relying on the variable."""
    wrong = _find_error(setting, value)
    shown = f"{setting.name}={value}"
    if wrong is not None:
        problem, message, better = wrong
        better = f"{setting.name}={better}" if better is not None else None
        stops = problem != "silently_off"
        yield SettingFinding(shown, problem, message, better, setting.source, stops=stops)
        return
    if setting.deprecated:
        message = f"still works in {product} {release}, which warns that it will be removed"
        better = _find_replacement(setting.name, value, release)
        yield SettingFinding(shown, "deprecated", message, better, setting.source, True)
    note = load_replacements()["other_layers"].get(setting.name)
    if note is not None:
        yield SettingFinding(shown, "other_layers", note, None, setting.source, True)


def _find_error(setting: Setting, value: str) -> tuple[str, str, str | None] | None:
    """Return (problem, message, a value that works), or None for a valid value."""
    if setting.kind in ("switch", "number") and not _parses_as(int, value):
        if setting.name == "VLLM_PORT" and "://" in value:
            message = "set by Kubernetes for a service named vllm, not by you; rename the service"
            return "invalid", message, None
        if setting.kind == "number":
            return "invalid", f"expected a whole number; {_STOPS}", None
        word = {"true": "1", "yes": "1", "on": "1"}.get(value.lower(), "0" if value.lower() in _OFF else None)
        return "invalid", f"expected 0 or 1; {_STOPS}", word
    if setting.kind == "decimal" and not _parses_as(float, value):
        return "invalid", f"expected a number; {_STOPS}", None
    if setting.kind == "choice":
        return _check_choice(setting, value)
    if setting.kind == "choices":
        parts = (part.strip() for part in value.split(",") if part.strip())
        return next((wrong for wrong in (_check_choice(setting, part) for part in parts) if wrong), None)
    if setting.kind == "words" and setting.on and value.lower() not in _OFF:
        words = [word.lower() for word in setting.on]
        any_case = {"true", "True"} <= set(setting.on)
        if value in setting.on or (any_case and value.strip().lower() in words):
            return None
        listed = " or ".join(dict.fromkeys(words))
        message = f"is treated as off, and vLLM prints no warning; on is {listed}"
        return "silently_off", message, setting.on[0]
    return None


def _check_choice(setting: Setting, value: str) -> tuple[str, str, str | None] | None:
    if value in setting.choices:
        return None
    same = next((choice for choice in setting.choices if choice.lower() == value.lower()), None)
    if same is not None:
        message = f"the choices are case sensitive; {_STOPS}"
        return ("wrong_case", message, same) if setting.case_sensitive else None
    close = find_closest(value, setting.choices, most=1)
    message = f"expected one of {', '.join(setting.choices)}; {_STOPS}"
    return "invalid", message, close[0] if close else None


def _find_undecisive(
    release: str, environ: Mapping[str, str], scheme: str | None, moe_backend: str
) -> Iterator[SettingFinding]:
    """Yield valid variables that do not decide the MoE backend, because other settings come before them."""
    schemes = [scheme] if scheme else list(backends.SCHEMES)
    governing = {name: backend_requests.find_governing_variables(name, release) for name in backends.SCHEMES}
    for name in sorted(environ):
        governed = [key for key in backends.SCHEMES if name in governing[key]]
        mine = [key for key in schemes if key in governed]
        setting = f"{name}={environ[name]}"
        if not governed:
            continue
        if not mine:
            message = f"decides {', '.join(governed)} layers only, not {scheme}"
            yield SettingFinding(setting, "other_layers", message, None, governing[governed[0]][name], True)
            continue
        source = governing[mine[0]][name]
        shadowed = [backend_requests.find_shadowed_variables(key, release, environ) for key in mine]
        if all(_is_decided_by_flag(moe_backend, key, release) for key in mine):
            linear = name in load_replacements()["linear_too"]["names"]
            if linear and any(key.startswith("fp8") for key in mine):
                message = f"--moe-backend {moe_backend} chooses for experts; linear layers follow it"
                yield SettingFinding(setting, "other_layers", message, None, source, True)
                continue
            message = f"does not decide the MoE backend: --moe-backend {moe_backend} comes before it"
            yield SettingFinding(setting, "shadowed", message, None, source)
        elif all(name in variables for variables in shadowed):
            yield SettingFinding(setting, "shadowed", f"has no effect: {shadowed[0][name]}", None, source)


def _is_decided_by_flag(moe_backend: str, scheme: str, release: str) -> bool:
    """Return True if the flag decides for this scheme; some releases ignore it for some schemes."""
    flag = backend_tables.load_tables(scheme, release).flags.get(moe_backend)
    return (
        moe_backend in backend_tables.load_releases()[release].moe_backends
        and moe_backend != backends.AUTO
        and not (flag is not None and flag.ignored)
    )


def _parses_as(kind: type[int] | type[float], value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def find_unconsidered(
    release: str, environ: Mapping[str, str], command: Sequence[str]
) -> tuple[SettingFinding, ...]:
    """Return the settings that may change what the experts run on, and that the answer leaves out."""
    flags = read_flags(command, release)
    ignored = []
    if asks_for_experts(flags) and not read_parallelism(command, release)[0]:
        given = [str(flag) for flag in flags if flag.name == EXPERT_PARALLEL]
        message = "vLLM splits experts over more than one GPU only, and this server has one"
        source = f"vLLM {release}: fused_moe/config.py"
        ignored.append(SettingFinding(given[-1], "ignored", message, None, source))
    return (*ignored, *_find_flags(flags, release), *_find_variables(release, environ))


def list_others(release: str, environ: Mapping[str, str], command: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all other settings that vLLM reads and the answer does not look at."""
    considered = {None, *_CONSIDERED, *load_replacements()["not_considered"]["flags"]}
    governing = _list_governing(release)
    flags = [flag.written for flag in read_flags(command, release) if flag.name not in considered]
    known = load_vllm_variables().list_at(release)
    variables = [name for name in sorted(environ) if name in known and not known[name].moe]
    variables += [name for name in sorted(environ) if name in load_flashinfer_variables().rows]
    return tuple(dict.fromkeys([*flags, *(name for name in variables if name not in governing)]))


def _find_flags(flags: Sequence[GivenFlag], release: str) -> Iterator[SettingFinding]:
    known, table = load_vllm_flags().list_at(release), load_replacements()["not_considered"]
    last = {flag.name: flag for flag in flags if flag.name is not None}
    for name, flag in last.items():
        reason = table["flags"].get(name)
        if name == KERNEL_CONFIG and "linear_backend" in f"{flag.key} {flag.value}":
            reason = table["flags"]["--linear-backend"]
        if reason is None or (flag.value or "") in table["assumed"].get(name, ()):
            continue
        if flag.written.startswith(("--no-", "--disable-")):
            continue
        yield SettingFinding(str(flag), "not_considered", reason, None, known[name].source, True)


def _find_variables(release: str, environ: Mapping[str, str]) -> Iterator[SettingFinding]:
    known = load_vllm_variables().list_at(release)
    governing = _list_governing(release)
    for name in sorted(environ):
        if name in known and known[name].moe and name not in governing:
            source = f"{known[name].first}: {known[name].moe}"
            message = "vLLM's code of MoE layers reads it"
            setting = f"{name}={environ[name]}"
            yield SettingFinding(setting, "not_considered", message, None, source, True)


def _list_governing(release: str) -> set[str]:
    """Return the variables that the tables of backends consider."""
    find = backend_requests.find_governing_variables
    return {name for scheme in backends.SCHEMES for name in find(scheme, release)}
