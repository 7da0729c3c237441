"""Asks a release of vLLM, in a child process with limits, whether command lines would start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moedoctor.diagnose.preflight.command import ServeCommand
from moedoctor.diagnose.preflight.judge import answer_unasked, judge_start
from moedoctor.diagnose.preflight.model import Headers, read_headers
from moedoctor.diagnose.preflight.records import StartAnswer
from moedoctor.processes.ask import run_module, search_path
from moedoctor.text import shorten
from moedoctor.upstream.releases.wheel import KernelError, unpack

_CHILD = "moedoctor.upstream.preflight.child"
_PARTS = re.compile(
    r"vllm/.+\.(?:py|json|jinja|yaml|txt)|vllm/_(?:C|moe_C|qutlass_C|flashmla_C)\w*\.abi3\.so|vllm-[^/]+\.dist-info/.+"
)
"""The files of a wheel that answer: its Python code, and the compiled parts whose text names operators."""
_MEMORY_LIMIT = 64 << 30
"""Bytes of address space; torch reserves much more than it uses."""
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_PLUGINS": "",
    "OMP_NUM_THREADS": "1",  # a fork of a process with OpenMP's threads hangs
}


class ReleaseError(Exception):
    """A release that cannot be asked; one line says what was expected."""


@dataclass(frozen=True)
class Release:
    """The place of a vLLM: this environment, another Python, or an unpacked wheel."""

    name: str
    python: str = sys.executable
    folder: Path | None = None
    """A folder with the package vllm, put before what the environment has."""


@dataclass(frozen=True)
class Question:
    """Everything about a start that the command line does not say."""

    capability: tuple[int, int]
    memory: int
    """Bytes of one GPU."""
    gpus: int
    ranks: tuple[int, ...] | None = None
    post: bool = False
    trust_remote_code: bool = False
    seconds: float = 600.0
    names: bool = True
    """Without a checkpoint: make the tensors that the release would read, and load them."""


def find_installed() -> Release | None:
    """Return the vLLM of this environment, or None without one."""
    try:
        return Release(importlib.metadata.version("vllm").partition("+")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def find_release(text: str) -> Release:
    """Return the release of a wheel, a folder with the package vllm, or a Python. Raises ReleaseError."""
    path = Path(text)
    if os.path.isdir(path) and os.path.isfile(path / "vllm" / "__init__.py"):
        return Release(path.name, folder=path.resolve())
    if not os.path.isfile(path):
        raise ReleaseError(
            f"{shorten(text)}: is neither a file nor a folder with vllm; expected a wheel (`pip download "
            "--no-deps vllm==X.Y.Z`), an unpacked one, or a Python"
        )
    if path.suffix == ".whl":
        try:
            return Release(path.name.split("-")[1], folder=unpack(path, "preflight", _PARTS))
        except (KernelError, IndexError) as error:
            raise ReleaseError(str(error)) from error
    if not os.access(path, os.X_OK):
        raise ReleaseError(f"{shorten(text)}: is neither a wheel nor a program; expected a Python")
    return Release(shorten(text), python=os.path.abspath(path))


def ask_release(
    release: Release, commands: Sequence[ServeCommand], question: Question, headers: Headers
) -> list[StartAnswer]:
    """Return the answer of a release to each command line, whose models are folders.

    `headers` has the tensors of their files. Raises Interrupted inside `interrupts.hold_signals`.
    """
    with _enter_environment(release) as environ:
        trusted = commands if question.trust_remote_code else [each.drop_trust() for each in commands]
        request = {
            **asdict(question),
            "memory_limit": _MEMORY_LIMIT,
            "headers": {**headers, **_read_drafts(commands)},
            "commands": [{"words": each.words, "variables": dict(each.variables)} for each in trusted],
        }
        ended = run_module(_CHILD, request, seconds=question.seconds, environ=environ, python=release.python)
    environment: Mapping[str, Any] = ended.answers[0] if ended.answers else {}
    why = environment.get("problem") or ended.problem or "it gave no answer"
    version = environment.get("versions", {}).get("vllm", release.name)
    replies = ended.answers[1:]
    answers = [
        judge_start(reply, environment, each.words, each.variables)
        for reply, each in zip(replies, commands, strict=False)
    ]
    return [*answers, *(answer_unasked(version, each.words, why) for each in commands[len(answers) :])]


@contextlib.contextmanager
def _enter_environment(release: Release) -> Iterator[dict[str, str]]:
    """Give the variables with which the child finds this moedoctor and the release, and no GPU."""
    if release.python == sys.executable:
        folders = [str(release.folder)] if release.folder is not None else []
        yield {**_QUIET, "PYTHONPATH": os.pathsep.join([*folders, search_path()])}
        return
    # The folder of this package holds other packages, too, which must not hide those of the other Python.
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        os.symlink(Path(__file__).parents[2], Path(folder, "moedoctor"))
        yield {**_QUIET, "PYTHONPATH": folder}


def _read_drafts(commands: Sequence[ServeCommand]) -> dict[str, Any]:
    """Return the headers of the draft models that ``--speculative-config`` names as folders."""
    headers: dict[str, Any] = {}
    for command in commands:
        for place, word in enumerate(command.words):
            name, _, value = word.partition("=")
            if name.replace("_", "-") not in ("--speculative-config", "-sc"):
                continue
            text = value or " ".join(command.words[place + 1 : place + 2])
            with contextlib.suppress(ValueError):
                config = json.loads(text)
                draft = config.get("model") if isinstance(config, dict) else None
                if isinstance(draft, str) and os.path.isdir(draft):
                    headers.update(read_headers(Path(draft)))
    return headers
