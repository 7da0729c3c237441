"""What MD013 runs: a layer's offloaded weights are repacked after loading, and it is looked where they end
up.

Device tensors are fake (`torch._subclasses`): they have a device, a shape and a storage and no data, so
upstream's own functions run without a GPU, and every tensor's device is the one that it would have."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from moedoctor.results import Observation
from moedoctor.upstream.releases.release_source import ReleaseSource

MARK = "_vllm_is_uva_offloaded"
EXPERTS, ROWS, COLUMNS = 8, 256, 128
"""Of a packed weight, uint8 [experts, rows, columns]."""
CASES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w13_weight": ((EXPERTS, COLUMNS // 8, ROWS * 2), torch.int32),
    "w2_weight": ((EXPERTS, ROWS, COLUMNS), torch.uint8),
}
"""What repacking makes of each: another shape and type as for Marlin, or the same, with other bytes."""

View = Callable[[torch.Tensor], torch.Tensor]
Replace = Callable[[nn.Module, str, torch.Tensor], None]
Context = Callable[[nn.Module, torch.device], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Reload:
    """The two functions that decide it, made for a `View`: what gives the GPU a view of host memory."""

    replace: Callable[[View], Replace]
    context: Callable[[View], Context]


def rebinding(view: View) -> Replace:
    """The failing algorithm: the parameter object is kept, with its marks, and gets the new data."""

    def replace(layer: nn.Module, name: str, new: torch.Tensor) -> None:
        getattr(layer, name).data = new

    return replace


def remembering(view: View) -> Context:
    """What is around it: a parameter that lost its mark while it was processed is offloaded again."""

    @contextlib.contextmanager
    def context(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
        marked = [name for name, one in module.named_parameters() if getattr(one, MARK, False)]
        yield module
        for name, one in module.named_parameters():
            if name in marked and not getattr(one, MARK, False):
                one.data = view(one.data.to("cpu"))
                setattr(one, MARK, True)

    return context


def observe(implementation: Reload | ReleaseSource) -> Observation:
    """Where the bytes are that count as offloaded, after a layer was processed as vLLM does it.

    For a release also with what the plug-in puts around its function.
    """
    if not isinstance(implementation, ReleaseSource):
        return Observation(places(implementation))
    from moedoctor.upstream.plugin.offload_fix import forgetting

    made = upstream(implementation)
    patched = places(Reload(made.replace, forgetting(made.context)))
    return Observation({**places(made), "host_bytes_with_plug_in": patched["host_bytes"]})


def places(made: Reload) -> dict[str, Any]:
    """Process a layer with two repacked weights, and look where each ends up."""
    with FakeTensorMode(), _NothingToCopy():
        views: list[torch.Tensor] = []

        def view(host: torch.Tensor) -> torch.Tensor:
            """A device tensor over host memory, remembered as such."""
            assert host.device.type == "cpu"
            views.append(torch.empty_like(host, device="cuda"))
            return views[-1]

        layer = nn.Module()
        for name in CASES:
            host = torch.empty(EXPERTS, ROWS, COLUMNS, dtype=torch.uint8)  # [experts, rows, columns]
            parameter = nn.Parameter(view(host), requires_grad=False)
            setattr(parameter, MARK, True)
            layer.register_parameter(name, parameter)
        with made.context(view)(layer, torch.device("cuda")):
            for name, (shape, dtype) in CASES.items():
                made.replace(view)(layer, name, torch.empty(shape, dtype=dtype, device="cuda"))
        on_host = {one.untyped_storage()._cdata for one in views}
        rows: list[dict[str, Any]] = [
            {
                "parameter": name,
                "repacked_to": f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}",
                "bytes": one.numel() * one.element_size(),
                "marked": bool(getattr(one, MARK, False)),
                "memory": "host" if one.untyped_storage()._cdata in on_host else "device",
            }
            for name, one in layer.named_parameters()
        ]
    sizes = {
        place: sum(row["bytes"] for row in rows if row["memory"] == place) for place in ("host", "device")
    }
    return {
        "asked_bytes": sum(sizes.values()),
        "host_bytes": sizes["host"],
        "device_bytes": sizes["device"],
        "weights": rows,
    }


class _NothingToCopy(TorchFunctionMode):
    """`copy_` between fake tensors does nothing; a torch without CUDA does not know how to do even that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.copy_ else func(*args, **(kwargs or {}))


def upstream(source: ReleaseSource) -> Reload:
    """The release's own `replace_parameter` and `device_loading_context`."""

    def attributes(weight: torch.Tensor, given: dict[str, Any] | None) -> None:
        for name, value in (given or {}).items():
            setattr(weight, name, value)

    def replace(view: View) -> Replace:
        names = {"torch": torch, "set_weight_attrs": attributes}
        found: Replace = source.function("vllm/model_executor/utils.py", "replace_parameter", names)
        return found

    def context(view: View) -> Context:
        names = {
            "torch": torch,
            "contextmanager": contextlib.contextmanager,
            "envs": types.SimpleNamespace(VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=False),
            "is_pin_memory_available": lambda: False,
            "get_accelerator_view_from_cpu_tensor": view,
        }
        file = "vllm/model_executor/model_loader/utils.py"
        found: Context = source.function(file, "device_loading_context", names)
        return found

    return Reload(replace, context)
