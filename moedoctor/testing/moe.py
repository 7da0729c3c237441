"""The problems of `moe.yaml`: a layer and tokens with one trouble each, and what is wrong with an output."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moedoctor.fixes.moe.weight_layout import tile_scales
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import e2m1, moe_layer
from moedoctor.reference.agreement import Bounds, agree, choose_bounds
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe_layer import Layer, compute_expected, make_layer, make_problem
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.testing.questions import FORMATS, Setting, UnfitError, pad_rows, takes

# T = tokens, E = experts, K = top_k, H = hidden size, I = intermediate size
_UNITS = {"bf16": 8, "fp8": 16, "fp8-block": 16, "nvfp4": 16, "mxfp4": 32}
"""Format -> what hidden and intermediate size must be multiples of."""
_MX_BLOCK = 32
_MOST_NAMED = 4096
"""Elements of the hidden states up to which a wrong output is explained; it takes seconds for more."""
_BOUNDS = Bounds(cosine=0.9998, norm=0.02, element=0.03, matched=0.99, worst=0.1)
"""Of kernels that do not quantize activations; wide enough for sums and intermediates in bfloat16."""


@dataclass
class Problem:
    """A layer with the tokens that pass it, in the reference's form; changes replace parts."""

    layer: Layer
    """mxfp4 is held as the float32 values of its codes."""
    x: torch.Tensor
    """bfloat16 [T, H]"""
    topk_weights: torch.Tensor
    """float32 [T, K]"""
    topk_ids: torch.Tensor
    """int32 [T, K]"""
    codes: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """mxfp4: ``w13`` and ``w2`` -> (codes uint8 [E, N, K/2], scales uint8 [E, N, K/32])."""
    first: int = 0
    """The first token that has a right output."""

    @property
    def experts(self) -> int:
        return self.layer.shape.experts


def _repeat_ids(problem: Problem) -> None:
    if problem.topk_ids.shape[1] < 2:
        raise UnfitError("a token has one expert")
    problem.topk_ids[::2, 1] = problem.topk_ids[::2, 0]


def _skip_ids(problem: Problem, weight: float = 0.5) -> None:
    problem.topk_ids[::2, 0] = -1
    problem.topk_ids[1::3] = -1
    problem.topk_weights[problem.topk_ids < 0] = weight


def _put_unknown(problem: Problem) -> None:
    problem.topk_ids[0, 0], problem.topk_ids[0, -1] = problem.experts, -2
    problem.topk_ids[-1, -1] = 1 << 24


def _choose_two(problem: Problem) -> None:
    """Send every token to the last two experts, so that the others are idle."""
    lanes = torch.arange(problem.topk_ids.shape[1], device=problem.x.device)  # [K]
    problem.topk_ids[:] = torch.where(lanes < 2, problem.experts - 1 - lanes, -1)
    if problem.topk_ids.shape[1] > 2:
        raise UnfitError("a token has more than two experts")


def _break_idle(problem: Problem) -> None:
    _choose_two(problem)
    if problem.experts < 3:
        raise UnfitError("no expert is idle")
    for weight in _take_bf16(problem):
        weight[:-2] = torch.nan


def _take_bf16(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    w13, w2 = problem.layer.w13, problem.layer.w2
    if problem.layer.quantization != "bf16" or not isinstance(w13, torch.Tensor):
        raise UnfitError("asked of bf16 only")
    assert isinstance(w2, torch.Tensor)
    return w13, w2


def _break_token(problem: Problem) -> None:
    problem.x[0], problem.first = torch.nan, 1


def _scale_weights(problem: Problem) -> None:
    problem.topk_weights *= 2.5
    problem.topk_weights[:, ::2] *= -0.2


def _raise_values(problem: Problem) -> None:
    """Make values between the products larger than float16 holds."""
    w13, w2 = _take_bf16(problem)
    w13 *= 1024
    w2 /= 1024


def _pad(problem: Problem, *names: str) -> None:
    for name in names:
        setattr(problem, name, pad_rows(getattr(problem, name), 8, 1))


def _cast_ids(problem: Problem) -> None:
    problem.topk_ids = problem.topk_ids.long()


CHANGES: Mapping[str, Callable[[Problem], Any]] = {
    **dict.fromkeys(
        ("ordinary", "odd_sizes", "unwritten_memory", "earlier_calls", "no_tokens"), lambda _: None
    ),
    "one_busy_expert": _choose_two,
    "broken_idle_experts": _break_idle,
    "broken_token": _break_token,
    "repeated_ids": _repeat_ids,
    "skipped_ids": _skip_ids,
    "skipped_weights": lambda problem: _skip_ids(problem, torch.nan),
    "all_skipped": lambda problem: problem.topk_ids.fill_(-1),
    "unknown_ids": _put_unknown,
    "weights_as_given": _scale_weights,
    "large_values": _raise_values,
    "padded_hidden": lambda problem: _pad(problem, "x"),
    "padded_ids": lambda problem: _pad(problem, "topk_ids", "topk_weights"),
    "int64_ids": _cast_ids,
}
"""Question -> what it does to an ordinary problem."""


def list_variants(fn: Callable[..., Any], options: Mapping[str, Any]) -> Sequence[str]:
    """Return ``fp8 silu`` and so on."""
    formats = options.get("formats", FORMATS if takes(fn, "scales") else ("bf16",))
    activations = options.get("activations", ("silu",))
    return [f"{form} {activation}" for form in formats for activation in activations]


def ask(fn: Callable[..., Any], question: str, sizes: Mapping[str, int], how: Setting) -> str | None:
    """Return what is wrong with the output, or None."""
    form, activation = how.variant.split()
    if activation != how.options.get("activations", ("silu",))[0] and not takes(fn, "activation"):
        raise TypeError("it has no parameter activation")
    if form != "bf16" and not takes(fn, "scales"):
        raise TypeError("it has no parameter scales")
    inputs = how.options.get("inputs", "none")
    inputs = inputs if isinstance(inputs, str) else inputs[form]
    problem = build(sizes, form, activation, inputs, how.device, how.seed)
    CHANGES[question](problem)
    w13, w2, scales = convert(problem, how.options, inputs)
    if question == "unknown_ids":
        w13, w2 = _put_between_nan(w13), _put_between_nan(w2)
    more = {"scales": scales, "activation": activation, "format": form}
    named = {name: value for name, value in more.items() if takes(fn, name)}

    def call(x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = fn(x, w13, w2, shares, ids, **named)
        return output

    given = (problem.x, problem.topk_weights, problem.topk_ids)
    before = [tensor.clone() for tensor in (*given, w13, w2)]
    if question == "earlier_calls":
        call(problem.x * 64, problem.topk_weights, problem.topk_ids)
    with _fill_new_memory() if question == "unwritten_memory" else contextlib.nullcontext():
        output = call(*given)
    names = ("hidden_states", "topk_weights", "topk_ids", "w13", "w2")
    for name, now, then in zip(names, (*given, w13, w2), before, strict=True):
        if not torch.equal(_view_bytes(now), _view_bytes(then)):
            return f"{name} was written to"
    return judge(problem, output, inputs, named=how.named)


def build(
    sizes: Mapping[str, int], form: str, activation: str, inputs: str, device: str, seed: int
) -> Problem:
    """Return a random layer and tokens. Raises UnfitError for sizes that the format does not have."""
    hidden, intermediate = sizes["hidden"], sizes["intermediate"]
    if hidden % _UNITS[form] or intermediate % _UNITS[form]:
        raise UnfitError(f"{form} needs sizes in multiples of {_UNITS[form]}")
    if sizes["top_k"] > sizes["experts"]:
        raise UnfitError("top_k is more than the experts")
    shape = LayerShape(hidden, intermediate, sizes["experts"], sizes["top_k"], activation)
    layer = make_layer(shape, "bf16" if form == "mxfp4" else form, seed=seed, device=device)
    codes = {}
    if form == "mxfp4":
        draw = torch.Generator().manual_seed(seed)
        drawn = {name: _draw_mxfp4(getattr(layer, name).shape, draw, device) for name in ("w13", "w2")}
        codes = {name: each[:2] for name, each in drawn.items()}
        layer = replace(layer, quantization="mxfp4", w13=drawn["w13"][2], w2=drawn["w2"][2])
    made = make_problem(layer, max(sizes["tokens"], 1), inputs, seed=seed, device=device)
    tokens = slice(sizes["tokens"])
    return Problem(layer, made.x[tokens], made.topk_weights[tokens], made.topk_ids[tokens], codes)


def _draw_mxfp4(
    size: torch.Size, draw: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes uint8 [E, N, K/2], scales uint8 [E, N, K/32], values float32 [E, N, K])."""
    experts, rows, columns = size
    codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=draw, dtype=torch.uint8)
    middle = 127 + round(math.log2(1 / (2.93 * columns**0.5)))  # 2.93: root mean square of the codes
    scales = torch.randint(middle - 1, middle + 2, (experts, rows, columns // _MX_BLOCK), generator=draw)
    spread = torch.exp2(scales.float() - 127).repeat_interleave(_MX_BLOCK, 2)  # [E, N, K]
    values = e2m1.decode(e2m1.unpack(codes)) * spread
    return codes.to(device), scales.to(torch.uint8).to(device), values.to(device)


def convert(
    problem: Problem, options: Mapping[str, Any], inputs: str
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return w13, w2 and scales in the layout that the options name."""
    layer, scales = problem.layer, {}
    gate = options.get("gate", "first") if layer.shape.gated else "first"

    def order(tensor: torch.Tensor) -> torch.Tensor:
        return order_rows(tensor, gate)

    def tile(tensor: torch.Tensor) -> torch.Tensor:
        return tile_scales(tensor) if options.get("block_scales") == "swizzled" else tensor

    stored: dict[str, torch.Tensor] = {}
    for name, weight, reorder in (("w13", layer.w13, order), ("w2", layer.w2, lambda tensor: tensor)):
        if name in problem.codes:
            codes, blocks = problem.codes[name]
            stored[name], scales[name] = reorder(codes), tile(reorder(blocks))
        elif isinstance(weight, Nvfp4):
            stored[name], scales[name] = reorder(weight.packed), tile(reorder(weight.block_scales))
            scales[f"{name}_global"] = weight.global_scale
        elif isinstance(weight, Fp8):
            if weight.block and gate == "interleaved":
                raise UnfitError("rows of gate and up in turn do not make blocks")
            stored[name] = reorder(weight.values)
            scales[name] = reorder(weight.scale) if weight.block else weight.scale
        else:
            stored[name] = reorder(weight)
    if inputs in ("fp8", "nvfp4"):
        for name, value in (("w13", layer.input_scale), ("w2", layer.intermediate_scale)):
            scales[f"{name}_input"] = torch.tensor(value, device=problem.x.device)
    return stored["w13"], stored["w2"], scales


def order_rows(tensor: torch.Tensor, gate: str) -> torch.Tensor:
    """Return [E, 2N, ...] with the gate's rows ``first``, as they come, ``last``, or ``interleaved``."""
    if gate == "first":
        return tensor
    raw = _view_bytes(tensor).unflatten(1, (2, -1))  # [E, 2, N, ...]
    moved = raw.flip(1) if gate == "last" else raw.transpose(1, 2)
    ordered: torch.Tensor = moved.flatten(1, 2).contiguous().view(tensor.dtype)
    return ordered


def judge(problem: Problem, output: torch.Tensor, inputs: str, *, named: bool) -> str | None:
    """Return what is wrong with `output` [T, H] of the problem, or None."""
    if output.shape != problem.x.shape:
        return f"the output is {list(output.shape)}, expected {list(problem.x.shape)}"
    ids = problem.topk_ids
    known = torch.where((ids >= 0) & (ids < problem.experts), ids, -1).int()  # [T, K]
    weights = problem.topk_weights.masked_fill(known < 0, 0.0)  # [T, K]
    given = moe_layer.Problem(problem.layer, problem.x, weights, known)
    expected = compute_expected(given, inputs, output)[problem.first :]
    if not len(expected):
        return None
    bounds = _BOUNDS if inputs == "none" else choose_bounds(inputs)
    # The share of a long row; one element is 6 % of a row of 16, and many rows are asked.
    slack = 3 * math.sqrt((1 - bounds.matched) / output.shape[1])
    bounds = replace(bounds, matched=bounds.matched - slack)
    agreement = agree(output[problem.first :].float(), expected, bounds)
    if agreement.reason is None or problem.first or not named:
        return agreement.reason
    return f"{agreement.reason}{_name_mistake(given, output, inputs)}"


def _name_mistake(problem: moe_layer.Problem, output: torch.Tensor, inputs: str) -> str:
    """Return ``: as with the gate and up halves of w13 swapped``; empty if no known mistake explains it."""
    from moedoctor.diagnose.capsule.computation import Computation
    from moedoctor.diagnose.capsule.explain import diagnose
    from moedoctor.diagnose.capsule.mistakes import BY_NAME

    if problem.layer.quantization == "mxfp4" or problem.x.is_cuda or problem.x.numel() > _MOST_NAMED:
        return ""
    best = diagnose(Computation(problem, inputs), output).best
    names = best.mistakes if best is not None else ()
    words = [BY_NAME[name].words for name in names if name in BY_NAME]
    return f": as with {' and '.join(words)}" if words else ""


def _put_between_nan(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [E, ...] in memory that holds NaN in the place of two experts before and behind it."""
    raw = _view_bytes(weight)
    wide = raw.new_zeros(len(raw) + 4, *raw.shape[1:])
    wide.view(torch.uint8).fill_(255)  # NaN in every floating type
    wide[2:-2] = raw
    return wide.view(weight.dtype)[2:-2]


@contextlib.contextmanager
def _fill_new_memory() -> Iterator[None]:
    """Have torch fill memory that it allocates with NaN, which no output may hold."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as integers, which torch can join and compare, and NaN too."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole[tensor.element_size()])
