"""A call of an engine of vLLM 0.33.0 (H100, MARLIN, CUDA graphs) whose expert 3 got 64 times its scale.

The global scale of w13 was multiplied in the backend's weights after loading, and `mismatch=1` recorded the
call (`make evidence NAMES=recorded_scale_graphs`).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from moedoctor.cli import main
from moedoctor.diagnose.capsule import replay
from moedoctor.results import to_plain
from moedoctor.trace.capsule import load

FILE = Path(__file__).parent / "engine_wrong_scale.moecapsule"


@pytest.fixture(scope="module")
def result() -> Any:
    """What a child of `moedoctor replay` answers."""
    return json.loads(json.dumps(to_plain(replay.judge(load(FILE)))))


def test_the_wrong_call_is_found_and_the_expert_is_named(result: dict[str, Any]) -> None:
    recorded, diagnosis = result["recorded"], result["diagnosis"]
    assert (result["judged"], result["right"]) == (True, False)
    assert (recorded["wrong_tokens"], recorded["cosine_token"]) == (1, 2)
    # Only this token has expert 3, beside expert 7, so that either may be the wrong one.
    found = (diagnosis["explanation"], *diagnosis["not_told_apart"])
    assert [3] in [explanation["experts"] for explanation in found]
    assert all(explanation["experts"] in ([3], [7]) for explanation in found)
    assert found[0]["cosine"] > 0.9999
    assert diagnosis["runner_up"]["cosine"] < 0.99


def test_the_answer_names_the_entry_and_that_the_kernel_did_not_do_it(capsys, result, monkeypatch):
    monkeypatch.setattr(replay, "ask", lambda module, request, seconds: result)
    assert main(["replay", str(FILE)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "The backend's w13_weight_scale_2 has it, and the checkpoint has not (expert 3: 64 times the others'"
        "): loading or repacking the weights did it, not the kernel"
    ) in text
    assert "the nearest is MD014: `moedoctor explain MD014`" in text
