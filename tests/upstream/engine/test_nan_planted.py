"""The engines with a planted NaN: what is planted, and when the trace counts as right."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from moedoctor.faults.routing.nan_routing import NanRouting
from moedoctor.interfaces import Measurement
from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.results import ClaimVerdict, Observation
from moedoctor.upstream.engine import engine, nan_planted
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult
from moedoctor.upstream.engine.nan_planted import NOTHING

FOUND = {"what": "NaN", "point": "model.layers.0.self_attn.attn", "step": 2}


def test_only_the_embedding_of_the_token_is_made_nan(tmp_path: Path) -> None:
    clean = load_file(write_qwen3_moe(tmp_path / "clean") / "model.safetensors")
    change = functools.partial(nan_planted.plant, token=477)
    wrong = load_file(write_qwen3_moe(tmp_path / "wrong", change=change) / "model.safetensors")
    rows = wrong.pop("model.embed_tokens.weight").isnan().any(1).nonzero().flatten().tolist()
    assert rows == [477]
    assert clean.pop("model.embed_tokens.weight").isfinite().all()
    assert all(tensor.equal(clean[name]) for name, tensor in wrong.items())


def table(monkeypatch: pytest.MonkeyPatch, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows if every engine is right, but for `changes` to the probes of some labels."""

    def run_engines(requests: Sequence[EngineRequest], *, parallel: int) -> list[EngineResult]:
        results = []
        for request in requests:
            assert request.environ["MOEDOCTOR_TRACE"] == "nan"
            runner = {"0": "V1", "1": "V2"}[request.environ["VLLM_USE_V2_MODEL_RUNNER"]]
            probe = {
                "runner_in_use": runner,
                "steps": 6,
                "nan_in_real": 0 if NOTHING in request.label else 5,
                "first_real": None if NOTHING in request.label else FOUND,
                "routers_watched": 2,
                "not_reached": 0,
                **changes.get(request.label, {}),
            }
            tokens = ((probe.pop("token", 477), 2),)
            results.append(EngineResult(request.label, tokens, probe=probe, fixes="nan (watched)"))
        return results

    monkeypatch.setattr(engine, "need_engine", lambda: None)
    monkeypatch.setattr(engine, "run_engines", run_engines)
    return nan_planted.planted_table({})


@pytest.mark.parametrize(
    ("label", "change", "verdict"),
    [
        ("", {}, ClaimVerdict.CONFIRMED),
        (
            "V2, CUDA graphs, embedding of the first generated token",
            {"first_real": None},
            ClaimVerdict.REFUTED,
        ),
        (
            "V1, eager, embedding of the first generated token",
            {"first_real": {**FOUND, "step": 1}},
            ClaimVerdict.REFUTED,
        ),
        ("V1, CUDA graphs, nothing", {"first_real": FOUND}, ClaimVerdict.REFUTED),
        ("V2, CUDA graphs, nothing", {"routers_watched": 0}, ClaimVerdict.REFUTED),
        ("V2, CUDA graphs, nothing", {"runner_in_use": "V1"}, ClaimVerdict.UNTESTED),
        ("V2, CUDA graphs, nothing", {"token": 20}, ClaimVerdict.UNTESTED),
    ],
)
def test_each_engine_must_find_what_was_planted_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, label: str, change: dict[str, Any], verdict: ClaimVerdict
) -> None:
    rows = table(monkeypatch, **{label: change})
    assert len(rows) == 6
    measured = Measurement("installed", Observation({"rows": json.loads(json.dumps(rows))}))
    claim = next(claim for claim in NanRouting.claims if claim.key == "planted_nan")
    judgement = claim.judge((), [measured], {"max_missed": 0, "max_false": 0})
    assert judgement.verdict is verdict, judgement.reason
