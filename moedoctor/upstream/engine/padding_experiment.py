"""The experiment of MD001 in a real engine: padding rows made NaN, and the top-k of another release.

Only for engines that moedoctor starts itself. Only the trace `nan` reads ``MOEDOCTOR_EXPERIMENT``, which
holds JSON: ``{"poison_padding": true, "topk_softmax": "moe_C.so of another release"}``,
``{"poison_padding": true, "restated_topk": true}``, or ``{"poison_memory": true}``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moedoctor.upstream.plugin.register import FixError, Patch
from moedoctor.upstream.plugin.routing_fix import routed

VARIABLE = "MOEDOCTOR_EXPERIMENT"
_NAMESPACE, _OTHER = b"\0_moe_C\0", b"\0_moe_X\0"


@dataclass(frozen=True)
class Experiment:
    """What is put wrong on purpose."""

    poison_padding: bool = False
    """The attention output of padding rows becomes NaN."""
    poison_memory: bool = False
    """Memory that the process will get holds NaN before the model is made."""
    topk_softmax: str | None = None
    """Shared object of another release, whose `topk_softmax` replaces vLLM's own."""
    restated_topk: bool = False
    """The top-k of 0.19.1, restated, replaces `topk_softmax`."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Experiment | None:
        """Return the experiment in the environment, None without any. Raises FixError for an invalid one."""
        text = environ.get(VARIABLE, "").strip()
        if not text:
            return None
        try:
            experiment = cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise FixError(f"{VARIABLE}: {error}; expected JSON with poison_padding") from None
        for name in ("poison_padding", "poison_memory", "restated_topk"):
            value = getattr(experiment, name)
            if not isinstance(value, bool):
                raise FixError(f"{VARIABLE}: {name} is {value!r}; expected true or false")
        if not isinstance(experiment.topk_softmax, str | None):
            raise FixError(f"{VARIABLE}: topk_softmax is {experiment.topk_softmax!r}; expected a path")
        return experiment

    def poison(self, output: Any, real: int) -> None:
        """Make the rows of `output` [tokens, ...] from `real` on NaN."""
        if self.poison_padding and output.shape[0] > real:
            output[real:].fill_(float("nan"))

    def prepare(self) -> tuple[Sequence[Patch], str]:
        """Load the other release's kernel; return the patch for it, and in words what is wrong on purpose."""
        patches, changes = [], ["padding rows are made NaN"] if self.poison_padding else []
        if self.poison_memory:
            changes.append(f"{_leave_nan_behind()} MiB of memory held NaN")
        if self.topk_softmax is not None:
            library = Path(self.topk_softmax)
            replacement = _other(load_beside(library))
            patches.append(_topk_patch(lambda _: replacement))
            changes.append(f"topk_softmax of {library.parent.name}")
        elif self.restated_topk:
            from moedoctor.upstream.releases.old_topk import topk_softmax

            patches.append(_topk_patch(partial(routed, ours=topk_softmax)))
            changes.append("topk_softmax of 0.19.1, restated")
        return patches, "; ".join(changes) or "nothing is put wrong"


def _topk_patch(wrap: Callable[[Any], Any]) -> Patch:
    takes = "topk_weights gating_output"
    return Patch("vllm._custom_ops", "topk_softmax", wrap, takes, ("topk_softmax(",))


def _leave_nan_behind() -> int:
    """Fill GPU memory with NaN and free it; return the MiB. The next allocations hold NaN."""
    import torch

    mib = min(torch.cuda.mem_get_info()[0] // 4, 8 << 30) >> 20
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(mib)]
    for block in blocks:
        block.fill_(0xFF)  # all ones is NaN in bfloat16, float16 and float32
    torch.cuda.synchronize()
    del blocks, block
    torch.cuda.empty_cache()
    return mib


def load_beside(path: Path) -> Any:
    """Load the MoE operators of another release beside those of the vLLM that is loaded.

    All releases register the same namespace, which is one string in the shared object; a copy that says
    ``_moe_X`` instead is what is loaded. Raises FixError unless the string occurs exactly once.
    """
    import torch

    from moedoctor.upstream.releases.moe_kernels import causes, load_library

    changed, loaded = renamed(path.read_bytes()), str(path)
    try:
        with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:  # nobody else may write to it
            copy = Path(folder, "moe.so").resolve()
            loaded = str(copy)
            copy.write_bytes(changed)
            runtime = path.parent / "libcudart.so.12"
            if runtime.is_file():
                import ctypes

                ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
            load_library(copy)
    except OSError as error:
        name = f"{path.parent.name}/{path.name}"  # reports go to others, and so would the rest of the path
        reason = causes(error).replace(loaded, name)
        raise FixError(f"{name} does not load beside vLLM's own kernels: {reason}") from None
    return torch.ops._moe_X


def renamed(library: bytes) -> bytes:
    """Return `library` with its operators' namespace changed. Raises FixError unless it occurs once."""
    count = library.count(_NAMESPACE)
    if count != 1:
        raise FixError(f"the namespace _moe_C is {count} times in the shared object; expected it once")
    return library.replace(_NAMESPACE, _OTHER)


def _other(operators: Any) -> Any:
    from moedoctor.upstream.releases.moe_kernels import fill

    schema = operators.topk_softmax.default._schema

    def topk_softmax(
        topk_weights: Any,
        topk_ids: Any,
        token_expert_indices: Any,
        gating_output: Any,
        renormalize: bool = False,
        e_score_correction_bias: Any = None,
        is_padding: Any = None,  # newer releases route no padding rows; the other kernel routes them all
    ) -> None:
        values = {
            "topk_weights": topk_weights,
            "topk_indices": topk_ids,
            "token_expert_indices": token_expert_indices,
            "gating_output": gating_output,
            "renormalize": renormalize,
            "bias": e_score_correction_bias,
        }
        operators.topk_softmax(**fill(schema, values))

    return topk_softmax
