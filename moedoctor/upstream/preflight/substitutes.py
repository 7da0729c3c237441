"""Everything that vLLM is told about a GPU that is not there, as one table.

A row names the function or method that vLLM calls, and the answer. A row whose target a release does not have
is reported: an answer that rests on it may be wrong. For a child process only: what is substituted stays so.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moedoctor.upstream.preflight.meta import MADE, OnMeta
from moedoctor.upstream.selection import substitute


@dataclass(frozen=True)
class Gpu:
    """The GPUs of the machine that the question is about."""

    capability: tuple[int, int]
    memory: int
    """Bytes of one GPU."""
    count: int

    def describe(self) -> Any:
        """Return an object with the attributes of ``torch.cuda.get_device_properties``."""
        major, minor = self.capability
        return types.SimpleNamespace(
            name="substituted by moedoctor",
            major=major,
            minor=minor,
            total_memory=self.memory,
            multi_processor_count=132,
            shared_memory_per_block_optin=232448 if major in (9, 10) else 101376,
            shared_memory_per_multiprocessor=233472 if major in (9, 10) else 102400,
            is_integrated=False,
            warp_size=32,
            L2_cache_size=50 << 20,
            max_threads_per_multi_processor=2048,
        )


@dataclass(frozen=True)
class Substitution:
    """One answer in place of a device."""

    targets: tuple[str, ...]
    """``module:attribute``, wherever releases have it; one of them is enough."""
    answer: Callable[[Gpu], Any]
    """Makes the object that is put there."""
    until: str = ""
    """The last vLLM release that has a target; empty if all known ones do."""


def _return_constant(value: Callable[[Gpu], Any]) -> Callable[[Gpu], Any]:
    """Make a function that ignores its arguments and returns `value` of the GPU."""
    return lambda gpu: lambda *_, **__: value(gpu)


def _make_placeholder(name: str) -> Any:
    """Make a class for streams, events and devices: modules create them, and nothing runs them."""
    names = ("__init__", "__enter__", "__exit__", "record", "wait", "synchronize")
    methods = {each: lambda self, *_, **__: None for each in names}
    return type(name, (), methods)


_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
_CALLS: Mapping[str, Callable[[Gpu], Any]] = {
    "cuda.get_device_properties": Gpu.describe,
    "cuda.get_device_capability": lambda gpu: gpu.capability,
    "cuda.get_device_name": lambda gpu: gpu.describe().name,
    "cuda.mem_get_info": lambda gpu: (gpu.memory, gpu.memory),
    "cuda.current_device": lambda gpu: 0,
    "cuda.set_device": lambda gpu: None,
    "accelerator.is_available": lambda gpu: True,
    "accelerator.current_device_index": lambda gpu: 0,
    "accelerator.set_device_index": lambda gpu: None,
    **dict.fromkeys(("cuda.device_count", "accelerator.device_count"), lambda gpu: gpu.count),
    **dict.fromkeys(("cuda.max_memory_allocated", "accelerator.max_memory_allocated"), lambda gpu: 0),
    **{
        f"{place}.{name}": lambda gpu: None
        for place in ("cuda", "accelerator")
        for name in ("empty_cache", "synchronize", "reset_peak_memory_stats")
    },
}
"""Functions of torch -> what they return, whatever they are given."""
TORCH = (
    *(Substitution((f"torch:{name}",), _return_constant(answer)) for name, answer in _CALLS.items()),
    Substitution(("torch:cuda.Stream",), lambda gpu: _make_placeholder("Stream")),
    Substitution(("torch:cuda.Event",), lambda gpu: _make_placeholder("Event")),
    Substitution(("torch:cuda.device",), lambda gpu: _make_placeholder("device")),
    Substitution(("torch:version.cuda",), lambda gpu: torch.version.cuda or "13.0"),
    # Nothing is compiled here: the decorator would import torch's compiler, which takes seconds.
    Substitution(("torch:compile",), lambda gpu: lambda model=None, **_: model or (lambda each: each)),
    # For the caller's file and line, torch reads and parses the file.
    Substitution(
        ("torch._library.utils:get_source",),
        lambda gpu: lambda level: "{0.f_code.co_filename}:{0.f_lineno}".format(sys._getframe(level)),
    ),
)
"""Put there before vLLM is imported, which reads some of it while it is imported."""

VLLM = (
    Substitution(("vllm.model_executor.models.registry:_run_in_subprocess",), lambda gpu: lambda ask: ask()),
    Substitution(
        (
            "vllm.config.parallel:cuda_device_count_stateless",
            "vllm.utils.torch_utils:cuda_device_count_stateless",
        ),
        _return_constant(lambda gpu: gpu.count),
        until="0.20.2",
    ),
    # They import ray to ask, and nothing starts ray here.
    Substitution(
        ("vllm.ray.lazy_utils:is_ray_initialized", "vllm.ray.lazy_utils:is_in_ray_actor"),
        _return_constant(lambda gpu: False),
    ),
    # The swap space is refused by the memory of this machine, which is not the server's.
    Substitution(
        ("vllm.config.cache:get_cpu_memory",), _return_constant(lambda gpu: 1 << 50), until="0.17.1"
    ),
    # DeepGEMM does not load without CUDA. For a GPU of 9.0 it leaves the scales of blocks as they are.
    Substitution(("vllm.utils.deep_gemm:transform_sf_into_required_layout",), lambda gpu: lambda sf, **_: sf),
)
PLATFORM = {
    "get_device_total_memory": lambda gpu: gpu.memory,
    "device_count": lambda gpu: gpu.count,
    "is_fully_connected": lambda gpu: True,
    "num_compute_units": lambda gpu: gpu.describe().multi_processor_count,
    "get_device_uuid": lambda gpu: "GPU-0",
    "is_pin_memory_available": lambda gpu: False,
    "is_arch_support_pdl": lambda gpu: gpu.capability >= (9, 0),
    "get_device_communicator_cls": lambda gpu: _COMMUNICATOR,
    "get_device_numa_node": lambda gpu: None,
    "get_all_device_numa_nodes": lambda gpu: None,
    "log_warnings": lambda gpu: None,
    "import_kernels": lambda gpu: None,
    "supports_fp8": lambda gpu: gpu.capability >= (8, 9),
}
"""Methods of vLLM's platform class, by name. A release that lacks one does not ask for it."""

_COMPILER = "torch._inductor.lowering"
REAL_TENSORS = (
    "vllm.model_executor.layers.fused_moe.layer:determine_expert_map",
    "vllm.model_executor.layers.fused_moe.expert_map_manager:determine_expert_map",
)
"""Functions whose tensors are read while experts are loaded: they make real ones on the CPU."""


def substitute_torch(gpu: Gpu) -> list[str]:
    """Answer torch's and Triton's questions about devices. Return the targets that this torch lacks."""
    if torch.version.cuda is None:
        # vLLM's configuration imports this module of FlashInfer, which asks for torch's CUDA runtime.
        module: Any = types.ModuleType("flashinfer.comm.cuda_ipc")
        module.__getattr__ = lambda name: None
        sys.modules[module.__name__] = module
    with contextlib.suppress(ImportError):
        import triton.backends

        for name, backend in triton.backends.backends.items():
            driver = _make_driver(gpu) if name == "nvidia" else backend.driver
            driver.is_active = staticmethod(lambda name=name: name == "nvidia")
            triton.backends.backends[name] = replace(backend, driver=driver)
    gone = list(_apply(TORCH, gpu))
    # vLLM changes torch's compiler when it is imported, if it can be imported: that takes seconds, too.
    is_hidden = sys.modules.setdefault(_COMPILER, None) is None  # type: ignore[arg-type]
    with contextlib.suppress(Exception):  # `substitute_vllm` says why
        importlib.import_module("vllm")
    if is_hidden:
        del sys.modules[_COMPILER]
    return gone


def _make_driver(gpu: Gpu) -> Any:
    """Make a driver class of Triton: some of vLLM's modules ask it for the GPU when they are imported."""
    from triton.backends.compiler import GPUTarget

    properties = gpu.describe()
    facts = {
        "max_shared_mem": properties.shared_memory_per_block_optin,
        "multiprocessor_count": properties.multi_processor_count,
        "warpSize": properties.warp_size,
    }

    answers: dict[str, Callable[[Gpu], Any]] = {
        "get_current_target": lambda gpu: GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32),
        "get_current_device": lambda gpu: 0,
        "get_device_interface": lambda gpu: torch.cuda,
        "get_active_torch_device": lambda gpu: torch.device("cuda", 0),
    }
    methods = {name: _return_constant(answer)(gpu) for name, answer in answers.items()}
    utils = types.SimpleNamespace(get_device_properties=lambda device: facts)
    return type("Driver", (), {"utils": utils, **methods})


def substitute_vllm(gpu: Gpu) -> tuple[list[str], list[str]]:
    """Answer vLLM's questions about devices. Return (what was answered in its place, targets that are gone).

    Raises `substitute.SubstituteError` if vLLM cannot be imported.
    """
    installed = substitute.install()
    installed.use(gpu.capability)
    platforms: Any = importlib.import_module("vllm.platforms")
    platform = type(platforms.current_platform)
    for name, answer in PLATFORM.items():
        setattr(platform, name, classmethod(_return_constant(answer)(gpu)))
    gone = list(_apply(VLLM, gpu))
    wrapped = [_make_real(target) for target in REAL_TENSORS]
    if not any(wrapped):
        gone.append(" or ".join(REAL_TENSORS))
    return list(installed.notes), gone


def join_groups(config: Any, rank: int) -> None:
    """Become `rank` of the world of `config`, in process groups that talk to nobody."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state as state

    if dist.is_initialized():
        state.destroy_model_parallel()
        state.destroy_distributed_environment()
    kept: Any = _GROUPS or (dist.init_process_group, dist.new_group, state.init_model_parallel_group)
    _GROUPS[:] = kept
    start, new_group, make = kept

    def start_fake(*_: Any, world_size: int = -1, rank: int = -1, **__: Any) -> None:
        start(backend="fake", store=FakeStore(), world_size=world_size, rank=rank)

    def make_without_queue(*arguments: Any, **options: Any) -> Any:
        return make(*arguments, **{**options, "use_message_queue_broadcaster": False})

    dist.init_process_group = start_fake
    dist.new_group = lambda ranks=None, backend=None, **_: new_group(ranks, backend="fake")
    changes: dict[str, Callable[..., Any]] = {
        "_node_count": lambda group: 1,
        "in_the_same_node_as": lambda group, source_rank=0: [True] * dist.get_world_size(group),
        "init_model_parallel_group": make_without_queue,
    }
    for name, change in changes.items():
        put(state, name, change)
    parallel = config.parallel_config
    sizes = [parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
    if hasattr(parallel, "prefill_context_parallel_size"):
        sizes.append(parallel.prefill_context_parallel_size)
    context = {"decode_context_model_parallel_size": parallel.decode_context_parallel_size}
    with set_current_vllm_config(config):
        state.init_distributed_environment(parallel.world_size, rank, "tcp://127.0.0.1:1", rank, "nccl")
        state.ensure_model_parallel_initialized(*sizes, **context)


_GROUPS: list[Any] = []
"""The functions of torch and vLLM that `join_groups` replaced, as they were."""


def substitute_reading(on_meta: OnMeta) -> None:
    """Let vLLM's loader read names, shapes and types from headers, or those that the release would write."""
    from vllm.model_executor.model_loader import default_loader

    put(default_loader, "safetensors_weights_iterator", on_meta.read_weights)
    if MADE in on_meta.headers:  # there is no file to look for
        loader = default_loader.DefaultModelLoader
        put(loader, "_get_weights_iterator", lambda *_: on_meta.read_weights([MADE]))


def put(owner: Any, name: str, value: Any) -> None:
    """Put `value` in place of an attribute. Raises AttributeError if this release does not have it."""
    getattr(owner, name)
    setattr(owner, name, value)


def _apply(rows: Sequence[Substitution], gpu: Gpu) -> Iterator[str]:
    """Put the answers in place, and yield each row that no target of this release takes."""
    for row in rows:
        found = [place for target in row.targets if (place := find_target(target)) is not None]
        for owner, name in found:
            setattr(owner, name, row.answer(gpu))
        if not found and not row.until:
            yield " or ".join(row.targets)


def find_target(target: str) -> tuple[Any, str] | None:
    """Return the owner and name of ``module:path.of.attribute``, or None if it is not there."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        getattr(owner, name)
    except (ImportError, AttributeError):
        return None
    return owner, name


def _make_real(target: str) -> bool:
    """Let a function make its tensors on the CPU. Return False if this release does not have it."""
    place = find_target(target)
    if place is None:
        return False
    original = getattr(*place)

    def make(*arguments: Any, **options: Any) -> Any:
        with torch.device("cpu"):
            return original(*arguments, **options)

    setattr(*place, make)
    return True
