"""The origin of a report, so that it can be cited and made again: time, code and command line.

Paths of this machine are left out: of an absolute path only its last part is kept, behind ``…/``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from moedoctor import __version__
from moedoctor.processes.cuda_tools import run_tool
from moedoctor.redaction import HIDDEN, Redactor, strip_folders

ARGUMENTS: ContextVar[tuple[str, ...] | None] = ContextVar("arguments", default=None)
"""The arguments of this call of the command line; None outside it."""

_OURS = ("moedoctor", "scenarios", "pyproject.toml")
_GIT_SECONDS = 10.0
_CHANGE_ANSWERS = (
    "VLLM_",
    "FLASHINFER_",
    "MOEDOCTOR_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "TORCH_CUDA_ARCH_LIST",
)


class Spread(TypedDict):
    """The least, the middle and the largest of several readings."""

    min: float
    median: float
    max: float


class GpuReadings(TypedDict):
    """NVML's readings of one GPU while it worked. A key is absent if the driver does not report it."""

    index: int
    """NVML's number of the GPU."""
    name: str
    samples: int
    busy_samples: int
    """Samples in which the GPU worked; the other values are of these."""
    sm_clock_mhz: NotRequired[Spread]
    sm_clock_limit_mhz: NotRequired[float]
    memory_clock_mhz: NotRequired[Spread]
    power_watts: NotRequired[Spread]
    power_limit_watts: NotRequired[float]
    temperature_celsius: NotRequired[Spread]
    throttle_reasons: NotRequired[dict[str, float]]
    """Reason -> share of the busy samples in which it held clocks down."""


class GpuState(TypedDict):
    """The state of the GPUs during the measurement, or why it is not known."""

    interval_seconds: NotRequired[float]
    gpus: NotRequired[list[GpuReadings]]
    not_sampled: NotRequired[str]


class Origin(TypedDict):
    """The origin of a report."""

    date: str
    """The time when the report was made, in UTC: ``2026-11-23T04:05:06Z``."""
    version: str
    """moedoctor's version."""
    commit: str | None
    """The commit of moedoctor if it runs from a checkout."""
    dirty: bool | None
    """True if that checkout has changes that are not committed."""
    command_line: str | None
    """The call, without secrets and folders of the machine; None if Python code called it."""
    again: list[str]
    """Lines of a shell that make the report again."""
    iterations: NotRequired[dict[str, Any]]
    """The number of repeats of each measurement."""
    gpu_state: NotRequired[GpuState]


def record_origin(
    *,
    variables: Mapping[str, str] | None = None,
    gpu_state: GpuState | None = None,
    iterations: Mapping[str, Any] | None = None,
) -> Origin:
    """Return the origin of a report that is made now.

    `variables` are those of the environment that the report shows; the ones that change an answer are part of
    the lines that make the report again.
    """
    commit, dirty = describe_checkout()
    arguments = ARGUMENTS.get()
    line = None if arguments is None else write_command_line(arguments)
    made: Origin = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "version": __version__,
        "commit": commit,
        "dirty": dirty,
        "command_line": line,
        "again": _repeat_commands(line, commit, dirty, variables or {}),
    }
    if iterations is not None:
        made["iterations"] = dict(iterations)
    if gpu_state is not None:
        made["gpu_state"] = gpu_state
    return made


def write_command_line(arguments: Sequence[str]) -> str:
    """Return the call as a line for a shell, without secrets and without folders of this machine."""
    return strip_folders(Redactor.from_this_process().mask(shlex.join(["moedoctor", *arguments])))


def describe_checkout(folder: Path | None = None) -> tuple[str | None, bool | None]:
    """Return (commit, whether it was changed) of the checkout that moedoctor runs from; (None, None) if none.

    Git writes nothing, and runs no program that the checkout's settings name.
    """
    root = Path(__file__).parent.parent if folder is None else folder
    git = shutil.which("git") if (root / ".git").exists() else None
    if git is None:
        return None, None
    quiet = ["--no-optional-locks", "-c", "core.fsmonitor=false", "-C", os.fspath(root)]
    try:
        answer = run_tool(
            git, [*quiet, "status", "--porcelain=v2", "--branch", "--", *_OURS], seconds=_GIT_SECONDS
        )
    except OSError:
        return None, None
    lines = answer.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    if answer.code != 0 or commit is None or not re.fullmatch("[0-9a-f]{40,64}", commit):
        return None, None
    return commit, any(not line.startswith("#") for line in lines)


def _repeat_commands(
    line: str | None, commit: str | None, dirty: bool | None, variables: Mapping[str, str]
) -> list[str]:
    if line is None:
        return []
    # A value with a folder or a secret means nothing on another machine.
    settings = [
        f"{name}={shlex.quote(value)}"
        for name, value in variables.items()
        if name.startswith(_CHANGE_ANSWERS) and HIDDEN not in value and "/" not in value
    ]
    changes = "  # and changes that are not committed" if dirty else ""
    checkout_line = [f"git checkout {commit}{changes}"] if commit else []
    return [*checkout_line, " ".join([*settings, line])]
