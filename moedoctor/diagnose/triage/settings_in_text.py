"""The start of a server as a text tells of it: flags, variables, sizes, versions of libraries, WSL."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from moedoctor.redaction import Redactor
from moedoctor.text import escape

_COMMAND = re.compile(r"\bvllm serve [\w/~.$-]|api_server (?:\\|--\w)|\bvllm bench ")
_FLAG = re.compile(
    r"--([a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*)(?:(?:=| (?!-))[\"']?([^\s\"'\\,\]<>|&;{][^\s\"'\\,\]]*))?"
)
_ARGUMENTS = re.compile(r"non-default args\W{1,3}")
_ARGUMENT = re.compile(
    r"['\"]?\b([a-z][a-z0-9]*(?:_[a-z0-9]+)+|model|dtype|quantization)['\"]? ?[:=] ?['\"]?([^\s'\",){}]+)"
)
_CALL = re.compile(r"\b(?:LLM|(?:Async)?EngineArgs)\(")
_ITEM = re.compile(r"^[-\"'\[ ]{0,4}--[a-z][\w-]*(?![\w-]|: |:$)")  # not "--enforce-eager: helps"
_VARIABLE = re.compile(
    r"(?<!passing )\b((?:VLLM|FLASHINFER|CUDA|NCCL|PYTORCH|TORCH|TRITON|MOEDOCTOR)_[A-Z0-9_]{2,60})"
    r"(?:=|[\"']?: )[\"']?([^\s\"',;]{1,80})"
)
_LIBRARIES = {
    "torch": re.compile(r"\b(?:py)?torch(?: version)?\W{1,20}v?(\d\.\d{1,2}(?:\.\d{1,2})?)(?:\+\w+)?\b"),
    "cuda": re.compile(
        r"\bcuda(?: runtime| toolkit| used to build pytorch)?(?: version)?\W{1,12}(1[0-9]\.\d)\b"
    ),
    "driver": re.compile(r"\bdriver(?: version)?\W{1,12}(\d{3}\.\d{2,3}(?:\.\d{2})?)\b"),
}
_WSL = re.compile(r"\bwsl ?2?\b|microsoft-standard-wsl")
_ADVISED = re.compile(r"\b(?:add|use|try) `?--([a-z][a-z0-9-]*)(?: ([\w-]+))?")
_SECRET = re.compile(r"key|token|secret|passw", re.IGNORECASE)
_MOST, _CALL_LINES = 200, 30


@dataclass
class Settings:
    """The start of a server."""

    flags: dict[str, str] = field(default_factory=dict)
    """Flag without dashes -> its value, or an empty string; of command lines, compose files and calls."""
    variables: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    """torch, cuda, driver -> version."""
    wsl: bool = False
    shown: bool = False
    """True if the text shows the arguments of the server."""


@dataclass
class SettingsReader(Settings):
    """The start of a server, filled line by line."""

    _continued: bool = False
    _call: int = 0
    """Lines of a Python call that may still come."""

    def read(self, shown: str) -> None:
        """Take in one line as it is written."""
        lower = shown.lower()
        command = _COMMAND.search(shown)
        if command or self._continued or _ITEM.match(shown):
            self.shown |= command is not None
            self._add(_FLAG.findall(shown[command.start() :] if command else shown))
            self._continued = shown.endswith("\\")
        if arguments := _ARGUMENTS.search(lower):
            self.shown = True
            self._add(_ARGUMENT.findall(shown[arguments.end() :]))
        call = _CALL.search(shown)
        if call or self._call:
            self.shown |= call is not None
            self._add(_ARGUMENT.findall(shown[call.end() :] if call else shown))
            self._call = _CALL_LINES if call else self._call - 1
            if shown.endswith(")"):
                self._call = 0
        for name, value in _VARIABLE.findall(shown):
            if len(self.variables) < _MOST:
                self.variables[name] = value.rstrip(".)")
        for name, pattern in _LIBRARIES.items():
            if name not in self.libraries and (match := pattern.search(lower)):
                self.libraries[name] = match[1]
        self.wsl = self.wsl or ("wsl" in lower and _WSL.search(lower) is not None)

    def explain_repetition(self, step: str) -> str:
        """Return a next step with what it recommends and the text sets already, which then did not help."""
        flags = (
            f"--{name} {value}".strip()
            for name, value in _ADVISED.findall(step)
            if self.flags.get(name) in ([value] if value else ["", "True"])
        )
        variables = (
            f"{name}={value}"
            for name, value in re.findall(r"\b([A-Z][A-Z0-9_]{4,60})=([\w.]{1,40})", step)
            if self.variables.get(name) == value
        )
        again = dict.fromkeys((*flags, *variables))
        return f"{step}; the text sets {' and '.join(again)} already" if again else step

    def mask(self, redactor: Redactor) -> Settings:
        """Return what may be shown: without secrets and control characters."""
        masked = {
            kind: {
                escape(name): escape(redactor.mask(value))
                for name, value in getattr(self, kind).items()
                if not _SECRET.search(name)
            }
            for kind in ("flags", "variables")
        }
        return Settings(masked["flags"], masked["variables"], dict(self.libraries), self.wsl, self.shown)

    def _add(self, found: list[tuple[str, str]]) -> None:
        for name, value in found[:_MOST]:
            if len(self.flags) < _MOST:
                self.flags[name.replace("_", "-")] = value.strip("[]()")
