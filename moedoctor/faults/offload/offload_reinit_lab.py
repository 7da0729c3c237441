"""What MD009 runs: a function that makes the input batch again, ours or upstream's, on a runner that stands
in."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

from moedoctor.faults.offload.offload_reinit import OffloadReinitParameters
from moedoctor.results import Observation
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
"""(runner, KV-cache config, kernel block sizes): puts another `input_batch` into the runner where it must."""


def refuses(runner: Any, kv_cache_config: Any, kernel_block_sizes: list[int]) -> None:
    """The failing algorithm: an assertion forbids what hybrid models always need."""
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    if sizes != runner._init_block_sizes or kernel_block_sizes != runner._init_kernel_block_sizes:
        assert runner.offload_config.uva.cpu_offload_gb == 0, "no new input batch while weights are offloaded"
        runner.input_batch = ("made for", tuple(sizes))


def observe(parameters: OffloadReinitParameters, implementation: Any) -> Observation:
    """What the function does with offload, and in the two situations in which nobody ever saw it fail."""
    release = implementation if isinstance(implementation, ReleaseSource) else None
    rebuild = upstream(release) if release is not None else implementation
    sizes = LAYOUTS[parameters.layout]
    seen = {
        "block_sizes": list(sizes),
        "with_offload": outcome(rebuild, sizes, parameters.offload_gb),
        "without_offload": outcome(rebuild, sizes, 0.0),
        "default_sizes": outcome(rebuild, DEFAULT, parameters.offload_gb),
    }
    if release is not None:
        from moedoctor.upstream.plugin.offload_fix import unasserted

        seen["with_offload_and_plug_in"] = outcome(unasserted(rebuild), sizes, parameters.offload_gb)
    return Observation(seen)


def outcome(rebuild: Rebuild, sizes: Sequence[int], offload_gb: float) -> str:
    """``rebuilt``, ``kept``, or what was raised."""
    runner = stand_in(offload_gb)
    before = runner.input_batch
    specs = [_spec(size) for size in sizes]
    groups = [types.SimpleNamespace(kv_cache_spec=one, layer_names=["layer"]) for one in specs]
    config = types.SimpleNamespace(kv_cache_groups=groups)
    try:
        rebuild(runner, config, list(sizes))
    except AssertionError as error:
        return f"AssertionError: {' '.join(str(error).split())}"[:200]
    return "kept" if runner.input_batch is before else "rebuilt"


def stand_in(offload_gb: float) -> Any:
    """A runner with what the function reads, in the names of all releases."""
    runner = MagicMock()
    runner.max_model_len = runner.max_encoder_len = LENGTH
    runner.cache_config.block_size = DEFAULT[0]
    runner.offload_config = types.SimpleNamespace(uva=types.SimpleNamespace(cpu_offload_gb=offload_gb))
    runner._init_block_sizes = list(DEFAULT)
    runner._init_kernel_block_sizes = list(DEFAULT)
    runner._init_max_num_blocks = [_spec(size).max_num_blocks_per_req(None, LENGTH) for size in DEFAULT]
    runner._init_slot_mapping_modes = [_MODES.TOKEN_TO_KV_SLOT for _ in DEFAULT]
    runner.cp_kv_cache_interleave_size = runner.parallel_config.cp_kv_cache_interleave_size = 1
    return runner


def _spec(size: int) -> Any:
    """One KV-cache group's specification."""
    return types.SimpleNamespace(
        block_size=size,
        num_speculative_blocks=0,
        max_num_blocks_per_req=lambda config, length: -(-length // size),
    )


def upstream(source: ReleaseSource) -> Rebuild:
    """The release's own function; what it calls is replaced by the least that lets it run."""

    class Never:
        """A kind of KV-cache group that does not occur here."""

    kinds = types.SimpleNamespace(ENCODER_ONLY_ATTENTION=0, MAMBA=1)
    names = {
        "EncoderOnlyAttentionSpec": Never,
        "MambaSpec": Never,
        "cdiv": lambda a, b: -(-a // b),
        "get_total_cp_world_size": lambda: 1,
        "InputBatch": lambda **options: ("made for", tuple(options["block_sizes"])),
        "KVCacheSpecKind": kinds,
        "SlotMappingMode": _MODES,
        "get_kv_cache_spec_kind": lambda spec: None,
    }
    function: Callable[..., None] = source.function(FILE, FUNCTION, names)

    def rebuild(runner: Any, kv_cache_config: Any, kernel_block_sizes: list[int]) -> None:
        given = (kernel_block_sizes,) if "kernel_block_sizes" in function.__code__.co_varnames[:3] else ()
        if not given:  # newer releases read them off the runner
            runner.kernel_block_sizes = kernel_block_sizes
        function(runner, kv_cache_config, *given)

    return rebuild
