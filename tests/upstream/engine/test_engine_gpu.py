"""Real engines on a GPU with an installed vLLM. Some minutes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.bench.engines import Plan, Variant, measure
from moedoctor.faults.offload.offload_garbage import OffloadGarbageParameters, judge_own_model
from moedoctor.faults.offload.offload_garbage_lab import compare, own_model_trial
from moedoctor.reference.checkpoints import write_qwen3_moe, write_tokenizer
from moedoctor.results import CaseVerdict
from moedoctor.upstream.engine.experiment import Ran, run_trials, write_checkpoints
from moedoctor.upstream.engine.offload_table import COPIES, ON_GPU, UVA, make_evidence, make_trial

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]


@pytest.mark.parametrize(("fixes", "outcome"), [("", "crash 2"), ("offload", "same tokens")])
def test_marlin_without_uva(tmp_path: Path, fixes: str, outcome: str) -> None:
    folder = str(write_qwen3_moe(tmp_path / "model", scheme="nvfp4"))
    trials = [make_trial("NVFP4 MARLIN", "eager", place, folder, fixes) for place in (ON_GPU, UVA, COPIES)]
    rows = make_evidence(run_trials(trials))["table"]
    outcomes = {row["experts"]: row["outcome"] for row in rows}
    assert (outcomes[ON_GPU], outcomes[COPIES]) == ("control", outcome)
    # Repacking takes what is read through UVA back to the GPU (MD013), from some release on.
    assert outcomes[UVA] in ("same tokens", *(() if fixes else ("back on the GPU",)))


def test_the_first_wrong_layer_of_the_users_model_is_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in tensors:
            if "layers.2.mlp" in name and name.endswith("down_proj.weight_scale_2"):
                tensors[name] = tensors[name] * 16

    sizes = '{"max_model_len": 64, "kv_cache_memory_bytes": 67108864, "gpu_memory_utilization": 0.05}'
    trials = []
    for name, change, offload in (("right", None, False), ("wrong", spoil, True)):
        folder = write_qwen3_moe(tmp_path / name, scheme="nvfp4", layers=4, change=change)
        write_tokenizer(folder, 512)
        parameters = OffloadGarbageParameters(
            mode="eager", model=str(folder), prompt="t265 t511 t43 t73 t395", max_tokens=6, arguments=sizes
        )
        trials.append(replace(own_model_trial(parameters, offload=offload), control=None))
    control, other = run_trials(trials)
    comparison = compare(Ran(other.trial, other.result, control.result), parameters)
    assert comparison["layers_compared"] == 4
    assert (comparison["first_bit"], comparison["first_layer"]) == ("model.layers.2", "model.layers.2")
    judged = judge_own_model(comparison)
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert "model.layers.2" in judged.figure


def test_nan_logits_give_the_tokens_that_triage_names() -> None:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits = torch.full((2, 151_936), torch.nan, device="cuda")  # [tokens, vocabulary]
    rows = torch.arange(2, device="cuda", dtype=torch.int32)  # [tokens]
    kinds = {"is_drafting": False} if "is_drafting" in gumbel_sample.__code__.co_varnames else {}
    heats = [torch.full((2,), heat, device="cuda") for heat in (0.0, 1.0)]  # [requests] each
    sampled = [gumbel_sample(logits, rows, heat, rows.long(), rows.long(), False, **kinds) for heat in heats]
    assert [each.tolist() for each in (logits.argmax(-1), *sampled)] == [[0, 0], *[[1023, 1023]] * 2]


VARIANTS = (
    "vllm=--moe-backend triton --enforce-eager",
    "optional=MOEDOCTOR_FIXES=moe MOEDOCTOR_FIXES_OPTIONAL=1 --moe-backend triton --enforce-eager",
    "required=MOEDOCTOR_FIXES=moe --moe-backend triton --enforce-eager",
)


def plant_nan(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Make one weight of one expert of the last layer NaN, an expert that few tokens are sent to."""
    last = max(name for name in tensors if name.endswith("experts.5.down_proj.weight"))
    tensors[last].view(torch.uint8)[0, 0] = 0x7F  # NaN in E4M3
    tensors[last.replace("experts.5.down_proj", "gate")][5] = 0


def test_a_layer_whose_weights_are_refused_is_left_to_vllm_only_if_the_fix_is_optional() -> None:
    variants = [Variant.parse(text) for text in VARIANTS]
    # The V2 runner takes the largest of 1,024 logits: of 512 that are NaN, it is one that is not there.
    with write_checkpoints("fp8", change=plant_nan, vocab=1024) as folders:
        measured = measure(Plan(Path(folders["fp8"]), variants, batches=(1,), repeats=1, control=True))
    base, left, stopped = measured.engines
    assert "moe is refused: w2_weight holds NaN" in str(stopped.failed)
    assert base.failed is left.failed is None
    assert "MoedoctorExperts × 1" in left.experts
    assert "," in left.experts, "the other layer is vLLM's"
    # Prompts that reach the NaN are not clear, so only the others are compared.
    assert left.tokens_of >= 10
    assert left.tokens_same > 0.7 * left.tokens_of > left.control_same
