"""Which known failures can strike this machine: collect facts, then match each entry's rules with them.

Every collector may fail. Its error is then a fact, under `collector_errors`, and rules that need the missing
fact do not fit. What takes seconds (trying to pin memory, upstream's own collectors) runs in child processes,
at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moedoctor import __version__, environment
from moedoctor.diagnose.check import fix_plugin
from moedoctor.diagnose.check.arch import JitCache, arch_findings, read_jit_cache
from moedoctor.diagnose.check.machine import Machine, fits, offload_path
from moedoctor.diagnose.check.packages import find_problems, package_fits
from moedoctor.diagnose.check.pinning import Pinning, not_tried, try_pinning
from moedoctor.diagnose.check.records import SEVERITIES, CheckResult, Finding
from moedoctor.diagnose.check.settings import setting_findings, setting_problems
from moedoctor.entries import entries
from moedoctor.entries.entry import Entry, Rule
from moedoctor.environment import Sources, no_gpu
from moedoctor.processes.cuda_tools import Tool, find_tools
from moedoctor.redaction import Redactor
from moedoctor.upstream.releases.collectors import Collected, collect_flashinfer, collect_vllm

_WITHOUT_GPU = 0.5
"""The factor on the confidence of a rule that does not mention GPUs, on a machine without one."""


def _nvcc(environ: Mapping[str, str]) -> Tool | None:
    """Return the nvcc that FlashInfer would call: the newest on this machine."""
    return max(find_tools(("nvcc",), environ), key=lambda tool: tool.cuda, default=None)


@dataclass(frozen=True)
class Probes:
    """The collectors beside `moedoctor.environment`. Tests replace them; each may raise anything."""

    pinning: Callable[[], Pinning] = try_pinning
    vllm: Callable[[], Collected] = collect_vllm
    flashinfer: Callable[[], Collected] = collect_flashinfer
    nvcc: Callable[[Mapping[str, str]], Tool | None] = _nvcc
    jit_cache: Callable[[Mapping[str, str]], JitCache] = read_jit_cache
    fix_plugin: Callable[[Mapping[str, str]], Mapping[str, Any]] = fix_plugin.state
    requires: Callable[[str], Iterable[str] | None] | None = None
    """The requirements of a distribution; None reads its metadata."""


@dataclass
class _Facts:
    """Facts, and the errors of those that could not be collected."""

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
    """Collect the facts and judge them. Never raises for the state of a machine."""
    sources, probes = sources or Sources(), probes or Probes()
    collected = environment.collect(sources)
    facts = _Facts(collected, _redactor(sources), dict(collected.get("collector_errors") or {}))
    nvcc = facts.attempt("nvcc", lambda: probes.nvcc(sources.environ))
    machine = _machine(sources, probes, collected, nvcc)
    cache = facts.attempt("jit_cache", lambda: probes.jit_cache(sources.environ))
    pinning, reports = _ask_children(machine, probes, facts)
    package_pairs = facts.attempt("packages", lambda: package_fits(machine)) or ()
    findings = _findings(machine, cache or JitCache("", ()), facts)
    return CheckResult(
        environment={
            **collected,
            "nvcc": nvcc.version if nvcc else None,
            "cuda_toolkit": machine.cuda,
            "pinned_memory": asdict(pinning),
            "vllm_offload": asdict(machine.offload),
            "packages": [asdict(pair) for pair in package_pairs],
            "flashinfer_jit_folders": _folders(cache, facts.redactor),
            "moedoctor_fixes": facts.attempt(
                "moedoctor_fixes", lambda: _plugin(sources, probes, facts.redactor)
            ),
            "collectors": reports,
            "collector_errors": facts.errors,
        },
        findings=tuple(finding for finding in findings if finding.severity != "note"),
        conditional=tuple(finding for finding in findings if finding.severity == "note"),
        problems=(
            *find_problems(machine, package_pairs, pinning, nvcc, facts.errors),
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


def _ask_children(machine: Machine, probes: Probes, facts: _Facts) -> tuple[Pinning, dict[str, Any]]:
    """Try pinning and run upstream's collectors; return (pinning, report or error by package)."""
    without = no_gpu(machine.facts)
    questions: dict[str, Callable[[], Any]] = {} if without else {"pinning": probes.pinning}
    questions |= {
        name: ask
        for name, ask in (("vllm", probes.vllm), ("flashinfer", probes.flashinfer))
        if machine.facts.get(name)
    }
    with ThreadPoolExecutor(max_workers=3) as pool:
        answers = pool.map(lambda item: facts.attempt(*item), questions.items())
        by_name = dict(zip(questions, answers, strict=True))
    pinning = by_name.pop("pinning", None) or not_tried(without or facts.errors.get("pinning", "no answer"))
    reports: dict[str, Any] = {}
    for name, answer in by_name.items():
        error = facts.errors.get(name) if answer is None else answer.error
        reports[name] = {"error": error} if error else dict(answer.facts)
    return pinning, reports


Observer = Callable[[Entry, Machine, JitCache, Redactor], Iterable[Finding]]

OBSERVERS: Mapping[str, Observer] = {"MD004": arch_findings, "MD010": setting_findings}
"""Entry -> code that finds what rules cannot express. Findings of both are merged."""


def _findings(machine: Machine, cache: JitCache, facts: _Facts) -> list[Finding]:
    """Return one finding an entry, the worst first."""
    by_entry: list[Finding] = []
    for entry in entries().values():
        findings = [*_by_rules(entry, machine, facts.redactor), *_observed(entry, machine, cache, facts)]
        if findings:
            by_entry.append(_merged(findings))
    return sorted(by_entry, key=_rank)


def _observed(entry: Entry, machine: Machine, cache: JitCache, facts: _Facts) -> Iterable[Finding]:
    observer = OBSERVERS.get(entry.id)
    if observer is None:
        return ()
    findings = facts.attempt(
        f"observations for {entry.id}", lambda: tuple(observer(entry, machine, cache, facts.redactor))
    )
    return findings or ()


def _by_rules(entry: Entry, machine: Machine, redactor: Redactor) -> Iterator[Finding]:
    for rule in entry.affects:
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


def _merged(findings: Sequence[Finding]) -> Finding:
    """Return the worst finding of an entry, with the reasons and the evidence of the others added."""
    first, *others = sorted(findings, key=_rank)
    why = "; ".join(dict.fromkeys(finding.why for finding in findings))
    evidence = dict(first.evidence)
    for other in others:
        evidence |= {key: fact for key, fact in other.evidence.items() if key not in evidence}
    return replace(first, why=why, evidence=evidence)


def _rank(finding: Finding) -> tuple[int, float, str]:
    return SEVERITIES.index(finding.severity), -finding.confidence, finding.id


def _plugin(sources: Sources, probes: Probes, redactor: Redactor) -> dict[str, Any]:
    state = probes.fix_plugin(sources.environ)
    return {key: redactor.text(value) if isinstance(value, str) else value for key, value in state.items()}


def _folders(cache: JitCache | None, redactor: Redactor) -> dict[str, Any] | None:
    if cache is None:
        return None
    return {"path": redactor.text(cache.path), "folders": [asdict(folder) for folder in cache.folders]}
