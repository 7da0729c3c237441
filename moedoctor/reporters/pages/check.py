"""The page of `moedoctor check`: what can strike this machine, and the facts about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moedoctor.diagnose.check.records import CheckResult
from moedoctor.diagnose.ignores import Ignored
from moedoctor.reporters.page import Block, Bullets, Fold, Heading, Item, Paragraph, Span, Table, list_section
from moedoctor.reporters.text import count_of, format_value, list_figures
from moedoctor.text import escape

_DEPENDS = "Whether these strike depends on the server's flags, the checkpoint, the model or your own code:"


def make_check_page(result: CheckResult) -> list[Block]:
    """Return the counts, what was found, what was not looked at, and the facts."""
    rows = list(list_facts(result.environment))
    if result.described:
        rows = [row for row in rows if row[0] in _DESCRIBED]
    page: list[Block] = [
        Heading(f"moedoctor {result.version}: check of {result.target}", 1),
        Paragraph(Span(summarize(result), "bold")),
    ]
    if result.findings:
        page.append(Paragraph(f"Can strike here: {', '.join(each.id for each in result.findings)}"))
    if result.without_vllm:
        page.append(Paragraph(Span(result.without_vllm, "warning")))
    page += _show_findings(result)
    page += list_section("Not known for this build", result.unknown)
    page += list_section("Read from the source", result.read)
    page += list_section("Not looked at", result.not_looked_at)
    return [*page, Fold("Environment", [Table(("fact", "value"), rows)])]


def _show_findings(result: CheckResult) -> Iterator[Block]:
    if result.problems:
        yield Heading("What does not work together")
    for problem in result.problems:
        error = [("seen", str(problem.evidence["error"]))] if "error" in problem.evidence else []
        lines = [("why", problem.why), *error, ("next", problem.next_step)]
        yield Item(problem.severity, problem.what, lines)
    if result.findings:
        yield Heading("Known failures that can strike here")
    for finding in result.findings:
        needs = [("needs", finding.needs)] if finding.needs else []
        shown = (f"{name.removeprefix('variables.')} {text}" for name, text in list_figures(finding.evidence))
        evidence = ("seen", ", ".join(shown))
        lines = [("why", finding.why), *needs, evidence, ("next", finding.next_step)]
        yield Item(finding.severity, f"{finding.id} {finding.name}: {finding.title}", lines)
    if result.conditional:
        yield Heading("Not decided by this machine")
        yield Paragraph(_DEPENDS)
        yield Bullets([f"{note.id} {note.name}: {note.needs or note.why}" for note in result.conditional])
    if result.findings or result.conditional:
        yield Paragraph(("Details: ", Span("moedoctor explain ID", "code")))
    yield from list_ignored(result.ignored)


def list_ignored(ignored: Sequence[Ignored]) -> list[Block]:
    """Return the findings that `--ignore` leaves out, each with the reason."""
    until = {each: f" (until {each.until})" if each.until else "" for each in ignored}
    lines = [escape(f"{each.id}: {each.title}: {each.reason}{until[each]}") for each in ignored]
    return list_section("Found and ignored", lines)


def summarize(result: CheckResult) -> str:
    """Return ``2 errors · 1 warning · 0 problems · 5 not decided here · 0 facts missing``."""
    counts = result.summary
    missing = len(result.environment.get("collector_errors") or {})
    ignored = (f"{len(result.ignored)} ignored",) if result.ignored else ()
    return " · ".join(
        (
            count_of(counts.error, "error"),
            count_of(counts.warning, "warning"),
            count_of(counts.problems, "problem"),
            f"{counts.conditional} not decided here",
            f"{count_of(missing, 'fact')} missing",
            *((f"{len(result.unknown)} not known for this build",) if result.unknown else ()),
            *ignored,
        )
    )


# The facts in the few words that a person reads; JSON has all of them.

_PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "vllm": "vllm",
    "flashinfer": "flashinfer-python",
    "flashinfer_cubin": "flashinfer-cubin",
    "flashinfer_jit_cache": "flashinfer-jit-cache",
}
_COLLECTORS = {
    "vllm": ("cuda_runtime_version", "cudnn_version", "vllm_build_flags"),
    "flashinfer": ("Target CUDA archs (resolved)", "flashinfer-cubin", "flashinfer-jit-cache", "flashinfer"),
}
"""The facts from upstream's own reports that are worth a line."""
_UNKNOWN = "unknown"
_DESCRIBED = (
    "GPU",
    "torch",
    "vllm",
    "flashinfer-python",
    "flashinfer-cubin",
    "CPU offload",
    "fixes for this vLLM",
    "variables",
)
"""The facts that an environment has which is only described."""


def list_facts(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Give (name, words) of each fact, in the order of the report."""
    yield "GPU", _describe(facts.get("gpus"), _describe_gpus)
    driver, cuda = facts.get("driver"), facts.get("cuda_driver")
    yield "driver", f"{driver} (CUDA {cuda})" if driver and cuda else str(driver or "none")
    built = "torch without CUDA" if facts.get("torch") else "no torch"
    if facts.get("torch_cuda"):
        built = f"torch is built for {facts['torch_cuda']}"
    elif "torch_cuda" in (facts.get("collector_errors") or {}):
        built = "what torch is built for is not known"
    compiler = f"nvcc {facts['nvcc']}" if facts.get("nvcc") else "no nvcc"
    yield "CUDA toolkit", f"{compiler}, {built}"
    yield "system", _describe_system(facts)
    yield "pinned memory", _describe(facts.get("pinned_memory"), _describe_pinning)
    yield "locked memory", _describe(facts.get("locked_memory_limit_bytes"), _describe_limit)
    for key, name in _PACKAGES.items():
        if key in ("torch", "vllm", "flashinfer") or facts.get(key):
            yield name, _describe_package(key, facts)
    if facts.get("vllm"):
        yield "CPU offload", _describe(facts.get("vllm_offload"), _describe_offload)
    if facts.get("flashinfer"):
        yield "JIT cache", _describe(facts.get("flashinfer_jit_folders"), _describe_jit_cache)
    yield "moedoctor fixes", _describe(facts.get("moedoctor_fixes"), _describe_fixes)
    if known := (facts.get("moedoctor_fixes") or {}).get("known"):
        yield "fixes for this vLLM", "; ".join(_describe_fix(name, row) for name, row in known.items())
    yield "variables", _describe(facts.get("env"), _describe_variables)
    for package, answer in (facts.get("collectors") or {}).items():
        yield f"{package} says", _describe_collected(package, answer)
    for name, error in (facts.get("collector_errors") or {}).items():
        yield f"no {name}", str(error)


def _describe(fact: Any, describe: Callable[[Any], str]) -> str:
    """Return a fact in words; one that could not be read is unknown."""
    return _UNKNOWN if fact is None else describe(fact)


def _describe_gpus(gpus: Sequence[Mapping[str, Any]]) -> str:
    visible = [gpu for gpu in gpus if gpu.get("visible")]
    if not visible:
        return "none" if not gpus else f"none of {len(gpus)} is visible to CUDA programs"
    names: Counter[str] = Counter()
    for gpu in visible:
        memory = gpu.get("memory_bytes")
        size = f", {memory / 2**30:.0f} GiB" if memory else ""
        capability = f" ({gpu['capability']}{size})" if gpu.get("capability") else ""
        names[f"{gpu.get('name') or _UNKNOWN}{capability}"] += 1
    return "; ".join(text if count == 1 else f"{count} × {text}" for text, count in names.items())


def _describe_system(facts: Mapping[str, Any]) -> str:
    parts = [str(facts.get("platform") or _UNKNOWN), f"kernel {facts.get('kernel')}"]
    parts.append(f"Python {facts.get('python')}")
    places = {"wsl": "WSL", "container": "in a container"}
    return ", ".join((*parts, *(words for name, words in places.items() if facts.get(name))))


def _describe_pinning(pinning: Mapping[str, Any]) -> str:
    word = {True: "works", False: "FAILS", None: "not tried"}[pinning["works"]]
    return f"{word}: {pinning['reason']}"


def _describe_limit(limit: int | str) -> str:
    return f"at most {limit / 2**20:.0f} MiB for a process" if isinstance(limit, int) else str(limit)


def _describe_package(key: str, facts: Mapping[str, Any]) -> str:
    version, name = facts.get(key), _PACKAGES[key]
    if not version:
        return _UNKNOWN if key in (facts.get("collector_errors") or {}) else "not installed"
    wrong = [
        f"{need['by']} requires {need['expected']}"
        for need in facts.get("packages") or ()
        if need["package"] == name and not need["ok"]
    ]
    return f"{version}; {', '.join(wrong)}" if wrong else str(version)


def _describe_offload(path: Mapping[str, Any]) -> str:
    uva, pins = path["uva"], path["pins"]
    ways = {True: "maps host memory (UVA)", False: "copies in every forward (no UVA)", None: "path unknown"}
    reasons = dict.fromkeys((uva["reason"], pins["reason"]))
    pinned = {True: "pinned", False: "not pinned", None: "pinning unknown"}[pins["value"]]
    return f"{ways[uva['value']]}, {pinned}: {'; '.join(reasons)}"


def _describe_jit_cache(cache: Mapping[str, Any]) -> str:
    folders = [
        f"{folder['release']}/{'_'.join(folder['targets']) or 'no target'} ({folder['modules']} modules)"
        for folder in cache["folders"]
    ]
    return f"{cache['path']}: {', '.join(folders) or 'empty'}"


def _describe_fixes(state: Mapping[str, Any]) -> str:
    return f"{'active' if state['active'] else 'not active'}: {state['reason']}"


def _describe_fix(name: str, row: Mapping[str, Any]) -> str:
    return f"{name} {row['basis']}" + (f" ({row['reason']})" if row["basis"] == "refused" else "")


def _describe_variables(variables: Mapping[str, str]) -> str:
    shown = " ".join(f"{name}={value}" for name, value in variables.items())
    return shown or "none of VLLM_*, FLASHINFER_*, CUDA_*"


def _describe_collected(package: str, answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return f"nothing: {answer['error']}"
    flat = dict(_flatten(answer))
    shown = [f"{name}: {format_value(flat[name])}" for name in _COLLECTORS.get(package, ()) if name in flat]
    return "; ".join(shown) or f"{len(flat)} facts, see --format json"


def _flatten(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value)
        else:
            yield str(name), value
