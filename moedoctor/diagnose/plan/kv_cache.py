"""How many tokens fit into the memory that is left for the KV cache, counted as vLLM counts them.

vLLM keeps one pool of blocks for all layers. Layers are put into groups of equal size, every group takes
blocks of one size in bytes, and a request takes blocks from every group. So a hybrid model pays for its
recurrent layers in whole blocks, and "bytes per token" times tokens is not the size of its pool. Source:
vllm/v1/core/kv_cache_utils.py and vllm/model_executor/models/config.py of 0.18.0, 0.19.1, 0.20.0 and 0.21.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moedoctor.models.shape import ModelShape

ALIGNMENT = 16
"""Attention kernels take blocks of a multiple of this many tokens."""
_PADDING_LIMIT = 1.5
"""Below this ratio of most to fewest layers of a kind, vLLM pads the smaller kind instead of splitting."""


class PlanError(ValueError):
    """Something that cannot be planned; one line says what and what to give instead."""


@dataclass(frozen=True)
class Layers:
    """Layers of one kind, as the cache sees them."""

    count: int
    page_bytes: int
    """Bytes that one block takes in one layer."""
    block_tokens: int
    """Tokens of one block; 0 for recurrent layers, whose block is one request's state."""
    window: int | None = None


@dataclass(frozen=True)
class KvCache:
    """The pool and what it holds."""

    block_size: int
    """Tokens of one attention block."""
    groups: int
    layers_per_group: int
    block_bytes: int
    """Bytes of one block over the layers of a group: what the pool is divided by."""
    blocks: int
    blocks_per_request: int
    """Blocks that a request of the whole context takes."""
    bytes_per_token: int
    """Bytes of keys and values of one token in all attention layers, without rounding to blocks."""
    state_bytes_per_request: int
    """Bytes of recurrent state of one request, without rounding to blocks."""
    tokens_printed_to_0_20: int
    """What vLLM 0.17.1 to 0.20.0 print as the size of the cache: blocks // groups x block size."""
    tokens_printed_from_0_21: int
    """What vLLM 0.21.0 and newer print: concurrency x context."""
    concurrency: float
    """Requests of the whole context that fit at once."""


def kv_cache(
    shape: ModelShape,
    *,
    available_bytes: int,
    context: int,
    kv_bytes: int,
    model_bytes: int = 2,
    block_size: int = 16,
    batched_tokens: int = 8192,
) -> KvCache:
    """What `available_bytes` of cache hold for requests of `context` tokens.

    `kv_bytes` and `model_bytes` are the sizes of one element of the cache and of the model's own type.
    Raises PlanError where the model's layers cannot share blocks.
    """
    kinds = _same_page(_kinds(shape, kv_bytes, model_bytes, block_size))
    if not kinds:
        raise PlanError(
            f"{shape.name}: no attention and no recurrent layers, so there is no KV cache to plan"
        )
    per_group = _group_size([one.count for one in kinds])
    groups = [(one, _ceil(one.count, per_group)) for one in kinds]
    count = sum(number for _, number in groups)
    block_bytes = kinds[0].page_bytes * per_group
    blocks = max(0, available_bytes // kinds[0].page_bytes // per_group)
    taken = sum(number * _blocks_of(one, context, batched_tokens) for one, number in groups)
    tokens = min(one.block_tokens for one in kinds if one.block_tokens) if _attends(kinds) else 0
    concurrency = blocks / taken
    return KvCache(
        block_size=tokens,
        groups=count,
        layers_per_group=per_group,
        block_bytes=block_bytes,
        blocks=blocks,
        blocks_per_request=taken,
        bytes_per_token=sum(one.count * one.kv_elements() for one in shape.attention) * kv_bytes,
        state_bytes_per_request=(
            shape.recurrent.count * shape.recurrent.bytes_per_request(model_bytes) if shape.recurrent else 0
        ),
        tokens_printed_to_0_20=blocks // count * tokens,
        tokens_printed_from_0_21=int(concurrency * context),
        concurrency=concurrency,
    )


def _kinds(shape: ModelShape, kv_bytes: int, model_bytes: int, block_size: int) -> list[Layers]:
    """The kinds of layers with their own page sizes. A hybrid's attention block grows to hold a state."""
    recurrent = shape.recurrent
    state = recurrent.bytes_per_request(model_bytes) if recurrent else 0
    if state and shape.attention:
        per_token = max(one.kv_elements() for one in shape.attention) * kv_bytes
        block_size = max(block_size, ALIGNMENT * _ceil(state, ALIGNMENT * per_token))
    kinds = [
        Layers(one.count, one.kv_elements() * kv_bytes * block_size, block_size, one.sliding_window)
        for one in shape.attention
    ]
    if recurrent:
        # Padded to the attention layers' page, which was made large enough above.
        kinds.append(Layers(recurrent.count, max([state, *(one.page_bytes for one in kinds)]), 0))
    return kinds


def _same_page(kinds: Sequence[Layers]) -> list[Layers]:
    """All layers with the largest page: those with a smaller one get blocks of more tokens."""
    largest = max((one.page_bytes for one in kinds), default=0)
    made = []
    for one in kinds:
        if largest % one.page_bytes:
            raise PlanError(
                f"pages of {one.page_bytes} and {largest} bytes do not divide each other, so vLLM "
                "refuses this model; give another --block-size or --kv-dtype"
            )
        ratio = largest // one.page_bytes
        made.append(replace(one, page_bytes=largest, block_tokens=one.block_tokens * ratio))
    return made


def _group_size(counts: Sequence[int]) -> int:
    fewest, most = min(counts), max(counts)
    return most if most < fewest * _PADDING_LIMIT else fewest


def _blocks_of(layers: Layers, context: int, batched_tokens: int) -> int:
    """Blocks that one request of `context` tokens takes of one group of these layers."""
    if not layers.block_tokens:
        return 1
    if layers.window is None:
        return _ceil(context, layers.block_tokens)
    # The window need not begin at the start of a block: one more.
    return _ceil(min(layers.window - 1 + batched_tokens, context), layers.block_tokens) + 1


def _attends(kinds: Sequence[Layers]) -> bool:
    return any(one.block_tokens for one in kinds)


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
