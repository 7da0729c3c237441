"""The start of a server as a text tells of it: flags, variables, sizes, versions of libraries, WSL."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from moedoctor.diagnose.triage.cause import load_lines
from moedoctor.redaction import Redactor
from moedoctor.text import escape

_LIBRARIES = ("torch", "cuda", "driver")
_SECRET = re.compile(r"key|token|secret|passw", re.IGNORECASE)
_INNERMOST = re.compile(r"[(\[{<][^()\[\]{}<>]*[)\]}>]")
_DEPTH = 12
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
    model: str = ""
    """The model that is served, or the first one that the text names."""

    def explain_repetition(self, step: str) -> str:
        """Return a next step with what it recommends and the text sets already, which then did not help."""
        flags = (
            f"--{name} {value}".strip()
            for name, value in load_lines()["advised"].findall(step)
            if self.flags.get(name) in ([value] if value else ["", "True"])
        )
        variables = (
            f"{name}={value}"
            for name, value in re.findall(r"\b([A-Z][A-Z0-9_]{4,60})=([\w.]{1,40})", step)
            if self.variables.get(name) == value
        )
        again = dict.fromkeys((*flags, *variables))
        return f"{step}; the text sets {' and '.join(again)} already" if again else step


@dataclass
class SettingsReader(Settings):
    """The start of a server, filled line by line."""

    _continued: bool = False
    _call: int = 0
    """Lines of a Python call that may still come."""

    def read(self, shown: str) -> None:
        """Take in one line as it is written."""
        lower, lines = shown.lower(), load_lines()
        command = lines["command"].search(shown)
        if command or self._continued or lines["item"].match(shown):
            self.shown |= command is not None
            self.model = (command and command["model"]) or self.model
            self._add(lines["flag"].findall(shown[command.start() :] if command else shown))
            self._continued = shown.endswith("\\")
        if arguments := lines["arguments"].search(lower):
            self.shown = True
            self._add(lines["argument"].findall(_cut_nested(shown[arguments.end() :])))
        call = lines["call"].search(shown)
        if call or self._call:
            self.shown |= call is not None
            self._add(lines["argument"].findall(shown[call.end() :] if call else shown))
            self._call = _CALL_LINES if call else self._call - 1
            if shown.endswith(")"):
                self._call = 0
        if not self.model and (named := lines["model"].search(shown)):
            self.model = named[0]
        for name, value in lines["variable"].findall(shown):
            if len(self.variables) < _MOST:
                self.variables[name] = value.rstrip(".)")
        for name in _LIBRARIES:
            if name not in self.libraries and (match := lines[name].search(lower)):
                self.libraries[name] = match[1]
        self.wsl = self.wsl or ("wsl" in lower and lines["wsl"].search(lower) is not None)

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
        flags, variables = masked["flags"], masked["variables"]
        model = redactor.mask(self.model)
        return Settings(flags, variables, dict(self.libraries), self.wsl, self.shown, model)

    def _add(self, found: list[tuple[str, str]]) -> None:
        for name, value in found[:_MOST]:
            if len(self.flags) < _MOST:
                self.flags[name.replace("_", "-")] = value.strip("[]()")


def _cut_nested(text: str) -> str:
    """Return arguments without what is inside the brackets of one of them, such as a configuration."""
    for _ in range(_DEPTH):
        text, count = _INNERMOST.subn("…", text)
        if not count:
            break
    return text
