"""Engines with the fix `moe` whose weights it refuses once they are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moedoctor.bench.engines import Plan, Variant, measure
from moedoctor.upstream.engine.experiment import write_checkpoints

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]
NAN = 0x7F
"""The code of NaN in E4M3."""
VARIANTS = (
    "vllm=--moe-backend triton --enforce-eager",
    "optional=MOEDOCTOR_FIXES=moe MOEDOCTOR_FIXES_OPTIONAL=1 --moe-backend triton --enforce-eager",
    "required=MOEDOCTOR_FIXES=moe --moe-backend triton --enforce-eager",
)


def plant_nan(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Make one weight of one expert of the last layer NaN."""
    last = max(name for name in tensors if name.endswith("experts.5.down_proj.weight"))
    tensors[last].view(torch.uint8)[0, 0] = NAN


def test_a_layer_whose_weights_are_refused_is_left_to_vllm_only_if_the_fix_is_optional() -> None:
    variants = [Variant.parse(text) for text in VARIANTS]
    with write_checkpoints("fp8", change=plant_nan) as folders:
        measured = measure(Plan(Path(folders["fp8"]), variants, batches=(1,), repeats=1, control=True))
    base, left, stopped = measured.engines
    print(measured.engines)
    assert "moe is refused: w2_weight holds NaN" in str(stopped.failed)
    assert base.failed is left.failed is None
    assert "MoedoctorExperts × 1" in left.experts
    assert "," in left.experts, "the other layer is vLLM's"
    # Prompts that reach the NaN are not clear, so only the others are compared.
    assert left.tokens_of >= 10
    assert left.tokens_same > 0.7 * left.tokens_of > left.control_same
