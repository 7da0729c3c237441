"""The start of a server, from words, a compose file or a script, as the words after ``vllm serve``."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from moedoctor.diagnose.settings.flags import split_command
from moedoctor.text import TextFileError, read_text, read_yaml

_MOST_BYTES = 4_000_000
_ENGINES = frozenset({"LLM", "EngineArgs", "AsyncEngineArgs"})
_IMAGE = re.compile(r"vllm", re.IGNORECASE)
_PREFIXES = ("VLLM_", "FLASHINFER_")
TRUST = "--trust-remote-code"


class CommandError(Exception):
    """A command line, compose file or script that starts no server; one line says what was expected."""


@dataclass(frozen=True)
class ServeCommand:
    words: tuple[str, ...]
    """After ``vllm serve``; the model comes first."""
    variables: Mapping[str, str]
    """``VLLM_*`` and ``FLASHINFER_*`` variables that are set with it."""
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return self.words[0]

    @property
    def source(self) -> tuple[str, str]:
        """The model and its revision."""
        pairs = pairwise([word for each in self.words for word in each.split("=", 1)])
        return self.model, next((value for flag, value in pairs if flag == "--revision"), "main")

    def use_sizes(self, tensor_parallel: int, expert_parallel: bool) -> ServeCommand:
        kept = list(
            _drop_flags(self.words, {"--tensor-parallel-size", "-tp"}, {"--enable-expert-parallel", "-ep"})
        )
        kept += ["--tensor-parallel-size", str(tensor_parallel)]
        return replace(self, words=(*kept, *(["--enable-expert-parallel"] if expert_parallel else [])))

    def drop_trust(self) -> ServeCommand:
        """Return the same start without ``--trust-remote-code``, which would run code of the checkpoint."""
        return replace(self, words=tuple(_drop_flags(self.words, (), {TRUST})))


def _drop_flags(words: Sequence[str], valued: Any, switches: Any) -> Iterator[str]:
    skip = False
    for word in words:
        name = word.partition("=")[0].replace("_", "-") if word.startswith("-") else word
        if skip:
            skip = False
        elif name in valued:
            skip = "=" not in word
        elif name not in switches:
            yield word


def read_words(words: Sequence[str]) -> ServeCommand:
    """Return the start that a command line makes. Raises CommandError if it names no model."""
    served = split_command(words)
    command = list(served.command)
    if command and _IMAGE.search(command[0]):
        command = command[1:]
    if command and command[0] == "serve":
        command = command[1:]
    given, rest = None, []
    following = iter(command)
    for word in following:
        if word == "--model":
            given = next(following, None)
        elif word.startswith("--model="):
            given = word.partition("=")[2]
        else:
            rest.append(word)
    if given is None:
        if not rest or rest[0].startswith("-"):
            raise CommandError("the command line names no model, expected: -- vllm serve MODEL [flags]")
        given = rest.pop(0)
    return ServeCommand((given, *rest), dict(served.settings))


def read_compose(path: Path) -> ServeCommand:
    """Return the start of the one service of a compose file that runs vLLM. Raises CommandError."""
    try:
        value = read_yaml(path).data
    except TextFileError as error:
        raise CommandError(f"{path}:{error.line}: {error.message}") from error
    services = value.get("services") if isinstance(value, Mapping) else None
    found = {
        name: service
        for name, service in (services.items() if isinstance(services, Mapping) else ())
        if isinstance(service, Mapping)
        and _IMAGE.search(" ".join(str(service.get(key, "")) for key in ("image", "entrypoint", "command")))
    }
    if len(found) != 1:
        many = f"{len(found)} services run vLLM ({', '.join(found)})" if found else "no service runs vLLM"
        raise CommandError(f"{path}: {many}, expected one with an image or command that names vllm")
    [(name, service)] = found.items()
    try:
        words = [*_split(service.get("entrypoint")), *_split(service.get("command"))]
    except ValueError as error:
        raise CommandError(f"{path}: the command of {name} cannot be split: {error}") from error
    variables = _read_environment(service.get("environment"))
    command = read_words(words)
    own = {key: text for key, text in variables.items() if key.upper().startswith(_PREFIXES)}
    return replace(
        command, variables={**own, **command.variables}, notes=(f"the service {name} of {path.name}",)
    )


def _split(value: Any) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value)
    return [str(item) for item in value] if isinstance(value, Sequence) else []


def _read_environment(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(name): "" if text is None else str(text) for name, text in value.items()}
    pairs = (str(item).partition("=") for item in value or ())
    return {name: text for name, equals, text in pairs if equals}


def read_script(path: Path) -> ServeCommand:
    """Return the start that the first ``LLM(...)`` call of a Python script makes; it is read, not run.

    Raises CommandError without such a call, or if its model is not a text.
    """
    try:
        tree = ast.parse(read_text(path, _MOST_BYTES, "a Python script"))
    except (TextFileError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CommandError(f"{path}: cannot be read as Python: {error}") from error
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in _ENGINES  # vllm.LLM or LLM
    ]
    if not calls:
        raise CommandError(f"{path}: calls neither {' nor '.join(sorted(_ENGINES))}, expected such a call")
    call = min(calls, key=lambda node: node.lineno)
    named = {each.arg: each.value for each in call.keywords if each.arg is not None}
    named |= dict(zip(("model",), call.args, strict=False))
    values, notes = {}, [f"{path.name}:{call.lineno}"]
    for name, node in named.items():
        try:
            values[name] = ast.literal_eval(node)
        except (ValueError, TypeError):
            notes.append(f"{path.name}:{node.lineno}: {name} is not a literal and was not read")
    model = values.pop("model", None)
    if not isinstance(model, str):
        raise CommandError(f'{path}:{call.lineno}: the model is not a text, expected LLM(model="...")')
    flags = (word for name, value in values.items() for word in _make_flag(name, value))
    return ServeCommand((model, *flags), {}, tuple(notes))


def _make_flag(name: str, value: Any) -> list[str]:
    """Return the words of a command line that set an argument of ``LLM``."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, (dict, list, tuple)):
        return [flag, json.dumps(value)]
    return [flag, str(value)]
