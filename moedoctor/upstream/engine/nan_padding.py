"""Real engines with the NaN trace: how often padding holds NaN.

Every engine is a tiny Qwen3-MoE in BF16 with random weights, compiled, with piecewise CUDA graphs. The
columns are those of vllm-project/vllm#39593.

`measure_parallel_padding` runs two data-parallel ranks: two engines of one process each, on two GPUs of one
host, or on one if there is only one. vLLM reads their ranks from its ``VLLM_DP_*`` variables. Ranks are
padded to the same batch, and a rank whose prompts are done runs dummy batches until all are; those are no
steps of the trace.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.results import UnavailableError
from moedoctor.upstream.engine.engine import EngineRequest
from moedoctor.upstream.engine.experiment import (
    Ran,
    Trial,
    make_rows,
    require_a_run,
    run_trials,
    write_checkpoints,
)

BATCH = 11
"""Prompts at once: graphs are not captured for this size, so decode steps are padded to 16."""
TRACED: Mapping[str, str] = {"MOEDOCTOR_TRACE": "nan"}
SECONDS = 280.0
"""Time limit of an engine."""
RANKS = 2
CONFIGS: Mapping[str, Mapping[str, Any]] = {"DP=2": {}, "DEP=2": {"enable_expert_parallel": True}}
"""As vllm-project/vllm#39593 names them -> engine arguments; D is data parallel, EP expert parallel."""
_SIZES = [1, 2, 4, 8, 16, 32]
_TOKENS = 24
_MODEL = {"experts": 16, "top_k": 4}
_RANK_SECONDS = 150.0
"""Time limit of a pair of ranks; a rank whose partner died waits until then."""
_ONE_PROCESS: Mapping[str, Any] = {"distributed_executor_backend": "uni", "async_scheduling": False}
"""Keeps the worker in the engine's process, which has the trace. With asynchronous scheduling the ranks could
differ in their numbers of forward passes, and each would wait for the other."""
_RANK_PROMPTS, _RANK_TOKENS = (BATCH, 3), (_TOKENS, 12)
"""Prompts and new tokens of each rank: the second has more padding, and ends before the first."""
_ON_ONE_GPU: Mapping[str, str] = {"NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1"}
"""Keeps NCCL on sockets, also where a network card or a fabric of NVLink could be found."""
_PORTS = 8
"""Ports from the first on that vLLM may use, one after another."""


def make_engine_arguments() -> dict[str, Any]:
    """Return the arguments of all engines: compiled, with piecewise CUDA graphs and the Triton experts."""
    return {
        "moe_backend": "triton",
        "enforce_eager": False,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": _SIZES},
    }


def make_prompts() -> Sequence[list[int]]:
    """Return prompts of 3 to 13 tokens, so that prefill steps are padded, too."""
    return [[(7 * prompt + 13 * place) % 500 + 5 for place in range(3 + prompt)] for prompt in range(BATCH)]


def measure_padding(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each configuration. Raises UnavailableError if no engine ran."""
    with write_checkpoints("bf16", **_MODEL) as folders:
        trials = [
            _make_trial(folders["bf16"], f"1 GPU, {backend}", attention_backend=backend)
            for backend in ("TRITON_ATTN", "FLASH_ATTN")
        ]
        ran = run_trials(trials)
    table = require_a_run(make_rows(ran, _make_row))
    return [*table, {"config": "DP=2", "not_run": "scenarios/engine/nan_padding_dp.yaml does"}]


def measure_parallel_padding(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each rank and one for both, for each of `CONFIGS`.

    With fewer than two GPUs both ranks run on the first, and the names of the rows say so. Raises
    UnavailableError if no pair of engines ran.
    """
    import torch

    shared = torch.cuda.device_count() < RANKS
    table: list[dict[str, Any]] = []
    with write_checkpoints("bf16", **_MODEL) as folders:
        for name, arguments in CONFIGS.items():
            config = f"{name} on one GPU" if shared else name
            ran = run_trials(rank_trials(folders["bf16"], config, arguments, shared=shared), parallel=RANKS)
            table += rank_rows(config, ran)
    return require_a_run(table)


def rank_trials(
    model: str, config: str, arguments: Mapping[str, Any], *, shared: bool = False
) -> list[Trial]:
    """Return the engines of all ranks, which must be started together; if `shared`, on one GPU.

    NCCL refuses two ranks on one GPU of one host. Each rank gets a host name of its own then, so they talk
    over sockets. The MoE layers compute the same, but more slowly, since the processes take turns.
    """
    port = free_ports(_PORTS)
    return [
        Trial(
            EngineRequest(
                model,
                make_prompts()[: _RANK_PROMPTS[rank]],
                {**make_engine_arguments(), **_ONE_PROCESS, **arguments},
                {
                    **TRACED,
                    "VLLM_DP_RANK": str(rank),
                    "VLLM_DP_RANK_LOCAL": "0" if shared else str(rank),
                    "VLLM_DP_SIZE": str(RANKS),
                    "VLLM_DP_MASTER_PORT": str(port),
                    # All ranks talk over the loopback device.
                    **dict.fromkeys(("VLLM_DP_MASTER_IP", "VLLM_HOST_IP"), "127.0.0.1"),
                    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"),
                    **({**_ON_ONE_GPU, "NCCL_HOSTID": f"moedoctor-rank-{rank}"} if shared else {}),
                },
                max_tokens=_RANK_TOKENS[rank],
                probe=_REPORT,
                seconds=_RANK_SECONDS,
                label=f"{config}, rank {rank}",
            ),
            {"config": f"{config}, rank {rank}"},
        )
        for rank in range(RANKS)
    ]


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that are free now. Raises UnavailableError."""
    for first in range(29600, 60000, count):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise UnavailableError(f"no {count} consecutive free ports on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def rank_rows(config: str, ran: Sequence[Ran]) -> list[dict[str, Any]]:
    """Return a row for each rank, and if all ran one with their counts added up."""

    def make_columns(engine: Ran) -> dict[str, Any]:
        probe, first = engine.result.probe, engine.result.probe["first_padding"]
        return {
            **_make_row(engine),
            "nan_in_real": probe["nan_in_real"],
            "routers_watched": probe["routers_watched"],
            "rows_with_repeated_ids": sum(sum(router["repeated"]) for router in probe["routers"]),
            "first_in_padding": "" if first is None else f"{first['what']} at {first['point']}",
        }

    table = make_rows(ran, make_columns)
    if any("error" in row for row in table):
        return table
    added = ("steps", "steps_with_padding", "nan_in_padding", "inf_in_padding", "nan_in_real")
    total = {
        key: sum(row[key] for row in table) for key in (*added, "routers_watched", "rows_with_repeated_ids")
    }
    padded = total["steps_with_padding"]
    pads = sum(row["mean_pad_tokens"] * row["steps_with_padding"] for row in table)
    sums = {
        "config": f"{config}, both ranks",
        **total,
        "nan_share": round(total["nan_in_padding"] / padded, 4) if padded else 0.0,
        "mean_pad_tokens": round(pads / padded, 2) if padded else 0.0,
        "first_in_padding": "",
    }
    return [*table, sums]


_REPORT = "moedoctor.upstream.engine.nan_padding:report"


def report(llm: Any) -> dict[str, Any]:
    """Probe: return what the NaN trace of this engine has found."""
    from moedoctor.plugin.nan_trace import trace_of_this_process

    found = trace_of_this_process().report()
    if found is None:
        raise LookupError("the NaN trace saw no model")
    return found.to_evidence()


def _make_trial(model: str, label: str, **arguments: Any) -> Trial:
    request = EngineRequest(
        model,
        make_prompts(),
        {**make_engine_arguments(), **arguments},
        TRACED,
        max_tokens=_TOKENS,
        probe=_REPORT,
        seconds=SECONDS,
        label=label,
    )
    return Trial(request, {"config": label})


def _make_row(engine: Ran) -> dict[str, Any]:
    from moedoctor.trace.nan_report import make_row

    return make_row(engine.result.probe)
