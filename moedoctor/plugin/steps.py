"""The begin and end of steps of vLLM's model runners, for fixes and traces that watch an engine.

vLLM's dummy runs, which warm up and capture graphs, do not call `_model_forward` of its V1 model runner, nor
`prepare_inputs` of V2. So a step here is one that computes tokens of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.plugin.register import Patch

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


@dataclass
class Steps:
    """Calls back at each step of either model runner."""

    begin: Callable[[int, int], None]
    """(rows that are no padding, rows)"""
    end: Callable[[Any], None]
    """(output of the model, or None if it raised or has none)"""
    _real: int = 0
    """Tokens of the step that are not padding."""
    _running: bool = False
    _warming_up: bool = False

    def list_patches(self) -> Sequence[Patch]:
        """Return what is to be wrapped."""
        padded = ("num_tokens_after_padding=num_tokens_after_padding",)
        keeps = ("self.prepare_inputs(", "self.execute_model_state = ExecuteModelState(")
        return (
            Patch(_WORKER, "compile_or_warm_up_model", self._wrap_warm_up, "self"),
            Patch(_RUNNER, "execute_model", self._wrap_step, "scheduler_output", ("self._model_forward(",)),
            Patch(_RUNNER, "_model_forward", self._wrap_forward, "input_ids positions", ("self.model(",)),
            Patch(_RUNNER_V2, "prepare_inputs", self._wrap_inputs, "scheduler_output batch_desc", padded),
            Patch(_RUNNER_V2, "execute_model", self._wrap_v2_step, "scheduler_output dummy_run", keeps),
        )

    def _begin(self, real: int, rows: int) -> None:
        if self._warming_up:
            return
        self._running = True
        self.begin(min(real, rows), rows)

    def _end(self, hidden: Any) -> None:
        if not self._running:
            return  # a warm-up, or there was nothing to do
        self._running = False
        self.end(hidden)

    def _wrap_warm_up(self, original: Any) -> Any:
        """Call nothing meanwhile: the V2 model runner warms up with steps that look like any other."""

        def compile_or_warm_up_model(worker: Any, *arguments: Any, **options: Any) -> Any:
            self._warming_up = True
            try:
                return original(worker, *arguments, **options)
            finally:
                self._warming_up = False

        return compile_or_warm_up_model

    def _wrap_step(self, original: Any) -> Any:
        """Remember how many tokens of the step are real."""

        def execute_model(runner: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
            self._real = int(scheduler_output.total_num_scheduled_tokens)
            return original(runner, scheduler_output, *arguments, **options)

        return execute_model

    def _wrap_forward(self, original: Any) -> Any:
        """Run one step."""

        def forward(runner: Any, *arguments: Any, **options: Any) -> Any:
            self._begin(self._real, _count_rows(arguments, options))
            output = hidden = None
            try:
                output = original(runner, *arguments, **options)
                hidden = output[0] if isinstance(output, tuple) else output
            finally:
                self._end(hidden)
            return output

        return forward

    def _wrap_inputs(self, original: Any) -> Any:
        """Begin a step of the V2 model runner when its batch is known."""

        def prepare_inputs(runner: Any, *arguments: Any, **options: Any) -> Any:
            batch = original(runner, *arguments, **options)
            self._begin(int(batch.num_tokens), int(batch.num_tokens_after_padding))
            return batch

        return prepare_inputs

    def _wrap_v2_step(self, original: Any) -> Any:
        """End a step of the V2 model runner, which keeps the model's output for its sampler."""

        def execute_model(runner: Any, *arguments: Any, **options: Any) -> Any:
            finished = False
            try:
                result = original(runner, *arguments, **options)
                finished = True
            finally:
                kept = runner.execute_model_state if finished else None
                self._end(getattr(kept, "hidden_states", None))
            return result

        return execute_model


def _count_rows(arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Return the number of rows of the padded batch."""
    names = ("input_ids", "positions", "intermediate_tensors", "inputs_embeds")
    given = dict(zip(names, arguments, strict=False)) | options
    for name in ("input_ids", "inputs_embeds"):
        if given.get(name) is not None:
            return int(given[name].shape[0])
    return int(given["positions"].shape[-1])
