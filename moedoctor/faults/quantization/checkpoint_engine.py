"""The engine tier of the checkpoint failures: vLLM itself on a damaged checkpoint, and on a repaired one.

Each is compared with an engine on a reference checkpoint that means the same numbers. Where the two agree to
within rounding, vLLM read the checkpoint as it was meant.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from moedoctor.faults.quantization.checkpoint_changes import CHECKPOINTS, LAYERS
from moedoctor.interfaces import Judgement
from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.results import CaseVerdict, Evidence, Observation
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, run_engines
from moedoctor.upstream.engine.offload_engine import need_engine

PROMPTS = ((265, 511, 43, 73, 395), (290, 346, 157, 185, 327), (364, 101, 424, 166, 406, 153, 200))
CLOSE = 0.25
"""By how much logprobs of the same tokens may differ in engines that are to compute the same function. With
the prompts above the best token leads by at least 0.75 at every step."""
Run = Callable[[list[EngineRequest]], list[EngineResult]]


def observe(id: str, moe_backend: str, repaired: bool, run: Run = run_engines) -> Observation:
    """vLLM on the damaged or the repaired checkpoint of a failure, and on the reference. Runs in the child.

    Raises UnavailableError where no engine can run.
    """
    if run is run_engines:
        need_engine()
    reference, damaged, repair = CHECKPOINTS[id]
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folders = {
            label: write_qwen3_moe(Path(name) / label, scheme="nvfp4", layers=LAYERS, change=change)
            for label, change in (("reference", reference), ("tested", repair if repaired else damaged))
        }
        results = run([_request(str(folder), label, moe_backend) for label, folder in folders.items()])
    first, second = results
    return Observation(
        {
            "vllm": second.version,
            "moe_backend": second.log.moe_backend,
            "reference_error": None if first.error is None else first.error.message,
            "error": None if second.error is None else second.error.message,
            "allowed_difference": CLOSE,
            **_compared(first, second),
        }
    )


def _request(folder: str, label: str, moe_backend: str) -> EngineRequest:
    arguments = {"moe_backend": moe_backend, "enforce_eager": True, "max_model_len": 64}
    return EngineRequest(
        folder, PROMPTS, {**arguments, "max_num_batched_tokens": 64}, max_tokens=8, logprobs=5, label=label
    )


def _compared(first: EngineResult, second: EngineResult) -> Evidence:
    """How many prompts get other tokens, and how far logprobs of the same token in the same place part."""
    other, largest, nonfinite, steps = 0, 0.0, 0, 0
    for mine, theirs, my_steps, their_steps in zip(
        first.tokens, second.tokens, first.logprobs or (), second.logprobs or (), strict=False
    ):
        other += mine != theirs
        for place, (one, two) in enumerate(zip(my_steps, their_steps, strict=False)):
            if mine[:place] != theirs[:place]:
                break
            steps += 1
            # What is not finite comes back from the engine's process as text.
            nonfinite += sum(1 for value in two.values() if not math.isfinite(float(value)))
            shared = [abs(float(one[key]) - float(two[key])) for key in one.keys() & two.keys()]
            largest = max([largest, *(value for value in shared if math.isfinite(value))])
    return {
        "prompts": len(PROMPTS),
        "steps_compared": steps,
        "prompts_with_other_tokens": other,
        "largest_logprob_difference": round(largest, 4),
        "nonfinite_logprobs": nonfinite,
    }


def judge(seen: Evidence) -> Judgement:
    """The verdict on what `observe` gave."""
    if seen["reference_error"]:
        return Judgement(CaseVerdict.ERROR, "the reference engine failed", str(seen["reference_error"]))
    if seen["error"]:
        return Judgement(CaseVerdict.REPRODUCED, f"vLLM {seen['vllm']} stops: {str(seen['error'])[:120]}")
    if not seen["steps_compared"]:
        return Judgement(CaseVerdict.ERROR, "no logprobs came back", "there is nothing to compare")
    figure = (
        f"{seen['prompts_with_other_tokens']} of {seen['prompts']} prompts with other tokens, logprobs "
        f"differ by {seen['largest_logprob_difference']:g}"
    )
    if seen["nonfinite_logprobs"]:
        figure += f", {seen['nonfinite_logprobs']} not finite"
    wrong = seen["nonfinite_logprobs"] or seen["largest_logprob_difference"] > seen["allowed_difference"]
    if wrong or seen["prompts_with_other_tokens"]:
        return Judgement(CaseVerdict.REPRODUCED, figure)
    return Judgement(CaseVerdict.CLEAN, figure)
