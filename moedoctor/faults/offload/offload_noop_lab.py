"""The child process for MD013: offloaded weights are repacked after loading; where do they end up?

Device tensors are fake (`torch._subclasses`): they have a device, a shape and a storage but no data, so
upstream's own functions run without a GPU, and every tensor's device is the one that it would have. The
engine tier asks the CUDA driver where the weights of a real engine are.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from moedoctor.faults.offload.offload_noop import OffloadNoopParameters
from moedoctor.plugin.offload_fix import MARK, remove_marks
from moedoctor.plugin.register import read_vllm_version
from moedoctor.results import Case, Evidence, UnavailableError
from moedoctor.upstream.engine.engine import EngineResult
from moedoctor.upstream.engine.experiment import run_trials, write_checkpoints
from moedoctor.upstream.engine.offload_table import EAGER, UVA, make_trial
from moedoctor.upstream.releases.release_source import ReleaseSource

EXPERTS, ROWS, COLUMNS = 8, 256, 128
"""Sizes of a packed weight, uint8 [experts, rows, columns]."""
REPACKED: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w13_weight": ((EXPERTS, COLUMNS // 8, ROWS * 2), torch.int32),
    "w2_weight": ((EXPERTS, ROWS, COLUMNS), torch.uint8),
}
"""The result of repacking each: another shape and type as for Marlin, or the same with other bytes."""
_HOST = ("host", "cpu")
V2_OFFLOADS = Version("0.28.0")
"""The first release whose V2 model runner installs the offloader."""
REPACKS_TO_GPU = Version("0.33.0")
"""The first release that leaves repacked weights on the GPU."""

Replace = Callable[[nn.Module, str, torch.Tensor], None]
"""(layer, name, data): gives a parameter new data."""
MakeContext = Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]
"""Makes `device_loading_context` for a function that gives the GPU a view of host memory."""


def model(case: Case, parameters: OffloadNoopParameters, release: None) -> Evidence:
    """The failing algorithm; for `fixed` inside the plug-in's wrapper."""
    return find_places(replace_data, make_remembering, fixed=case.subject == "fixed")


def library(case: Case, parameters: OffloadNoopParameters, release: ReleaseSource | None) -> Evidence:
    """The release's functions, also inside the plug-in's wrapper. Raises SourceError, UnavailableError."""
    functions = load_upstream(release or ReleaseSource.installed())
    patched = find_places(*functions, fixed=True)
    return {**find_places(*functions), "host_bytes_with_plug_in": patched["host_bytes"]}


def engine(case: Case, parameters: OffloadNoopParameters, release: None) -> Evidence:
    """One engine with its expert weights offloaded, as MARLIN repacks them.

    `v2_runner`: on the V2 model runner, for `fixed` on the older one. `repacked`: on the older one, for
    `fixed` with the plug-in's fix. Raises UnavailableError if this release cannot have the failure, and
    RuntimeError.
    """
    environ = choose_engine_variables(parameters.cause, case.subject == "fixed", Version(read_vllm_version()))
    with write_checkpoints("nvfp4") as folders:
        uva = make_trial("NVFP4 MARLIN", EAGER, UVA, folders["nvfp4"])
        request = replace(
            uva.request,
            arguments={**uva.request.arguments, "cpu_offload_params": list(REPACKED)},
            environ={**uva.request.environ, **environ},
            probe="moedoctor.upstream.engine.probes:locate_weights",
        )
        (ran,) = run_trials([replace(uva, request=request, control=None)])
    return collect_engine_evidence(ran.result, environ)


def choose_engine_variables(cause: str, fixed: bool, release: Version) -> dict[str, str]:
    """Return the variables of an engine. Raises UnavailableError if `release` cannot have the failure."""
    if cause == "repacked":
        if release < REPACKS_TO_GPU:
            raise UnavailableError(
                f"vLLM {release} offloads again what it repacks; {REPACKS_TO_GPU} does not"
            )
        return {"VLLM_USE_V2_MODEL_RUNNER": "0", **({"MOEDOCTOR_FIXES": "offload"} if fixed else {})}
    if release >= V2_OFFLOADS:
        raise UnavailableError(f"the V2 model runner offloads from vLLM {V2_OFFLOADS} on; this is {release}")
    return {"VLLM_USE_V2_MODEL_RUNNER": "0" if fixed else "1"}


def collect_engine_evidence(result: EngineResult, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the bytes by place. Raises RuntimeError for an engine that did not answer."""
    if result.error is not None or not result.probe:
        reason = "no probe" if result.error is None else f"{result.error.kind}: {result.error.message}"
        raise RuntimeError(f"the engine did not run: {reason[:300]}")
    weights = [row for row in result.probe["parameters"] if row["name"].rpartition(".")[2] in REPACKED]
    return {
        "vllm": result.version,
        "variables": dict(environ),
        "asked_bytes": sum(row["bytes"] for row in weights),
        "host_bytes": sum(row["bytes"] for row in weights if row["place"] in _HOST),
        "device_bytes": sum(row["bytes"] for row in weights if row["place"] not in _HOST),
        "offloader_in_the_log": result.log.offloader,
        "offloaded_in_the_log": result.log.offloaded,
        "allocated_bytes": result.allocated,
    }


def replace_data(layer: nn.Module, name: str, new: torch.Tensor) -> None:
    """The failing algorithm: the parameter object stays, with its marks, and gets the new data."""
    getattr(layer, name).data = new


def make_remembering(view: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The context around it: a parameter that lost its mark while it was processed is offloaded again."""

    @contextlib.contextmanager
    def remember(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
        marked = [name for name, weight in module.named_parameters() if getattr(weight, MARK, False)]
        yield module
        for name, weight in module.named_parameters():
            if name in marked and not getattr(weight, MARK, False):
                weight.data = view(weight.data.to("cpu"))
                setattr(weight, MARK, True)

    return remember


def find_places(replace: Replace, make_context: MakeContext, *, fixed: bool = False) -> dict[str, Any]:
    """Process a layer with two repacked weights, and see where each ends up.

    `fixed`: inside the plug-in's wrapper.
    """
    with FakeTensorMode(), _NothingToCopy():
        views: list[torch.Tensor] = []

        def view(host: torch.Tensor) -> torch.Tensor:
            """A device tensor over host memory."""
            assert host.device.type == "cpu"
            views.append(torch.empty_like(host, device="cuda"))
            return views[-1]

        layer = nn.Module()
        for name in REPACKED:
            host = torch.empty(EXPERTS, ROWS, COLUMNS, dtype=torch.uint8)  # [experts, rows, columns]
            parameter = nn.Parameter(view(host), requires_grad=False)
            setattr(parameter, MARK, True)
            layer.register_parameter(name, parameter)
        context = make_context(view)
        with (remove_marks(context) if fixed else context)(layer, torch.device("cuda")):
            for name, (shape, dtype) in REPACKED.items():
                replace(layer, name, torch.empty(shape, dtype=dtype, device="cuda"))
        on_host = {tensor.untyped_storage()._cdata for tensor in views}
        rows: list[dict[str, Any]] = [
            {
                "parameter": name,
                "repacked_to": f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}",
                "bytes": weight.nbytes,
                "marked": bool(getattr(weight, MARK, False)),
                "memory": "host" if weight.untyped_storage()._cdata in on_host else "device",
            }
            for name, weight in layer.named_parameters()
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
    """`copy_` between fake tensors does nothing; a torch without CUDA cannot do even that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.copy_ else func(*args, **(kwargs or {}))


def load_upstream(source: ReleaseSource) -> tuple[Replace, MakeContext]:
    """The release's own `replace_parameter` and `device_loading_context`."""

    def set_attributes(weight: torch.Tensor, attributes: dict[str, Any] | None) -> None:
        for name, value in (attributes or {}).items():
            setattr(weight, name, value)

    def make_context(view: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        names = {
            "torch": torch,
            "contextmanager": contextlib.contextmanager,
            "envs": types.SimpleNamespace(VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=False),
            "is_pin_memory_available": lambda: False,
            "get_accelerator_view_from_cpu_tensor": view,
        }
        return source.load_function(
            "vllm/model_executor/model_loader/utils.py", "device_loading_context", names
        )

    names = {"torch": torch, "set_weight_attrs": set_attributes}
    return source.load_function("vllm/model_executor/utils.py", "replace_parameter", names), make_context
