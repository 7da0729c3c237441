"""Settings of a server that the answer of `moedoctor backends` does not consider, though vLLM reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moedoctor.diagnose.settings.flags import (
    EXPERT_PARALLEL,
    KERNEL_CONFIG,
    MOE_BACKEND,
    GivenFlag,
    asks_for_experts,
    read_flags,
    read_parallelism,
)
from moedoctor.diagnose.settings.tables import (
    SettingFinding,
    load_flashinfer_variables,
    load_replacements,
    load_vllm_flags,
    load_vllm_variables,
)
from moedoctor.fixes.backends.release_tables import SCHEMES
from moedoctor.fixes.backends.requests import find_governing_variables

_SIZES = ("--tensor-parallel-size", "--data-parallel-size")
_CONSIDERED = {MOE_BACKEND, KERNEL_CONFIG, EXPERT_PARALLEL, "--quantization", "--model", *_SIZES}


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
    return {name for scheme in SCHEMES for name in find_governing_variables(scheme, release)}
