"""The trace `nan`: the place in vLLM at which a NaN first appears, and the expert ids that its routers give.

It watches the output of each attention layer (except MLA attention, which is another class), the logits and
ids of each router, the output of each MoE layer, and the output of the model. All of this happens inside
operators that vLLM's compiler does not look into, so compilation does not change. The operator of the experts
checks what its layer made in two launches, which CUDA graphs hold. So a replayed step costs the host two
launches, one before and one after the model, for any number of layers, and copies of the record to the host.
Those are what is left if the process dies of an illegal access or an assertion on the device. Warm-up and
capture are not recorded. The report is printed when the process ends.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import Any

import torch

from moedoctor.plugin.process_end import ProcessEnd
from moedoctor.plugin.register import Patch, apply_patches, call_after
from moedoctor.plugin.steps import Steps
from moedoctor.text import escape, escape_commands, print_message
from moedoctor.trace.nan_report import NanReport
from moedoctor.trace.nan_state import NanState


class EngineTrace:
    """The trace of one worker process. Its device memory is taken when the first layer is made."""

    def __init__(self) -> None:
        self.running = False
        self.process: int | None = None
        """The process that made the first layer and owns the record; None before."""
        self._state: NanState | None = None
        self._points: dict[str, int] = {}
        self._router = ""
        self._attention: tuple[str, Any] | None = None
        """Name and output of the attention layer that ran last, until experts have checked it."""
        self._before_experts: set[str] = set()
        """Attention layers that are followed by experts, as a run without graphs has shown."""
        self._rows: int | None = None
        """Rows of the attention's output: the rows of this rank."""

    @property
    def state(self) -> NanState:
        if self._state is None:
            on_gpu = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
            self._state, self.process = NanState(device), os.getpid()
        return self._state

    def find_point(self, name: str) -> int:
        """Return the number of the point with this name, which gets one at its first use."""
        if name not in self._points:
            self._points[name] = self.state.add_point(name)
        return self._points[name]

    def report(self) -> NanReport | None:
        """Wait for the device and return the report, or None if no model was made."""
        return None if self._state is None else self._state.report()

    def last_report(self) -> NanReport | None:
        """Return the report up to the last finished step, which needs no device; None if there is none."""
        return None if self._state is None else self._state.last_report()

    # --- The wrappers of vLLM's functions -----------------------------------------------------------------

    def wrap_attention(self, layer: Any) -> None:
        """Hold what the layer's implementation writes until the experts that follow check it.

        Piecewise graphs leave attention out, so a launch here would cost the host its time at each step. The
        output is alive until the piece after it, which has the experts, has run. Layers that no experts have
        followed yet, such as dense layers, are checked here.
        """
        original, name, state = layer.impl.forward, str(layer.layer_name), self.state

        @functools.wraps(original)
        def forward(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            output = options.get("output")
            if output is not None:
                self._attention = (name, output)
                if name not in self._before_experts:
                    state.watch(self.find_point(name), output.flatten(1))  # [tokens, columns]
            return result

        layer.impl.forward = forward

    def wrap_moe(self, original: Any) -> Any:
        """Watch the attention's output, the logits and the experts' sum after a MoE layer has run."""

        parameters = list(inspect.signature(original).parameters)[1:]

        def apply_quant_method(runner: Any, *arguments: Any, **options: Any) -> Any:
            given = {**dict(zip(parameters, arguments, strict=False)), **options}
            layer = given.get("layer", runner)  # newer releases: the runner is the layer
            self._router = str(getattr(layer, "layer_name", "experts"))
            attention, self._attention = self._attention, None
            logits = given["router_logits"]
            self._rows = None if attention is None else int(attention[1].shape[0])
            shared, routed = original(runner, *arguments, **options)
            self._watch_layer(attention, logits, routed)
            return shared, routed

        return apply_quant_method

    def _watch_layer(self, attention: tuple[str, Any] | None, logits: Any, routed: Any) -> None:
        outputs = []
        if attention is not None:
            if attention[0] in self._before_experts or not self.running:
                outputs.append((attention[0], attention[1].flatten(1)))  # else it was checked already
            self._before_experts.add(attention[0])
        if not hasattr(routed, "shape"):  # a later kernel adds up the experts: nothing to look at yet
            routed = None
        if self._is_own(logits if routed is None else routed):
            if logits is not None:
                outputs.append((f"{self._router}.router_logits", logits))
            if routed is not None:
                outputs.append((self._router, routed))
        points = [self.find_point(name) for name, _ in outputs]
        tensors = [tensor for _, tensor in outputs]  # [tokens, columns] each
        if len(outputs) == 3:
            self.state.watch_three(points, tensors)
            return
        for point, tensor in zip(points, tensors, strict=True):
            self.state.watch(point, tensor)

    def _is_own(self, x: Any) -> bool:
        """Return True if `x` has this rank's rows; of all ranks' rows it is not known which are padding."""
        return x is not None and self._rows in (None, int(x.shape[0]))

    def wrap_router(self, original: Any) -> Any:
        """Check the ids that a router gives."""

        def select_experts(router: Any, *arguments: Any, **options: Any) -> Any:
            weights, ids = original(router, *arguments, **options)
            if self._is_own(ids):
                point = self.find_point(f"{self._router}.topk_ids")
                own = self._rows is not None
                self.state.watch_ids(point, ids, int(router.global_num_experts), own=own)
            return weights, ids

        return select_experts

    def begin(self, real: int, rows: int) -> None:
        """Begin a step of `rows` rows, of which the first `real` are not padding."""
        self.state.begin(real, rows)
        self.running, self._attention = True, None

    def end(self, hidden: Any) -> None:
        """End the step, with the model's output if it has one."""
        if not self.running:
            return
        self.running = False
        if hasattr(hidden, "is_floating_point"):
            self.state.watch_last(self.find_point("model"), hidden)
        else:
            self.state.end()
        self.state.mirror()  # what follows, such as the sampler, may end the CUDA context


class ExitReport(ProcessEnd):
    """Prints the report of `trace` once, when this process ends, or a fork of it that made a record."""

    def __init__(self, trace: EngineTrace) -> None:
        self.trace = trace
        super().__init__(self.print)

    def print(self) -> None:
        """Print the report to standard error, if this process made a record and has not printed it yet."""
        process = os.getpid()
        if self.trace.process != process:
            return
        try:
            report = self.trace.report()
        except Exception as error:  # after an illegal access or an assertion the device cannot be read
            reason = str(error).partition("\n")[0]
            report = self.trace.last_report()
            if report is None:
                print_message(f"the NaN trace cannot be read: {reason}")
                return
            print_message(f"the NaN trace ends with the last finished step, for the device failed: {reason}")
        if report is not None:
            lines = (f"moedoctor: NaN trace of process {process}", *report.to_text().splitlines())
            print("\n".join(escape_commands(escape(line)) for line in lines), file=sys.stderr, flush=True)


_active: ExitReport | None = None
"""The trace of this process."""


def apply(version: str) -> str:
    """Start the trace in the vLLM of this process; see `moedoctor.plugin.register`."""
    global _active
    if _active is not None:
        _active.prepare()  # this process may be a fork of the one where the trace was started
        return "is active already"
    trace = EngineTrace()
    layers = "vllm.model_executor.layers"
    attention, experts = f"{layers}.attention.attention:Attention", f"{layers}.fused_moe"
    moe, router = f"{experts}.runner.moe_runner:MoERunner", f"{experts}.router.base_router:BaseRouter"
    made = functools.partial(call_after, then=trace.wrap_attention)
    routed = ("return topk_weights, topk_ids",)
    patches = [
        Patch(attention, "__init__", made, source=("self.impl = ", "self.layer_name = ")),
        Patch(moe, "_apply_quant_method", trace.wrap_moe, "router_logits", ("self.router.select_experts(",)),
        Patch(router, "select_experts", trace.wrap_router, "router_logits", routed),
        *Steps(trace.begin, trace.end).list_patches(),
    ]
    apply_patches("nan", version, patches)
    _active = ExitReport(trace)
    return "attention (not MLA), router and MoE outputs are watched for NaN; report at exit"


def trace_of_this_process() -> EngineTrace:
    """Return the trace that `apply` started. Raises LookupError if there is none."""
    if _active is None:
        raise LookupError("no NaN trace in this process: start it with MOEDOCTOR_TRACE=nan")
    return _active.trace
