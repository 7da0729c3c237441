"""The engine tier of MD003, MD005 and MD008: vllm#37883's table, which `offload_table` runs, judged."""

from __future__ import annotations

from collections.abc import Sequence

from moedoctor.interfaces import Judgement
from moedoctor.results import CaseVerdict, Evidence
from moedoctor.upstream.engine.experiment import Outcome

_FAILED = [outcome for outcome in Outcome if outcome.crashed or outcome is Outcome.OTHER]


def judge(table: Evidence) -> Judgement:
    """Reproduced if an engine with offload crashes or gives other tokens than the engine without."""
    if table["controls_wrong"]:
        reason = f"{table['controls_wrong']} engines without offload did not run"
        return Judgement(CaseVerdict.ERROR, "no control", reason)
    if table["not_fixed"]:
        reason = f"{table['not_fixed']} engines ran without the fix that they should have"
        return Judgement(CaseVerdict.ERROR, "the fix was not active", reason)
    if table["not_offloaded"]:
        reason = f"{table['not_offloaded']} engines: {_describe_first(table, [Outcome.NO_OFFLOAD])}"
        return Judgement(CaseVerdict.ERROR, "nothing was offloaded", reason)
    failed = table["crashed"] + table["other_tokens"]
    if failed:
        figure = f"{failed} of {table['cells']} cells fail: {_describe_first(table, _FAILED)}"
        return Judgement(CaseVerdict.REPRODUCED, figure[:200])
    cells, moved_back = table["cells"], table["moved_back"]
    if moved_back == cells:
        reason = _describe_first(table, [Outcome.MOVED_BACK])
        return Judgement(CaseVerdict.ERROR, "nothing was offloaded", reason)
    same = "all" if table["same"] == cells else f"{table['same']} of"
    figure = f"{same} {cells} cells give the tokens of the run without offload"
    if table["rounding"]:
        figure += f", {table['rounding']} those of the same compiled code with its weights on the GPU"
    if moved_back:
        figure += f"; in {moved_back} most weights were back on the GPU (MD013)"
    return Judgement(CaseVerdict.CLEAN, figure)


def _describe_first(table: Evidence, outcomes: Sequence[Outcome]) -> str:
    row = next(row for row in table["table"] if Outcome(row["outcome"]) in outcomes)
    return f"{row['backend']}, {row['experts']}: {row['detail']}"
