"""The trace that ships with moedoctor: there, small, and made by the script as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from moedoctor.bench.cache.replay import facts_of, replay_trace
from moedoctor.entries import reports_folder
from moedoctor.trace.format import SHIPPED, shipped_trace

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


def test_it_is_below_a_megabyte_and_has_the_shape_of_a_large_model() -> None:
    assert (reports_folder() / SHIPPED).stat().st_size < 1_000_000
    trace = shipped_trace()
    assert (trace.num_experts, trace.top_k, len(trace.layers)) == (128, 8, 8)
    assert trace.stream_rows == (256,) * 16
    assert all(len(call) == 8 for layer in range(8) for call in trace.calls(layer))


def test_its_settings_are_the_defaults_of_the_script() -> None:
    code = "import json, trace_model; print(json.dumps(vars(trace_model.Settings())))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert shipped_trace().made["settings"] == json.loads(done.stdout)


def test_it_says_how_it_was_made() -> None:
    made = shipped_trace().made
    assert made["script"] == "scripts/train_trace_model.py"
    assert made["steps_done"] > 1000
    assert made["held_out_loss"] < 2.0
    assert made["load_entropy_least"] > 0.9
    assert len(made["text_sha256"]) == 64


def test_tokens_reuse_experts_more_than_chance() -> None:
    facts = facts_of(shipped_trace())
    assert facts.reuse > 2 * 8 / 128


def test_where_there_is_no_choice_all_policies_agree_and_else_the_optimum_is_ahead() -> None:
    points = replay_trace(shipped_trace(), capacities=[8, 16])
    rates = {(one.policy, one.capacity): one.hit_rate for one in points}
    assert len({rates[policy, 8] for policy in ("lru", "lfu", "lfru", "aging", "belady")}) == 1
    assert rates["belady", 16] > rates["lru", 16] + 0.05
