"""The experts of one MoE layer of vLLM in host memory, with slots on the GPU that compute in their place.

Every modular backend computes a layer by ``moe_kernel.apply(hidden_states, w1, w2, topk_weights, topk_ids,
...)``, with scales and biases in a quantization config of the kernel. So tensors that are indexed by expert
are in these two places. Both get the cache's slots, whose addresses never change.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore
from moedoctor.fixes.layer_stream import BUFFERS, LayerStream
from moedoctor.fixes.offload.pinned import allocate, register
from moedoctor.plugin import hits_first
from moedoctor.plugin.expert_cache_options import CacheOptions
from moedoctor.results import UnavailableError

logger = logging.getLogger("vllm.moedoctor")

_PARTS = ("_a1", "_a2", "_w1", "_w2")
_FIELDS = ("scale", "alpha_or_gscale", "zp", "bias")
_ATTRIBUTE = "moedoctor_experts"
EXPERTS: ContextVar[int | None] = ContextVar("experts of the layer that computes", default=None)
"""Set while a cached layer computes, so that tiles are chosen as without the cache."""


class HostExperts:
    """One layer's experts in host memory, and the cache through which the layer computes with them."""

    cache: ExpertCache
    hits_first = False
    """Short calls compute with resident experts while others are copied."""
    stream: tuple[LayerStream, int, int] | None = None
    """The stream, this layer's number in it, and from how many tokens on calls pass through it."""

    def __init__(self, layer: Any, device: torch.device, options: CacheOptions) -> None:
        """Copy the experts of `layer`, which is loaded and repacked, to host memory, pinned if possible.

        The layer keeps its own until `give` replaces them.
        """
        tensors = find_expert_tensors(layer)
        self.store = _make_store(tensors, options)
        self._layer, self._device = layer, device
        self.kernel = layer.quant_method.moe_kernel
        self._compute = self.kernel.apply
        self._humming = {self.num_experts: getattr(self.kernel.fused_experts, "humming_configs", {})}
        """Experts that a call of HUMMING's kernel indexes -> its description of the layer."""
        self._parameters = {name: _find_holders(layer, tensor) for name, tensor in tensors.items()}
        self._rows: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        """The layer's number of experts."""
        return self.store.num_experts

    @property
    def top_k(self) -> int:
        """The number of experts of a token."""
        return int(self._layer.top_k)

    @property
    def tensor_parallel(self) -> int:
        """The number of GPUs that share the layer."""
        return int(getattr(self._layer.moe_config.moe_parallel_config, "tp_size", 1))

    @property
    def limit(self) -> Any:
        """The limit that clamps the activation; None if there is none."""
        experts = self.kernel.fused_experts
        own = getattr(experts, "activation_config", None)
        places = self._layer, self._layer.moe_config, experts.quant_config, own
        names = "swiglu_limit", "gemm1_clamp_limit", "clamp_limit"
        return next(filter(None, (getattr(place, name, None) for place in places for name in names)), None)

    def give(self, options: CacheOptions, *, captured: bool) -> ExpertCache:
        """Replace what the layer computes with by a new cache.

        `captured`: the engine captures CUDA graphs, which must then be captured again. Raises
        UnavailableError if it does and memory could not be pinned; then nothing was replaced.
        """
        if captured and not self.store.pinned:
            raise UnavailableError(
                f"CUDA graphs need pinned host memory: {self.store.reason}; use --enforce-eager"
            )
        engine = options.engine
        if engine == "auto":
            engine = "device" if self.store.pinned else "host"
        # Slots in a block that experts left would keep torch from releasing the rest of that block.
        torch.cuda.empty_cache()
        cache = ExpertCache(
            self.store,
            options.slots,
            policy=options.policy,
            device=self._device,
            engine="resident" if options.slots >= self.num_experts else engine,
        )
        if options.fill:
            cache.seed(torch.arange(min(options.slots, self.num_experts), device=self._device)[None])
        for name, slots in cache.weights.items():
            for holder in self._parameters[name]:
                setattr(self._layer, holder, torch.nn.Parameter(slots, requires_grad=False))
        self._describe(cache.weights)
        to_device(self._layer, self._device)  # other tensors may be in host memory, too
        if hasattr(self.kernel.impl, "inplace"):  # until 0.21.0
            self.kernel.impl.inplace = False  # the input of the second group is not the output of the first
        if self._rows is not None:
            cache.skip_padding(self._rows)
        self.cache, self.stream = cache, None
        self.hits_first = options.overlap and cache.engine == "device" and hits_first.can_split(self._layer)
        self.kernel.apply = _apply_through(self, self._compute, self.hits_first)
        return cache

    def _describe(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the kernel's quantization config hold `tensors`, and HUMMING know how many experts."""
        experts = self.kernel.fused_experts
        for name, tensor in tensors.items():
            part, _, field = name.partition(".")
            if field:
                setattr(getattr(experts.quant_config, part), field, tensor)
        if hasattr(experts, "humming_configs"):
            count = len(tensors["w1"])
            if count not in self._humming:
                whole = self._humming[self.num_experts]
                self._humming[count] = {
                    name: replace(config, num_experts=count) for name, config in whole.items()
                }
            experts.humming_configs = self._humming[count]

    @contextmanager
    def stream_all(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Give all experts [E, ...] out of the stream; the quantization config holds them meanwhile."""
        assert self.stream is not None
        stream, number, _ = self.stream
        with stream.fetch(number) as tensors:
            self._describe(tensors)
            try:
                yield tensors
            finally:
                self._describe(self.cache.weights)

    def streams(self, tokens: int) -> bool:
        """Return True if a call of so many tokens passes through the stream."""
        return self.stream is not None and tokens >= self.stream[2]

    def skip_padding(self, rows: torch.Tensor) -> None:
        """Let this cache and those that follow skip padding, as `ExpertCache.skip_padding`."""
        self._rows = rows
        self.cache.skip_padding(rows)


_MOST_STREAMED = 0.25
"""The share of all experts that two layer buffers may take by default."""


def stream_prompts(layers: Sequence[HostExperts], options: CacheOptions) -> LayerStream | None:
    """Let long calls pass through two buffers for all `layers`; return None if they do not.

    They do not if the options say so, if layers differ, or by default if the buffers would take too much.
    """
    held = [layer for layer in layers if layer.cache.engine != "resident"]
    if not held or options.stream == 0:
        return None
    if options.stream is None and _MOST_STREAMED * len(held) < BUFFERS:
        return None
    try:
        stream = LayerStream([layer.cache for layer in held])
    except ValueError as error:
        logger.warning("moedoctor: expert_cache: prompts pass through the slots: %s", error)
        return None
    for number, layer in enumerate(held):
        # A call that asks for each expert twice on average needs seven of eight, if all are equally likely.
        tokens = -(-2 * layer.num_experts // layer.top_k) if options.stream is None else options.stream
        fits = layer.cache.capacity // layer.top_k  # so many tokens are always one call
        layer.stream = (stream, number, max(tokens, fits + 1))
    return stream


def find_host_experts(model: Any) -> list[HostExperts]:
    """Return the experts of all layers of `model` that have a cache, in order."""
    attributes = (getattr(module, _ATTRIBUTE, None) for module in model.modules())
    return [experts for experts in attributes if experts is not None]


def install(layer: Any, options: CacheOptions, device: torch.device, *, captured: bool) -> ExpertCache:
    """Move the layer's experts to host memory and put slots in their place.

    Raises UnavailableError as `HostExperts.give`. The caller must call `expert_cache_fix.check_layer` first.
    """
    experts = HostExperts(layer, device, options)
    cache = experts.give(options, captured=captured)
    setattr(layer, _ATTRIBUTE, experts)
    return cache


def to_device(layer: Any, device: torch.device) -> None:
    """Move the layer's parameters, which stay the same objects: the quantization config may hold them."""
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(device)


def find_expert_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Return every tensor that the layer's kernel indexes by expert, [E, ...] each, by a name of our own."""
    experts, kernel = layer.local_num_experts, layer.quant_method.moe_kernel
    tensors = {"w1": layer.w13_weight.data, "w2": layer.w2_weight.data}
    for part, field in itertools.product(_PARTS, _FIELDS):
        tensor = getattr(getattr(kernel.fused_experts.quant_config, part), field)
        if not isinstance(tensor, torch.Tensor) or tensor.shape[:1] != (experts,):
            continue
        if experts > 1 or not part.startswith("_a"):  # one element is a scale of activations, for all experts
            tensors[f"{part}.{field}"] = tensor.data
    return tensors


def _find_holders(layer: Any, tensor: torch.Tensor) -> list[str]:
    """Return the layer's parameters that hold `tensor`: nothing may keep the experts on the device."""
    return [
        name
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.data_ptr() == tensor.data_ptr() and parameter.shape == tensor.shape
    ]


def _make_store(tensors: Mapping[str, torch.Tensor], options: CacheOptions) -> ExpertStore:
    """Return `tensors` in host memory, [E, ...] each; packed only if that memory is pinned."""
    pin = options.pin and torch.cuda.is_available()
    packable = any(tensor.dtype is torch.bfloat16 for tensor in tensors.values())
    if packable and options.packed and pin and options.engine != "host":
        store = ExpertStore({name: tensor.cpu() for name, tensor in tensors.items()}, packed=True)
        if store.pinned:
            return store
    return ExpertStore({name: _copy_to_host(tensor, pin) for name, tensor in tensors.items()}, pin=pin)


def _copy_to_host(tensor: torch.Tensor, pin: bool) -> torch.Tensor:
    """Return a copy of exactly its size: torch rounds pinned memory up to a power of two."""
    block, _ = allocate(tensor.nbytes, register if pin else None)
    return block.bytes.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _apply_through(experts: HostExperts, compute: Any, splits: bool) -> Any:
    """Return the kernel's `apply` through the layer's cache; `splits` as `HostExperts.hits_first`."""
    cache, kernel = experts.cache, experts.kernel
    # Ids of other groups are mapped to no expert, like those of other ranks.
    nowhere = torch.arange(cache.num_experts, dtype=torch.int32, device=cache.device)  # [E]
    nowhere[cache.capacity :] = -1

    def compute_through_stream(topk_ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        with experts.stream_all() as weights, _choose_tiles_for(cache.num_experts):
            given.update(w1=weights["w1"], w2=weights["w2"], expert_map=None)
            result: torch.Tensor = compute(topk_ids=topk_ids, **given)  # [T, H]
            cache.seed_from(topk_ids, weights)
        return result

    def apply(
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        has_gaps: bool = False,
        **given: Any,
    ) -> torch.Tensor:
        """Compute the layer; with `has_gaps` some ids are -1, and their pairs add nothing."""
        given.update(hidden_states=hidden_states, topk_weights=topk_weights)
        given["global_num_experts"] = cache.num_experts
        if experts.streams(len(topk_ids)):
            return compute_through_stream(topk_ids, given)
        unsorted = splits and topk_ids.numel() * hits_first.UNSORTED <= cache.num_experts
        many = cache.may_need_groups(topk_ids) or (has_gaps and not unsorted)
        given.update(w1=cache.weights["w1"], w2=cache.weights["w2"], expert_map=nowhere if many else None)
        with _choose_tiles_for(cache.num_experts):
            if many:
                return compute_in_groups(topk_ids, given).to(hidden_states.dtype)
            if unsorted:
                return hits_first.compute_in_two(cache, kernel.fused_experts, compute, topk_ids, given)
            result: torch.Tensor = compute(topk_ids=cache.acquire(topk_ids).slot_ids, **given)  # [T, H]
            return result

    def compute_in_groups(topk_ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for group in cache.groups(topk_ids):
            slots = torch.where(group.slot_ids < 0, cache.capacity, group.slot_ids)  # [T, K]
            result = compute(topk_ids=slots, **given)  # [T, H]
            # Always a copy: the kernel's output may be a view of its workspace.
            total = result.to(torch.float32, copy=True) if total is None else total.add_(result)
        assert total is not None
        return total

    return apply


@contextmanager
def _choose_tiles_for(experts: int) -> Iterator[None]:
    token = EXPERTS.set(experts)
    try:
        yield
    finally:
        EXPERTS.reset(token)
