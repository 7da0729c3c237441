"""`moedoctor backends`: the MoE backend that vLLM selects, and whether settings take effect."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moedoctor.commands.options import (
    Capability,
    Full,
    Output,
    PageFormat,
    choose_from,
    choose_release,
    convert_errors,
    declare,
    option,
    require_capability,
)
from moedoctor.commands.pages import deliver_document
from moedoctor.text import print_message

if TYPE_CHECKING:
    from moedoctor.diagnose.settings.tables import SettingFinding
    from moedoctor.fixes.backends import Selection
    from moedoctor.upstream.releases.questions import Inquiry
    from moedoctor.upstream.selection.agreement import Heard

_ALIASES = {"relu2": "relu2_no_mul"}
"""Nemotron's configuration says relu2, and its layers have no gate."""
_SEPARATE = ("flashinfer", "humming", "b12x", "hpc", "quark")
"""Optional libraries that are packages of their own; the others come inside vLLM."""
_ONLY_EXPERTS = (
    "this answer is about experts of 4096 x 2048 with top-8 softmax routing and without LoRA, not about "
    "linear layers or a draft model; `moedoctor preflight` asks the release's own code about all layers"
)
_SWITCH = "0.33.0"
"""From this release on, vLLM leaves DeepGEMM out for the experts of some types of models."""
_NINJA_TOO = "0.32.0"
"""From this release on, vLLM also looks for nvcc in CUDA_HOME, and needs ninja."""


@declare(
    command=typer.Argument(
        metavar="-- vllm serve ...", help="Command line of a server, whose settings are judged too."
    ),
    scheme=option(
        "NAME",
        "Type of weights and activations: nvfp4, nvfp4-w4a16, mxfp4, fp8, fp8-block or bf16. Default: as "
        "--quantization or the checkpoint's folder says; else an answer for each.",
        choose_from("moedoctor.fixes.backends.release_tables:SCHEMES"),
    ),
    release=option("X.Y.Z", "vLLM release, such as 0.21.0. Default: the installed one."),
    ep="The layer uses expert parallelism.",
    dp="The layer uses data parallelism.",
    activation=option(
        "NAME",
        "Activation of the layer: silu, swigluoai (gpt-oss), relu2 (Nemotron), gelu and others. "
        "Default: as config.json in the checkpoint's folder says; else silu.",
    ),
    backend=option("MARLIN", "Say if this backend would work, and which setting asks for it."),
    ask=typer.Option("--ask/--no-ask", help="Also ask the installed vLLM, which takes seconds."),
    strict="Exit with code 2 if the release is not known, as a newer one is.",
)
def backends(
    command: list[str] | None = None,
    sm: Capability = None,
    scheme: str | None = None,
    release: str | None = None,
    ep: bool = False,
    dp: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    ask: bool = True,
    strict: bool = False,
    format: PageFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Show which MoE backend vLLM selects, and why not the others.

    Also judges the VLLM_* and FLASHINFER_* variables and a server's command line for the same release. Exit
    code 1 if a setting does not take effect, no backend is selected, or --backend would not work.
    """
    from moedoctor import environment
    from moedoctor.diagnose.settings.flags import (
        MOE_BACKEND,
        find_moe_backend,
        read_parallelism,
        split_command,
    )
    from moedoctor.diagnose.settings.scheme import Found, find_scheme
    from moedoctor.diagnose.settings.settings import (
        check_settings,
        correct_flags,
        correct_variables,
        find_unconsidered,
    )
    from moedoctor.diagnose.settings.tables import load_vllm_variables
    from moedoctor.fixes.arch.flashinfer import list_releases as list_flashinfer_releases
    from moedoctor.fixes.backends import AUTO, select
    from moedoctor.fixes.backends.release_tables import load_releases
    from moedoctor.fixes.backends.requests import request, works
    from moedoctor.reporters.pages.backends import BackendsDocument, EachScheme, OneScheme, list_reasons
    from moedoctor.upstream.selection.agreement import adopt, list_disagreements, request_from_build

    environ = dict(os.environ)
    facts = environment.collect()
    asked_for = release
    release, instead_of = _release(release, facts.get("vllm"))
    notes: tuple[str, ...] = ()
    if asked_for is None and not facts.get("vllm"):
        notes, instead_of = (instead_of,), ""
    here = (facts.get("vllm") or "").partition("+")[0] == release
    line = split_command(command or ())
    line_ep, line_dp = read_parallelism(line.command, release)
    # Variables of the command line replace those of the environment.
    prefixes = ("VLLM_", "FLASHINFER_")
    upstream = {name: value for name, value in environ.items() if name.upper().startswith(prefixes)}
    variables = {**upstream, **line.settings}
    found = Found((scheme,), "") if scheme else find_scheme(line.command, release)
    capability = require_capability(sm or facts.get("capability"))
    meant, activation_notes = _find_activation(activation, line.command, release)
    question: dict[str, Any] = {
        "capability": capability,
        "scheme": found.schemes[0],
        "release": release,
        "ep": ep or line_ep,
        "dp": dp or line_dp,
        "activation": meant,
        "environ": variables,
    }
    moe_backend = find_moe_backend(line.command, release)
    notes += (*activation_notes, *_list_readings(variables, line.command, question))
    build = facts.get("vllm") if instead_of and asked_for is None else None
    inquiry = _find_inquiry("vllm") if build else None
    choices = inquiry.list_choices() if inquiry else {}
    values = choices.get(MOE_BACKEND, ())
    is_new = moe_backend in values and moe_backend not in load_releases()[release].moe_backends
    takes = functools.partial(works, schemes=found.schemes, **question)
    # Of an installed vLLM, the libraries are looked up as this variable says.
    looked_up = ("VLLM_HAS_FLASHINFER_CUBIN",) if here else ()
    left = {name: value for name, value in variables.items() if name not in looked_up}
    unconsidered = find_unconsidered(release, left, line.command)
    alone = len(found.schemes) == 1
    if found.why:
        taken = f"taken as {found.schemes[0]}" if alone else "the scheme of the experts is not known"
        notes = (f"{taken}: {found.why}", *notes)
    libraries = find_libraries(release, environ) if here and alone else None
    flashinfer = facts.get("flashinfer") if (here or build) and alone else None
    in_tables = AUTO if is_new else moe_backend
    with convert_errors(ValueError):
        selections = [select(**{**question, "scheme": each}, moe_backend=in_tables) for each in found.schemes]
        scheme = found.schemes[0] if alone else None
        more: dict[str, Any] = {"flashinfer": flashinfer, "scheme": scheme, "takes": takes}
        findings = check_settings(release, variables, line.command, **more)
        if inquiry is not None:
            own = (load_vllm_variables(), release, inquiry.list_variables())
            findings = correct_variables(findings, variables, *own)
            findings = correct_flags(findings, line.command, release, inquiry.list_flags(), choices)
        if flashinfer is not None and flashinfer not in list_flashinfer_releases():
            findings = _correct_flashinfer(findings, variables, flashinfer)
        heard: Sequence[Heard] = ()
        if ask and (build or (here and alone)):
            # A build may take what the release before it stops at.
            stopping = () if build else findings
            heard, answers = _ask(selections, build or release, moe_backend, variables, stopping)
            notes += answers
        if libraries is not None:
            libraries |= heard[0].libraries if heard else {}
            selections = [select(**question, moe_backend=moe_backend, libraries=libraries)]
        if build and heard:
            instead_of = f"vllm {build} is not in the tables: its own code was asked"
            instead_of += f"; settings are judged as in {release}"
            selections = [adopt(*each, build, values) for each in zip(selections, heard, strict=True)]
        elif is_new:
            notes += (f"{release} has no {MOE_BACKEND} {moe_backend}: answered without it",)
        asked: Any = None
        if backend and not alone:
            asked = tuple(_request_each(backend, question, found.schemes))
        elif backend and build and heard:
            asked = request_from_build(backend, selections[0], values, variables)
        elif backend:
            asked = request(backend, **question, libraries=libraries)
    selection, findings = selections[0], (*findings, *unconsidered)
    if alone:
        findings += _find_switch(selection)
        notes += (
            *_list_assumptions(selection, here=here or bool(heard)),
            *_list_failures(selection, variables),
        )
    shared: dict[str, Any] = {
        "request": asked,
        "settings": _mask_findings(findings, variables, environ),
        "notes": (*notes, _ONLY_EXPERTS),
        "exit_code": 0,
        "instead_of": instead_of,
    }
    report: BackendsDocument
    if alone:
        differing = list_disagreements(selection, heard[0]) if heard and here else ()
        report = OneScheme(**vars(selection), disagreements=differing, **shared)
    else:
        first = {"release": selection.release, "capability": question["capability"], "scheme": None}
        report = EachScheme(**first, schemes=tuple(selections), **shared)
    why = list_reasons(report)
    code = int(bool(why))
    if strict and instead_of and not why:
        code, why = 2, [instead_of]
    report = replace(report, exit_code=code)
    return deliver_document(report, format, output, full=full, code=code, reasons=why)


def _find_inquiry(package: str) -> Inquiry | None:
    """Return an inquiry into the source of an installed package, or None if it is not here."""
    from moedoctor.results import UnavailableError
    from moedoctor.upstream.releases.questions import Inquiry
    from moedoctor.upstream.releases.release_source import ReleaseSource

    with contextlib.suppress(UnavailableError):
        return Inquiry(ReleaseSource.installed(package))
    return None


def _correct_flashinfer(
    findings: tuple[SettingFinding, ...], variables: Mapping[str, str], version: str
) -> tuple[SettingFinding, ...]:
    """Correct the findings about variables by the installed FlashInfer, which is no known release."""
    from moedoctor.diagnose.settings.settings import correct_variables
    from moedoctor.diagnose.settings.tables import load_flashinfer_variables

    known, inquiry = load_flashinfer_variables(), _find_inquiry("flashinfer")
    release = known.find_release(version)
    if release is None or not any(name.upper().startswith("FLASHINFER_") for name in variables):
        return findings
    declared = inquiry.list_flashinfer_variables() if inquiry else None
    return correct_variables(findings, variables, known, release, declared)


def _request_each(backend: str, question: Mapping[str, Any], schemes: Sequence[str]) -> Sequence[str]:
    """Return in words whether a backend would work for each scheme. Raises ValueError if none has it."""
    from moedoctor.fixes.backends.requests import request

    answers, unknown = [], []
    for scheme in schemes:
        try:
            answer = request(backend, **{**question, "scheme": scheme})
        except ValueError as error:
            unknown.append(error)
            answers.append("there is none of this name")
        else:
            answers.append(f"works: {answer.how}" if answer.works else f"does not work: {answer.reason}")
    if len(unknown) == len(schemes):
        raise unknown[0]
    return answers


def _find_activation(named: str | None, command: Sequence[str], release: str) -> tuple[str, tuple[str, ...]]:
    """Return the activation of the experts and how it was found: the option, else config.json, else silu."""
    from moedoctor.diagnose.settings.scheme import find_activation
    from moedoctor.fixes.backends.release_tables import load_releases

    if named is not None:
        meant = _ALIASES.get(named, named)
        return meant, () if meant == named else (f"{named} layers have no gate: taken as {meant}",)
    activation, why = find_activation(command, release)
    if activation in load_releases()[release].activations:
        return activation, (f"the activation is taken as {activation}: {why}",)
    return "silu", (f"the activation is not known ({why}): taken as silu; name it with --activation",)


def _list_readings(
    variables: Mapping[str, str], command: Sequence[str], question: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return notes on how the command line was understood, and what was not looked at."""
    from moedoctor.diagnose.settings.flags import read_flags
    from moedoctor.diagnose.settings.settings import list_others

    release, notes = question["release"], []
    names = {flag.name for flag in read_flags(command, release)}
    if question["ep"] and question["dp"] and "--all2all-backend" not in names:
        notes.append("taken to be split with --all2all-backend allgather_reducescatter, the default")
    if others := list_others(release, variables, command):
        notes.append(f"not looked at: {', '.join(others)}")
    return tuple(notes)


def _find_switch(selection: Selection) -> tuple[SettingFinding, ...]:
    """Return a finding if vLLM may switch the selected backend off for the model's type."""
    from packaging.version import Version

    from moedoctor.diagnose.settings.tables import SettingFinding

    on_blackwell = selection.capability.partition(".")[0] in ("10", "12")
    automatic = selection.decided_by == "automatic" and "DEEPGEMM" in (selection.chosen or "")
    if not (on_blackwell and automatic) or Version(selection.release) < Version(_SWITCH):
        return ()
    source = "vllm/utils/deep_gemm.py: should_auto_disable_deep_gemm"
    message = f"vLLM leaves {selection.chosen} out on Blackwell for types of models that it lists"
    return (SettingFinding("model_type", "not_considered", message, None, source, True),)


def _list_failures(selection: Selection, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note if DeepGEMM fails on this GPU in this release, for experts or beside them: MD031."""
    from packaging.version import Version

    from moedoctor.entries import load_entries

    entry, release = load_entries()["MD031"], Version(selection.release)
    beside = selection.scheme == "fp8-block" and variables.get("VLLM_USE_DEEP_GEMM") != "0"
    on_12 = selection.capability.partition(".")[0] == "12"
    if not on_12 or not ("DEEPGEMM" in (selection.chosen or "") or beside):
        return ()
    struck = any(Version(part.first) <= release <= Version(part.last) for part in entry.releases)
    also = "; layers without experts take it too, unless --linear-backend names another" if beside else ""
    return (f"MD031: {entry.affects[0].why}{also}; {entry.next}",) if struck else ()


def _ask(
    selections: Sequence[Selection],
    version: str,
    moe_backend: str,
    environ: Mapping[str, str],
    findings: Sequence[SettingFinding],
) -> tuple[Sequence[Heard], tuple[str, ...]]:
    """Return the answers of the installed vLLM to the same questions, and notes."""
    from moedoctor.upstream.selection.agreement import AgreementError, ask_all

    if any(finding.stops for finding in findings):
        return (), ("the installed vLLM was not asked, because it stops at a setting",)
    if sys.stderr.isatty():
        print_message("asking the installed vLLM, which takes seconds")
    try:
        heard = ask_all(selections, moe_backend=moe_backend, environ=environ)
    except AgreementError as error:
        return (), (str(error),)
    count = len({backend for each in heard for backend in each.refusals})
    return heard, (f"the installed vLLM {version} was asked about {count} backends", *heard[0].notes)


def _list_assumptions(selection: Selection, *, here: bool) -> tuple[str, ...]:
    """Return notes on what is assumed about a release that is not installed here."""
    from moedoctor.fixes.backends.release_tables import load_releases

    if here:
        return ()
    notes = ["optional libraries are taken to be there as this release requires or brings them"]
    if (
        "flashinfer" in (selection.chosen or "").lower()
        and not load_releases()[selection.release].flashinfer_cubin
    ):
        notes.append(
            f"vLLM {selection.release} does not require flashinfer-cubin: if that and nvcc are both missing, "
            "it does not find FlashInfer, and the FlashInfer backends drop out"
        )
    return tuple(notes)


def _mask_findings(
    findings: Sequence[SettingFinding], settings: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[SettingFinding, ...]:
    """Return the findings without secrets, user names and home folders, so that they fit into an issue."""
    from moedoctor.redaction import Redactor

    redactor = Redactor.from_environment(environ, platform.node())
    masked = []
    for finding in findings:
        mark = " " if finding.setting.startswith("-") else "="
        name, given, value = finding.setting.partition(mark)
        shown = redactor.mask_setting(name.strip("-").replace("-", "_"), value) if given else value
        instead = finding.instead.replace(value, shown) if finding.instead and value else finding.instead
        setting = f"{redactor.mask(name)}{given}{shown}"
        message = redactor.mask(finding.message)
        masked.append(replace(finding, setting=setting, message=message, instead=instead))
    return tuple(masked)


# What this machine gives if the command line leaves it open: release, GPU, libraries.


def _release(asked_for: str | None, installed: str | None) -> tuple[str, str]:
    """Return a release of the tables, and why it is this one if it is another. Raises InputError."""
    from moedoctor.plugin.register import find_base, list_known_releases

    known = list_known_releases()
    if asked_for is not None:
        return choose_release(asked_for)
    if installed is None:
        return known[-1], f"vllm is not installed here: answered for {known[-1]}, the newest in the tables"
    own = installed.partition("+")[0]  # a development version stays as it is
    nearest = find_base(own) or known[0]
    return nearest, "" if nearest == own else f"vllm {installed} is not in the tables: answered for {nearest}"


def find_libraries(release: str, environ: Mapping[str, str]) -> dict[str, bool]:
    """Return the optional libraries that vLLM `release` would find in this environment.

    Only needed if vLLM itself cannot say. Nothing is imported, so a broken library is taken to be there.
    """
    from moedoctor.fixes.backends import is_on

    libraries = {name: find_spec(name) is not None for name in _SEPARATE}
    # vllm/utils/flashinfer.py, has_flashinfer: it must also be able to get its kernels from somewhere.
    brought = find_spec("flashinfer_cubin") or is_on(environ.get("VLLM_HAS_FLASHINFER_CUBIN", "0"))
    libraries["flashinfer"] &= bool(brought) or _compiles(release, environ)
    if find_spec("deep_gemm"):  # else as the release brings it along
        libraries["deep_gemm"] = True
    return libraries


def _compiles(release: str, environ: Mapping[str, str]) -> bool:
    """Return whether vLLM `release` finds what compiles FlashInfer's kernels."""
    from packaging.version import Version

    if Version(release) < Version(_NINJA_TOO):
        return shutil.which("nvcc") is not None
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = None if home else shutil.which("nvcc")
    nvcc = on_path or shutil.which(os.fspath(Path(home or "/usr/local/cuda", "bin", "nvcc")))
    return nvcc is not None and shutil.which("ninja") is not None
