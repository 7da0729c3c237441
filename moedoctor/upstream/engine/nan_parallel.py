"""The NaN trace of two data-parallel ranks: two engines of one process each, on two GPUs of one host.

vLLM takes the ranks of such engines from its ``VLLM_DP_*`` variables. Ranks are padded to the same batch, and
one whose prompts are through runs dummy batches until all are; those are no steps of the trace.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.results import UnavailableError
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, run_engines
from moedoctor.upstream.engine.nan_requests import engine_arguments, evidence_row, prompts, said, traced

RANKS = 2
CONFIGS: Mapping[str, Mapping[str, Any]] = {"DP=2": {}, "DEP=2": {"enable_expert_parallel": True}}
"""As vllm-project/vllm#39593 names them -> engine arguments; D is data parallel, EP expert parallel."""
SECONDS = 110.0
"""Time limit of a pair of engines; one that waits for a rank which died waits until then."""
_ONE_PROCESS: Mapping[str, Any] = {"distributed_executor_backend": "uni", "async_scheduling": False}
"""The worker stays in the engine's process, where the trace is asked. With asynchronous scheduling there the
ranks' numbers of forward passes could differ, and each would wait for the other."""
_PROMPTS, _TOKENS = (11, 3), (24, 12)
"""Prompts and new tokens of each rank: the second has more padding, and is through before the first."""
_PORTS = 8
"""Ports from the first on that vLLM may take, one after another."""


def parallel_table(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row a rank and one for both, with the columns of vllm-project/vllm#39593, for each of `CONFIGS`.

    Raises UnavailableError where there are not two GPUs, or where no pair of engines ran.
    """
    import torch

    if torch.cuda.device_count() < RANKS:
        raise UnavailableError(f"{RANKS} ranks need {RANKS} GPUs; here are {torch.cuda.device_count()}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        model = write_qwen3_moe(Path(folder), experts=16, top_k=4)
        for config, arguments in CONFIGS.items():
            rows += table_rows(config, run_engines(rank_requests(model, config, arguments), parallel=RANKS))
    if all("error" in row for row in rows):
        raise UnavailableError(f"no engine ran: {rows[0]['error']}")
    return rows


def rank_requests(model: Path, config: str, arguments: Mapping[str, Any]) -> list[EngineRequest]:
    """The engines of all ranks, which must be started together."""
    port = free_ports(_PORTS)
    return [
        EngineRequest(
            str(model),
            prompts()[: _PROMPTS[rank]],
            {**engine_arguments(), **_ONE_PROCESS, **arguments},
            {**traced(), **rank_environ(rank, port)},
            max_tokens=_TOKENS[rank],
            probe="moedoctor.upstream.engine.nan_padding_engines:report",
            seconds=SECONDS,
            label=f"{config}, rank {rank}",
        )
        for rank in range(RANKS)
    ]


def rank_environ(rank: int, port: int) -> dict[str, str]:
    """What tells an engine its rank; all talk over the loopback device."""
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(RANKS),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens at now. Raises UnavailableError."""
    for first in range(29600, 60000, count):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise UnavailableError(f"no {count} free ports in a row on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def table_rows(config: str, results: Sequence[EngineResult]) -> list[dict[str, Any]]:
    """A row a rank, and one for all where all ran: their steps and what was seen added up."""
    rows: list[dict[str, Any]] = []
    for result in results:
        if result.error is not None:
            rows.append({"config": result.label, "error": said(result)})
            continue
        repeated = sum(sum(one["repeated"]) for one in result.probe["routers"])
        first = result.probe["first_padding"]
        rows.append(
            {
                "config": result.label,
                **evidence_row(result),
                "nan_in_real": result.probe["nan_in_real"],
                "routers_watched": result.probe["routers_watched"],
                "rows_with_repeated_ids": repeated,
                "first_in_padding": "" if first is None else f"{first['what']} at {first['point']}",
            }
        )
    if any("error" in row for row in rows):
        return rows
    return [*rows, _merged(config, rows)]


def _merged(config: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    added = ("steps", "steps_with_padding", "nan_in_padding", "inf_in_padding", "nan_in_real")
    total = {
        key: sum(row[key] for row in rows) for key in (*added, "routers_watched", "rows_with_repeated_ids")
    }
    padded = total["steps_with_padding"]
    pads = sum(row["mean_pad_tokens"] * row["steps_with_padding"] for row in rows)
    return {
        "config": f"{config}, both ranks",
        **total,
        "nan_share": round(total["nan_in_padding"] / padded, 4) if padded else 0.0,
        "mean_pad_tokens": round(pads / padded, 2) if padded else 0.0,
        "first_in_padding": "",
    }
