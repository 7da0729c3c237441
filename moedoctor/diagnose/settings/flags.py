"""The command line of a vLLM server: its variables, its flags judged for one release, and its MoE backend."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moedoctor.diagnose.settings.tables import Setting, SettingFinding, load_vllm_flags
from moedoctor.fixes import backends
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.fixes.backends import requests as backend_requests
from moedoctor.text import find_closest

MOE_BACKEND = "--moe-backend"
KERNEL_CONFIG = "--kernel-config"
EXPERT_PARALLEL = "--enable-expert-parallel"
_OPTIMIZATION = "--optimization-level"
_OPPOSITES = (
    ("--no-", "--"),
    ("--no-", "--enable-"),
    ("--disable-", "--enable-"),
    ("--enable-", "--disable-"),
)
"""(prefix of the opposite of a switch, prefix of the switch itself)."""
_PROGRAM = re.compile(r"(?:.*/)?vllm|vllm\.\S+|\S*vllm-openai\S*")
"""``vllm``, ``python -m vllm.entrypoints.openai.api_server``, the image ``vllm/vllm-openai:v0.21.0``."""
_SETTING = re.compile(r"(?:--env=|-e)?((?:vllm|flashinfer)_\w+)=(.*)", re.IGNORECASE | re.DOTALL)
"""As in ``NAME=VALUE vllm serve`` and ``docker run -e NAME=VALUE``."""
_NO_FLAG = re.compile(r"-?|-\d+|-\d*\.\d+|[^-].*|.*\s.*", re.DOTALL)
"""Words that argparse takes for values, as vLLM has no flag that looks like a number."""
_SIZES = ("--tensor-parallel-size", "--data-parallel-size", "--prefill-context-parallel-size")


@dataclass(frozen=True)
class Served:
    """A command line that starts a server."""

    settings: Mapping[str, str]
    """``VLLM_*`` and ``FLASHINFER_*`` variables that are set on the line itself."""
    command: tuple[str, ...]
    """The words from ``vllm`` on; the words before belong to another program."""


@dataclass(frozen=True)
class GivenFlag:
    written: str
    """The flag as it was given, without its value."""
    name: str | None
    """The flag that vLLM reads; None for an unknown one."""
    value: str | None
    key: str = ""
    """The key after the dot of ``--kernel-config.moe_backend``."""

    def __str__(self) -> str:
        return self.written if self.value is None else f"{self.written} {self.value}"


def split_command(words: Sequence[str]) -> Served:
    """Split a command line at the program. Without the word vLLM, all of it is vLLM's."""
    start = next((place for place, word in enumerate(words) if _PROGRAM.fullmatch(word)), 0)
    matches = [_SETTING.fullmatch(word) for word in words[:start]]
    return Served({match[1]: match[2] for match in matches if match}, tuple(words[start:]))


def read_parallelism(command: Sequence[str], release: str) -> tuple[bool, bool]:
    """Return (expert parallelism, data parallelism) of a command line.

    vLLM splits experts over more than one GPU only: fused_moe/config.py, FusedMoEParallelConfig.make.
    """
    flags = read_flags(command, release)
    sizes = {flag.name: flag.value for flag in flags if flag.name in _SIZES}
    several = {name for name, value in sizes.items() if value not in (None, "", "1")}
    is_split = bool(several) or any(flag.name == "--config" for flag in flags)
    return is_split and asks_for_experts(flags), "--data-parallel-size" in several


def asks_for_experts(flags: Sequence[GivenFlag]) -> bool:
    """Return True if the flags ask for expert parallelism; the last one counts."""
    given = [flag for flag in flags if flag.name == EXPERT_PARALLEL]
    return bool(given) and not (
        given[-1].written.startswith(("--no", "--disable")) or (given[-1].value or "").lower() == "false"
    )


def read_flags(command: Sequence[str], release: str) -> tuple[GivenFlag, ...]:
    """Return the flags of a command line as vLLM's parser reads them.

    ``_`` is read as ``-``, and any unique beginning is enough.
    """
    known = load_vllm_flags().list_at(release)
    flags = []
    words = list(command)
    for place, word in enumerate(words):
        if word == "--":
            break
        if _NO_FLAG.fullmatch(word) or word == "-h" or word.startswith("--help"):  # --help=Section, too
            continue
        if word.startswith("-O") and _OPTIMIZATION in known:  # vLLM rewrites it before it parses the line
            word = f"{_OPTIMIZATION}={word[2:].removeprefix('=')}"
        elif word[:2] in known and not word.startswith((f"{word[:2]}=", "--")) and word not in known:
            word = f"{word[:2]}={word[2:]}"  # -qfp8
        written, equals, value = word.partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        given = value if equals else following if _NO_FLAG.fullmatch(following) else None
        name, dot, key = written.partition(".")
        name = name.replace("_", "-") if name.startswith("--") else name
        flags.append(GivenFlag(written, _resolve_name(name, known), given, key if dot else ""))
    return tuple(flags)


def _resolve_name(name: str, known: Mapping[str, Setting]) -> str | None:
    if name in known:
        return known[name].of or name
    for opposite, switch in _OPPOSITES:
        if name.startswith(opposite) and switch + name.removeprefix(opposite) in known:
            return switch + name.removeprefix(opposite)
    beginnings = [flag for flag in known if flag.startswith(name)] if name.strip("-") else []
    return known[beginnings[0]].of or beginnings[0] if len(beginnings) == 1 else None


def find_moe_backend(command: Sequence[str], release: str) -> str:
    """Return the MoE backend of a command line, ``auto`` if it names none."""
    return _choose_moe_backend(read_flags(command, release))


def _choose_moe_backend(flags: Sequence[GivenFlag]) -> str:
    values = [flag.value or "" for flag in flags if flag.name == MOE_BACKEND]
    configured = _read_kernel_config(flags)
    chosen = _normalize(values[-1]) if values else backends.AUTO
    return chosen if chosen != backends.AUTO or configured is None else _normalize(configured)


def _read_kernel_config(flags: Sequence[GivenFlag]) -> str | None:
    """Return the moe_backend of --kernel-config, as JSON or by its dotted key."""
    value = None
    for flag in flags:
        if flag.name != KERNEL_CONFIG:
            continue
        if flag.key:
            value = flag.value if flag.key == "moe_backend" else value
            continue
        try:
            config = json.loads(flag.value or "")
        except ValueError:
            continue
        backend = config.get("moe_backend") if isinstance(config, dict) else None
        value = backend if isinstance(backend, str) else value
    return value


def _normalize(value: str) -> str:
    return value.strip().lower().replace("-", "_")


def check_flags(flags: Sequence[GivenFlag], release: str, scheme: str | None) -> Iterator[SettingFinding]:
    """Yield what is wrong with the flags of a command line."""
    known = load_vllm_flags().list_at(release)
    for flag in flags:
        if flag.name is None:
            yield _report_unknown(flag, known, release)
        elif flag.key and "-" in flag.key and flag.name == KERNEL_CONFIG:
            better = f"{flag.written.partition('.')[0]}.{flag.key.replace('-', '_')}={flag.value}"
            message = "keys after the dot are field names: written with _, not -"
            yield SettingFinding(str(flag), "invalid", message, better, known[flag.name].source, stops=True)
        elif flag.name != MOE_BACKEND and known[flag.name].choices:
            yield from _check_choice(flag, known[flag.name], release)
    given = [flag for flag in flags if flag.name == MOE_BACKEND]
    for overruled in given[:-1]:
        message = f"given more than once: the last one, {given[-1].value}, counts"
        yield SettingFinding(str(overruled), "shadowed", message, None, known[MOE_BACKEND].source)
    for last in given[-1:]:
        yield from _check_choice(last, known[MOE_BACKEND], release)
    configured, backend = _read_kernel_config(flags), _choose_moe_backend(flags)
    if given and configured is not None and backend != _normalize(configured):
        message = f"{MOE_BACKEND} {given[-1].value} comes before it"
        setting = f"{KERNEL_CONFIG} moe_backend={configured}"
        yield SettingFinding(setting, "shadowed", message, None, known[KERNEL_CONFIG].source)
    if given:
        backend = _normalize(given[-1].value or "")
    if scheme is not None and backend != backends.AUTO:
        yield from _check_scheme(backend, scheme, release)


def _check_scheme(value: str, scheme: str, release: str) -> Iterator[SettingFinding]:
    """Yield a finding for a backend that is valid, but not for layers of this scheme."""
    flags = backend_tables.load_tables(scheme, release).flags
    if value not in backend_tables.load_releases()[release].moe_backends:
        return
    flag, shown = flags.get(value), f"{MOE_BACKEND} {value}"
    if flag is None:
        valid = ", ".join(other.value for other in flags.values() if other.backends)
        message = f"not for {scheme}: vLLM {release} stops; it takes {valid}"
        yield SettingFinding(shown, "invalid", message, None, f"vLLM {release}", stops=True)
    elif flag.refused:
        message = f"vLLM {release} refuses it for {scheme}: {flag.refused}"
        yield SettingFinding(shown, "invalid", message, None, flag.source, stops=True)
    elif flag.ignored:
        message = f"vLLM {release} ignores it for {scheme} layers and prints no warning"
        way = backend_requests.find_way_to_ask(value, scheme, release)
        variable = way if way and not way.startswith("--") else None
        yield SettingFinding(shown, "ignored", message, variable, flag.source)


def _report_unknown(flag: GivenFlag, known: Mapping[str, Setting], release: str) -> SettingFinding:
    name = flag.written.partition(".")[0].replace("_", "-")
    if absence := load_vllm_flags().explain_absence(name, release):
        problem, other, source = absence
        verb = "came" if problem == "not_yet" else "went"
        message = f"vLLM {release} does not have it and stops: it {verb} with {other}"
        return SettingFinding(str(flag), problem, message, None, source, stops=True)
    close = find_closest(name, known, most=1, misspelt=True)
    better = (f"{close[0]} {flag.value}" if flag.value is not None else close[0]) if close else None
    message = f"vLLM {release} does not know it and stops"
    return SettingFinding(str(flag), "misspelt" if close else "unknown", message, better, "", stops=True)


def _check_choice(flag: GivenFlag, setting: Setting, release: str) -> Iterator[SettingFinding]:
    value = flag.value or ""
    # --moe-backend and --linear-backend are read in any case and with - for _; --all2all-backend is not.
    if (value if flag.name == "--all2all-backend" else _normalize(value)) in setting.choices:
        return
    close = find_closest(value, setting.choices, most=1)
    message = f"vLLM {release} takes {', '.join(setting.choices)}, and stops"
    problem = "wrong_case" if _normalize(value) in setting.choices else "invalid"
    better = f"{setting.name} {close[0]}" if close else None
    yield SettingFinding(str(flag), problem, message, better, setting.source, stops=True)
