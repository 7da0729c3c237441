"""Facts in a text about its machine: releases, GPUs, MoE backends. Releases rule failures in or out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from moedoctor.diagnose.triage.signatures import Signature
from moedoctor.entries.entry import PACKAGES, Entry

Release = tuple[int, int, int, int]
"""Major, minor, patch, and 0, or -1 for a build before that release."""
_OLDEST: Release = (0, 17, 1, 0)
"""The oldest release of vLLM that was looked at."""
_BACKENDS = "`moedoctor backends`"

_NUMBER = r"v?(\d{1,2}\.\d{1,3}(?:\.\d{1,4})?(?:\.?(?:rc|dev|post|a|b)\d{1,9}){0,3})(?![\d.]*\d)"
_BETWEEN = (
    r"s|version|release|image|docker|container|engine|server|build|wheel|is|was|at|on|v1|latest|nightly|from"
)
_VLLM = (
    rf"vllm(?: api server)?[ _-]version\W{{0,40}}?{_NUMBER}"
    rf"|\bvllm(?:-openai(?:-rocm)?)?(?:['_\W]{{1,4}}(?:{_BETWEEN})){{0,3}}[_\W]{{1,4}}?{_NUMBER}"
    rf"|(?:^|\s){_NUMBER}(?: release)? of vllm\b|vllm-openai:[\w.-]{{1,60}}\W{{1,4}}{_NUMBER}"
    rf"|llm engine \({_NUMBER}\) with config|[█▄▀] {{1,3}}version {_NUMBER}"
    rf"|^version\W{{1,4}}{_NUMBER} .{{0,30}}vllm"
)
_FLASHINFER = rf"flashinfer(?:[-_](?:python|cubin)|\.__version__)?(?: version)?\W{{1,30}}?{_NUMBER}"
_BARE = r"(?:\b(?:in|on|with|since|to|from|under)|^|[,.;(]) ?v?(0\.(?:1[7-9]|[2-9]\d)\.\d{1,2})(?![.\w]*\w)"
"""A number that is a release of vLLM, and of nothing else that texts name without its name."""
_NOT_ABOUT = (
    r"deprecat|unmaintained|will be removed|removed in|(?:fixed|resolved|landed|merged|works|working|fine"
    r"|good|right|correct|available) (?:in|on|with|since|by|as of)"
    r"|(?<!after )(?<!since )(?<!(?:after|since) (?:the|our) )(?:upgrad|updat)(?:e|es|ing) (?:to|vllm)"
    r"|downgrad\w{0,5} (?:\S{1,20} ){0,3}?to |requires? |needs? |at least|target"
)
# Of words around a release, which is \0: it failed whatever is said of another one, or it was left.
_FAILED = (
    r"(?:broke|break|fail|crash|stop|die|hang|garbage|wrong|regress)\w{0,6} (?:(?:in|on|with|since) )?v?\0"
    r"|\0\W{0,3}(?:still|(?:does|do|did)(?:n.t| not) (?:help|fix|change|solve)|brings? (?:it|this) back)\b"
)
_LEFT = r"(?:upgrad|updat|mov)\w{0,5} (?:.{0,20}\bfrom )?(?:vllm )?v?\0 to v?\d"
_GPU = re.compile(
    r"(?:geforce )?\b(?:rtx(?: pro)? \d{4}(?: ?(?:ti|super|d|ada|blackwell)\b){0,2}|rtx ?a\d{4}"
    r"|gh200|gb200|gb300|gb10|h100|h200|h800|h20|b100|b200|b300|a100|a800|l40s?|v100|p100"
    r"|(?:nvidia|tesla) (?:a10g?|l4|l20|t4)|dgx spark|jetson (?:agx )?(?:thor|orin)|mi\d{3}x?)\b(?![-_/.]\w)"
)
_CAPABILITY = re.compile(
    r"\bsm_?(\d{2,3})[af]?\b(?!\.[\dx]| or (?:higher|newer|later|above))"
    r"|(?:\bsm[_ ]?|compute capability\W{0,4})(\d{1,2}\.\d)(?![\d.]*\d)"
)
_BACKEND = re.compile(
    r"using '?([a-z][a-z0-9_]{2,40}(?: [a-z]{2,20}(?='))?)'? (?:backend for )?"
    r"(?:\w{1,20} )?moe(?: backend)?\b|moe backend '?([a-z][a-z0-9_]{2,40})'? (?:does not|is not)"
    r"|--moe-backend[ =]{1,2}'?\"?([a-z][a-z0-9_]{2,40})|moe_backend\W{1,5}([a-z][a-z0-9_]{2,40})"
)
_MOST = 64


@dataclass
class Facts:
    """The releases that a text is about. Filled line by line."""

    vllm: set[Release] = field(default_factory=set)
    other_vllm: set[Release] = field(default_factory=set)
    """Releases that the text names without saying that they failed: "fixed in", "upgrade to"."""
    flashinfer: set[Release] = field(default_factory=set)
    gpus: dict[str, None] = field(default_factory=dict)
    """GPUs and compute capabilities, as the text writes them, in order."""
    backends: dict[str, None] = field(default_factory=dict)
    """Words in the place of a MoE backend that was chosen or asked for, in order."""
    _after_name: bool = False
    """True if the line before is ``Name: vllm``, as pip shows it."""

    def read(self, line: str) -> None:
        """Take in one line, in lower case."""
        if self._after_name and (version := re.match(rf"version: {_NUMBER}", line)):
            line = f"vllm {version[1]}"
        self._after_name = line == "name: vllm"
        for product, pattern, releases in (
            ("vllm", _VLLM, self.vllm),
            ("flashinfer", _FLASHINFER, self.flashinfer),
            ("0.", _BARE, self.vllm),
        ):
            if len(releases) >= _MOST or not any(word in line for word in (product, "version", "llm engine")):
                continue
            for match in re.finditer(pattern, line):
                text = next(filter(None, match.groups()))
                start = match.start(match.lastindex or 0) if product == "0." else match.start()
                around = f"{line[:start][-40:]}\0{line[match.end() :][:40]}"
                another = re.search(_NOT_ABOUT, around.partition("\0")[0]) and not re.search(_FAILED, around)
                if (release := parse(text)) and not (another or re.search(_LEFT, around)):
                    releases.add(release)
                elif release and product != "flashinfer":
                    self.other_vllm.add(release)
        self._read_gpus(line)
        if "moe" in line and len(self.backends) < _MOST:
            for match in _BACKEND.finditer(line):
                self.backends[next(filter(None, match.groups())).upper().replace(" ", "_")] = None

    def _read_gpus(self, line: str) -> None:
        if len(self.gpus) >= _MOST or not any(digit in line for digit in "0123456789"):
            return
        for match in _GPU.finditer(line):
            self.gpus[match[0].upper()] = None
        for match in _CAPABILITY.finditer(line):
            self.gpus[f"SM {match[2] or f'{match[1][:-1]}.{match[1][-1]}'}"] = None

    def explain_exclusion(self, signature: Signature) -> str:
        """Return why the releases named leave no room for a signature, or an empty string.

        Unknown releases leave room.
        """
        if signature.needs_version and not self.vllm:
            return "the text does not say which release of vLLM failed"
        if signature.since and self.vllm and max(self.vllm) < _read_boundary(signature.since):
            return f"the text names vLLM {_show(max(self.vllm))}, and the failure came with {signature.since}"
        if signature.fixed and self.vllm and min(self.vllm) >= _read_boundary(signature.fixed):
            return f"the text names vLLM {_show(min(self.vllm))}, and {signature.fixed} fixed the failure"
        fixed = signature.flashinfer_fixed
        if fixed and self.flashinfer and min(self.flashinfer) >= _read_boundary(fixed):
            return f"the text names FlashInfer {_show(min(self.flashinfer))}, and the failure is older"
        return ""

    def list_backends(self) -> tuple[str, ...]:
        """Return the MoE backends that a release of vLLM knows, as the text writes them in capitals."""
        if not self.backends:
            return ()
        from moedoctor.fixes.backends.release_tables import list_backend_names

        return tuple(name for name in self.backends if name in list_backend_names())

    def summarize(self) -> str:
        """Return the releases in a few words, or an empty string without any."""
        return " · ".join(
            f"{product} {_list(releases)}"
            for product, releases in (("vLLM", self.vllm), ("FlashInfer", self.flashinfer))
            if releases
        )

    def summarize_others(self) -> str:
        """Return the releases of vLLM that the text names as others than the one that failed."""
        others = self.other_vllm - self.vllm
        return f"vLLM {_list(others)}" if others else ""


def release_words(entry: Entry, facts: Facts) -> str:
    """Return in words if the releases in the text have a failure, and which release fixes it."""
    if entry.fixed == "no":
        sentences = ["no release has a fix"]
    else:
        # The step that helps depends on the text: it stands in the finding.
        nothing = entry.fixed.startswith("nothing")
        sentences = [entry.fixed.partition(";")[0] if nothing else f"fixed: {entry.fixed}"]
    for package, named in (("vllm", facts.vllm), ("flashinfer", facts.flashinfer)):
        ranges = [affected for affected in entry.releases if affected.package == package]
        if not named or not ranges:
            continue
        release = max(named)
        shown = f"{PACKAGES[package]} {_show(release)}"
        fits = [part for part in ranges if _read_boundary(part.first) <= release <= _read_boundary(part.last)]
        if fits:
            sentences.insert(0, f"{shown} has it ({fits[0].range})")
        elif release > max(_read_boundary(part.last) for part in ranges):
            fixed = [part.fixed for part in ranges if part.fixed and _read_boundary(part.fixed) <= release]
            words = f"has the fix of {fixed[-1]}" if fixed else "is newer than what was looked at"
            sentences.insert(0, f"{shown} {words}")
        elif package == "vllm" and release < _OLDEST:
            sentences.insert(0, f"{shown} is older than what was looked at")
        else:
            sentences.insert(0, f"{shown} is not among those that are known to have it")
    return "; ".join(sentences)


def fit_step(step: str, facts: Facts) -> str:
    """Return a next step whose `moedoctor backends` asks for the release and the GPU that the text names."""
    if _BACKENDS not in step:
        return step
    from moedoctor.fixes.backends.release_tables import CAPABILITIES
    from moedoctor.fixes.backends.release_tables import load_releases as list_known_releases

    capabilities = [gpu[3:] for gpu in facts.gpus if gpu.startswith("SM ") and gpu[3:] in CAPABILITIES]
    releases = [
        text for text in map(_show, sorted(facts.vllm, reverse=True)) if text in list_known_releases()
    ]
    options = "".join(
        f" --{name} {values[0]}" for name, values in (("sm", capabilities), ("release", releases)) if values
    )
    return step.replace(_BACKENDS, f"{_BACKENDS[:-1]}{options}`")


def parse(text: str) -> Release | None:
    """Return a release, or None for what is not one: builds from a clone without tags are 0.1.dev1."""
    final = re.split(r"rc|dev|post|a|b", text, maxsplit=1)[0]
    numbers = [int(number) for number in re.findall(r"\d+", final)][:3]
    if len(numbers) < 2:
        return None
    early = any(mark in text for mark in ("rc", "dev", "a", "b"))
    if early and tuple(numbers[:2]) < (0, 4):
        return None
    major, minor, patch = [*numbers, 0][:3]
    return major, minor, patch, -1 if early else 0


def _read_boundary(text: str) -> Release:
    release = parse(text)
    if release is None:
        raise ValueError(f"{text} is not a release")
    return release


def _list(releases: set[Release]) -> str:
    return ", ".join(map(_show, sorted(releases)[:4]))


def _show(release: Release) -> str:
    return ".".join(map(str, release[:3])) + ("-dev" if release[3] else "")
