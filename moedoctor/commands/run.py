"""`moedoctor run`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from moedoctor.commands.options import (
    Device,
    Full,
    InputError,
    Output,
    ReportFormat,
    Tolerance,
    Verbose,
    choose_from,
    convert_errors,
    declare,
    deliver_report,
    make_folder,
    number,
    option,
    print_reasons,
)
from moedoctor.text import print_message

if TYPE_CHECKING:
    from moedoctor.results import Report

_RELEASE = re.compile(r"\d+\.\d+\.\d+[A-Za-z0-9.+-]*")
_MAX_JOBS = 256
_TIME_BUDGET = 180.0
"""Seconds of a run of all failures on a terminal: as long as a person may wait for a first answer."""
_CAPSULE_SECONDS = 300.0
_CAPSULE_SUFFIX = ".moecapsule"


@declare(
    targets=typer.Argument(
        metavar="PATH|NAME|ID",
        help="Scenario files, folders, names or ids. Default: all scenarios that come with moedoctor.",
    ),
    only=option(
        "ID|KEY=VALUE",
        "Run only cases with KEY=VALUE (a parameter, subject, tier, id or name), or of this id.",
    ),
    subject=option(
        "NAME", "Run only this subject: faulty, fixed, installed, vllm@X.Y.Z or flashinfer@X.Y.Z."
    ),
    vllm_kernels=option(
        "X.Y.Z=PATH",
        "Also test vLLM X.Y.Z, with the kernels from this wheel or .so file, as subject vllm@X.Y.Z.",
    ),
    flashinfer=option(
        "X.Y.Z=PATH",
        "Also test FlashInfer X.Y.Z, with the sources from this wheel or folder, as subject "
        "flashinfer@X.Y.Z.",
    ),
    timeout=option(
        "SECONDS",
        "Seconds that a case may take. Default: the time in the scenario file.",
        number("seconds, more than 0 and at most 86400", most=86_400),
    ),
    time_budget=option(
        "SECONDS",
        "End the run after so many seconds and list what is left. Cheap cases of all failures run first. "
        f"Default: {_TIME_BUDGET:g} for a table of all failures on a terminal, without --strict and "
        "--baseline; else no end.",
        number("seconds, more than 0 and at most 86400", most=86_400),
    ),
    thorough="Run everything, however long it takes.",
    jobs=typer.Option(
        "--jobs", "-j", metavar="N", min=1, help="CPU cases at the same time. Default: one a core."
    ),
    strict="Exit with code 1 also if something was skipped.",
    fail_on=option(
        "SEVERITY",
        "What gives exit code 1: error, warning (also absent and skipped scenarios) or never.",
        choose_from(("error", "warning", "never")),
    ),
    baseline=option("FILE", "A JSON report that this run must not be worse than."),
    keep_capsules=option(
        "DIR",
        "Keep MoE calls that turn out wrong in this folder, for `moedoctor replay`. Not the control's. "
        "Engines of a case record theirs, from vLLM 0.21.0 on, if a MoE call can show the failure.",
        callback=make_folder,
    ),
    capsule=option("FILE", "Also describe this recorded MoE call in the report; with --format markdown."),
)
def run(
    targets: list[str] | None = None,
    format: ReportFormat = "table",
    output: Output = None,
    full: Full = False,
    only: list[str] | None = None,
    subject: list[str] | None = None,
    vllm_kernels: list[str] | None = None,
    flashinfer: list[str] | None = None,
    device: Device = "auto",
    timeout: float | None = None,
    time_budget: float | None = None,
    thorough: bool = False,
    jobs: int | None = None,
    strict: bool = False,
    fail_on: str = "error",
    baseline: Path | None = None,
    tolerance: Tolerance = None,
    keep_capsules: Path | None = None,
    capsule: Path | None = None,
    verbose: Verbose = False,
) -> int:
    """Reproduce failures, apply the fix, prove it.

    Without a target, all scenarios that come with moedoctor run. Each case runs in its own process.
    """
    from moedoctor import catalogue, comparison, environment, gate
    from moedoctor.bench.gpu_state import sample_gpus
    from moedoctor.origin import record_origin
    from moedoctor.processes import interrupts
    from moedoctor.reporters.output import inspect_terminal, show_progress
    from moedoctor.results import CaseVerdict, ReportError, load_report
    from moedoctor.runner.plan import Options, plan
    from moedoctor.runner.pool import ServerError
    from moedoctor.runner.run import run
    from moedoctor.scenario.file import ScenarioError
    from moedoctor.scenario.targets import TargetError, load_targets

    if thorough and time_budget is not None:
        raise InputError("--thorough has no time budget: leave out --time-budget, or --thorough")
    if time_budget is None and not (thorough or targets or only or strict or baseline) and format == "table":
        time_budget = _TIME_BUDGET if inspect_terminal(output)[1] else None
    # Everything that can be wrong is checked before anything runs.
    with convert_errors(TargetError, ScenarioError, ReportError, catalogue.PluginError, ValueError):
        before = load_report(baseline) if baseline else None
        allowed = comparison.Tolerance.parse(tolerance or ())
        options = Options(
            subjects=tuple(subject or ()),
            only=tuple(_parse_condition(text) for text in only or ()),
            sources=_read_sources(vllm_kernels or (), flashinfer or ()),
            timeout=timeout,
            device=device,
            capsules=None if keep_capsules is None else os.path.abspath(keep_capsules),
        )
        scenarios = load_targets(targets or ())
        facts = environment.collect()
        plans = plan(scenarios, options, facts)
        if before is not None:
            comparison.check_comparable(before.environment, facts)
    described = None if capsule is None else _describe(capsule)
    parallel = min(jobs or os.cpu_count() or 1, _MAX_JOBS)
    with convert_errors(ServerError), sample_gpus(facts, device) as readings, show_progress() as progress:
        report = run(plans, facts, parallel=parallel, progress=progress, time_budget=time_budget)
    cases = [case for scenario in report.scenarios for case in scenario.cases]
    ran = sum(case.verdict is not CaseVerdict.SKIPPED for case in cases)
    counts = {"cases_run": ran, "runs_of_a_case": 1, "at_once_on_the_cpu": parallel}
    origin = record_origin(variables=facts.get("env"), gpu_state=readings, iterations=counts)
    report = replace(report, origin=origin, capsule=described)
    if before is not None:
        partial = options.partial or bool(targets)
        changed = comparison.compare(before, report, allowed, partial=partial)
        report = replace(report, findings=changed.findings)
    others = {fault.id for fault in catalogue.load_faults().values() if not catalogue.is_ours(fault)}
    decision = gate.decide(report, strict=strict, fail_on=cast(Any, fail_on), others=others, baseline=before)
    code, reasons = decision.exit_code, decision.reasons
    if report.summary.interrupted:
        code, reasons = interrupts.exit_code(), ("interrupted before every case had run", *reasons)
    report = replace(report, summary=replace(report.summary, exit_code=code, reasons=reasons))
    text, problem = deliver_report(report, format, output, verbose=verbose, full=full)
    if keep_capsules is not None:
        _name_capsules(report, keep_capsules)
    print_reasons(code, reasons, text, output)
    return code if problem is None else problem


def _describe(capsule: Path) -> Mapping[str, Any]:
    """Return what the reference makes of a recorded call. Raises InputError."""
    from moedoctor.diagnose.capsule.replay import ReplayError, replay
    from moedoctor.reporters.pages.replay import replay_document

    with convert_errors(ReplayError):
        return replay_document(replay(capsule, lambda record: (), "cpu", seconds=_CAPSULE_SECONDS))


def _name_capsules(report: Report, folder: Path) -> None:
    """Print what the cases left in the folder."""
    kept = [
        name
        for scenario in report.scenarios
        for case in scenario.cases
        for name in case.evidence.get("capsules", ())
    ]
    for name in kept:
        print_message(
            f"kept {folder / name}" if name.endswith(_CAPSULE_SUFFIX) else f"a wrong call is {name}"
        )
    if not kept:
        print_message(
            f"no wrong MoE call was found, so {folder} holds no new capsule; engines are watched from vLLM "
            "0.21.0 on, if a MoE call can show the failure"
        )


def _parse_condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if equals and key.strip() and value.strip():
        return key.strip(), value.strip()
    return "id", text


def _read_sources(vllm: Sequence[str], flashinfer: Sequence[str]) -> dict[str, str]:
    """Return subject name -> path of its code. Raises InputError for what is not X.Y.Z=PATH."""
    from moedoctor.upstream.flashinfer.source import check_source
    from moedoctor.upstream.releases.wheel import KernelError, check_kernels

    sources: dict[str, str] = {}
    given = [("vllm", "--vllm-kernels", "0.19.1=vllm-0.19.1-….whl", text) for text in vllm]
    example = "0.6.13=flashinfer_python-0.6.13-….whl"
    given += [("flashinfer", "--flashinfer", example, text) for text in flashinfer]
    for package, name, example, text in given:
        release, equals, path = text.partition("=")
        if not equals or _RELEASE.fullmatch(release) is None or not path:
            raise InputError(f"{name} {text}: expected X.Y.Z=PATH, such as {example}")
        if f"{package}@{release}" in sources:
            raise InputError(f"{name} {text}: {release} was given twice")
        with convert_errors(KernelError):
            if package == "vllm":
                check_kernels(Path(path))
            else:
                check_source(release, Path(path))
        sources[f"{package}@{release}"] = str(Path(path).resolve())
    return sources
