"""A capsule: one call of a MoE layer, in a safetensors file that another machine can judge.

The file ``NAME.moecapsule`` holds tensors, and in its metadata ``format`` (``moedoctor-capsule``),
``version`` (``1``) and ``record``: a JSON object with the fields of `Record`. There is no prompt text in it.
T tokens, K experts a token, E experts in the layer, U of them held, hidden size H, intermediate size I, and
N = 2I rows of w13 (gate half first), or I without a gate:

| tensor | type and shape |
|---|---|
| ``x`` | BF16, F16 or F32 [T, H] |
| ``output`` | the same; missing if the process died in the call |
| ``topk_ids``, ``topk_weights`` | int32 [T, K], -1 for none; F32 [T, K] |
| ``router_logits`` | optional; BF16, F16 or F32 [T, E] |
| ``expert_ids`` | int32 [U], ascending: the experts whose weights are held |
| ``w13``, ``w2`` | [U, N, H] and [U, H, I], BF16, F16, F32 or E4M3; uint8 and half as wide for NVFP4 |
| ``w13_scale``, ``w2_scale`` | F32 [U]; w13 also [U, 2], gate and up by themselves; blocks: [U, R, C] |
| ``w13_block_scales``, ``w2_block_scales`` | ``nvfp4``: E4M3 [U, N, H/16] and [U, H, I/16], row by row |
| ``input_scale``, ``intermediate_scale`` | optional; F32 [] |
| ``backend.NAME`` | optional: a tensor as the backend got it, in its own layout; [U, ...] |

``w13`` and ``w2`` are the weights as the checkpoint has them. If blocks of FP8 weights have scales of their
own, the record names a block's rows and columns; R and C count the blocks of a matrix, and gate and up each
begin one. Reading checks every name, type and shape against the record before a tensor is loaded.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moedoctor.models.layer_shape import LayerShape
from moedoctor.processes.files import check_writable, write
from moedoctor.reference.agreement import agree, choose_bounds, relative_error
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight
from moedoctor.reference.moe_layer import Layer, Problem, compute_expected
from moedoctor.reference.nvfp4 import BLOCK, Nvfp4
from moedoctor.text import TextFileError, escape, format_size, open_file, print_message, shorten

FORMAT = "moedoctor-capsule"
VERSION = "1"
SUFFIX = ".moecapsule"
MAX_BYTES = 256 * 10**6
"""The size limit of a recording, unless another is given."""
_LARGEST = 8 * 2**30
_MOST_HEADER_BYTES = 4 * 2**20
_MOST_TENSORS = 256
_MOST_NAME_BYTES, _MOST_LINE_BYTES = 200, 400
"""Of a tensor, and of what the header says about it."""
_MOST_PAIRS, _MOST_VALUES = 2**20, 2**26
"""Pairs of token and expert, and values of their outputs, that a replay takes memory for."""
OF_BACKEND = "backend."
"""The prefix of the names of tensors that are as the backend got them."""
_CALL = ("x", "output", "topk_ids", "topk_weights", "router_logits")
_FLOATS = ("BF16", "F16", "F32")
_SCALED = ("fp8", "nvfp4")
"""Activations whose scale is a tensor of the capsule."""

Size = Annotated[int, Field(ge=1, le=2**24)]
Line = Annotated[str, Field(max_length=1000)]


class CapsuleError(Exception):
    """A capsule that cannot be used or made; one line says what is wrong and what was expected."""


class Record(BaseModel):
    """The facts about a call that a capsule holds beside the tensors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    layer: Line
    """The layer's name in the model."""
    hidden: Size
    intermediate: Size
    experts: Size
    """Experts of the whole layer."""
    top_k: Size
    activation: Literal["silu", "gelu_tanh", "relu2"]
    quantization: Literal["bf16", "fp8", "nvfp4"]
    """Of the weights."""
    block: tuple[Size, Annotated[int, Field(ge=0, le=2**24)]] | None = None
    """``fp8``: rows and columns of w13 and w2 that share a scale, 0 columns for a whole row; None: all do."""
    activations: Literal["none", "fp8", "fp8_token", "fp8_block", "nvfp4"] = "none"
    """The backend's quantization of activations: with the capsule's scale (``fp8``, ``nvfp4``), or with one
    for each token, or for each 128 of its values."""
    weights: Literal["recorded", "none", "synthetic"] = "recorded"
    """``synthetic``: random codes under the recorded scales, so the output is not that of these weights."""
    backend: Line = "unknown"
    reason: Line = ""
    """The reason why this call was kept."""
    call: Annotated[int, Field(ge=0)] = 0
    """The number of this layer's call."""
    tokens: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The rows of the call that were kept; empty for all."""
    call_tokens: Annotated[int, Field(ge=0)] = 0
    """The rows that the call had."""
    parallel: dict[Line, int] = {}
    """``tensor_parallel_size`` and the like."""
    kernel: dict[Line, Line] = {}
    """Parameters of the backend's kernel."""
    packages: dict[Line, Line] = {}
    environment: dict[Line, Line] = {}
    """Masked variables."""
    addresses: dict[Line, tuple[int, int]] = {}
    """Address on the GPU and bytes of the layer's and the call's tensors, if the process died."""

    @property
    def shape(self) -> LayerShape:
        """Return the size of the whole layer."""
        return LayerShape(self.hidden, self.intermediate, self.experts, self.top_k, self.activation)


@dataclass(frozen=True)
class Capsule:
    """One call."""

    record: Record
    tensors: Mapping[str, torch.Tensor]
    """As in the file."""

    @property
    def size(self) -> int:
        """Return the most bytes that its file can have: the tensors, and a header with a line for each."""
        header = len(json.dumps(_make_metadata(self), ensure_ascii=False).encode())
        return header + sum(tensor.nbytes + _MOST_LINE_BYTES for tensor in self.tensors.values())

    @property
    def expert_ids(self) -> Sequence[int]:
        """Return the experts that are held."""
        ids: list[int] = self.tensors["expert_ids"].tolist()
        return ids

    def to(self, device: str) -> Capsule:
        """Return the capsule with its tensors on `device`."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    def to_problem(self) -> Problem:
        """Return the call with the experts that are held; an id becomes the place of its expert.

        Raises CapsuleError if it holds no weights, not those of every expert that the call uses, or no scale
        of its quantized activations.
        """
        if "w13" not in self.tensors:
            raise CapsuleError("it holds no weights, so nothing can be computed; record one with weights")
        held = self.tensors["expert_ids"]
        places = torch.full((self.record.experts,), -2, dtype=torch.int32, device=held.device)  # [E]
        places[held.long()] = torch.arange(len(held), dtype=torch.int32, device=held.device)
        ids = self.tensors["topk_ids"]  # [T, K]
        inside = (ids >= 0) & (ids < self.record.experts)  # [T, K]
        moved = torch.where(inside, places[ids.long().clamp(0, self.record.experts - 1)], -1)  # [T, K]
        missing = ids[moved == -2].unique().tolist()
        if missing:
            raise CapsuleError(f"it lacks the weights of the experts {missing[:8]}, which the call uses")
        return Problem(self._make_layer(), self.tensors["x"], self.tensors["topk_weights"], moved.int())

    def compare_half_scales(self) -> torch.Tensor | None:
        """Return float32 [U, 2]: the scales of gate and up relative to the gate's; None if w13 has one."""
        scale = self.tensors.get("w13_scale")
        return None if scale is None or scale.dim() != 2 else scale / scale[:, :1]

    def fold_half_scales(self) -> Capsule:
        """Return the capsule with one scale of w13 an expert, as kernels want it: `w2` takes the ratio.

        Exact, because the layer is linear in the up half; see `moedoctor.fixes.moe.checkpoint_scales.fold`.
        """
        halves = self.compare_half_scales()
        if halves is None:
            return self
        tensors = dict(self.tensors)
        tensors["w13_scale"] = tensors["w13_scale"][:, 0].contiguous()
        tensors["w2_scale"] = tensors["w2_scale"] * halves[:, 1]
        return replace(self, tensors=tensors)

    def compute_expected(self, near: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [T, H], what the reference computes; `near` as `moe_layer.compute_expected`.

        Raises CapsuleError if it lacks weights.
        """
        return compute_expected(self.fold_half_scales().to_problem(), self.record.activations, near)

    def _make_layer(self) -> Layer:
        def scale(name: str) -> float:
            value = self.tensors.get(name)
            if value is None and self.record.activations in _SCALED:
                raise CapsuleError(f"it lacks {name}, the scale of its {self.record.activations} activations")
            return 1.0 if value is None else float(value)

        shape = replace(self.record.shape, experts=len(self.expert_ids))
        return Layer(
            shape,
            self.record.quantization,
            self._make_weight("w13"),
            self._make_weight("w2"),
            input_scale=scale("input_scale"),
            intermediate_scale=scale("intermediate_scale"),
        )

    def _make_weight(self, name: str) -> Weight:
        values = self.tensors[name]
        if self.record.quantization == "bf16":
            return values
        scale = self.tensors[f"{name}_scale"]
        if self.record.block is not None:
            rows, columns = self.record.block
            halves = 2 if name == "w13" and self.record.shape.gated else 1
            return Fp8(values, scale, (rows, columns or values.shape[2]), halves)
        scale = scale[:, 0] if scale.dim() == 2 else scale  # [U]
        if self.record.quantization == "fp8":
            return Fp8(values, scale)
        return Nvfp4(values, self.tensors[f"{name}_block_scales"], scale)


def make_whole_capsule(problem: Problem, output: torch.Tensor, activations: str, **facts: Any) -> Capsule:
    """Return the capsule of a call that is known whole, with `output` [T, H]; `facts` are fields of `Record`.

    `activations` says how the backend quantizes them, as `Record.activations`.
    """
    layer, shape = problem.layer, problem.layer.shape
    tensors = {
        "x": problem.x,
        "output": output if output.dtype == torch.float32 else output.bfloat16(),
        "topk_ids": problem.topk_ids.int(),
        "topk_weights": problem.topk_weights.float(),
        "expert_ids": torch.arange(shape.experts, dtype=torch.int32),
        **_name_weight_tensors("w13", layer.w13),
        **_name_weight_tensors("w2", layer.w2),
    }
    if activations in _SCALED:
        tensors["input_scale"] = torch.tensor(layer.input_scale)
        tensors["intermediate_scale"] = torch.tensor(layer.intermediate_scale)
    fields: dict[str, Any] = {
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "activation": shape.activation,
        "quantization": layer.quantization.removesuffix("-block"),  # `block` says it
        "activations": activations,
        "block": layer.w13.block if isinstance(layer.w13, Fp8) else None,
        "call_tokens": len(problem.x),
    }
    record = Record(**fields, **facts)
    return Capsule(record, {name: tensor.detach().cpu() for name, tensor in tensors.items()})


def _name_weight_tensors(name: str, weight: Weight) -> dict[str, torch.Tensor]:
    if isinstance(weight, Nvfp4):
        scales, scale = weight.block_scales, weight.global_scale
        return {name: weight.packed, f"{name}_block_scales": scales, f"{name}_scale": scale}
    if isinstance(weight, Fp8):
        return {name: weight.values, f"{name}_scale": weight.scale}
    return {name: weight}


def keep_tokens(capsule: Capsule, tokens: Sequence[int]) -> Capsule:
    """Return the capsule of some of its tokens, with the experts that they use, `top_k` at least.

    With an id of -1, the layer's last expert is kept too, because a kernel may take the one for the other.
    """
    rows = torch.tensor(list(tokens), dtype=torch.long)
    tensors = dict(capsule.tensors)
    for name in _CALL:
        if name in tensors:
            tensors[name] = tensors[name][rows]
    used = torch.isin(tensors["expert_ids"], tensors["topk_ids"])  # [U]
    if bool((tensors["topk_ids"] < 0).any()):
        used |= tensors["expert_ids"] == capsule.record.experts - 1
    spare = (~used).nonzero().flatten()[: max(0, capsule.record.top_k - int(used.sum()))]
    used[spare] = True  # a layer has at least as many experts as a token uses
    for name in _list_model_names(capsule):
        tensors[name] = tensors[name][used]
    tensors["expert_ids"] = tensors["expert_ids"][used]
    before = capsule.record.tokens or range(len(capsule.tensors["x"]))
    record = capsule.record.model_copy(update={"tokens": tuple(before[token] for token in tokens)})
    return Capsule(record, tensors)


def fit(capsule: Capsule, limit: int) -> Capsule:
    """Return the capsule within `limit` bytes: whole, or else with the fewest tokens that show the failure.

    That is one token, because each token is judged by itself. If no token shows a failure, it has as many as
    fit, the first ones. Raises CapsuleError with the size that one token needs if that is more.
    """
    if capsule.size <= limit:
        return capsule
    failing = find_failing_tokens(capsule)
    tokens = failing[:1] or range(len(capsule.tensors["x"]))
    least = keep_tokens(capsule, tokens[:1])
    if least.size > limit:
        raise CapsuleError(
            f"one token and its experts need {least.size / 1e6:.1f} MB, more than the {limit / 1e6:.1f} MB "
            "that a capsule may have; allow more with --max-size"
        )
    counts = range(1, len(tokens) + 1)  # the size grows with every token
    return keep_tokens(
        capsule, tokens[: bisect_right(counts, limit, key=lambda n: keep_tokens(capsule, tokens[:n]).size)]
    )


def find_failing_tokens(capsule: Capsule) -> list[int]:
    """Return the tokens each of which shows the failure by itself, the one that is furthest off first.

    These are outputs with NaN or Inf of a finite input, or else those past the bounds of the reference; none
    if the capsule has no output, or no weights to compute a reference with.
    """
    if "output" not in capsule.tensors:  # the call died
        return []
    output = capsule.tensors["output"].float()  # [T, H]
    broken = ~output.isfinite().all(1) & capsule.tensors["x"].isfinite().all(1)  # [T]
    if bool(broken.any()):
        return [int(token) for token in broken.nonzero()]
    if capsule.record.weights != "recorded":
        return []
    try:
        expected = capsule.compute_expected(output)  # [T, H]
    except CapsuleError:  # it cannot be judged
        return []
    bounds, errors = choose_bounds(capsule.record.activations), relative_error(output, expected)  # [T]
    order = [int(token) for token in errors.argsort(descending=True)]
    return [
        token
        for token in order
        if not agree(output[token : token + 1], expected[token : token + 1], bounds).right
    ]


def add_weights(capsule: Capsule, weights: Callable[[list[int]], Mapping[str, torch.Tensor]]) -> Capsule:
    """Return the capsule with the tensors that `weights` returns for its experts."""
    tensors = weights(list(capsule.expert_ids))
    known = "recorded" if "w13" in tensors else "none"
    return Capsule(capsule.record.model_copy(update={"weights": known}), {**capsule.tensors, **tensors})


def drop_weights(capsule: Capsule) -> Capsule:
    """Return the capsule without anything that is part of the model."""
    names = _list_model_names(capsule)
    tensors = {name: tensor for name, tensor in capsule.tensors.items() if name not in names}
    return Capsule(capsule.record.model_copy(update={"weights": "none"}), tensors)


def draw_synthetic_weights(capsule: Capsule, seed: int = 37) -> Capsule:
    """Return the capsule with random codes in place of the weights; scales and shapes stay."""
    draw = torch.Generator().manual_seed(seed)
    tensors = dict(capsule.tensors)
    for name in (name for name in ("w13", "w2") if name in tensors):
        old = tensors[name]
        if old.dtype == torch.uint8:
            tensors[name] = torch.randint(0, 256, old.shape, generator=draw, dtype=torch.uint8)
        else:
            size = old.float().std()
            tensors[name] = (torch.randn(old.shape, generator=draw) * size).to(old.dtype)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(OF_BACKEND)}
    return Capsule(capsule.record.model_copy(update={"weights": "synthetic"}), tensors)


def name_file(record: Record, process: int) -> str:
    """Return the name of the file for a call that the process recorded."""
    layer = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in record.layer)
    return f"{layer[-120:].lstrip('.')}-call{record.call}-{process}{SUFFIX}"


def save(capsule: Capsule, path: Path, say: Callable[[str], None] = print_message) -> None:
    """Write a capsule, whole or not at all, for this user only; `say` gets one line with its size first.

    Raises OutputError, an OSError.
    """
    check_writable(path)
    data = to_bytes(capsule)
    tokens, experts = len(capsule.tensors["x"]), len(capsule.expert_ids)
    held = f"{tokens} tokens, {experts} experts, weights {capsule.record.weights}"
    say(f"{path}: {format_size(len(data))}, {held}")
    write(path, data, private=True)


def to_bytes(capsule: Capsule) -> bytes:
    """Return what its file holds."""
    from safetensors.torch import save as serialized

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in capsule.tensors.items()}
    return serialized(tensors, _make_metadata(capsule))


def from_bytes(data: bytes) -> Capsule:
    """Return the capsule of `to_bytes` in a process of ours: tensors are not checked, as `load` does."""
    from safetensors.torch import load as tensors_of

    length = int.from_bytes(data[:8], "little")
    return Capsule(_read_record(json.loads(data[8 : 8 + length])["__metadata__"]), tensors_of(data))


def _make_metadata(capsule: Capsule) -> dict[str, str]:
    return {"format": FORMAT, "version": VERSION, "record": capsule.record.model_dump_json()}


def load(path: Path) -> Capsule:
    """Load the capsule in a file. Raises CapsuleError, and nothing else, for whatever is wrong with it."""
    import safetensors

    try:
        with open_file(path, expected=f"a capsule ({SUFFIX})") as file:
            file.seek(0, 2)
            if file.tell() > _LARGEST:
                raise CapsuleError(f"is {file.tell()} bytes long, expected at most {_LARGEST}")
            file.seek(0)
            header = int.from_bytes(file.read(8), "little")
            if header > _MOST_HEADER_BYTES:
                raise CapsuleError(
                    f"is not a safetensors file: its header is {header} bytes, more than {_MOST_HEADER_BYTES}"
                )
        with safetensors.safe_open(path, framework="pt") as source:
            record = _read_record(source.metadata() or {})
            names = list(source.keys())
            _check_names(record, names)
            shapes = {name: source.get_slice(name) for name in names}
            _check_shapes(
                record, {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in shapes.items()}
            )
            capsule = Capsule(record, {name: source.get_tensor(name) for name in names})
        _check_values(capsule)
    except CapsuleError as error:
        raise CapsuleError(f"{path}: {error}") from None
    except TextFileError as error:
        raise CapsuleError(f"{path}: {error.message}") from None
    except safetensors.SafetensorError as error:
        raise CapsuleError(f"{path}: is not a safetensors file ({shorten(str(error), 120)})") from None
    except OSError as error:
        raise CapsuleError(f"{path}: cannot be read ({error.strerror})") from None
    return capsule


def _list_model_names(capsule: Capsule) -> list[str]:
    """Return the names of the tensors [U, ...] that are part of the model."""
    weights = {f"{weight}{part}" for weight in ("w13", "w2") for part in ("", "_scale", "_block_scales")}
    return [name for name in capsule.tensors if name in weights or name.startswith(OF_BACKEND)]


def _read_record(metadata: Mapping[str, str]) -> Record:
    if metadata.get("format") != FORMAT:
        raise CapsuleError(f"is a safetensors file without the format {FORMAT}, expected a capsule")
    if metadata.get("version") != VERSION:
        version = shorten(metadata.get("version", "none"), 40)
        raise CapsuleError(f"has format version {version}, expected {VERSION}: use a newer moedoctor")
    try:
        # Strict for JSON: lists become tuples, nothing else is converted.
        return Record.model_validate_json(metadata.get("record", ""))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "record"
        raise CapsuleError(f"{shorten(escape(place), 80)}: {shorten(first['msg'], 120)}") from None
    except (ValueError, RecursionError) as error:
        raise CapsuleError(f"record: {shorten(str(error), 120)}") from None


def _check_names(record: Record, names: Sequence[str]) -> None:
    if len(names) > _MOST_TENSORS:
        raise CapsuleError(f"holds {len(names)} tensors, expected at most {_MOST_TENSORS}")
    long = next((name for name in names if len(name.encode()) > _MOST_NAME_BYTES), None)
    if long is not None:
        raise CapsuleError(f"names a tensor '{shorten(long, 60)}', expected at most {_MOST_NAME_BYTES} bytes")
    needed = {"x", "topk_ids", "topk_weights", "expert_ids"}
    weights: set[str] = set()
    if record.weights != "none":
        parts = {"bf16": ("",), "fp8": ("", "_scale"), "nvfp4": ("", "_scale", "_block_scales")}
        weights = {f"{weight}{part}" for weight in ("w13", "w2") for part in parts[record.quantization]}
    if missing := (needed | weights) - set(names):
        raise CapsuleError(f"lacks the tensor {min(missing)}")
    known = needed | weights | {"output", "router_logits", "input_scale", "intermediate_scale"}
    other = [name for name in names if name not in known and not name.startswith(OF_BACKEND)]
    if other:
        raise CapsuleError(f"holds the tensor '{shorten(other[0], 60)}', which a capsule does not have")


def _check_shapes(record: Record, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    shape = found["x"][1]
    tokens = shape[0] if len(shape) == 2 else 0
    held = found["expert_ids"][1]
    count = held[0] if len(held) == 1 else 0
    if record.top_k > record.experts:
        raise CapsuleError(
            f"has top_k {record.top_k} and {record.experts} experts, expected at least as many"
        )
    if record.experts > _MOST_PAIRS:
        raise CapsuleError(f"names {record.experts} experts, expected at most {_MOST_PAIRS}")
    hidden, size, rows = record.hidden, record.intermediate, record.shape.w13_rows
    if tokens * record.top_k > _MOST_PAIRS or tokens * record.top_k * max(hidden, rows) > _MOST_VALUES:
        raise CapsuleError(
            f"has {tokens} tokens of {record.top_k} experts and {hidden} values, more than can be replayed; "
            "keep fewer tokens with `moedoctor capsule copy --max-size`"
        )
    if record.block is not None and record.quantization != "fp8":
        raise CapsuleError(f"has a block of scales and {record.quantization} weights, expected fp8 weights")
    packed = 2 if record.quantization == "nvfp4" else 1
    codes = {"bf16": _FLOATS, "fp8": ("F8_E4M3",), "nvfp4": ("U8",)}[record.quantization]
    expected: dict[str, tuple[tuple[str, ...], list[tuple[int, ...]]]] = {
        "x": (_FLOATS, [(tokens, hidden)]),
        "output": (_FLOATS, [(tokens, hidden)]),
        "topk_ids": (("I32",), [(tokens, record.top_k)]),
        "topk_weights": (("F32",), [(tokens, record.top_k)]),
        "router_logits": (_FLOATS, [(tokens, record.experts)]),
        "expert_ids": (("I32",), [(count,)]),
        "w13": (codes, [(count, rows, hidden // packed)]),
        "w2": (codes, [(count, hidden, size // packed)]),
        "w13_scale": (("F32",), _list_scale_shapes(record, "w13", count)),
        "w2_scale": (("F32",), _list_scale_shapes(record, "w2", count)),
        "w13_block_scales": (("F8_E4M3",), [(count, rows, hidden // BLOCK)]),
        "w2_block_scales": (("F8_E4M3",), [(count, hidden, size // BLOCK)]),
        "input_scale": (("F32",), [()]),
        "intermediate_scale": (("F32",), [()]),
    }
    for name, (dtype, given) in found.items():
        if name.startswith(OF_BACKEND):
            if given[:1] != (count,):
                raise CapsuleError(
                    f"{shorten(name, 60)} is {list(given)}, expected [{count}, ...]: an expert each"
                )
            continue
        dtypes, shapes = expected[name]
        if dtype not in dtypes or given not in shapes:
            wanted = " or ".join(str(list(each)) for each in shapes)
            raise CapsuleError(
                f"{name} is {dtype} {list(given)}, expected {' or '.join(dtypes)} {wanted} as its record says"
            )
    if not tokens:
        raise CapsuleError("holds no token, expected at least one")
    if record.quantization == "nvfp4" and (hidden % BLOCK or size % BLOCK):
        raise CapsuleError(f"hidden {hidden} and intermediate {size} must be multiples of {BLOCK} for nvfp4")
    if record.tokens and len(record.tokens) != tokens:
        raise CapsuleError(f"names {len(record.tokens)} tokens and holds {tokens}")


def _list_scale_shapes(record: Record, name: str, count: int) -> list[tuple[int, ...]]:
    """Return the shapes that the scales of `count` matrices may have."""
    gated = name == "w13" and record.shape.gated
    if record.block is None:
        return [(count,), (count, 2)] if gated else [(count,)]
    hidden, size = record.hidden, record.intermediate
    rows, columns = (size, hidden) if name == "w13" else (hidden, size)
    tall, wide = record.block
    return [(count, (2 if gated else 1) * -(-rows // tall), -(-columns // (wide or columns)))]


def _check_values(capsule: Capsule) -> None:
    held = capsule.tensors["expert_ids"]
    ordered = bool((held[1:] > held[:-1]).all()) if len(held) > 1 else True
    if not ordered or (len(held) and not 0 <= int(held[0]) <= int(held[-1]) < capsule.record.experts):
        raise CapsuleError(
            f"expert_ids must be ascending, from 0 to {capsule.record.experts - 1}; they are not"
        )
    if len(held) < capsule.record.top_k:
        raise CapsuleError(f"holds {len(held)} experts, expected at least top_k {capsule.record.top_k}")


def describe(capsule: Capsule) -> dict[str, Any]:
    """Return what it holds as plain data: the record, and name -> type, shape and bytes of each tensor."""
    return {
        "record": json.loads(capsule.record.model_dump_json()),
        "bytes": capsule.size,
        "tensors": [
            {
                "name": name,
                "type": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
            }
            for name, tensor in sorted(capsule.tensors.items())
        ],
    }
