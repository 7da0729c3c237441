"""The problems of `router.yaml`: logits with one trouble each, and what is wrong with a routing of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moedoctor.reference import routing as reference
from moedoctor.reference.agreement import find_differing_rows
from moedoctor.testing.questions import Setting, UnfitError, pad_rows, requires, takes

# T = tokens, E = experts, K = top_k


@dataclass
class Call:
    """One call of a router."""

    logits: torch.Tensor
    """[T, E] on the device of the router."""
    top_k: int
    scoring: str
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments: ``renormalize``, ``bias``, ``num_groups`` and ``topk_groups``."""


def _put(call: Call, value: float, columns: slice | int = slice(None)) -> None:
    """Set every second row, or some columns of these rows; the others show whether rows are independent."""
    call.logits[::2, columns] = value


def _mask_half(call: Call) -> None:
    call.logits[:, ::2] = -torch.inf
    if call.logits.shape[1] // 2 < call.top_k:
        raise UnfitError("fewer experts are left than top_k")


def _change(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Call], None]:
    def change_logits(call: Call) -> None:
        call.logits = change(call.logits)

    return change_logits


def _lower(call: Call) -> None:
    """Make the scores of every second row zero, as sigmoid computes them, and ask for a sum of 1."""
    call.logits[::2] -= 500.0
    call.options["renormalize"] = True


def _add_bias(call: Call) -> None:
    experts = call.logits.shape[1]
    call.options["bias"] = torch.linspace(1.0, -1.0, experts, device=call.logits.device)  # [E]


def _add_groups(call: Call) -> None:
    experts = call.logits.shape[1]
    if experts % 4 or experts // 2 < call.top_k or experts < 8:
        raise UnfitError("the experts do not make four groups")
    call.options |= {"num_groups": 4, "topk_groups": 2}
    # The two best experts are in two groups, and the third and fourth best in those as well or not.
    call.logits[:, 0], call.logits[:, -1] = 9.0, 8.0


CHANGES: Mapping[str, Callable[[Call], Any]] = {
    **dict.fromkeys(("ordinary", "every_expert", "odd_experts", "no_tokens"), lambda call: None),
    "bfloat16_logits": _change(torch.Tensor.bfloat16),
    "float16_logits": _change(torch.Tensor.half),
    "nan_rows": lambda call: _put(call, torch.nan),
    "nan_entry": lambda call: _put(call, torch.nan, call.logits.shape[1] // 2),
    "inf_entry": lambda call: _put(call, torch.inf, call.logits.shape[1] // 2),
    "masked_experts": _mask_half,
    "masked_rows": lambda call: _put(call, -torch.inf),
    "equal_logits": lambda call: _put(call, 1.5),
    "large_logits": _change(lambda logits: logits * 1e4),
    "padded_rows": _change(lambda logits: pad_rows(logits, 5, 100.0)),
    "column_major": _change(lambda logits: logits.t().contiguous().t()),
    "renormalized": lambda call: call.options.update(renormalize=True),
    "scores_of_zero": _lower,
    "bias": _add_bias,
    "groups": _add_groups,
}
"""Question -> what it does to ordinary logits."""


def ask(fn: Callable[..., Any], question: str, sizes: Mapping[str, int], how: Setting) -> str | None:
    """Return what is wrong with the routing, or None."""
    tokens, experts, top_k = sizes["tokens"], sizes["experts"], sizes["top_k"]
    if not 1 <= top_k <= experts:
        raise UnfitError("top_k must be between 1 and the number of experts")
    draw = torch.Generator().manual_seed(how.seed)
    logits = torch.randn(tokens, experts, generator=draw).to(how.device) * 2  # [T, E]
    call = Call(logits, top_k, how.options.get("scoring", "softmax"))
    CHANGES[question](call)
    before = call.logits.clone()
    if takes(fn, "num_groups"):
        call.options = {"num_groups": 1, "topk_groups": 1, **call.options}
    if requires(fn, "bias"):
        call.options = {"bias": torch.zeros(experts, device=how.device), **call.options}
    settings = {name: value for name, value in call.options.items() if takes(fn, name)}
    weights, ids = fn(call.logits, top_k, **settings)[:2]
    if how.options.get("renormalize"):
        call.options["renormalize"] = True
    if not torch.equal(before.nan_to_num(nan=7.0), call.logits.nan_to_num(nan=7.0)):
        return "the logits were written to"
    return judge(call, weights, ids)


def judge(call: Call, weights: torch.Tensor, ids: torch.Tensor) -> str | None:
    """Return what is wrong with `weights` and `ids` [T, K], or None.

    Ids must be distinct and in range and weights finite in every row. Rows whose scores are numbers must be
    those of the reference, up to rounding and ties.
    """
    tokens, experts = call.logits.shape
    if list(ids.shape) != [tokens, call.top_k] or ids.shape != weights.shape:
        return f"weights are {list(weights.shape)} and ids {list(ids.shape)} for {tokens} tokens"
    if ids.is_floating_point():
        return f"ids are {ids.dtype}"
    logits, weights, ids = call.logits.float().cpu(), weights.float().cpu(), ids.long().cpu()
    for row in range(tokens):
        chosen = ids[row].tolist()
        if not all(0 <= expert < experts for expert in chosen):
            return f"row {row}: ids {chosen} for {experts} experts"
        if len(set(chosen)) < len(chosen):
            return f"row {row}: an expert is chosen twice: {chosen}"
        if not bool(weights[row].isfinite().all()):
            return f"row {row}: a weight is not finite: {weights[row].tolist()}"
    bias = call.options.get("bias")
    options = {**call.options, "bias": None if bias is None else bias.cpu()}
    right = getattr(reference, f"topk_{call.scoring}")
    right_weights, right_ids = right(logits, call.top_k, **options)
    usable = (logits.isfinite() | (logits == -torch.inf)).all(1)  # [T]
    usable &= (logits > -torch.inf).sum(1) >= call.top_k
    usable &= right_weights.sum(1) > 0
    half = call.logits.dtype in (torch.bfloat16, torch.float16)
    differs = find_differing_rows(
        logits[usable],
        ids[usable],
        weights[usable],
        right_ids[usable],
        scoring=call.scoring,
        bias=options["bias"],
        renormalize=bool(options.get("renormalize")),
        atol=4e-3 if half else 2e-5,
    )
    if not bool(differs.any()):
        return None
    row = int(usable.nonzero().flatten()[differs.nonzero()[0, 0]])
    got, expected = (
        f"experts {ids[row].tolist()} with {[round(weight, 4) for weight in weights[row].tolist()]}"
        for ids, weights in ((ids, weights), (right_ids, right_weights))
    )
    return f"row {row}: {got}, expected {expected}"
