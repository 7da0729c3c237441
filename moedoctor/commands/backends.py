"""`moedoctor backends`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moedoctor
from moedoctor import environment
from moedoctor.commands.backends_machine import capability_of, libraries_here, public_version, release_of
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.diagnose.settings.flags import parallel_of, served
from moedoctor.diagnose.settings.settings import check_settings, moe_backend_of
from moedoctor.diagnose.settings.tables import SettingFinding
from moedoctor.fixes import backends
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.fixes.backends import requests as backend_requests
from moedoctor.redaction import Redactor
from moedoctor.reporters.backends import FORMATS, BackendsReport, outcome, render
from moedoctor.reporters.output import OutputError, check_writable, write

if TYPE_CHECKING:
    from moedoctor.upstream.selection.agreement import Heard

_ALIASES = {"relu2": "relu2_no_mul"}
"""Nemotron's configuration says relu2, and its layers have no gate."""
_ALL_TO_ALL = "allgather_reducescatter"
_WITHOUT_CUBIN = (
    "vLLM {release} does not require flashinfer-cubin: where that and nvcc are both missing, "
    "it takes FlashInfer for missing, and the FlashInfer backends drop out"
)


@dataclass(frozen=True)
class BackendsRequest:
    """The command line of `moedoctor backends`, as text."""

    sm: str | None = None
    scheme: str = "nvfp4"
    release: str | None = None
    ep: bool = False
    dp: bool = False
    activation: str = "silu"
    backend: str | None = None
    format: str = "table"
    output: Path | None = None
    command: tuple[str, ...] = ()
    """What came after ``--``: a server's command line."""
    ask_installed: bool = True
    """Ask the installed vLLM itself, where it is the release in question."""


@dataclass(frozen=True)
class _Question:
    """A request, with this machine's facts in place of what it left open."""

    capability: str
    scheme: str
    options: Mapping[str, Any]
    """What `backends.select` and `backend_requests.request` both take."""
    moe_backend: str
    settings: Mapping[str, str]
    """The variables, those of the command line over those of the environment."""
    command: tuple[str, ...]

    @property
    def release(self) -> str:
        return str(self.options["release"])

    def select(self, libraries: Mapping[str, bool] | None) -> backends.Selection:
        return backends.select(
            self.capability,
            self.scheme,
            moe_backend=self.moe_backend,
            environ=self.settings,
            libraries=libraries,
            **self.options,
        )


def backends_command(request: BackendsRequest, environ: Mapping[str, str] | None = None) -> int:
    """Say which backend is selected and why each other one is not; judge the settings.

    1 where a setting does not take effect, the forced backend would not work, nothing is selected, or the
    installed vLLM disagrees with the tables; else 0. Raises InputError for what cannot be used.
    """
    if request.format not in FORMATS:
        raise InputError(f"--format {request.format}: expected one of {', '.join(FORMATS)}")
    with as_input_error(OutputError):
        check_writable(request.output)
    report = _report(request, os.environ if environ is None else environ)
    terminal = request.output is None and sys.stdout.isatty()
    text = render(report, request.format, width=shutil.get_terminal_size().columns if terminal else None)
    if request.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        with as_input_error(OutputError):
            write(request.output, text)
        print(f"moedoctor: {outcome(report.selection)}; written to {request.output}", file=sys.stderr)
    return report.exit_code


def _report(request: BackendsRequest, environ: Mapping[str, str]) -> BackendsReport:
    facts = environment.collect()
    installed = facts.get("vllm")
    release, notes = release_of(request.release, installed)
    question, said = _question(request, release, capability_of(request.sm, facts), environ)
    here = installed is not None and public_version(installed) == release
    flashinfer = facts.get("flashinfer") if here else None
    with as_input_error(ValueError):
        selection = question.select(None)
        asked = _asked(request.backend, question, None)
        findings = check_settings(
            release, question.settings, question.command, flashinfer=flashinfer, scheme=request.scheme
        )
        heard: Heard | None = None
        libraries = libraries_here(release, environ) if here else None
        if here and request.ask_installed:
            heard, answers = _ask(selection, question, findings)
            libraries = {**(libraries or {}), **heard.libraries} if heard else libraries
            said = (*said, *answers)
        if libraries is not None:
            selection = question.select(libraries)
            asked = _asked(request.backend, question, libraries)
    differences: tuple[str, ...] = ()
    if heard is not None:
        from moedoctor.upstream.selection.agreement import disagreements

        differences = disagreements(selection, heard)
    found = bool(
        differences
        or selection.chosen is None
        or any(not one.takes_effect for one in findings)
        or (asked and not asked.works)
    )
    notes = (*notes, *said, *_remarks(selection, here=here))
    shown = _redacted(findings, question.settings, environ)
    return BackendsReport(selection, asked, shown, differences, notes, int(found), moedoctor.__version__)


def _question(
    request: BackendsRequest, release: str, capability: str, environ: Mapping[str, str]
) -> tuple[_Question, tuple[str, ...]]:
    """(the question, notes on how the command line was understood)."""
    line = served(request.command)
    ep, dp = parallel_of(line.command, release)
    activation = _ALIASES.get(request.activation, request.activation)
    options = {
        "release": release,
        "ep": request.ep or ep,
        "dp": request.dp or dp,
        "activation": activation,
    }
    settings = {
        name: value for name, value in environ.items() if name.upper().startswith(("VLLM_", "FLASHINFER_"))
    }
    notes = []
    if activation != request.activation:
        notes.append(f"{request.activation} layers have no gate: taken as {activation}")
    moe_backend = moe_backend_of(line.command, release)
    question = _Question(
        capability, request.scheme, options, moe_backend, {**settings, **line.settings}, line.command
    )
    if "--config" in line.command:
        notes.append("the file that --config names was not read")
    if options["ep"] and options["dp"]:
        notes.append(f"taken to be split with --all2all-backend {_ALL_TO_ALL}, the default")
    return question, tuple(notes)


def _asked(
    backend: str | None, question: _Question, libraries: Mapping[str, bool] | None
) -> backend_requests.Request | None:
    if not backend:
        return None
    return backend_requests.request(
        backend,
        question.capability,
        question.scheme,
        environ=question.settings,
        libraries=libraries,
        **question.options,
    )


def _ask(
    selection: backends.Selection, question: _Question, findings: Sequence[SettingFinding]
) -> tuple[Heard | None, tuple[str, ...]]:
    """(what the installed vLLM says of the same question, notes)."""
    from moedoctor.upstream.selection.agreement import AgreementError, ask_installed

    stopping = [one.setting for one in findings if one.stops]
    if stopping:
        return None, ("the installed vLLM was not asked, for it stops at a setting",)
    if sys.stderr.isatty():
        print("moedoctor: asking the installed vLLM, which takes seconds", file=sys.stderr)
    try:
        heard = ask_installed(selection, moe_backend=question.moe_backend, environ=question.settings)
    except AgreementError as error:
        return None, (str(error),)
    agreed = f"the installed vLLM {selection.release} was asked about {len(heard.supported)} backends"
    return heard, (agreed, *heard.notes)


def _remarks(selection: backends.Selection, *, here: bool) -> tuple[str, ...]:
    if here:
        return ()
    notes = ["optional libraries are taken to be there as this release requires or brings them"]
    chosen = (selection.chosen or "").lower()
    if "flashinfer" in chosen and not backend_tables.releases()[selection.release].flashinfer_cubin:
        notes.append(_WITHOUT_CUBIN.format(release=selection.release))
    return tuple(notes)


def _redacted(
    findings: Sequence[SettingFinding], settings: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[SettingFinding, ...]:
    """The findings fit to be pasted into an issue: no secrets, user names or home folders."""
    redactor = Redactor.of(environ, platform.node())
    found = []
    for one in findings:
        mark = " " if one.setting.startswith("-") else "="
        name, given, value = one.setting.partition(mark)
        shown = redactor.setting(name.strip("-").replace("-", "_"), value) if given else value
        instead = one.instead.replace(value, shown) if one.instead and value else one.instead
        setting = f"{redactor.text(name)}{given}{shown}"
        found.append(replace(one, setting=setting, message=redactor.text(one.message), instead=instead))
    return tuple(found)


def main(arguments: Sequence[str]) -> int:
    """Only for `python -m moedoctor.commands.backends`: write the reports that `reports/backends` keeps."""
    from moedoctor.reporters.backend_pages import write_reports

    if len(arguments) != 1:
        print("usage: python -m moedoctor.commands.backends FOLDER", file=sys.stderr)
        return 2
    write_reports(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
