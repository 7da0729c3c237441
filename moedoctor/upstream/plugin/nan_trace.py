"""The trace `nan`: where a NaN starts inside vLLM, and which expert ids its routers give.

Watched are each attention layer's output (but not that of MLA attention, a class of its own), each router's
logits and ids, each MoE layer's output, and the model's. All of it happens inside operators that vLLM's
compiler takes as they are, so compilation does not change. What a layer made is looked at by its experts'
operator, in two launches that CUDA graphs hold: a step that is replayed costs the host two launches, one
before and one after the model, whatever its number of layers. Warm-up and capture are not recorded. The
report is printed when the process ends.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from typing import Any

from moedoctor.trace.nan_report import NanReport
from moedoctor.upstream.plugin.fix_support import FixError, expect, replace_once
from moedoctor.upstream.plugin.nan_exit import ExitReport

NAME = "nan"
_TRACE = "_moedoctor_nan_trace"
"""Where the trace of a process is kept: at vLLM's own class of model runners."""

_OTHER_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

logger = logging.getLogger("vllm.moedoctor")


class EngineTrace:
    """The trace of one worker process. Its device memory is taken when the first layer is made."""

    def __init__(self, experiment: Any = None) -> None:
        self.experiment = experiment
        """A `moedoctor.upstream.engine.padding_experiment.Experiment`, or None."""
        self.scheduled = 0
        """Tokens of the step that are no padding."""
        self.running = False
        self.process: int | None = None
        """The process that made the first layer, whose record this is."""
        self.exit: ExitReport | None = None
        self._state: Any = None
        self._points: dict[str, int] = {}
        self._router = ""
        self._attention: tuple[str, Any] | None = None
        """Name and output of the attention layer that ran last, until experts looked at it."""
        self._before_experts: set[str] = set()
        """Attention layers that experts follow, as a run without graphs has shown."""
        self._rows: int | None = None
        """Rows of the attention's output, which are those of this rank."""

    @property
    def state(self) -> Any:
        if self._state is None:
            import torch

            from moedoctor.trace.nan_state import NanState

            on_gpu = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
            self._state, self.process = NanState(device), os.getpid()
        return self._state

    def point(self, name: str) -> int:
        """The number of the point with this name, taken at its first use."""
        if name not in self._points:
            self._points[name] = self.state.point(name)
        return self._points[name]

    def report(self) -> NanReport | None:
        """What was found; None where no model was made. Waits for the device."""
        return None if self._state is None else self._state.report()

    # --- What vLLM's functions are wrapped with -----------------------------------------------------------

    def around_attention(self, layer: Any) -> None:
        """Keep what the layer's implementation writes until the experts that follow look at it.

        Piecewise graphs leave attention out, so a launch here would cost the host its time at each step. The
        output lives until the piece after it is through, where the experts are. Layers after which none came
        yet, such as dense ones, are looked at here.
        """
        original, name, state = layer.impl.forward, str(layer.layer_name), self.state

        @functools.wraps(original)
        def forward(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            output = options.get("output")
            if output is not None:
                if self.experiment is not None and self.running:
                    self.experiment.poison(output, self.scheduled)
                self._attention = (name, output)
                if name not in self._before_experts:
                    state.watch(self.point(name), output.flatten(1))  # [tokens, columns]
            return result

        layer.impl.forward = forward

    def around_moe(self, original: Any) -> Any:
        """Watch the attention's output, the logits and the experts' sum when a MoE layer is through."""

        @functools.wraps(original)
        def apply_quant_method(runner: Any, layer: Any, *arguments: Any, **options: Any) -> Any:
            self._router = str(getattr(layer, "layer_name", "experts"))
            attention, self._attention = self._attention, None
            logits = options.get("router_logits", arguments[1] if len(arguments) > 1 else None)
            self._rows = None if attention is None else int(attention[1].shape[0])
            shared, routed = original(runner, layer, *arguments, **options)
            self._watch_layer(attention, logits, routed)
            return shared, routed

        return apply_quant_method

    def _watch_layer(self, attention: tuple[str, Any] | None, logits: Any, routed: Any) -> None:
        made = []
        if attention is not None:
            if attention[0] in self._before_experts or not self.running:
                made.append((attention[0], attention[1].flatten(1)))  # else it was looked at already
            self._before_experts.add(attention[0])
        if self._is_own(routed):
            if logits is not None:
                made.append((f"{self._router}.router_logits", logits))
            made.append((self._router, routed))
        points = [self.point(name) for name, _ in made]
        tensors = [one for _, one in made]  # [tokens, columns] each
        if len(made) == 3:
            self.state.watch_three(points, tensors)
            return
        for point, one in zip(points, tensors, strict=True):
            self.state.watch(point, one)

    def _is_own(self, x: Any) -> bool:
        """Whether the rows of `x` are this rank's own; which of all ranks' rows are padding is not known."""
        return self._rows is None or self._rows == int(x.shape[0])

    def around_router(self, original: Any) -> Any:
        """Look at the ids that a router gives."""

        @functools.wraps(original)
        def select_experts(router: Any, *arguments: Any, **options: Any) -> Any:
            weights, ids = original(router, *arguments, **options)
            if self._is_own(ids):
                point = self.point(f"{self._router}.topk_ids")
                own = self._rows is not None
                self.state.watch_ids(point, ids, int(router.global_num_experts), own=own)
            return weights, ids

        return select_experts

    def around_step(self, original: Any) -> Any:
        """Remember how many tokens of the step are real."""

        @functools.wraps(original)
        def execute_model(runner: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
            self.scheduled = int(scheduler_output.total_num_scheduled_tokens)
            return original(runner, scheduler_output, *arguments, **options)

        return execute_model

    def around_forward(self, original: Any) -> Any:
        """One step of the trace; vLLM's dummy runs do not come here."""

        @functools.wraps(original)
        def model_forward(runner: Any, *arguments: Any, **options: Any) -> Any:
            rows = _rows(arguments, options)
            self.state.begin(min(self.scheduled, rows), rows)
            self.running, self._attention = True, None
            try:
                output = original(runner, *arguments, **options)
            except BaseException:
                self.state.end()
                raise
            finally:
                self.running = False
            hidden = output[0] if isinstance(output, tuple) else output
            if hasattr(hidden, "is_floating_point"):
                self.state.watch_last(self.point("model"), hidden)
            else:
                self.state.end()
            return output

        return model_forward


def apply(version: str) -> str:
    """Start the trace in the vLLM of this process; what is watched, in a few words.

    Raises FixError where vLLM is not as expected; nothing has been changed then.
    """
    if os.environ.get(_OTHER_RUNNER, "0").strip() not in ("", "0"):
        raise FixError(f"{_OTHER_RUNNER} is set, and the trace knows the other model runner only: unset it")
    attention = _module("vllm.model_executor.layers.attention.attention").Attention
    moe = _module("vllm.model_executor.layers.fused_moe.runner.moe_runner").MoERunner
    router = _module("vllm.model_executor.layers.fused_moe.router.base_router").BaseRouter
    runner = _module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    expect(attention, "__init__", (), ("self.impl = ", "self.layer_name = "))
    expect(moe, "_apply_quant_method", ("layer", "router_logits"), ("self.router.select_experts(",))
    expect(router, "select_experts", ("router_logits",), ("return topk_weights, topk_ids",))
    expect(runner, "execute_model", ("scheduler_output",), ("self._model_forward(",))
    expect(runner, "_model_forward", ("input_ids", "positions"), ("self.model(",))
    active = getattr(runner, _TRACE, None)
    if isinstance(active, EngineTrace):
        if active.exit is not None:
            active.exit.prepare()  # this process may be a fork of the one where the trace was started
        return "is active already"
    from moedoctor.upstream.engine.padding_experiment import Experiment

    trace = EngineTrace(Experiment.from_environment(os.environ))
    setattr(runner, _TRACE, trace)
    replace_once(attention, "__init__", lambda original: _after(original, trace.around_attention), by=NAME)
    replace_once(moe, "_apply_quant_method", trace.around_moe, by=NAME)
    replace_once(router, "select_experts", trace.around_router, by=NAME)
    replace_once(runner, "execute_model", trace.around_step, by=NAME)
    replace_once(runner, "_model_forward", trace.around_forward, by=NAME)
    trace.exit = ExitReport(trace)
    said = "attention (not MLA), router and MoE outputs are watched for NaN; report at exit"
    return said if trace.experiment is None else f"{said}; {trace.experiment.apply()}"


def trace_of_this_process() -> EngineTrace:
    """The trace that `apply` started; raises LookupError where there is none."""
    module = sys.modules.get("vllm.v1.worker.gpu_model_runner")
    found = getattr(getattr(module, "GPUModelRunner", None), _TRACE, None)
    if not isinstance(found, EngineTrace):
        raise LookupError("no NaN trace in this process: start it with MOEDOCTOR_TRACE=nan")
    return found


def _after(original: Any, then: Any) -> Any:
    @functools.wraps(original)
    def made(owner: Any, *arguments: Any, **options: Any) -> None:
        original(owner, *arguments, **options)
        then(owner)

    return made


def _rows(arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Rows of the padded batch."""
    given = dict(
        zip(("input_ids", "positions", "intermediate_tensors", "inputs_embeds"), arguments, strict=False)
    )
    given |= options
    for name in ("input_ids", "inputs_embeds"):
        if given.get(name) is not None:
            return int(given[name].shape[0])
    return int(given["positions"].shape[-1])


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FixError(f"there is no {name}: {error}") from None
