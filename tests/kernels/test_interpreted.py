"""The kernels in Triton's interpreter, against the reference; other tests run them compiled, on a GPU."""

import json

import pytest

from tests.interpreted import needs_triton, run_check, run_checks
from tests.kernels.test_expert_ids import INTERPRETED as IDS
from tests.kernels.test_expert_ids import WATCH
from tests.kernels.test_routing import INTERPRETED as ROUTERS
from tests.kernels.test_routing import POLICIES

pytestmark = needs_triton

ROUTING = [
    json.dumps((*case, options | {"nan_policy": policy})) for *case, options in ROUTERS for policy in POLICIES
]
EXPERTS = (
    # More blocks than a grid has rows. Every code in each place of a word.
    *("rows", "decoding,64,128,128,4,2", "e4m3"),
    # Small and large blocks of a plan, pairs without an expert, more pairs than the kernel reads at once.
    *("plan,1,0.3,40,5", "plan,16,0.0,40,5", "plan,16,0.5,2,5", "plan,64,1.0,40,5", "plan,64,0.3,1500,5"),
    # Random formats, scales, biases, activations, sizes, and types of input and ids.
    *(f"random,{seed}" for seed in range(3)),
    # A scale for a matrix, a half, a row, a block; masked rows and columns; programs that share a token's
    # experts, in several turns, one of them not full.
    *(f"fp8_rows,{seed}" for seed in (4, 5, 8, 11, 13)),
    # bfloat16 holds values near 1e-13 as well as those near 1; they meet codes that are close to 2**-126.
    *("shared,3,1,2", "small,bfloat16,-40"),
)
MORE = (
    *("fp8-block,relu2,9,288,160", "nvfp4,gelu_tanh,20,96,48", "shared,5,2,3", "small,float16,-8"),
    *(f"random,{seed}" for seed in range(3, 19)),
    *(f"fp8_rows,{seed}" for seed in (0, 3, 12, 14)),
)
QUESTIONS = (
    "router:route cache:make_device_cache moe:run_slots:bf16:fp8 moe:run_experts:bf16:nvfp4"
    " moe:run_host_workers:bf16:nvfp4"
)
CACHE = "kernels/interpreted_cache.py"
SLOW = {
    "experts": ("expert_cases.py", *MORE),
    "questions": ("testing/asking.py", *QUESTIONS.split()),
    "forwards": (CACHE, "forward", "grouped", "mapped", "streamed"),
    "cache": (CACHE, "stateful", "packed_exponents", "broken", "policies", "between"),
}


def test_in_the_interpreter() -> None:
    run_checks(
        ("kernel_calls.py", *ROUTING, "group edges", "inf ranks by logit", "sorts every arrangement"),
        ("id_and_watch_calls.py", *IDS, *WATCH),
        ("trace/interpreted_keep.py",),
        (CACHE, "wrong_ids", "many_ids", "reseeded", "cpus_part"),
        ("expert_cases.py", *EXPERTS),
    )


@pytest.mark.slow
@pytest.mark.parametrize("checks", SLOW)
def test_more_in_the_interpreter(checks: str) -> None:
    run_check(*SLOW[checks])
