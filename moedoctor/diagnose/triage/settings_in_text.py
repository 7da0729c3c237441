"""The start of a server as a text tells of it: flags, variables, sizes, versions of libraries, WSL."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from moedoctor.diagnose.triage.cause import load_lines
from moedoctor.diagnose.triage.signatures import load_data
from moedoctor.redaction import Redactor
from moedoctor.text import escape

_LIBRARIES = ("torch", "cuda", "driver")
_SECRET = re.compile(r"key|token|secret|passw", re.IGNORECASE)
_COUNTS = re.compile(
    r"(?:max|num)[-_](?:[a-z]{1,20}[-_]){0,2}tokens\b|\btokenizer(?:-mode|-revision)?\b(?![-_])",
    re.IGNORECASE,
)
"""Words of tokens that a model reads, which are no secret."""
_INNERMOST = re.compile(r"[(\[{<][^()\[\]{}<>]*[)\]}>]")
_MOST, _CALL_LINES, _MOST_VALUE, _DEPTH = 200, 30, 120, 12
_LIST_LINES = 12
_MODEL = "model-tag"
"""The name of the positional argument of `vllm serve`."""


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
    _flag: str = ""
    """The flag whose value may come next."""
    _in_words: bool = False
    """True if no command line names the model."""
    _call: int = 0
    """Lines of a Python call that may still come."""
    _listed: int = 0
    """Lines that may still come of a list of attempts."""
    attempts: dict[str, None] = field(default_factory=dict)
    """Attempts that the text says change nothing, as `list_settings` names them."""

    def read(self, shown: str, of_another: bool = False) -> None:
        """Take in one line as it is written; `of_another` is True for a quotation."""
        lower, lines = shown.lower(), load_lines()
        if not of_another:
            self._read_attempts(shown, lower)
        command = lines["command"].search(shown)
        if command:
            self.shown, self._flag = True, _MODEL if "serve" in command[0] else ""
        listed = self._flag not in ("", _MODEL) and lines["lone"].match(shown)
        if command or self._continued or listed or lines["item"].match(shown):
            ended = self._read_words(shown[command.end() :] if command else shown, 2)
            self._continued = shown.endswith(("\\", " ^")) and not ended
        else:
            self._flag = ""
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
        if not self.model or (self._in_words and not lines["moe_name"].search(self.model)):
            named = [match[0].rstrip(".") for match in lines["model"].finditer(shown)]
            with_experts = [name for name in named if lines["moe_name"].search(name)]
            if with_experts or (named and not self.model):
                self.model, self._in_words = (with_experts or named)[0], True
        for name, value in lines["variable"].findall(shown):
            if len(self.variables) < _MOST:
                self.variables[name] = value.rstrip(".):")
        for name in _LIBRARIES:
            if name not in self.libraries and (match := lines[name].search(lower)):
                self.libraries[name] = match[1]
        self.wsl = self.wsl or ("wsl" in lower and lines["wsl"].search(lower) is not None)

    def _read_attempts(self, shown: str, lower: str) -> None:
        """Take in settings that a sentence, or an item of a list of attempts, says to change nothing."""
        lines, blank = load_lines(), not lower.strip()
        listed = self._listed > 0 and not blank and not lines["command"].search(shown)
        if lines["attempts"].search(lower):
            self._listed = _LIST_LINES
        elif not blank or self._listed < _LIST_LINES:  # a blank line may stand before the list, and ends it
            self._listed = self._listed - 1 if listed else 0
        for sentence in re.split(r"(?<=[.!?;]) |, but ", shown):
            clause = sentence.lower()
            if lines["helped"].search(clause) or not (listed or lines["no_help"].search(clause)):
                continue
            rows = load_data("facts.yaml")["attempts"].items()
            found = [*list_settings(sentence), *(name for name, known in rows if re.search(known, clause))]
            self.attempts.update(dict.fromkeys(found[: _MOST - len(self.attempts)]))

    def mask(self, redactor: Redactor) -> Settings:
        """Return what may be shown: without secrets and control characters."""
        masked = {
            kind: {
                escape(name): escape(redactor.mask(value))
                for name, value in getattr(self, kind).items()
                if not _SECRET.search(_COUNTS.sub("", name))
            }
            for kind in ("flags", "variables")
        }
        flags, variables = masked["flags"], masked["variables"]
        model = redactor.mask(self.model)
        return Settings(flags, variables, dict(self.libraries), self.wsl, self.shown, model)

    def _read_words(self, text: str, depth: int) -> bool:
        """Take in words of a command line, as a shell reads them; return True if the command ends there."""
        at, here = 0, False
        for _ in range(_MOST):
            word = load_lines()["word"].match(text, at)
            if word is None or word["stop"] or word.end() == at:
                return word is not None and word["stop"] is not None
            at, quoted = word.end(), word["text"]
            value = quoted or (word["bare"] or "").strip("\"'").rstrip("\\^")
            flag = load_lines()["flag"].match(f"{word['key'] or ''}{value}")
            if depth and quoted and not word["key"] and re.match(r"--[a-z][\w-]* ", value) and not here:
                self._read_words(value, depth - 1)  # some words in one quotation, in a list
            elif flag and (word["key"] or flag["set"] or " " not in value):
                name = load_data("facts.yaml")["short_flags"].get(flag["name"], flag["long"] and flag["name"])
                self._add([(name, flag["value"] or "")] if name and (name != "model" or flag["set"]) else [])
                self._flag, here = "" if flag["set"] else name or "", True
            elif value and self._flag in (_MODEL, "model"):
                self.model, self._flag, self._in_words = value, "", False
            elif value and self._flag and value[0] != "-":
                self._add([(self._flag, value)])
                self._flag, here = "", False
        return False

    def _add(self, found: list[tuple[str, str]]) -> None:
        for name, value in found[:_MOST]:
            if len(self.flags) < _MOST:
                value = "" if _SECRET.search(_COUNTS.sub("", value)) else value.strip("[]()")[:_MOST_VALUE]
                self.flags[name.replace("_", "-")] = value


def _cut_nested(text: str) -> str:
    """Return arguments without what is inside the brackets of one of them, such as a configuration."""
    for _ in range(_DEPTH):
        text, count = _INNERMOST.subn("…", text)
        if not count:
            break
    return text


def list_settings(text: str) -> list[str]:
    """Return the flags and variables that a text names: ``--x VALUE``, ``without --x`` or ``X=1``."""
    return [
        match["variable"]
        or f"{'without ' if match['absent'] else ''}{match['flag']} {match['value'] or ''}".strip()
        for match in load_lines()["setting"].finditer(text)
    ]
