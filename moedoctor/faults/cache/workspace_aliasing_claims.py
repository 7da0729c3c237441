"""What was said about vLLM's modular kernel and its workspace, and what that kernel does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

_WAYS = {"what apply returns": False, "the result before apply copies it": True}


def measure_modular_kernel(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """The installed vLLM's kernel once a group: what it returns, and what it copies that from."""
    from moedoctor.faults.cache.workspace_aliasing import WorkspaceAliasingParameters
    from moedoctor.faults.cache.workspace_aliasing_lab import observe
    from moedoctor.upstream.moe_backends.modular_moe import ModularMoe

    rows = []
    for what, unfinished in _WAYS.items():
        for groups in (2, 4):
            parameters = WorkspaceAliasingParameters.model_validate({"alias": "sum", "groups": groups})
            seen = observe(parameters, device, ModularMoe.installed(device, unfinished=unfinished)).evidence
            counts = {key: seen[key] for key in ("wrong_rows", "rows", "same_memory")}
            rows.append({"what": what, "groups": groups, **counts})
    return Observation({"rows": rows})


def judge_modular_kernel(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Tokens that are wrong because what the kernel returned was overwritten."""
    seen = next(one.outcome.evidence for one in units if isinstance(one.outcome, Observation))
    said = []
    shares = {}
    for what in _WAYS:
        rows = [row for row in seen["rows"] if row["what"] == what]
        wrong, every = (sum(row[key] for row in rows) for key in ("wrong_rows", "rows"))
        shares[what] = wrong / every
        said.append(f"{what}: {wrong} of {every} tokens wrong")
    holds = next(iter(shares.values())) >= limits["min_share"]
    return ClaimJudgement(ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED, seen, "; ".join(said))


CLAIMS = (
    ClaimTest(
        "modular_kernel",
        judge_modular_kernel,
        measure_modular_kernel,
        units=lambda subjects: [one for one in subjects if one == "installed"],
        needs_gpu=True,
        needs="an installed vLLM",
        thresholds=("min_share",),
    ),
)
