"""Counts the tokens that fit into the memory that is left for the KV cache, as vLLM counts them.

vLLM keeps one pool of blocks for all layers. It puts layers into groups of equal size; every group takes
blocks of the same size in bytes, and a request takes blocks from every group. So a hybrid model pays for its
recurrent layers in whole blocks, and the pool is larger than "bytes per token" times tokens. Source:
vllm/v1/core/kv_cache_utils.py and vllm/model_executor/models/config.py of 0.18.0, 0.19.1, 0.20.0 and 0.21.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moedoctor.models.shape import ModelShape

ALIGNMENT = 16
"""Attention kernels take blocks of a multiple of this many tokens."""
MODEL_BYTES = 2
"""Bytes of one element of the model's own type, BF16."""
_PADDING_LIMIT = 1.5
"""Below this ratio of most to fewest layers of a kind, vLLM pads the smaller kind instead of splitting."""


class PlanError(ValueError):
    """A request that cannot be planned; one line says why and what to give instead."""


@dataclass(frozen=True)
class Layers:
    """Layers of one kind in the cache."""

    count: int
    page_bytes: int
    """Bytes of one block in one layer."""
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
    """Bytes of one block over the layers of a group; the pool consists of such blocks."""
    blocks: int
    blocks_per_request: int
    """Blocks of a request of the whole context."""
    bytes_per_token: int
    """Bytes of keys and values of one token in all attention layers, without rounding to blocks."""
    state_bytes_per_request: int
    """Bytes of recurrent state of one request, without rounding to blocks."""
    tokens_printed_to_0_20: int
    """The size of the cache that vLLM 0.17.1 to 0.20.0 print: blocks // groups x block size."""
    tokens_printed_from_0_21: int
    """The size that vLLM 0.21.0 and newer print: concurrency x context."""
    concurrency: float
    """Requests of the whole context that fit at once."""


def fit_kv_cache(
    shape: ModelShape,
    *,
    available_bytes: int,
    context: int,
    kv_bytes: int,
    block_size: int = 16,
    batched_tokens: int = 8192,
) -> KvCache:
    """Return what `available_bytes` of cache hold for requests of `context` tokens.

    `kv_bytes` is the size of one element of the cache. Raises PlanError if the model's layers cannot share
    blocks.
    """
    kinds = _unify_pages(_list_kinds(shape, kv_bytes, block_size))
    if not kinds:
        raise PlanError(
            f"{shape.name}: no attention and no recurrent layers, so there is no KV cache to plan"
        )
    fewest, most = min(kind.count for kind in kinds), max(kind.count for kind in kinds)
    per_group = most if most < fewest * _PADDING_LIMIT else fewest
    groups = [(kind, _divide_up(kind.count, per_group)) for kind in kinds]
    count = sum(number for _, number in groups)
    block_bytes = kinds[0].page_bytes * per_group
    blocks = max(0, available_bytes // block_bytes)
    taken = sum(number * _count_blocks(kind, context, batched_tokens) for kind, number in groups)
    tokens = min((kind.block_tokens for kind in kinds if kind.block_tokens), default=0)
    concurrency = blocks / taken
    return KvCache(
        block_size=tokens,
        groups=count,
        layers_per_group=per_group,
        block_bytes=block_bytes,
        blocks=blocks,
        blocks_per_request=taken,
        bytes_per_token=sum(layers.count * layers.count_kv_elements() for layers in shape.attention)
        * kv_bytes,
        state_bytes_per_request=(
            shape.recurrent.count * shape.recurrent.count_bytes_per_request(MODEL_BYTES)
            if shape.recurrent
            else 0
        ),
        tokens_printed_to_0_20=blocks // count * tokens,
        tokens_printed_from_0_21=int(concurrency * context),
        concurrency=concurrency,
    )


def _list_kinds(shape: ModelShape, kv_bytes: int, block_size: int) -> list[Layers]:
    """Return the kinds of layers with their page sizes. A hybrid's attention block grows to hold a state."""
    recurrent = shape.recurrent
    state = recurrent.count_bytes_per_request(MODEL_BYTES) if recurrent else 0
    if state and shape.attention:
        per_token = max(layers.count_kv_elements() for layers in shape.attention) * kv_bytes
        block_size = max(block_size, ALIGNMENT * _divide_up(state, ALIGNMENT * per_token))
    kinds = [
        Layers(
            layers.count,
            layers.count_kv_elements() * kv_bytes * block_size,
            block_size,
            layers.sliding_window,
        )
        for layers in shape.attention
    ]
    if recurrent:
        # Padded to the attention layers' page, which was made large enough above.
        kinds.append(Layers(recurrent.count, max([state, *(kind.page_bytes for kind in kinds)]), 0))
    return kinds


def _unify_pages(kinds: Sequence[Layers]) -> list[Layers]:
    """Give all layers the largest page; layers with a smaller one get blocks of more tokens."""
    largest = max((kind.page_bytes for kind in kinds), default=0)
    unified = []
    for kind in kinds:
        if largest % kind.page_bytes:
            raise PlanError(
                f"pages of {kind.page_bytes} and {largest} bytes do not divide each other, so vLLM "
                "refuses this model; give another --block-size or --kv-dtype"
            )
        ratio = largest // kind.page_bytes
        unified.append(replace(kind, page_bytes=largest, block_tokens=kind.block_tokens * ratio))
    return unified


def _count_blocks(layers: Layers, context: int, batched_tokens: int) -> int:
    """Return the blocks that a request of `context` tokens takes of one group of these layers."""
    if not layers.block_tokens:
        return 1
    if layers.window is None:
        return _divide_up(context, layers.block_tokens)
    # The window need not begin at the start of a block: one more.
    return _divide_up(min(layers.window - 1 + batched_tokens, context), layers.block_tokens) + 1


def _divide_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
