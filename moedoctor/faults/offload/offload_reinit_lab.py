"""The child process for MD009: our or upstream's function that rebuilds the input batch, on a mock runner."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

from moedoctor.faults.offload.offload_reinit import OffloadReinitParameters
from moedoctor.plugin.offload_fix import skip_assertion
from moedoctor.results import Case, Evidence
from moedoctor.upstream.releases.release_source import ReleaseSource

FILE = "vllm/v1/worker/gpu_model_runner.py"
FUNCTION = "GPUModelRunner.may_reinitialize_input_batch"
DEFAULT = (16,)
LENGTH = 4096
LAYOUTS = {"hybrid": (784, 784, 16), "block_size": (32,)}
"""Block sizes of the KV-cache groups; a hybrid model pads its attention blocks up to a state of its other
layers."""

_MODES = types.SimpleNamespace(NONE=0, TOKEN_TO_KV_SLOT=1)

Rebuild = Callable[[Any, Any, list[int]], None]
"""(runner, KV-cache config, kernel block sizes): gives the runner another `input_batch` if it needs one."""


def model(case: Case, parameters: OffloadReinitParameters, release: None) -> Evidence:
    """The failing algorithm; for `fixed` inside the plug-in's wrapper."""
    return observe(parameters, skip_assertion(refuse) if case.subject == "fixed" else refuse)


def library(case: Case, parameters: OffloadReinitParameters, release: ReleaseSource | None) -> Evidence:
    """The release's own function, also inside the plug-in's wrapper. Raises SourceError, UnavailableError."""
    rebuild = load_upstream(release or ReleaseSource.installed())
    patched = try_rebuild(skip_assertion(rebuild), LAYOUTS[parameters.layout], parameters.offload_gb)
    return {**observe(parameters, rebuild), "with_offload_and_plug_in": patched}


def refuse(runner: Any, kv_cache_config: Any, kernel_block_sizes: list[int]) -> None:
    """The failing algorithm: an assertion forbids what hybrid models always need."""
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    if sizes != runner._init_block_sizes or kernel_block_sizes != runner._init_kernel_block_sizes:
        assert runner.offload_config.uva.cpu_offload_gb == 0, "no new input batch while weights are offloaded"
        runner.input_batch = ("made for", tuple(sizes))


def observe(parameters: OffloadReinitParameters, rebuild: Rebuild) -> Evidence:
    """Run the function with offload, and in two situations in which it never failed."""
    sizes = LAYOUTS[parameters.layout]
    return {
        "block_sizes": list(sizes),
        "with_offload": try_rebuild(rebuild, sizes, parameters.offload_gb),
        "without_offload": try_rebuild(rebuild, sizes, 0.0),
        "default_sizes": try_rebuild(rebuild, DEFAULT, parameters.offload_gb),
    }


def try_rebuild(rebuild: Rebuild, sizes: Sequence[int], offload_gb: float) -> str:
    """Return ``rebuilt``, ``kept``, or the assertion error."""
    runner = mock_runner(offload_gb)
    before = runner.input_batch
    groups = [types.SimpleNamespace(kv_cache_spec=_make_spec(size), layer_names=["layer"]) for size in sizes]
    config = types.SimpleNamespace(kv_cache_groups=groups)
    try:
        rebuild(runner, config, list(sizes))
    except AssertionError as error:
        return f"AssertionError: {' '.join(str(error).split())}"[:200]
    return "kept" if runner.input_batch is before else "rebuilt"


def mock_runner(offload_gb: float) -> Any:
    """A runner with the attributes that the function reads, with the names of all releases."""
    runner = MagicMock()
    runner.max_model_len = runner.max_encoder_len = LENGTH
    runner.cache_config.block_size = DEFAULT[0]
    runner.offload_config = types.SimpleNamespace(uva=types.SimpleNamespace(cpu_offload_gb=offload_gb))
    runner._init_block_sizes = list(DEFAULT)
    runner._init_kernel_block_sizes = list(DEFAULT)
    runner._init_max_num_blocks = [_make_spec(size).max_num_blocks_per_req(None, LENGTH) for size in DEFAULT]
    runner._init_slot_mapping_modes = [_MODES.TOKEN_TO_KV_SLOT for _ in DEFAULT]
    runner.cp_kv_cache_interleave_size = runner.parallel_config.cp_kv_cache_interleave_size = 1
    return runner


def _make_spec(size: int) -> Any:
    return types.SimpleNamespace(
        block_size=size,
        num_speculative_blocks=0,
        max_num_blocks_per_req=lambda config, length: -(-length // size),
    )


def load_upstream(source: ReleaseSource) -> Rebuild:
    """The release's own function; the functions that it calls are replaced by the least that lets it run."""

    class Never:
        """A kind of KV-cache group that does not occur here."""

    names = {
        "EncoderOnlyAttentionSpec": Never,
        "MambaSpec": Never,
        "cdiv": lambda a, b: -(-a // b),
        "get_total_cp_world_size": lambda: 1,
        "InputBatch": lambda **options: ("made for", tuple(options["block_sizes"])),
        "KVCacheSpecKind": types.SimpleNamespace(ENCODER_ONLY_ATTENTION=0, MAMBA=1),
        "SlotMappingMode": _MODES,
        "get_kv_cache_spec_kind": lambda spec: None,
    }
    function: Callable[..., None] = source.load_function(FILE, FUNCTION, names)

    def rebuild(runner: Any, kv_cache_config: Any, kernel_block_sizes: list[int]) -> None:
        if "kernel_block_sizes" in function.__code__.co_varnames[:3]:
            function(runner, kv_cache_config, kernel_block_sizes)
        else:  # newer releases read them off the runner
            runner.kernel_block_sizes = kernel_block_sizes
            function(runner, kv_cache_config)

    return rebuild
