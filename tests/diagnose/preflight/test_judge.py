"""A start is judged by what the child reported: nothing of ours is dressed as vLLM's."""

from typing import Any

import pytest

from moedoctor.diagnose.preflight import checkpoint_load
from moedoctor.diagnose.preflight.judge import judge_start
from moedoctor.diagnose.preflight.records import RULES, StartAnswer, Verdict

ENVIRONMENT: dict[str, Any] = {"versions": {"vllm": "0.33.0", "transformers": "5.20.0"}, "unsatisfied": []}
STAGES = ("groups", "build", "load", "memory")


def error(
    stage: str = "load", kind: str = "ValueError", message: str = "wrong", **more: Any
) -> dict[str, Any]:
    frames = {"at": ["vllm/a.py:1"], "line": "assert a == b", "last_module": "vllm", "cause": ""}
    return {"stage": stage, "type": kind, "message": message, **frames, "tensor": "t", **more}


def rank(number: int = 0, **more: Any) -> dict[str, Any]:
    loaded = {"holes": more.pop("holes", []), "cast": more.pop("cast", []), "largest": 0}
    return {"rank": number, "seconds": dict.fromkeys(STAGES, 0.1), "bytes": 1, "loaded": loaded, **more}


def hole(pattern: str, written: float = 0.0, **more: Any) -> dict[str, Any]:
    facts = {"shape": [8, 8], "padded": False, "unused": False, "count": 2}
    return {"pattern": pattern, "written": written, **facts, "example": pattern.replace("N", "0"), **more}


def judge(*ranks: Any, environment: dict[str, Any] = ENVIRONMENT, **reply: Any) -> StartAnswer:
    seconds = {"arguments": 0.1, "config": 0.1}
    return judge_start({"seconds": seconds, "ranks": ranks, **reply}, environment, ("M",))


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (error(), Verdict.REFUSED),
        (error(kind="AssertionError", message=""), Verdict.REFUSED),
        (error(kind="KeyError"), Verdict.REFUSED),
        (error(kind="RuntimeError", message="The size of tensor a (3) must match b (4)"), Verdict.REFUSED),
        (error("groups"), Verdict.REFUSED),
        (error(kind="ModuleNotFoundError", message="No module named 'humming'"), Verdict.CANNOT_SAY),
        (error(kind="NotImplementedError"), Verdict.CANNOT_SAY),
        (error(kind="NotImplementedError", message="EPLB is not supported X."), Verdict.REFUSED),
        (error(last_module="moedoctor"), Verdict.CANNOT_SAY),
        (error(message="libcuda.so cannot found"), Verdict.CANNOT_SAY),
        (error(message="aten::foo with arguments from the Meta backend"), Verdict.CANNOT_SAY),
        (error(cause="ImportError: humming"), Verdict.CANNOT_SAY),
        (error(at=[]), Verdict.CANNOT_SAY),
        # A release wants a kernel before it applies adapters; an engine has it by then.
        (error("adapters", message="Old-style modular kernel not supported."), Verdict.CANNOT_SAY),
        (error("adapters", message="Fused MoE must provide a moe_kernel."), Verdict.CANNOT_SAY),
    ],
)
def test_only_the_releases_own_error_is_a_refusal(given: dict[str, Any], verdict: Verdict) -> None:
    answer = judge(rank(error=given))
    assert answer.verdict is verdict
    assert [row.outcome for row in answer.stages if row.stage == given["stage"]] != ["passed"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (error(message="no 'a.b' in it"), "no 'a.b' in it (t)"),
        (error(message="no 'a.b' in it", tensor=""), "no 'a.b' in it"),
        (error(message="Following weights were not initialized: {'norm.weight'}", tensor=""), "of a.N.w1"),
        (error("build", message="", line="assert rows % group_size == 0"), "group_size == 0 (t)"),
    ],
)
def test_a_refusal_names_its_tensor_once(given: dict[str, Any], reason: str) -> None:
    answer = judge(rank(error=given), skipped=[{"pattern": "a.N.w1", "count": 2}])
    assert answer.reason.endswith(reason)
    assert answer.findings[0].tensor in ("t", "a.b", "norm.weight")


def test_arguments_are_refused_without_a_frame() -> None:
    given = error("arguments", message="unrecognized arguments: --x", at=[], last_module="moedoctor")
    answer = judge(error=given)
    assert answer.verdict is Verdict.REFUSED
    assert answer.reason == "0.33.0 stops: unrecognized arguments: --x (t)"


@pytest.mark.parametrize(
    ("newer", "message", "verdict"),
    [
        (True, "Transformers does not recognize this architecture", Verdict.REFUSED),
        (False, "Transformers does not recognize this architecture", Verdict.CANNOT_SAY),
        (True, "transformers: head_dim is ambiguous", Verdict.CANNOT_SAY),
        (True, "Unknown quantization method: x", Verdict.REFUSED),
    ],
)
def test_another_transformers_decides_nothing(newer: bool, message: str, verdict: Verdict) -> None:
    broken = {"name": "transformers", "version": "1", "required": "<5", "newer": newer}
    unsatisfied = {**ENVIRONMENT, "unsatisfied": [broken]}
    answer = judge(error=error("config", message=message), environment=unsatisfied)
    assert answer.verdict is verdict
    assert any("the release requires <5" in note for note in answer.notes)


def test_kernels_that_the_release_requires_and_that_are_missing_are_named() -> None:
    """With HUMMING, 0.33.0 refuses on 9.0 what it loads with MARLIN."""
    missing = {"name": "humming-kernels", "version": "", "required": "==0.1.19", "newer": False}
    (note,) = judge(rank(), environment={**ENVIRONMENT, "unsatisfied": [missing]}).notes
    assert note.startswith("humming-kernels is not here, the release requires ==0.1.19: backends")


def test_empty_parameters_are_wrong_answers() -> None:
    holes = [hole("layers.N.w13"), hole("layers.N.w2", 0.5)]
    loaded = {"holes": holes, "cast": [], "largest": 0, "missing": {"first": "layers.0.gate", "count": 2}}
    answer = judge({**rank(), "loaded": loaded}, skipped=[{"pattern": "layers.N.w1", "count": 2}])
    assert answer.verdict is Verdict.WRONG
    assert "2 parameters are never written (layers.N.w13)" in answer.reason
    assert "reads nothing of layers.N.w1, and finds no layers.0.gate and 1 more" in answer.reason
    assert [finding.rule for finding in answer.findings] == ["not-written", "not-written"]
    assert "50.0%" in answer.findings[1].message


ON_GPU = "weights on the GPU while they are repacked"


@pytest.mark.parametrize(
    ("backend", "method", "workspace", "repacking"),
    [
        ("TRITON", "Fp8MoEMethod", "0.03 GiB", ("0.00", "9.50")),
        ("MARLIN", "ModelOptNvFp4FusedMoE", "0.03 GiB", ("1.15", "10.65")),
        ("HUMMING", "Fp8MoEMethod", "not known: HUMMING for fp8 was", ("0.81", "10.31")),
        ("a new one", "Fp8MoEMethod", "not known: A_NEW_ONE was measured on no GPU yet", None),
    ],
)
def test_memory_is_that_of_plan(backend, method, workspace, repacking):
    gib, names = 1 << 30, ("new tensors while a layer of experts is repacked (MD026)", ON_GPU)
    sizes = {"hidden": 256, "intermediate": 1024, "experts": 800, "top_k": 2, "is_gated": True}
    experts = {**sizes, "tokens": 2048, "host_bytes": gib, "moved": [3 * gib // 4] * 3}
    layers = [{"kind": "experts", "method": method, "backend": backend, "count": 2}]
    of_experts = {"new": gib, "left": gib // 4, "count": 2, "size": 2 * gib}
    of_linear = {"new": 3 * gib // 2, "left": 0, "count": 9, "size": gib // 4}
    after = [
        {"kind": "experts", "method": method, "problem": "", **of_experts},
        {"kind": "linear", "method": "Linear", "problem": "", **of_linear},
    ]
    kv = {"left": gib, "weights": 7 * gib, "memory": 12 * gib}
    known = {"experts": experts, "layers": layers, "bytes": 8 * gib, "kv": kv, "after": after}
    facts = dict(judge(rank(**known)).memory)
    assert facts["left for the KV cache, if activations took nothing"].startswith("1.00 GiB of 8.00 GiB")
    assert facts["of these on the host, at most"] == "1.00 GiB"
    assert facts["host memory while they are moved, at most"].startswith("2.75 GiB")
    there = "; the GPU has 12.00 GiB"
    assert tuple(map(facts.get, names)) == ("1.00 GiB", f"10.50 GiB{there}"), "an offloaded layer comes back"
    experts["has_uva"] = True
    assert dict(judge(rank(**known)).memory)[ON_GPU] == f"9.00 GiB{there}"
    experts |= {"host_bytes": 0, "has_uva": False}
    assert dict(judge(rank(**known)).memory)[ON_GPU] == f"10.00 GiB{there}"
    experts["host_bytes"] = gib
    after[1]["problem"] = "ImportError: humming"
    assert dict(judge(rank(**known)).memory)[ON_GPU] == "not known: ImportError: humming"
    after[1]["problem"], after[0]["problem"] = "", "ImportError: humming"
    facts = dict(judge(rank(**known)).memory)
    expected = (None, "not known: ImportError: humming")
    if repacking is not None:
        expected = (f"{repacking[0]} GiB, as `moedoctor plan` computes it", f"{repacking[1]} GiB{there}")
    assert tuple(map(facts.get, names)) == expected
    assert facts[f"workspace of {backend.upper().replace(' ', '_')} for 2,048 tokens"].startswith(workspace)
    assert judge(rank()).memory == ()


def test_settings_without_effect_are_warnings() -> None:
    words = ("M", "--moe-backend", "marlin")
    reply = {"seconds": {"arguments": 0.1}, "ranks": [rank()]}
    variables = {"VLLM_NVFP4_MOE_BACKEND": "marlin", "VLLM_USE_DEEP_GEMM": "0"}
    answer = judge_start(reply, ENVIRONMENT, words, variables)
    assert answer.verdict is Verdict.STARTS
    [finding] = answer.findings
    assert (finding.rule, finding.level, finding.id) == ("setting", "warning", "MD010")
    assert finding.message.startswith("VLLM_NVFP4_MOE_BACKEND=marlin: ")


def test_buffers_of_weights_that_offload_moves_are_wrong_answers() -> None:
    answer = judge({**rank(), "stale": ["layers.0.conv", "layers.1.conv"]}, rank())
    assert answer.verdict is Verdict.WRONG
    assert "up to 2 are never loaded (layers.0.conv)" in answer.reason
    assert [(finding.rule, finding.id) for finding in answer.findings] == [("stale-buffer", "MD008")]
    assert "--cpu-offload-params experts" in answer.next_step
    assert judge({**rank(), "stale": []}).verdict is Verdict.STARTS


def test_a_model_that_is_not_balanced_is_refused() -> None:
    answer = judge(rank(unbalanced="PhiMoEForCausalLM"), rank())
    assert (answer.verdict, answer.findings[0].id) == (Verdict.REFUSED, "MD038")
    assert "--enable-eplb: PhiMoEForCausalLM" in answer.reason
    assert judge(rank(unbalanced="")).verdict is Verdict.STARTS


@pytest.mark.parametrize(
    "sound",
    [
        hole("attn.k_scale"),
        hole("experts.w13_g_idx"),
        hole("experts.w2_weight", 0.9, padded=True),
        hole("experts.w13_bias", unused=True),
    ],
)
def test_what_a_sound_checkpoint_may_lack_is_no_alarm(sound: dict[str, Any]) -> None:
    assert judge(rank(holes=[sound])).verdict is Verdict.STARTS


def test_cut_and_converted_tensors_are_wrong_answers() -> None:
    cut = judge(rank(), too_large=[{"tensor": "k_proj", "shape": [4, 2], "read": 0.5}])
    assert (cut.verdict, cut.findings[0].tensor) == (Verdict.WRONG, "k_proj")
    cast = judge(rank(cast=[("a.weight", "float8_e4m3fn", "bfloat16")]))
    assert (cast.verdict, cast.findings[0].rule) == (Verdict.WRONG, "converted")


def test_an_error_on_a_later_rank_decides() -> None:
    answer = judge(rank(holes=[hole("x")]), rank(7, error=error()))
    assert (answer.verdict, answer.findings[0].rank, answer.ranks) == (Verdict.REFUSED, 7, (0, 7))


def test_weights_that_were_not_looked_at_are_no_all_clear() -> None:
    row = {"rank": 0, "seconds": {"groups": 0.1, "build": 0.1}, "bytes": 1}
    answer = judge(row)
    assert (answer.verdict, "weights were not looked at" in answer.reason) == (Verdict.STARTS, True)


@pytest.mark.parametrize(("problem", "words"), [("", "own mapping reads"), ("KeyError: x", "cannot be made")])
def test_names_that_were_made_are_no_checkpoint(problem: str, words: str) -> None:
    row = rank() if not problem else {**rank(), "seconds": {"groups": 0.1, "build": 0.1}}
    answer = judge(row, made=problem)
    assert (answer.verdict, "not looked at" in answer.reason) == (Verdict.STARTS, True)
    assert "moedoctor preflight headers" in answer.next_step
    assert words in answer.notes[0]


@pytest.mark.parametrize("checkpoint", [{}, {"made": ""}])
@pytest.mark.parametrize(
    ("left", "message", "step"),
    [
        (-24 << 30, "rank 0: the weights take 56.00 GiB, and vLLM may use 32.00 GiB", "--cpu-offload-gb"),
        (1 << 20, "rank 0: 1 GiB KV cache is needed", "--max-model-len"),
    ],
)
def test_too_little_memory_is_a_warning_and_the_reason(left, message, step, checkpoint) -> None:
    kv = {"refused": "1 GiB KV cache is needed", "tokens": None, "left": left, "weights": 56 << 30}
    answer = judge(rank(kv=kv), **checkpoint)
    assert (answer.verdict, answer.findings[0].level) == (Verdict.STARTS, "warning")
    assert message in answer.reason
    assert step in answer.next_step
    assert {row.stage: row.outcome for row in answer.stages}["memory"] == "warning"


def test_memory_that_could_not_be_planned_is_not_passed() -> None:
    """The engine plans it otherwise: an error of ours is none of the start."""
    answer = judge(rank(kv={"problem": "ImportError: no get_kv_cache_configs"}))
    assert answer.verdict is Verdict.STARTS
    assert {row.stage: row.outcome for row in answer.stages}["memory"] == "cannot say"
    assert "KV cache was not planned: ImportError: no get_kv_cache_configs" in answer.notes


def test_backends_that_are_not_used_have_a_reason() -> None:
    layers = [{"kind": "experts", "method": "Fp8MoEMethod", "backend": "FLASHINFER_TRTLLM", "count": 2}]
    reasons = [["experts", "FlashInfer TRTLLM", ""], ["experts", "TRITON", ""], ["linear", "A", "no B"]]
    draft = {"backends": [["experts", "EMULATION", "slow"]]}
    first, *others = judge({**rank(), "layers": layers, "backends": reasons, "draft": draft}).backends
    assert first[:2] == ("experts", "TRITON")
    assert others == [("linear", "A", "no B"), ("draft experts", "EMULATION", "slow")]


def test_repacking_that_was_not_done_is_not_known() -> None:
    after = [
        {"method": "MarlinMoE", "problem": "", "new": 3 << 20, "left": 0},
        {"method": "HummingMoE", "problem": "ImportError: humming", "new": 0, "left": 0},
        {"method": "Linear", "problem": "", "new": 0, "left": 0},
    ]
    seconds = {**rank()["seconds"], "after": 2.0}
    ranks = [{**rank(), "after": after, "seconds": seconds}, {**rank(1), "after": after}]
    answer = judge(*ranks, post=True)
    assert judge(*ranks).after == ()
    assert (answer.stages[-1].stage, answer.stages[-1].seconds) == ("after", 2.0)
    first, second = answer.after
    assert first.startswith("MarlinMoE: 0.00 GiB beside the loaded weights of a layer")
    assert first.endswith("meanwhile (MD026), 0.00 GiB afterwards")
    assert second == "HummingMoE: not done here: ImportError: humming"


@pytest.mark.parametrize(
    ("kind", "message", "id"),
    [
        ("KeyError", "'layers.0.mlp.experts.w2_weight'", "MD021"),
        ("ValueError", "The output_size of gate's and up's weight = 80 is not divisible by x", "MD022"),
        ("ValueError", "Detected some but not all shards of a.qkv_proj are quantized.", "MD023"),
        ("AssertionError", "Tried to load weights of size torch.Size([16, 512])to a parameter of size "
         "torch.Size([16, 256])", "MD023"),
        ("ValueError", "Total number of attention heads (28) must be divisible by 8", ""),
    ],
)  # fmt: skip
def test_a_refusal_names_the_known_failure(kind: str, message: str, id: str) -> None:
    answer = judge(rank(error=error(kind=kind, message=message)), config={"quantization": "modelopt_fp4"})
    assert [finding.id for finding in answer.findings] == [id]


def test_skipped_experts_and_converted_weights_are_known_failures() -> None:
    skipped = [{"pattern": "model.layers.N.mlp.experts.N.w1_proj.weight", "count": 8}]
    answer = judge(rank(holes=[hole("model.layers.N.mlp.experts.w13_weight", 0.5)]), skipped=skipped)
    assert {finding.rule: finding.id for finding in answer.findings} == {"not-written": "MD021"}
    answer = judge(rank(holes=[hole("model.layers.N.mlp.experts.w2_weight_scale")]))
    assert {finding.rule: finding.id for finding in answer.findings} == {"not-written": ""}
    answer = judge(rank(cast=[("a.weight", "F8_E4M3", "BF16")]))
    assert {finding.rule: finding.id for finding in answer.findings} == {"converted": "MD023"}


def test_an_adapter_is_refused_or_left_out_in_part() -> None:
    def apply(**row: Any) -> StartAnswer:
        adapter = {"name": "a", "modules": 1, "unplaced": [], "error": None, **row}
        return judge(rank(adapters={"wrapped": 2, "adapters": [adapter]}))

    assert apply().verdict is Verdict.STARTS
    message = "While loading /a, expected target modules in {'q_proj'} but received ['m.experts.0.up_proj']."
    refused = apply(error=error("adapters", message=message))
    assert (refused.verdict, refused.findings[0].id) == (Verdict.REFUSED, "MD029")
    assert [row.outcome for row in refused.stages if row.stage == "adapters"] == ["stopped"]
    assert apply(error=error("adapters", message="LoRA rank 64 is greater")).findings[0].id == ""
    long = f"expected target modules in {{{', '.join(f'experts.{n}' for n in range(900))}"
    assert apply(error=error("adapters", message=long)).findings[0].id == "MD029"
    for name, id in (("model.layers.0.mlp.experts.base_layer", "MD029"), ("model.x", "")):
        wrong = apply(unplaced=[name])
        assert (wrong.verdict, wrong.findings[0].id) == (Verdict.WRONG, id)
        assert wrong.reason == f"0.33.0 applies nothing of {name} of the adapter a"

    row = {"name": "a", "unplaced": [], "misfits": ["q.lora_A.weight [8, 128], for a weight [256, 256]"]}
    misfit = judge(rank(adapters={"adapters": [row]}))
    assert (misfit.verdict, misfit.findings[0].rule) == (Verdict.WRONG, "adapter-shape")
    assert misfit.reason == f"1 tensors of the adapter a do not fit: {row['misfits'][0]}"


@pytest.mark.parametrize(
    ("words", "verdict"), [((), Verdict.REFUSED), (("--trust-remote-code",), Verdict.CANNOT_SAY)]
)
def test_a_model_whose_own_code_was_left_out_is_not_refused(words, verdict) -> None:
    stopped = error("config", message="contains custom code")
    reply = {"words": ["M"], "error": stopped, "seconds": {"config": 0.1}}
    answer = judge_start(reply, ENVIRONMENT, ("M", *words))
    assert answer.verdict is verdict
    assert ("--trust-remote-code" in answer.next_step) == bool(words)


def test_lint_knows_what_decides_a_start_without_flags() -> None:
    errors = {rule for rule, (level, _) in RULES.items() if level == "error"}
    assert checkpoint_load._CHECKS.keys() == errors - {"stale-buffer"}
