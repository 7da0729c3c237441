"""What the routing functions refuse, in one line each: the argument, what was given, what was expected."""

from __future__ import annotations

import torch

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAN_POLICIES = ("zero", "finite")
SCORINGS = ("softmax", "sigmoid")
_LARGEST = torch.finfo(torch.float32).max


def check_routing(logits: torch.Tensor, top_k: int, bias: torch.Tensor | None, nan_policy: str) -> None:
    """The arguments that all routing functions share; raises TypeError or ValueError."""
    _check_floating("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits must have two dimensions [tokens, experts], got shape {list(logits.shape)}")
    experts = logits.shape[1]
    _check_int("top_k", top_k)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and the number of experts {experts}, got {top_k}")
    if bias is not None:
        _check_floating("bias", bias)
        if bias.shape != (experts,):
            raise ValueError(f"bias must have shape [{experts}], one value an expert, got {list(bias.shape)}")
        if bias.device != logits.device:
            raise ValueError(f"bias must be on the device of logits, {logits.device}, got {bias.device}")
    _check_name("nan_policy", nan_policy, NAN_POLICIES)


def check_groups(
    experts: int, top_k: int, num_groups: int, topk_groups: int, scoring: str, routed_scaling_factor: float
) -> None:
    """What grouped routing adds; raises TypeError or ValueError."""
    _check_int("num_groups", num_groups)
    if num_groups < 1 or experts % num_groups:
        raise ValueError(f"num_groups must divide the number of experts {experts}, got {num_groups}")
    _check_int("topk_groups", topk_groups)
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups must be between 1 and num_groups {num_groups}, got {topk_groups}")
    reachable = topk_groups * (experts // num_groups)
    if top_k > reachable:
        raise ValueError(
            f"top_k must be at most {reachable}, the experts of topk_groups {topk_groups}, got {top_k}"
        )
    _check_name("scoring", scoring, SCORINGS)
    if isinstance(routed_scaling_factor, bool) or not isinstance(routed_scaling_factor, (int, float)):
        raise TypeError(f"routed_scaling_factor must be a number, got {type(routed_scaling_factor).__name__}")
    if not abs(routed_scaling_factor) <= _LARGEST:
        raise ValueError(f"routed_scaling_factor must be a finite float32, got {routed_scaling_factor}")


def _check_floating(name: str, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in FLOATING:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {value.dtype}")


def _check_int(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
