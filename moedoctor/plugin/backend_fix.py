"""The fix `backend`: ``VLLM_NVFP4_MOE_BACKEND`` is honored, and the selection is logged with its reasons.

vllm-project/vllm#38971 asked for the variable; no release reads it. If the model is NVFP4 and no backend was
asked for otherwise, this fix sets the engine's ``moe_backend`` to the variable's backend, as
``--moe-backend`` does. vLLM logs at DEBUG why it does not use a backend; this fix raises that to INFO. If the
variable decides, it logs from our tables what vLLM would have selected, and why.
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
from moedoctor.fixes.backends.requests import NVFP4_VARIABLE, Wanted, read_wanted_backend
from moedoctor.plugin.register import Patch, apply_patches, refuse

logger = logging.getLogger("vllm.moedoctor")

NAME = "backend"
ORACLES = "vllm.model_executor.layers.fused_moe.oracle."
"""Prefix of the modules that select backends."""
_EXPECTED = ('if self.moe_backend != "auto":', "kernel_config.moe_backend = self.moe_backend")
"""The field through which a release passes --moe-backend to the engine; this fix sets the same field."""
_FP4_METHODS = ("modelopt_fp4", "petit_nvfp4", "nvfp4_per_token")
_OWN_COMMUNICATION = "flashinfer_moe_ep"
"""Backends that the engine must know of before its parallel settings are made."""


def apply(version: str) -> str:
    """Apply the fix; see `moedoctor.plugin.register`.

    A name that the release does not have, or that only the flag can ask for, stops an engine of an NVFP4
    model that asks for no backend by the flag.
    """
    arguments = "vllm.engine.arg_utils:EngineArgs"
    configuring = functools.partial(_wrap_create_engine_config, version=version)
    patches = (
        Patch(arguments, "create_engine_config", configuring, "self usage_context headless", _EXPECTED),
        Patch("vllm.logger", "init_logger", _wrap_init_logger, "name", ("getLogger(name)",)),
    )
    apply_patches(NAME, version, patches)
    selecting: list[Any] = [module for name, module in sys.modules.items() if name.startswith(ORACLES)]
    for module in selecting:
        if hasattr(module, "logger") and not isinstance(module.logger, LouderLogger):
            module.logger = LouderLogger(module.logger)
    wanted = read_wanted_backend(os.environ, version)
    if wanted is None:
        return f"reasons of the selection are logged; {NVFP4_VARIABLE} is not set"
    if wanted.flag is None:
        return f"reasons of the selection are logged; {wanted.problem}"
    return f"{os.environ[NVFP4_VARIABLE]} for NVFP4 MoE, reasons of the selection are logged"


def _wrap_create_engine_config(original: Any, *, version: str) -> Any:
    """Wrap `create_engine_config`: honor the variable in what it returns."""

    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        config = original(self, *arguments, **options)
        try:
            honored = _apply_variable(config, read_wanted_backend(os.environ, version))
        except Exception as error:
            refuse(NAME, f"{NVFP4_VARIABLE} could not be honored: {type(error).__name__}: {error}")
            return config
        if honored:
            # vLLM looks at no other backend now, so it has no reasons to log; the tables have.
            with contextlib.suppress(Exception):
                for line in explain_selection(config, version):
                    logger.info("moedoctor: %s", line)
        return config

    return create_engine_config


def _apply_variable(config: Any, wanted: Wanted | None) -> bool:
    """Change the configuration if the variable applies; return whether it was changed.

    Raises SystemExit if the variable applies and cannot be honored, unless the fix is optional.
    """
    if wanted is None:
        return False
    kernels, value = config.kernel_config, os.environ.get(NVFP4_VARIABLE)
    if kernels.moe_backend != "auto":
        if kernels.moe_backend != wanted.flag:
            asked = kernels.moe_backend
            logger.warning("moedoctor: %s=%s gives way to moe_backend=%s", NVFP4_VARIABLE, value, asked)
    elif not is_nvfp4(config.model_config):
        logger.info("moedoctor: %s=%s is not for this model, which is not NVFP4", NVFP4_VARIABLE, value)
    elif wanted.flag is None:
        refuse(NAME, wanted.problem or f"{NVFP4_VARIABLE}={value} names no backend")
    elif wanted.flag.startswith(_OWN_COMMUNICATION):
        flag = f"ask with --moe-backend {wanted.flag}"
        refuse(NAME, f"{NVFP4_VARIABLE}={value} comes too late for the engine's parallel settings; {flag}")
    else:
        kernels.moe_backend = wanted.flag
        logger.info("moedoctor: moe_backend=%s, as %s=%s asks", wanted.flag, NVFP4_VARIABLE, value)
        return True
    return False


def explain_selection(config: Any, version: str) -> Iterator[str]:
    """Yield what vLLM would have selected for this engine by itself, then each backend with its reason."""
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
    yield from (f"{candidate.backend}: {candidate.reason}" for candidate in selection.candidates)


def is_nvfp4(model_config: Any) -> bool:
    """Return True if the model is NVFP4, by the names of ModelOpt, compressed-tensors or vLLM."""
    if model_config is None:
        return False
    if str(getattr(model_config, "quantization", None)) in _FP4_METHODS:
        return True
    described = getattr(getattr(model_config, "hf_config", None), "quantization_config", None)
    if not isinstance(described, Mapping):
        described = getattr(described, "to_dict", dict)()
    return "nvfp4" in repr(described).lower()


def _wrap_init_logger(original: Any) -> Any:
    """Wrap `init_logger`: louder for the modules that select backends, which models import when built."""

    def init_logger(name: str) -> Any:
        logger = original(name)
        return LouderLogger(logger) if name.startswith(ORACLES) else logger

    return init_logger


class LouderLogger:
    """The logger of a vLLM module that logs at INFO what the module logs once at DEBUG."""

    def __init__(self, quiet: Any) -> None:
        self._quiet = quiet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._quiet, name)

    def debug_once(self, message: str, *arguments: Any, **options: Any) -> None:
        """Log why a backend is not used."""
        self._quiet.info_once(message, *arguments, **options)
