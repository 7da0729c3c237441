"""The selection of the installed vLLM, with variables and flags set, on a GPU of any capability.

For a child process only: the platform that is substituted stays so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from moedoctor.fixes import backends
from moedoctor.fixes.backends.requests import NVFP4_VARIABLE
from moedoctor.results import UnavailableError
from moedoctor.upstream.selection.oracle import Layer, Oracle
from moedoctor.upstream.selection.substitute import SubstituteError


@dataclass(frozen=True)
class Started:
    selected: str | None
    refused: str = ""
    """The reason why the start was refused; empty if it was not."""
    warned: bool = False
    """A message names the setting, but not what to set instead."""
    advice: str = ""
    """The setting that a message names instead."""


class InstalledSelection:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    @classmethod
    def from_this_environment(cls, release: str) -> InstalledSelection:
        """Return the installed vLLM. Raises UnavailableError if it is not `release` or cannot be asked."""
        installed = find_installed_release()
        if installed != release:
            raise UnavailableError(f"this point is about vLLM {release}, and {installed} is installed")
        try:
            return cls(Oracle())
        except SubstituteError as error:
            raise UnavailableError(str(error)) from error

    def start(self, capability: str, layer: Layer, environ: Mapping[str, str]) -> Started:
        """Select with these variables in the environment of this process."""
        major, _, minor = capability.partition(".")
        with mock.patch.dict(os.environ, environ):
            asked = self._oracle.ask((int(major), int(minor)), layer)
            warnings = _collect_warnings()
        warned = any(name in line for name in environ for line in warnings)
        return Started(asked.chosen, asked.error or "", warned)

    def list_overrides(self, capability: tuple[int, int], activation: str) -> dict[str, Any]:
        """Return the effect of flags and variables on the selection for NVFP4 layers at this capability."""

        def choose(moe_backend: str = backends.AUTO, activation: str = activation, **environ: str) -> str:
            with mock.patch.dict(os.environ, environ):
                layer = Layer("nvfp4", activation, moe_backend=moe_backend)
                asked = self._oracle.ask(capability, layer)
            return asked.chosen or f"an error: {asked.error}"

        declared: Mapping[str, Any] = importlib.import_module("vllm.envs").environment_variables
        gemm = "VLLM_NVFP4_GEMM_BACKEND"
        libraries = self._oracle.substitute.find_libraries()
        return {
            "vllm": find_installed_release(),
            "flashinfer_usable": bool(libraries.get("flashinfer")),
            "automatic": choose(),
            # Layers with a gate, which all releases' VLLM_CUTLASS takes.
            "with_flag_marlin": choose("marlin", "silu"),
            "with_flag_cutlass": choose("cutlass", "silu"),
            "variable_declared": NVFP4_VARIABLE in declared,
            "with_variable_MARLIN": choose(**{NVFP4_VARIABLE: "MARLIN"}),
            "with_variable_VLLM_CUTLASS": choose(**{NVFP4_VARIABLE: "VLLM_CUTLASS"}),
            "gemm_declared": gemm in declared,
            "with_gemm_variable": choose(**{gemm: "marlin"}),
            "gemm_capitals": _find_refusal(declared, gemm, "MARLIN"),
            "gemm_small": _find_refusal(declared, gemm, "marlin"),
        }


def find_installed_release() -> str:
    """Return the release of the vLLM of this environment. Raises UnavailableError if there is none."""
    try:
        return importlib.metadata.version("vllm").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise UnavailableError("vllm is not installed here") from None


def _find_refusal(declared: Mapping[str, Any], name: str, value: str) -> str:
    """Return the error of reading a variable with this value; empty without one, or if nothing reads it."""
    if name not in declared:
        return ""
    with mock.patch.dict(os.environ, {name: value}):
        try:
            declared[name]()
        except ValueError as error:
            return f"ValueError: {' '.join(str(error).split())}"
    return ""


def _collect_warnings() -> list[str]:
    """Return the warnings that vLLM prints about the environment when it configures an engine."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    envs: Any = importlib.import_module("vllm.envs")
    validate = getattr(envs, "validate_environ", None)
    if validate is None:  # moved to the platform by 0.33.0
        validate = importlib.import_module("vllm.platforms").current_platform.validate_environ
    keep = Keep(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm.envs", "vllm.platforms.interface")]
    for logger in loggers:
        logger.addHandler(keep)
    try:
        validate(False)
    finally:
        for logger in loggers:
            logger.removeHandler(keep)
    return lines
