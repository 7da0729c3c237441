"""MD010's claim about the fix `backend` inside vLLM, which only real engines can decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moedoctor.faults.base import ClaimCases, ClaimJudgement, claim, decide, untested


@claim(
    "backend_engine",
    measure="moedoctor.upstream.engine.backend_choice:choices",
    needs_gpu=True,
    needs="an installed vLLM that starts",
)
def backend_engine(cases: ClaimCases) -> ClaimJudgement:
    """Engines with the fix use the backend that the variable names, and no other name lets them start.

    Tokens and logprobs are those of the engine that ``--moe-backend`` asks for the same. Equal ones confirm
    the claim only if the other backend gives other logprobs.
    """
    rows = cases.rows()
    honoured = [row for row in rows if "reason" not in row]
    refused = [row for row in rows if "reason" in row]
    if not honoured:
        return untested("no engine ran", {"rows": rows})
    named = "; ".join(f"{row['asked']}: {_became(row)}" for row in honoured)
    stopped = "; ".join(
        f"{row['asked']} ({row['reason']}): {row['error'] if 'error' in row else row['detail']}"
        for row in refused
    )
    figure = f"{named}; {stopped}"
    ran = [row for row in honoured if "error" not in row]
    uncompared = [row for row in ran if None in (row["logprob_distance"], row["distance_of_other"])]
    if uncompared:
        return untested(f"an engine with --moe-backend did not run; {figure}", {"rows": rows})
    holds = all(row["refused"] for row in refused) and all(
        "error" not in row
        and row["chosen"] == row["asked"]
        and row["outcome"] == "same tokens"
        and float(row["logprob_distance"]) == 0
        for row in honoured
    )
    if holds and not all(float(row["distance_of_other"]) > 0 for row in honoured):
        return untested(
            f"both backends give the same logprobs, so they show nothing; {figure}", {"rows": rows}
        )
    return decide(holds, {"rows": rows}, figure)


def _became(row: Mapping[str, Any]) -> str:
    """Return what became of an engine with the fix, in words."""
    if "error" in row:
        return str(row["error"])
    return f"{row['chosen']} in place of {row['automatic']}, {row['outcome']}, {row['detail']}"
