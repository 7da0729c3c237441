"""Part of the fix `offload`: a mark "offloaded" that outlives the memory which it was about.

vLLM marks parameters whose data is a view of host memory. When a layer is processed after loading, 0.33.0
keeps the parameter object and gives it the repacked data, which is on the GPU; the mark stays, so the
weights are not offloaded again (MD013)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

MARK = "_vllm_is_uva_offloaded"


def taking_off(original: Any) -> Any:
    """`device_loading_context`, which takes the mark off a parameter whose memory was exchanged."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def device_loading_context(
        module: Any, target_device: Any, *arguments: Any, **options: Any
    ) -> Iterator[Any]:
        # The storages are held, so that no new one can take the place of an old one.
        before = {
            name: one.untyped_storage()
            for name, one in module.named_parameters()
            if getattr(one, MARK, False)
        }
        with original(module, target_device, *arguments, **options) as inside:
            yield inside
            for name, one in module.named_parameters():
                storage = before.get(name)
                if storage is not None and one.untyped_storage()._cdata != storage._cdata:
                    setattr(one, MARK, False)

    return device_loading_context


def forgetting(made: Any) -> Any:
    """`taking_off` for what makes the context from a function that maps host memory."""
    return lambda view: taking_off(made(view))
