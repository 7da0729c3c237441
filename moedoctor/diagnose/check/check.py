"""Finds the known failures that can strike this machine: collects facts, and matches each entry's rules.

Every collector may fail. Its error is then a fact, under `collector_errors`, and rules that need the missing
fact do not fit. What takes seconds (trying to pin memory, upstream's own collectors) runs in child processes,
at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

from moedoctor import __version__, environment
from moedoctor.diagnose.check import fix_plugin
from moedoctor.diagnose.check.arch import find_arch_failures
from moedoctor.diagnose.check.build import Build, inspect_build
from moedoctor.diagnose.check.machine import Machine, match_condition, offload_path
from moedoctor.diagnose.check.packages import compare_packages, find_problems
from moedoctor.diagnose.check.pinning import Pinning, make_untried
from moedoctor.diagnose.check.records import CheckResult, Finding, Problem, list_not_looked_at
from moedoctor.diagnose.check.settings import find_setting_failures, find_setting_problems
from moedoctor.diagnose.check.target import Probes, Target
from moedoctor.diagnose.cuda.jit_cache import JitCache
from moedoctor.diagnose.ignores import SEVERITIES, Ignore, list_idle, sort_out
from moedoctor.entries import load_entries
from moedoctor.entries.entry import PACKAGES, Entry
from moedoctor.environment import Sources, explain_missing_gpu
from moedoctor.redaction import Redactor

_WITHOUT_GPU = 0.5
"""The factor on the confidence of a rule that does not mention GPUs, on a machine without one."""


@dataclass(frozen=True)
class _Attempts:
    """Calls functions that may fail, and keeps their errors by name."""

    errors: dict[str, str]

    def __call__(self, name: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:
            self.errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
            return None


def check(
    sources: Sources | None = None, probes: Probes | None = None, *, target: Target | None = None
) -> CheckResult:
    """Collect the facts and judge them, masked. Never raises for the state of a machine.

    `target` is another environment than this Python; `sources` and `probes` stand in for this machine's.
    """
    target = target or Target(sources=sources or Sources(), probes=probes or Probes())
    sources, probes = target.sources, target.probes
    environ, facts = sources.environ, environment.collect(sources) | dict(target.facts)
    try:
        redactor = Redactor.from_environment(sources.environ, sources.host())
    except Exception:
        redactor = Redactor.from_environment(sources.environ, "")
    errors = dict(facts.get("collector_errors") or {})
    attempt = _Attempts({name: error for name, error in errors.items() if name not in target.facts})
    nvcc = attempt("nvcc", lambda: probes.nvcc(environ))
    cache = attempt("jit_cache", lambda: probes.jit_cache(environ))
    vllm = facts.get("vllm")
    unreadable = Build(known=frozenset(), unknown=("vLLM's source: it could not be read",))
    versions = {"vllm": vllm, "flashinfer": facts.get("flashinfer")}
    build = attempt("source", lambda: inspect_build(versions, target.find_source, environ)) or unreadable
    machine = Machine(
        facts,
        sources,
        cuda=".".join(map(str, nvcc.cuda)) if nvcc else facts.get("torch_cuda"),
        offload=offload_path(
            build.find_release("MD002") or vllm,
            wsl=facts.get("wsl"),
            kernel=facts.get("kernel"),
            variables=environ,
        ),
        redactor=redactor,
        jit_cache=cache or JitCache("", ()),
        metadata_requires=probes.requires,
        build=build,
    )
    pinning, reports = _ask_children(machine, probes, attempt)
    packages = attempt("packages", lambda: compare_packages(machine)) or ()
    findings = _find_failures(machine, attempt)
    plugin = attempt("moedoctor_fixes", lambda: probes.fix_plugin(environ, vllm, target.read_source))
    folders = asdict(cache) if cache else None
    result = CheckResult(
        environment={
            **facts,
            "nvcc": nvcc.version if nvcc else None,
            "cuda_toolkit": machine.cuda,
            "pinned_memory": asdict(pinning),
            "vllm_offload": asdict(machine.offload),
            "packages": [asdict(pair) for pair in packages],
            "flashinfer_jit_folders": folders,
            "moedoctor_fixes": plugin,
            "collectors": reports,
            "collector_errors": attempt.errors,
        },
        findings=tuple(finding for finding in findings if finding.severity != "note"),
        conditional=tuple(finding for finding in findings if finding.severity == "note"),
        problems=(
            *find_problems(machine, packages, pinning, nvcc, attempt.errors, tools=not target.described),
            *(attempt("settings", lambda: tuple(find_setting_problems(machine))) or ()),
            *fix_plugin.find_plugin_problems(plugin),
        ),
        version=__version__,
        target=target.name,
        described=target.described,
        read=build.answers,
        unknown=build.unknown,
    )
    result = replace(result, not_looked_at=(*list_not_looked_at(result), *target.not_looked_at))
    return redactor.record(result)


def apply_ignores(result: CheckResult, rules: Sequence[Ignore], today: date) -> CheckResult:
    """Return the result without the findings and problems that a rule leaves out; they are listed with it."""

    def name(each: Finding | Problem) -> tuple[Sequence[str], str]:
        return ((), each.what) if isinstance(each, Problem) else ((each.id, each.name), each.title)

    findings, first = sort_out(result.findings, rules, name, today)
    conditional, second = sort_out(result.conditional, rules, name, today)
    problems, third = sort_out(result.problems, rules, name, today)
    ignored = (*first, *second, *third)
    notes = (*result.not_looked_at, *list_idle(rules, ignored, today))
    return replace(
        result,
        findings=findings,
        conditional=conditional,
        problems=problems,
        ignored=ignored,
        not_looked_at=notes,
    )


def _ask_children(machine: Machine, probes: Probes, attempt: _Attempts) -> tuple[Pinning, dict[str, Any]]:
    """Try pinning and run upstream's collectors; return (pinning, report or error by package)."""
    without = explain_missing_gpu(machine.facts)
    questions: dict[str, Callable[[], Any]] = {} if without else {"pinning": probes.pinning}
    questions |= {
        name: ask
        for name, ask in (("vllm", probes.vllm), ("flashinfer", probes.flashinfer))
        if machine.facts.get(name) and ask is not None
    }
    with ThreadPoolExecutor(max_workers=3) as pool:
        answers = dict(zip(questions, pool.map(attempt, questions, questions.values()), strict=True))
    pinning = answers.pop("pinning", None) or make_untried(
        without or attempt.errors.get("pinning", "no answer")
    )
    reports: dict[str, Any] = {}
    for name, answer in answers.items():
        error = attempt.errors.get(name) if answer is None else answer.error
        reports[name] = {"error": error} if error else dict(answer.facts)
    return pinning, reports


OBSERVERS: Mapping[str, Callable[[Entry, Machine], Iterable[Finding]]] = {
    "MD004": find_arch_failures,
    "MD010": find_setting_failures,
}
"""Entry -> code that finds what rules cannot express. Findings of both are merged."""


def _find_failures(machine: Machine, attempt: _Attempts) -> list[Finding]:
    """Return one finding an entry, the worst first."""
    merged = []
    for entry in load_entries().values():
        findings = [*_apply_rules(entry, machine), *_observe(entry, machine, attempt)]
        if findings:
            merged.append(_merge(findings))
    return sorted(merged, key=_rank)


def _observe(entry: Entry, machine: Machine, attempt: _Attempts) -> Iterable[Finding]:
    observer = OBSERVERS.get(entry.id)
    if observer is None:
        return ()
    return attempt(f"observations for {entry.id}", lambda: tuple(observer(entry, machine))) or ()


def _apply_rules(entry: Entry, machine: Machine) -> Iterator[Finding]:
    """Yield the finding of the first rule of `entry` that fits."""
    reading = machine.build.readings.get(entry.id)
    version, like = None, machine.build.find_release(entry.id)
    if reading is not None and like is not None:
        version = machine.facts.get(reading.package)
        machine = replace(machine, facts={**machine.facts, reading.package: like})
    for rule in entry.affects:
        evidence = match_condition(rule.when, machine)
        if evidence is None:
            continue
        if version is not None and reading is not None:
            package = "vllm" if reading.package == "vllm" else "flashinfer-python"
            if package in evidence:
                words = f"read from this {PACKAGES[reading.package]}'s source"
                evidence = {**evidence, package: version, words: reading.where}
        confidence = rule.confidence
        if not machine.capabilities and not rule.when.any_set:  # a setting has no effect, GPU or not
            evidence = {**evidence, "gpu": "none here; it strikes where this environment runs on one"}
            confidence = round(confidence * _WITHOUT_GPU, 2)
        yield Finding.from_entry(
            entry, rule.severity, confidence, rule.why, evidence, rule.next, needs=rule.needs
        )
        return


def _merge(findings: Sequence[Finding]) -> Finding:
    """Return the worst finding of an entry, with the reasons and the evidence of the others added."""
    first, *others = sorted(findings, key=_rank)
    why = "; ".join(dict.fromkeys(finding.why for finding in findings))
    evidence = dict(first.evidence)
    for other in others:
        evidence |= {key: fact for key, fact in other.evidence.items() if key not in evidence}
    return replace(first, why=why, evidence=evidence)


def _rank(finding: Finding) -> tuple[int, float, str]:
    return SEVERITIES.index(finding.severity), -finding.confidence, finding.id
