"""`moedoctor run`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

from moedoctor import catalogue, environment, gate
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.commands.progress import progress_bar
from moedoctor.comparison import Tolerance, check_comparable, compare
from moedoctor.reporters.github import step_summary
from moedoctor.reporters.output import OutputError, append_step_summary, check_writable, emit
from moedoctor.reporters.text import summary_line
from moedoctor.results import Report, ReportError, load_report
from moedoctor.runner.plan import Options, plan
from moedoctor.runner.run import run
from moedoctor.scenario.file import ScenarioError
from moedoctor.scenario.targets import TargetError, load_targets

_RELEASE = re.compile(r"\d+\.\d+\.\d+[A-Za-z0-9.+-]*")
_DEVICE = re.compile(r"auto|cpu|cuda:\d{1,2}")
_FAIL_ON = get_args(gate.FailOn)
_MAX_JOBS = 256


@dataclass(frozen=True)
class RunRequest:
    """The command line of `moedoctor run`, as text."""

    targets: tuple[str, ...] = ()
    format: str = "table"
    output: Path | None = None
    only: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    flashinfer: tuple[str, ...] = ()
    device: str = "auto"
    timeout: float | None = None
    jobs: int | None = None
    strict: bool = False
    fail_on: str = "error"
    baseline: Path | None = None
    tolerance: tuple[str, ...] = ()


def run_command(request: RunRequest) -> int:
    """Run, report and return the exit code. Everything that can be wrong is checked before anything runs."""
    with as_input_error(
        TargetError, ScenarioError, ReportError, OutputError, catalogue.PluginError, ValueError
    ):
        if request.format not in catalogue.reporters():
            raise InputError(f"--format {request.format}: expected one of {', '.join(catalogue.reporters())}")
        if request.fail_on not in _FAIL_ON:
            raise InputError(f"--fail-on {request.fail_on}: expected one of {', '.join(_FAIL_ON)}")
        options = _options(request)
        tolerance = Tolerance.parse(request.tolerance)
        check_writable(request.output)
        baseline = load_report(request.baseline) if request.baseline else None
        scenarios = load_targets(request.targets)
        facts = environment.collect()
        plans = plan(scenarios, options, facts)
        if baseline is not None:
            check_comparable(baseline.environment, facts)
    parallel = min(request.jobs or os.cpu_count() or 1, _MAX_JOBS)
    with progress_bar() as progress:
        report = run(plans, facts, parallel=parallel, progress=progress)
    if baseline is not None:
        report = _compared(baseline, report, tolerance, partial=options.partial or bool(request.targets))
    code = gate.exit_code(report, strict=request.strict, fail_on=cast(gate.FailOn, request.fail_on))
    report = replace(
        report, summary=replace(report.summary, exit_code=130 if report.summary.interrupted else code)
    )
    with as_input_error(OutputError):
        emit(report, catalogue.reporters()[request.format], request.output)
    if request.format == "github":
        append_step_summary(step_summary(report), os.environ)
    if request.output is not None:
        print(f"moedoctor: {summary_line(report)}; written to {request.output}", file=sys.stderr)
    return report.summary.exit_code


def _compared(baseline: Report, report: Report, tolerance: Tolerance, *, partial: bool) -> Report:
    comparison = compare(baseline, report, tolerance, partial=partial)
    return replace(report, findings=comparison.findings)


def _options(request: RunRequest) -> Options:
    if _DEVICE.fullmatch(request.device) is None:
        raise InputError(f"--device {request.device}: expected auto, cpu or cuda:N")
    if request.timeout is not None and not 0 < request.timeout <= 86_400:
        raise InputError(f"--timeout {request.timeout:g}: expected more than 0 and at most 86400 seconds")
    return Options(
        subjects=request.subjects,
        only=tuple(_condition(text) for text in request.only),
        sources={**_sources(request.kernels), **_flashinfer_sources(request.flashinfer)},
        timeout=request.timeout,
        device=request.device,
    )


def _condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if equals and key.strip() and value.strip():
        return key.strip(), value.strip()
    return "id", text


def _sources(given: Sequence[str]) -> Mapping[str, str]:
    from moedoctor.upstream.releases.wheel import KernelError, check_kernels

    sources: dict[str, str] = {}
    for text in given:
        release, equals, path = text.partition("=")
        if not equals or _RELEASE.fullmatch(release) is None or not path:
            raise InputError(f"--vllm-kernels {text}: expected X.Y.Z=PATH, such as 0.19.1=vllm-0.19.1-….whl")
        if f"vllm@{release}" in sources:
            raise InputError(f"--vllm-kernels {text}: {release} was given twice")
        with as_input_error(KernelError):
            check_kernels(Path(path))
        sources[f"vllm@{release}"] = str(Path(path).resolve())
    return sources


def _flashinfer_sources(given: Sequence[str]) -> Mapping[str, str]:
    from moedoctor.upstream.flashinfer.source import check_source
    from moedoctor.upstream.releases.wheel import KernelError

    sources: dict[str, str] = {}
    for text in given:
        release, equals, path = text.partition("=")
        if not equals or _RELEASE.fullmatch(release) is None or not path:
            raise InputError(
                f"--flashinfer {text}: expected X.Y.Z=PATH, such as 0.6.13=flashinfer_python-0.6.13-….whl"
            )
        if f"flashinfer@{release}" in sources:
            raise InputError(f"--flashinfer {text}: {release} was given twice")
        with as_input_error(KernelError):
            check_source(release, Path(path))
        sources[f"flashinfer@{release}"] = str(Path(path).resolve())
    return sources
