"""Replays a capsule: is its output right, what explains it if not, and what each backend makes of it here.

The reference and every backend run in a child process of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moedoctor.processes.ask import ChildError, answer, ask
from moedoctor.processes.deaths import classify, find_first_line
from moedoctor.reference.moe_backend import Variant
from moedoctor.results import from_json

if TYPE_CHECKING:
    import torch

    from moedoctor.diagnose.capsule.computation import Computation
    from moedoctor.diagnose.capsule.explain import Diagnosis, Explanation
    from moedoctor.trace.capsule import Capsule

_CHILD = "moedoctor.diagnose.capsule.replay"
_CAPSULE_ERROR = "capsule"
_MOST_VALUES = 2**22
"""Values of the experts' outputs that are explained; a larger call is explained by fewer tokens."""


class ReplayError(Exception):
    """A capsule that cannot be replayed; one line says why."""


@dataclass(frozen=True)
class BackendReplay:
    """One backend on the recorded call."""

    backend: str
    quantization: str
    activations: str
    right: bool | None = None
    """True if its output agrees with the reference; None if it did not run."""
    against_reference: Mapping[str, Any] | None = None
    against_recorded: Mapping[str, Any] | None = None
    repeats: bool | None = None
    """True if its output agrees with the recorded output."""
    deterministic: bool | None = None
    """True if three calls gave the same bits."""
    unavailable: str | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Tensor:
    """One tensor of a capsule."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class CapsuleFacts:
    """The facts about a capsule, as `moedoctor.trace.capsule.describe` says."""

    record: Mapping[str, Any]
    bytes: int
    tensors: tuple[Tensor, ...]

    @property
    def has_output(self) -> bool:
        """True if the output of the call was recorded."""
        return any(tensor.name == "output" for tensor in self.tensors)


@dataclass(frozen=True)
class ReplayDocument:
    """The verdict on a recorded call, what explains it if it is wrong, and what backends compute."""

    command: ClassVar[str] = "replay"
    summary: ClassVar[Mapping[str, Any]] = {}
    file: str
    capsule: CapsuleFacts
    judged: bool
    """True if the recorded output could be compared with the reference."""
    right: bool | None
    recorded: Mapping[str, Any]
    """The agreement of the recorded output with the reference; empty if it was not judged."""
    diagnosis: Mapping[str, Any]
    backend_tensors: tuple[Mapping[str, Any], ...]
    """The backend's tensors, see `moedoctor.diagnose.capsule.layouts.BackendTensor`."""
    backends: tuple[BackendReplay, ...]
    environment: Mapping[str, Any] | None = field(default=None, metadata={"sparse": True})
    """The machine that replayed; None in reports of older releases."""

    @property
    def exit_code(self) -> int:
        """1 if the recorded output is wrong, else 0."""
        return 1 if self.right is False else 0


def replay(
    path: Path,
    variants: Callable[[Mapping[str, Any]], Sequence[Variant]],
    device: str,
    *,
    seconds: float,
) -> ReplayDocument:
    """Replay the capsule in `path` with the backends that `variants` returns for its record.

    Each child has `seconds`. Raises ReplayError if the capsule cannot be read or computed.
    """
    place = os.path.abspath(path)  # a child works in a folder of its own
    try:
        judged = ask(_CHILD, {"path": place}, seconds=seconds)
    except ChildError as error:
        raise ReplayError(f"{path}: the reference could not be computed: {error}") from error
    if _CAPSULE_ERROR in judged:
        raise ReplayError(f"{path}: {judged[_CAPSULE_ERROR]}")
    results = []
    for variant in variants(judged["facts"]["record"]):
        request = {"path": place, "variant": asdict(variant), "device": device}
        try:
            found = ask(_CHILD, request, seconds=seconds)
        except ChildError as error:
            found = {"failed": str(error)}
        if _CAPSULE_ERROR in found:  # such as a capsule without weights
            found = {"unavailable": found[_CAPSULE_ERROR]}
        results.append(BackendReplay(variant.name, variant.quantization, variant.activations, **found))
    facts = from_json(CapsuleFacts, judged.pop("facts"))
    return ReplayDocument(path.name, facts, **judged, backends=tuple(results))


def _carry_out(request: Mapping[str, Any]) -> dict[str, Any]:
    """In the child: judge the recorded output, or run one backend."""
    from moedoctor.trace.capsule import CapsuleError, load

    try:
        capsule = load(Path(request["path"]))
        if "variant" not in request:
            return judge(capsule)
        return _run_backend(capsule, Variant(**request["variant"]), request["device"])
    except CapsuleError as error:
        return {_CAPSULE_ERROR: str(error).removeprefix(f"{request['path']}: ")}


def judge(capsule: Capsule) -> dict[str, Any]:
    """Return the verdict without backends, as plain data. Raises CapsuleError if it lacks weights."""
    from moedoctor.diagnose.capsule.explain import diagnose
    from moedoctor.diagnose.capsule.layouts import compare_backend_tensors
    from moedoctor.reference.agreement import agree, choose_bounds, relative_error
    from moedoctor.trace.capsule import describe

    held = compare_backend_tensors(capsule) if capsule.record.weights == "recorded" else []
    base = {"facts": describe(capsule), "judged": False, "right": None, "recorded": {}, "diagnosis": {}}
    base["backend_tensors"] = [asdict(tensor) for tensor in held]
    if capsule.record.weights != "recorded" or "output" not in capsule.tensors:
        return base
    record = capsule.record
    call = make_computation(capsule)
    expected = call.compute_contributions().sum(1)  # [T, H]
    output = capsule.tensors["output"].float()  # [T, H]
    bounds = choose_bounds(record.activations)
    agreement = agree(output, expected, bounds)
    if not agreement.right:
        rounded = agree(output, capsule.compute_expected(output), bounds)
        agreement = rounded if rounded.right else agreement
    diagnosis: dict[str, Any] = {}
    if not agreement.right:
        most = max(2, _MOST_VALUES // (record.top_k * max(record.hidden, record.shape.w13_rows)))
        errors = relative_error(output, expected).nan_to_num(posinf=-1.0)  # [T]
        order = [int(token) for token in errors.argsort(descending=True)]  # not finite: last
        # The tokens that are furthest off, and as many of the best: a mistake may be in some experts only.
        tokens = sorted(order if len(order) <= most else {*order[: most // 2], *order[-(most // 2) :]})
        found = diagnose(call.select_tokens(tokens), output[tokens])
        diagnosis = record_diagnosis(found, capsule.expert_ids, tokens)
    return {
        **base,
        "judged": True,
        "right": agreement.right,
        "recorded": {**agreement.to_evidence(), **_find_nonfinite_experts(capsule, output, expected)},
        "diagnosis": diagnosis,
    }


def _find_nonfinite_experts(
    capsule: Capsule, output: torch.Tensor, expected: torch.Tensor
) -> dict[str, list[int]]:
    """Return the experts that every token with a NaN or Inf of its own uses, and no finite token.

    `output` and `expected` are float32 [T, H]. Empty without such a token, and if no expert is like that.
    """
    broken = ~output.isfinite().all(1) & expected.isfinite().all(1)  # [T]
    used = [{expert for expert in row if expert >= 0} for row in capsule.tensors["topk_ids"].tolist()]
    bad = [experts for experts, wrong in zip(used, broken.tolist(), strict=True) if wrong]
    sound = [experts for experts, wrong in zip(used, broken.tolist(), strict=True) if not wrong]
    found = set.intersection(*bad).difference(*sound) if bad else set()
    return {"nonfinite_experts": sorted(found)} if found else {}


def make_computation(capsule: Capsule) -> Computation:
    """Return the `Computation` of a capsule. Raises CapsuleError if it lacks weights."""
    import torch

    from moedoctor.diagnose.capsule.computation import Computation

    held, experts = list(capsule.expert_ids), capsule.record.experts
    place = {expert: index for index, expert in enumerate(held)}
    following = torch.tensor([place.get((expert + 1) % experts, -1) for expert in held])  # [U]
    return Computation(
        capsule.to_problem(),
        capsule.record.activations,
        half_scales=capsule.compare_half_scales(),
        neighbors=following,
        last=place.get(experts - 1),
    )


def record_diagnosis(
    diagnosis: Diagnosis, expert_ids: Sequence[int], tokens: Sequence[int]
) -> dict[str, Any]:
    """Return a diagnosis of `tokens` as plain data, with the ids of the layer's experts."""

    def record_explanation(found: Explanation) -> dict[str, Any]:
        experts = None if found.experts is None else [expert_ids[place] for place in found.experts]
        return {
            "mistakes": list(found.mistakes),
            "steps": [list(part) for part in found.deviation],
            "holds": found.holds,
            "share_explained": found.share,
            "cosine": found.cosine,
            "experts": experts,
            "tokens": None if found.tokens is None else [tokens[row] for row in found.tokens],
            "factor": found.factor,
            "taken": None if found.taken is None else expert_ids[found.taken],
            "token_shares": [
                {"token": tokens[row], "share_explained": share} for row, share in found.token_shares.items()
            ],
            "expert_shares": [
                {"expert": expert_ids[place], "share_explained": share}
                for place, share in found.expert_shares.items()
            ],
        }

    return {
        "explanation": None if diagnosis.best is None else record_explanation(diagnosis.best),
        "not_told_apart": [record_explanation(found) for found in diagnosis.equals],
        "runner_up": None if diagnosis.runner_up is None else record_explanation(diagnosis.runner_up),
        "explanations_compared": diagnosis.compared,
    }


def _run_backend(capsule: Capsule, variant: Variant, device: str) -> dict[str, Any]:
    import torch

    from moedoctor.bench.moe import backends
    from moedoctor.reference.agreement import agree, choose_bounds
    from moedoctor.reference.moe_layer import compute_expected
    from moedoctor.results import UnavailableError

    capsule = capsule.fold_half_scales()
    problem = capsule.to_problem()
    try:
        backend = backends.create(variant)
        reason = backend.unavailable(problem.layer.shape, device)
        if reason is None and bool((problem.topk_ids < 0).any()):
            reason = backend.check_empty_slots()
        if reason is not None:
            return {"unavailable": reason}
        moved = capsule.to(device).to_problem()
        prepared, x = backend.prepare(moved.layer), moved.x.bfloat16()  # [T, H]
        outputs = [prepared(x, moved.topk_weights, moved.topk_ids).float().cpu() for _ in range(3)]
    except UnavailableError as error:
        return {"unavailable": str(error)}
    except Exception as error:
        if classify(str(error)) is None:
            raise
        # The first line of a fault of CUDA names it, and the last line of the log need not.
        return {"failed": f"{type(error).__name__}: {find_first_line(str(error))}"}
    bounds = choose_bounds(variant.activations)
    output = outputs[0]  # [T, H]
    reference = agree(output, compute_expected(problem, variant.activations, output), bounds)
    recorded = None
    kept = capsule.tensors.get("output")
    if capsule.record.weights == "recorded" and kept is not None and bool(kept.isfinite().all()):
        recorded = agree(output, kept.float(), bounds)
    return {
        "right": reference.right,
        "against_reference": reference.to_evidence(),
        "against_recorded": None if recorded is None else recorded.to_evidence(),
        "repeats": None if recorded is None else recorded.right,
        "deterministic": all(torch.equal(output, other) for other in outputs[1:]),
    }


if __name__ == "__main__":
    answer(_carry_out)
