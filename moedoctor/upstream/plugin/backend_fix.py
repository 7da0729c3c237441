"""The fix `backend`: ``VLLM_NVFP4_MOE_BACKEND`` is honoured, and the selection is logged with its reasons.

The variable is what vllm-project/vllm#38971 asked for; no release reads it. Where the model is NVFP4 and no
backend was asked for otherwise, the engine's ``moe_backend`` is set to what the variable names, as
``--moe-backend`` sets it. vLLM logs at DEBUG why it passes a backend over; here that is raised to INFO, and
where the variable decides, what it would have selected and why is logged from the tables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from moedoctor.fixes.backends import select
from moedoctor.fixes.backends.requests import NVFP4_VARIABLE, Wanted, wanted_backend
from moedoctor.upstream.plugin.fix_support import expect, replace_once

logger = logging.getLogger("vllm.moedoctor")

ORACLES = "vllm.model_executor.layers.fused_moe.oracle."
"""What the names of the modules that select backends begin with."""
_EXPECTED = ('if self.moe_backend != "auto":', "kernel_config.moe_backend = self.moe_backend")
"""How a release hands --moe-backend to the engine; what is set below is what this sets."""
_FP4_METHODS = ("modelopt_fp4", "petit_nvfp4", "nvfp4_per_token")
_OWN_COMMUNICATION = "flashinfer_moe_ep"
"""Backends that the engine must know of before its parallel settings are made."""


def apply(version: str) -> str:
    """Apply the fix to the vLLM of this process, of release `version`; what is active, in a few words.

    Raises FixError where vLLM is not as expected; nothing has been changed then. A value of the variable
    that the release cannot honour is warned of when the engine is configured.
    """
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    expect(arguments, "create_engine_config", ("self", "usage_context", "headless"), _EXPECTED)
    loggers = importlib.import_module("vllm.logger")
    expect(loggers, "init_logger", ("name",), ("getLogger(name)",))
    replace_once(arguments, "create_engine_config", functools.partial(_honouring, version=version))
    replace_once(loggers, "init_logger", _louder)
    selecting: list[Any] = [one for name, one in sys.modules.items() if name.startswith(ORACLES)]
    for module in selecting:
        if hasattr(module, "logger") and not isinstance(module.logger, LouderLogger):
            module.logger = LouderLogger(module.logger)
    wanted = wanted_backend(os.environ, version)
    if wanted is None:
        return f"reasons of the selection are logged; {NVFP4_VARIABLE} is not set"
    if wanted.flag is None:
        return f"reasons of the selection are logged; {wanted.problem}"
    return f"{os.environ[NVFP4_VARIABLE]} for NVFP4 MoE, reasons of the selection are logged"


def _honouring(original: Any, *, version: str) -> Any:
    """`create_engine_config`, with the variable honoured in what it returns."""

    @functools.wraps(original)
    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        config = original(self, *arguments, **options)
        try:
            honoured = _honour(config, wanted_backend(os.environ, version))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            logger.warning("moedoctor: %s could not be honoured: %s", NVFP4_VARIABLE, said)
            return config
        if honoured:
            # vLLM looks at no other backend now, and has no reasons to log: those of the tables stand in.
            with contextlib.suppress(Exception):
                for line in reasons(config, version):
                    logger.info("moedoctor: %s", line)
        return config

    return create_engine_config


def _honour(config: Any, wanted: Wanted | None) -> bool:
    """Whether the configuration was changed."""
    if wanted is None:
        return False
    kernels, value = config.kernel_config, os.environ.get(NVFP4_VARIABLE)
    if wanted.flag is None:
        logger.warning("moedoctor: %s", wanted.problem)
    elif wanted.flag.startswith(_OWN_COMMUNICATION):
        logger.warning("moedoctor: %s=%s: ask with --moe-backend %s", NVFP4_VARIABLE, value, wanted.flag)
    elif kernels.moe_backend != "auto":
        if kernels.moe_backend != wanted.flag:
            asked = kernels.moe_backend
            logger.warning("moedoctor: %s=%s gives way to moe_backend=%s", NVFP4_VARIABLE, value, asked)
    elif not is_nvfp4(config.model_config):
        logger.info("moedoctor: %s=%s is not for this model, which is not NVFP4", NVFP4_VARIABLE, value)
    else:
        kernels.moe_backend = wanted.flag
        logger.info("moedoctor: moe_backend=%s, as %s=%s asks", wanted.flag, NVFP4_VARIABLE, value)
        return True
    return False


def reasons(config: Any, version: str) -> Iterator[str]:
    """What vLLM would have selected for this engine by itself, then each backend with its reason."""
    platform = importlib.import_module("vllm.platforms").current_platform
    major, minor = platform.get_device_capability()[:2]
    parallel = config.parallel_config
    described = getattr(config.model_config, "hf_config", None)
    activation = getattr(described, "mlp_hidden_act", None) or getattr(described, "hidden_act", None)
    selection = select(
        f"{major}.{minor}",
        "nvfp4",
        release=version,
        ep=bool(getattr(parallel, "enable_expert_parallel", False)),
        dp=getattr(parallel, "data_parallel_size", 1) > 1,
        activation="relu2_no_mul" if activation == "relu2" else "silu",  # relu2: Nemotron, no gate
        environ=os.environ,
    )
    yield f"by itself vLLM would select {selection.chosen or 'nothing'} on compute capability {major}.{minor}"
    yield from (f"{one.backend}: {one.reason}" for one in selection.candidates)


def is_nvfp4(model_config: Any) -> bool:
    """Whether the model's own configuration says NVFP4, in the words of ModelOpt, compressed-tensors or
    vLLM."""
    if model_config is None:
        return False
    if str(getattr(model_config, "quantization", None)) in _FP4_METHODS:
        return True
    described = getattr(getattr(model_config, "hf_config", None), "quantization_config", None)
    if not isinstance(described, Mapping):
        described = getattr(described, "to_dict", dict)()
    return "nvfp4" in repr(described).lower()


def _louder(original: Any) -> Any:
    """`init_logger`, louder for the modules that select backends; a model that is built imports those."""

    @functools.wraps(original)
    def init_logger(name: str) -> Any:
        logger = original(name)
        return LouderLogger(logger) if name.startswith(ORACLES) else logger

    return init_logger


class LouderLogger:
    """vLLM's logger of one module; what it logs once at DEBUG it logs once at INFO."""

    def __init__(self, quiet: Any) -> None:
        self._quiet = quiet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._quiet, name)

    def debug_once(self, message: str, *arguments: Any, **options: Any) -> None:
        """Why a backend was passed over."""
        self._quiet.info_once(message, *arguments, **options)
