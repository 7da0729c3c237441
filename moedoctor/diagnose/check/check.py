"""What can strike this machine: facts are collected, then each entry's rules are held against them.

Every collector may fail; its reason is then a fact, under `collector_errors`, and rules that need the fact
do not fit. What needs seconds (trying to pin memory, upstream's own collectors) runs in child processes, side
by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moedoctor import __version__, environment
from moedoctor.diagnose.check import fix_plugin
from moedoctor.diagnose.check.arch_findings import arch_findings
from moedoctor.diagnose.check.jit_folders import JitCache, read_jit_cache
from moedoctor.diagnose.check.machine import Machine
from moedoctor.diagnose.check.matching import fits
from moedoctor.diagnose.check.offload_path import offload_path
from moedoctor.diagnose.check.package_fit import Fit, package_fits
from moedoctor.diagnose.check.pinning import Pinning, not_tried, try_pinning
from moedoctor.diagnose.check.problems import find_problems
from moedoctor.diagnose.check.records import SEVERITIES, CheckResult, Finding
from moedoctor.diagnose.settings.findings import setting_findings, setting_problems
from moedoctor.entries import entries
from moedoctor.entries.entry import Entry
from moedoctor.entries.rules import Rule, rules
from moedoctor.environment import Sources, no_gpu
from moedoctor.processes.cuda_tools import Tool, find_tools
from moedoctor.redaction import Redactor
from moedoctor.upstream.releases.collectors import Collected, collect_flashinfer, collect_vllm

_WITHOUT_GPU = 0.5
"""What a rule without a word on GPUs is worth on a machine that has none: the failure needs one to strike."""


def _nvcc(environ: Mapping[str, str]) -> Tool | None:
    """The nvcc that FlashInfer would call: the newest of those found."""
    return max(find_tools(("nvcc",), environ), key=lambda tool: tool.cuda, default=None)


@dataclass(frozen=True)
class Probes:
    """What is asked beside `moedoctor.environment`. Tests replace any of them; each may raise anything."""

    pinning: Callable[[], Pinning] = try_pinning
    vllm: Callable[[], Collected] = collect_vllm
    flashinfer: Callable[[], Collected] = collect_flashinfer
    nvcc: Callable[[Mapping[str, str]], Tool | None] = _nvcc
    jit_cache: Callable[[Mapping[str, str]], JitCache] = read_jit_cache
    fix_plugin: Callable[[Mapping[str, str]], Mapping[str, Any]] = fix_plugin.state
    requires: Callable[[str], Iterable[str] | None] | None = None
    """A distribution's requirements; None for those of its metadata."""


@dataclass
class _Facts:
    """Facts as they come in, and why others do not."""

    values: dict[str, Any]
    redactor: Redactor
    errors: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            self.errors[name] = self.redactor.text(message)
            return None


def check(sources: Sources | None = None, probes: Probes | None = None) -> CheckResult:
    """Collect the facts and judge them. Never raises for what a machine is or lacks."""
    sources, probes = sources or Sources(), probes or Probes()
    collected = environment.collect(sources)
    facts = _Facts(collected, _redactor(sources), dict(collected.get("collector_errors") or {}))
    nvcc = facts.attempt("nvcc", lambda: probes.nvcc(sources.environ))
    machine = _machine(sources, probes, collected, nvcc)
    cache = facts.attempt("jit_cache", lambda: probes.jit_cache(sources.environ))
    pinning, reports = _asked_in_children(machine, probes, facts)
    fitting = facts.attempt("packages", lambda: _fits(machine)) or ()
    result = _judged(machine, cache or JitCache("", ()), facts)
    shown = {
        **collected,
        "nvcc": nvcc.version if nvcc else None,
        "cuda_toolkit": machine.cuda,
        "pinned_memory": asdict(pinning),
        "vllm_offload": asdict(machine.offload),
        "packages": [asdict(one) for one in fitting],
        "flashinfer_jit_folders": _folders(cache, facts.redactor),
        "moedoctor_fixes": facts.attempt("moedoctor_fixes", lambda: _plugin(sources, probes, facts.redactor)),
        "collectors": reports,
        "collector_errors": facts.errors,
    }
    return replace(
        result,
        environment=shown,
        problems=(
            *find_problems(machine, fitting, pinning, nvcc, facts.errors),
            *(facts.attempt("settings", lambda: tuple(setting_problems(machine, facts.redactor))) or ()),
        ),
        version=__version__,
    )


def _redactor(sources: Sources) -> Redactor:
    try:
        return Redactor.of(sources.environ, sources.host())
    except Exception:
        return Redactor.of(sources.environ, "")


def _machine(sources: Sources, probes: Probes, facts: Mapping[str, Any], nvcc: Tool | None) -> Machine:
    path = offload_path(
        facts.get("vllm"), wsl=facts.get("wsl"), kernel=facts.get("kernel"), variables=sources.environ
    )
    cuda = ".".join(map(str, nvcc.cuda)) if nvcc else facts.get("torch_cuda")
    machine = Machine(facts, sources, cuda, path)
    return replace(machine, metadata_requires=probes.requires) if probes.requires else machine


def _fits(machine: Machine) -> tuple[Fit, ...]:
    return package_fits(
        machine.version,
        machine.requires,
        torch_cuda=machine.facts.get("torch_cuda"),
        driver_cuda=machine.facts.get("cuda_driver"),
    )


def _asked_in_children(machine: Machine, probes: Probes, facts: _Facts) -> tuple[Pinning, dict[str, Any]]:
    """Pinning and upstream's reports, at once; (pinning, report or error by package)."""
    without = no_gpu(machine.facts)
    asked: dict[str, Callable[[], Any]] = {} if without else {"pinning": probes.pinning}
    asked |= {
        name: ask
        for name, ask in (("vllm", probes.vllm), ("flashinfer", probes.flashinfer))
        if machine.facts.get(name)
    }
    with ThreadPoolExecutor(max_workers=3) as pool:
        answers = dict(zip(asked, pool.map(lambda item: facts.attempt(*item), asked.items()), strict=True))
    pinning = answers.pop("pinning", None) or not_tried(without or facts.errors.get("pinning", "no answer"))
    reports: dict[str, Any] = {}
    for name, answer in answers.items():
        error = facts.errors.get(name) if answer is None else answer.error
        reports[name] = {"error": error} if error else dict(answer.facts)
    return pinning, reports


Observer = Callable[[Entry, Machine, JitCache, Redactor], Iterable[Finding]]

OBSERVERS: Mapping[str, Observer] = {"MD004": arch_findings, "MD010": setting_findings}
"""Entry -> what sees it where rules over versions and settings do not reach; findings of both are merged."""


def _judged(machine: Machine, cache: JitCache, facts: _Facts) -> CheckResult:
    found: list[Finding] = []
    for entry in entries().values():
        found += _by_rules(entry, machine, facts.redactor)
        found += _observed(entry, machine, cache, facts)
    merged = sorted(_merged(found), key=_rank)
    return CheckResult(
        environment={},
        findings=tuple(one for one in merged if one.severity != "note"),
        conditional=tuple(one for one in merged if one.severity == "note"),
    )


def _observed(entry: Entry, machine: Machine, cache: JitCache, facts: _Facts) -> Iterable[Finding]:
    observer = OBSERVERS.get(entry.id)
    if observer is None:
        return ()
    seen = facts.attempt(
        f"observations for {entry.id}", lambda: tuple(observer(entry, machine, cache, facts.redactor))
    )
    return seen or ()


def _by_rules(entry: Entry, machine: Machine, redactor: Redactor) -> Iterator[Finding]:
    for rule in rules(entry):
        evidence = fits(rule.when, machine, redactor)
        if evidence is not None:
            yield _finding(entry, rule, evidence, machine)
            return


def _finding(entry: Entry, rule: Rule, evidence: Mapping[str, Any], machine: Machine) -> Finding:
    confidence = rule.confidence
    if not machine.capabilities and not rule.when.any_set:  # a setting has no effect, GPU or not
        evidence = {**evidence, "gpu": "none here; it strikes where this environment runs on one"}
        confidence *= _WITHOUT_GPU
    return Finding(
        id=entry.id,
        name=entry.name,
        title=entry.title,
        severity=rule.severity,
        confidence=round(confidence, 2),
        why=rule.why,
        needs=rule.needs,
        evidence=evidence,
        next_step=rule.next,
    )


def _merged(found: Iterable[Finding]) -> Iterator[Finding]:
    """One finding for each entry: the worst speaks, the others add what they saw."""
    groups: dict[str, list[Finding]] = {}
    for one in found:
        groups.setdefault(one.id, []).append(one)
    for members in groups.values():
        first, *others = sorted(members, key=_rank)
        why = "; ".join(dict.fromkeys(one.why for one in members))
        evidence = dict(first.evidence)
        for other in others:
            evidence |= {key: value for key, value in other.evidence.items() if key not in evidence}
        yield replace(first, why=why, evidence=evidence)


def _rank(one: Finding) -> tuple[int, float, str]:
    return SEVERITIES.index(one.severity), -one.confidence, one.id


def _plugin(sources: Sources, probes: Probes, redactor: Redactor) -> dict[str, Any]:
    state = probes.fix_plugin(sources.environ)
    return {key: redactor.text(value) if isinstance(value, str) else value for key, value in state.items()}


def _folders(cache: JitCache | None, redactor: Redactor) -> dict[str, Any] | None:
    if cache is None:
        return None
    return {"path": redactor.text(cache.path), "folders": [asdict(one) for one in cache.folders]}
