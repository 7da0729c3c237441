"""Capsules come back as they were, and whatever is wrong with a file is one line."""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moedoctor.cli import main
from moedoctor.diagnose.capsule import replay
from moedoctor.diagnose.capsule.replay import CapsuleFacts, ReplayDocument, judge
from moedoctor.reference.agreement import agree, choose_bounds
from moedoctor.reference.moe import ROUNDINGS, MoeWeights, forward
from moedoctor.reference.moe_layer import make_quantizer
from moedoctor.reporters.pages.replay import answer_of
from moedoctor.results import from_json, to_plain
from moedoctor.trace import capsule as capsules
from moedoctor.trace.call_judge import is_right
from tests.capsules import SCHEMES, computation, make_capsule

_NAMES = "x output topk_ids topk_weights expert_ids w13 w2 w13_scale w2_block_scales input_scale"
_TENSORS = st.sampled_from(_NAMES.split())
ALLOWED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
made = functools.cache(make_capsule)
"""Nothing may change what it returns."""


def _metadata(capsule: capsules.Capsule, **changes: Any) -> dict[str, str]:
    record = json.loads(capsule.record.model_dump_json()) | changes
    return {"format": capsules.FORMAT, "version": capsules.VERSION, "record": json.dumps(record)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_a_capsule_comes_back_as_it_was(scheme: tuple[str, str], activation: str, tmp_path: Path) -> None:
    capsule = make_capsule(*scheme, activation=activation, halves=True, unusual=True)
    capsules.save(capsule, tmp_path / "one.moecapsule")
    again = capsules.load(tmp_path / "one.moecapsule")
    assert again.record == capsule.record
    assert again.tensors.keys() == capsule.tensors.keys()
    for name, tensor in capsule.tensors.items():
        assert again.tensors[name].dtype == tensor.dtype
        same = again.tensors[name].view(torch.uint8) if tensor.dim() else again.tensors[name]
        assert torch.equal(same, tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor), name


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True), st.sampled_from(SCHEMES))
@settings(max_examples=15)
def test_some_tokens_compute_what_they_computed_among_all(tokens: list[int], scheme: tuple[str, str]) -> None:
    capsule = made(*scheme, halves=True, unusual=True, seed=3)
    part = capsules.keep_tokens(capsule, tokens)
    whole = computation(capsule).compute_contributions()[tokens]  # [T', K, H]
    torch.testing.assert_close(computation(part).compute_contributions(), whole, rtol=1e-3, atol=1e-3)
    ids = set(part.tensors["topk_ids"].unique().tolist())
    used = {7 if expert == -1 else expert for expert in ids}  # -1 may be taken for the last expert
    assert used <= set(part.expert_ids)
    assert len(part.expert_ids) == max(len(used), capsule.record.top_k)
    assert part.record.tokens == tuple(tokens)


@given(st.integers(20_000, 700_000), st.sets(st.integers(0, 7)))
@settings(max_examples=15)
def test_a_capsule_keeps_to_its_size(limit: int, wrong: set[int]) -> None:
    """Whole, or the token that is furthest off, or of a right call as many as fit."""
    capsule = _with_wrong(made(), sorted(wrong))
    furthest = max(wrong, default=0)
    needed = capsules.keep_tokens(capsule, [furthest]).size
    if needed > limit:
        with pytest.raises(capsules.CapsuleError, match=f"need {needed / 1e6:.1f} MB"):
            capsules.fit(capsule, limit)
        return
    part = capsules.fit(capsule, limit)
    assert part.size <= limit
    tokens = list(part.record.tokens) or list(range(8))
    if capsule.size <= limit:
        assert tokens == list(range(8))
    elif wrong:
        assert tokens == [furthest]
        assert capsules.find_failing_tokens(part) == [0]
    else:
        assert tokens == list(range(len(tokens)))
        assert capsules.keep_tokens(capsule, range(len(tokens) + 1)).size > limit


def _with_wrong(capsule: capsules.Capsule, tokens: list[int]) -> capsules.Capsule:
    """The capsule with these outputs wrong, the last one most."""
    output = capsule.tensors["output"].clone()  # [T, H]
    for token in tokens:
        output[token] *= 2 + token
    return capsules.Capsule(capsule.record, {**capsule.tensors, "output": output})


@given(st.integers(0, 7), st.integers(0, 7))
@settings(max_examples=10)
def test_a_nan_of_a_finite_input_shows_the_failure(token: int, other: int) -> None:
    capsule = _with_wrong(make_capsule(), [(token + 1) % 8])
    capsule.tensors["output"][token] = float("nan")
    assert capsules.find_failing_tokens(capsule) == [token]
    capsule.tensors["x"][other, 3] = float("inf")
    if other != token:
        assert capsules.find_failing_tokens(capsule)[:1] == [token]


def test_a_backend_that_takes_one_of_two_global_scales_is_past_the_bound() -> None:
    """MD014: the reference has both, or `mismatch` would compare the mistake with itself."""
    capsule = make_capsule("nvfp4", halves=True)
    assert agree(capsule.tensors["output"].float(), capsule.compute_expected(), choose_bounds("none")).right
    assert capsules.find_failing_tokens(capsule) == []
    scale = capsule.tensors["w13_scale"]  # [U, 2]
    scale = scale.amax(1, keepdim=True).expand_as(scale)
    merged = capsules.Capsule(capsule.record, {**capsule.tensors, "w13_scale": scale})
    output = merged.compute_expected().bfloat16()
    wrong = capsules.Capsule(capsule.record, {**capsule.tensors, "output": output})
    assert capsules.find_failing_tokens(wrong)


def test_backend_tensors_follow_their_experts() -> None:
    capsule = make_capsule()
    own = torch.arange(8 * 3).view(8, 3)  # [U, 3]
    capsule = capsules.Capsule(capsule.record, {**capsule.tensors, "backend.w13": own})
    part = capsules.keep_tokens(capsule, [0])
    assert torch.equal(part.tensors["backend.w13"], own[list(part.expert_ids)])


def test_what_is_shared_holds_no_weights() -> None:
    capsule = make_capsule("nvfp4")
    backend = {"backend.w13": capsule.tensors["w13"].clone()}
    capsule = capsules.Capsule(capsule.record, {**capsule.tensors, **backend})
    bare, synthetic = capsules.drop_weights(capsule), capsules.draw_synthetic_weights(capsule)
    assert set(bare.tensors) == {"x", "output", "topk_ids", "topk_weights", "expert_ids"}
    assert synthetic.record.weights == "synthetic"
    assert "backend.w13" not in synthetic.tensors
    for name in ("w13", "w2"):
        equal = (synthetic.tensors[name] == capsule.tensors[name]).float().mean()
        assert equal < 0.05  # random bytes are equal once in 256
        scales = [each.tensors[f"{name}_block_scales"].view(torch.uint8) for each in (synthetic, capsule)]
        assert torch.equal(*scales)
    with pytest.raises(capsules.CapsuleError, match="holds no weights"):
        bare.to_problem()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"record": {"parallel": {"\n": ""}}}, r"parallel.\\n"),
        ({"record": {"hidden": 128}}, r" is BF16 \[8, 256\], expected BF16 or F16 or F32 \[8, 128\]"),
        ({"record": {"experts": 4}}, "expert_ids must be ascending, from 0 to 3"),
        ({"record": {"activation": "tanh"}}, "activation: Input should be"),
        ({"record": {"tokens": [0]}}, "names 1 tokens and holds 8"),
        ({"record": {"prompt": "hello"}}, "prompt: Extra inputs are not permitted"),
        ({"metadata": {"version": "2"}}, "has format version 2, expected 1"),
        ({"metadata": {"format": "other"}}, "without the format moedoctor-capsule"),
        ({"metadata": {"record": "[" * 100_000}}, "record: "),
        ({"drop": "w2_scale"}, "lacks the tensor w2_scale"),
        ({"add": {"w3": torch.zeros(1)}}, "holds the tensor 'w3', which a capsule does not have"),
        ({"add": {"expert_ids": torch.arange(8, dtype=torch.int32).flip(0)}}, "expert_ids must be ascending"),
        ({"record": {"block": [128, 128]}}, "has a block of scales and nvfp4 weights"),
        ({"add": {"backend.w13": torch.zeros(3)}}, r"backend.w13 is \[3\], expected \[8, ...\]"),
        ({"record": {"top_k": 2**20}}, "has top_k 1048576 and 8 experts"),
        ({"record": {"top_k": 2**20, "experts": 2**20}}, "more than can be replayed"),
        ({"add": {"w13": torch.zeros(8, 256, 256)}}, r"w13 is F32 \[8, 256, 256\], expected U8"),
    ],
)
def test_a_wrong_capsule_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    capsule = made()
    tensors = {**capsule.tensors, **change.get("add", {})}
    tensors.pop(change.get("drop"), None)
    metadata = _metadata(capsule, **change.get("record", {})) | change.get("metadata", {})
    path = tmp_path / "wrong.moecapsule"
    save_file(tensors, path, metadata)
    with pytest.raises(capsules.CapsuleError, match=message) as caught:
        capsules.load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_ids_without_weights_are_refused(tmp_path: Path) -> None:
    capsule = capsules.keep_tokens(make_capsule(), [0])
    ids = (capsule.tensors["topk_ids"] + 1) % 8
    moved = capsules.Capsule(capsule.record, {**capsule.tensors, "topk_ids": ids})
    with pytest.raises(capsules.CapsuleError, match="lacks the weights of the experts"):
        moved.to_problem()


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=ALLOWED)
def test_damaged_bytes_are_a_capsule_or_one_error(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "damaged.moecapsule"
    capsules.save(capsules.keep_tokens(made(), [0]), path)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            raw[data.draw(st.integers(0, min(len(raw), 3000) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(capsules.CapsuleError):
        capsules.load(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
_FIELDS = st.sampled_from([*capsules.Record.model_fields, "prompt"])
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.float8_e4m3fn)
_NUMBERS = st.sampled_from([0, -1, 1, 2**20, 2**24, 2**63, *range(2, 9), 16, 64, 128, 256, 4096])
_VALUES = st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -1e30, 3e38, 1e-40])


_CHANGES = st.fixed_dictionaries(
    {
        "fields": st.dictionaries(_FIELDS, _NUMBERS | _JSON, max_size=3),
        "types": st.dictionaries(_TENSORS, st.sampled_from(_TYPES), max_size=1),
        "values": st.dictionaries(_TENSORS, _VALUES, max_size=2),
        "shapes": st.dictionaries(_TENSORS, st.lists(st.integers(0, 9), max_size=3), max_size=1),
    }
)
"""Replacements of parts of a capsule."""


def _changed(change: dict[str, Any], scheme: tuple[str, str], path: Path) -> capsules.Capsule | None:
    """Write such a capsule and load it; None if that is an error of one line."""
    capsule = capsules.keep_tokens(made(*scheme), [0, 1])
    tensors = {name: tensor.clone() for name, tensor in capsule.tensors.items()}
    for name in (name for name in change["types"] if name in tensors):
        tensors[name] = tensors[name].float().to(change["types"][name])
    for name in (name for name in change["values"] if name in tensors):
        tensors[name] = torch.full(tensors[name].shape, change["values"][name]).to(tensors[name].dtype)
    for name in (name for name in change["shapes"] if name in tensors):
        tensors[name] = torch.zeros(change["shapes"][name]).to(tensors[name].dtype)
    save_file(tensors, path, _metadata(capsule, **change["fields"]))
    try:
        changed = capsules.load(path)
        changed.to_problem()
    except capsules.CapsuleError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 400 + len(str(path))
        return None
    return changed


@given(change=_CHANGES, scheme=st.sampled_from(SCHEMES))
@settings(max_examples=60, suppress_health_check=ALLOWED)
def test_any_record_and_any_tensors_are_a_call_or_one_line(change, scheme, tmp_path):
    """Whatever fields, types, shapes and values are; what is computed is what `replay` begins with."""
    capsule = _changed(change, scheme, tmp_path / "any.moecapsule")
    if capsule is not None:
        expected = computation(capsule).compute_contributions().sum(1)
        agree(capsule.tensors["output"].float(), expected, choose_bounds(capsule.record.activations))
        capsules.find_failing_tokens(capsule)
        json.dumps(capsules.describe(capsule))


@pytest.mark.slow
@given(change=_CHANGES, scheme=st.sampled_from(SCHEMES))
@settings(max_examples=40, suppress_health_check=ALLOWED)
def test_any_capsule_is_judged(change: dict[str, Any], scheme: tuple[str, str], tmp_path: Path) -> None:
    capsule = _changed(change, scheme, tmp_path / "any.moecapsule")
    if capsule is not None:
        json.dumps(judge(capsule))


def test_a_zero_input_scale_is_judged() -> None:
    """MD015: the backend divides by it, so the reference is NaN too, and no token is right."""
    whole = make_capsule("nvfp4", "nvfp4")
    output = torch.full_like(whole.tensors["output"], float("nan"))  # [T, H]
    tensors = {**whole.tensors, "input_scale": torch.tensor(0.0), "output": output}
    capsule = capsules.Capsule(whole.record, tensors)
    answer = judge(capsule)
    assert (answer["judged"], answer["right"]) == (True, False)
    assert answer["recorded"]["nonfinite_tokens"] == 8


def test_a_call_without_output_is_not_judged_and_says_why(tmp_path: Path) -> None:
    whole = make_capsule("bf16", tokens=2)
    tensors = {name: tensor for name, tensor in whole.tensors.items() if name != "output"}
    record = whole.record.model_copy(update={"reason": "the last call before the process died"})
    capsules.save(capsules.Capsule(record, tensors), tmp_path / "call.moecapsule")
    judged = judge(capsules.load(tmp_path / "call.moecapsule"))
    facts = from_json(CapsuleFacts, judged.pop("facts"))
    result = ReplayDocument("call.moecapsule", facts, **judged, backends=())
    assert (result.judged, result.right) == (False, None)
    assert "no output to judge (the last call before the process died)" in answer_of(result)


def test_a_call_of_a_backend_that_activates_in_float32_is_right() -> None:
    capsule = make_capsule("fp8", "fp8", tokens=256)
    problem, layer = capsule.to_problem(), capsule.to_problem().layer
    call = problem.x, MoeWeights(layer.w13, layer.w2), problem.topk_weights, problem.topk_ids
    output = forward(
        *call,
        quantize_input=make_quantizer("fp8", layer.input_scale),
        quantize_intermediate=make_quantizer("fp8", layer.intermediate_scale),
        rounding=ROUNDINGS[3],
    )  # [T, H]
    assert not agree(output, capsule.compute_expected(), choose_bounds("fp8")).right
    kept = capsules.Capsule(capsule.record, {**capsule.tensors, "output": output.bfloat16()})
    assert is_right(kept)
    assert capsules.find_failing_tokens(kept) == []
    assert judge(kept)["right"]


FILE = Path(__file__).parent / "engine_wrong_scale.moecapsule"
"""A call of vLLM 0.33.0 (H100, MARLIN, CUDA graphs) whose expert 3 got 64 times its scale.

The global scale of w13 was multiplied in the backend's weights after loading, and `mismatch=1` recorded the
call (`make evidence NAMES=recorded_scale_graphs`).
"""


@pytest.fixture(scope="module")
def result() -> Any:
    """Return the answer of a child of `moedoctor replay`."""
    return json.loads(json.dumps(to_plain(replay.judge(capsules.load(FILE)))))


def test_the_wrong_call_is_found_and_the_expert_is_named(result: dict[str, Any]) -> None:
    recorded, diagnosis = result["recorded"], result["diagnosis"]
    assert (result["judged"], result["right"]) == (True, False)
    assert (recorded["wrong_tokens"], recorded["cosine_token"]) == (1, 2)
    # Only this token has expert 3, beside expert 7, so that either may be the wrong one.
    found = (diagnosis["explanation"], *diagnosis["not_told_apart"])
    assert [3] in [explanation["experts"] for explanation in found]
    assert all(explanation["experts"] in ([3], [7]) for explanation in found)
    assert found[0]["cosine"] > 0.9999
    assert diagnosis["runner_up"]["cosine"] < 0.99


def test_the_answer_names_the_entry_and_that_the_kernel_did_not_do_it(capsys, result, monkeypatch):
    monkeypatch.setattr(replay, "ask", lambda module, request, seconds: result)
    assert main(["replay", str(FILE)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "The backend's w13_weight_scale_2 has it, and the checkpoint has not (expert 3: 64 times the others'"
        "): loading or repacking the weights did it, not the kernel"
    ) in text
    assert "the nearest is MD014: `moedoctor explain MD014`" in text
