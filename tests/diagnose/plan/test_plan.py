"""`plan` against the figures of vllm#38971 and against cases worked by hand."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.diagnose.plan.kv_cache import PlanError, fit_kv_cache
from moedoctor.diagnose.plan.plan import GIB, PlanRequest, plan
from moedoctor.diagnose.plan.repacking import compute_host_peak, compute_repacking
from moedoctor.models.config import shape_of
from moedoctor.models.layer_shape import LayerShape
from moedoctor.models.presets import list_presets, load_preset

SUPER = load_preset("nemotron-3-super-120b")
QWEN = load_preset("qwen3-30b-a3b")


@pytest.mark.parametrize(("gib", "tokens", "concurrency"), [(16.79, 732_160, 14.27), (18.37, 798_720, 15.62)])
def test_the_two_rows_of_the_issue(gib, tokens, concurrency):
    """The log rounds the KV memory to two digits, so it cannot show whether there is a 529th block."""
    kv = fit_kv_cache(SUPER, available_bytes=round(gib * GIB), context=262_144, kv_bytes=1)
    assert kv.tokens_printed_to_0_20 == tokens
    assert kv.concurrency == pytest.approx(concurrency, rel=0.003)
    assert (kv.block_size, kv.groups, kv.layers_per_group) == (8320, 6, 8)


def test_a_model_of_attention_alone():
    """48 layers of 4 heads of 128, BF16: 2 x 4 x 128 x 2 x 48 = 98,304 bytes a token, one group."""
    kv = fit_kv_cache(QWEN, available_bytes=98_304 * 16 * 1000 + 5, context=4096, kv_bytes=2)
    assert (kv.groups, kv.blocks, kv.bytes_per_token) == (1, 1000, 98_304)
    assert kv.tokens_printed_to_0_20 == 16_000
    assert kv.concurrency == 1000 / 256
    assert kv.tokens_printed_from_0_21 == 16_000


def test_a_sliding_window_limits_the_cache_of_a_request():
    """Gemma: 25 sliding layers of 8 x 256 and 5 full ones of 2 x 512, whose pages hold twice the tokens."""
    shape = load_preset("gemma-4-26b-a4b")
    kv = fit_kv_cache(shape, available_bytes=10 * GIB, context=65_536, kv_bytes=2, batched_tokens=2048)
    assert (kv.groups, kv.layers_per_group) == (6, 5)
    full = 65_536 // 32
    sliding = -(-(1023 + 2048) // 16) + 1
    assert kv.blocks_per_request == full + 5 * sliding


def test_pages_that_cannot_be_unified_are_refused():
    shape = load_preset("gemma-4-26b-a4b")
    odd = replace(shape, attention=(replace(shape.attention[0], num_kv_heads=3), shape.attention[1]))
    with pytest.raises(PlanError, match="do not divide"):
        fit_kv_cache(odd, available_bytes=GIB, context=1024, kv_bytes=2)


@given(name=st.sampled_from(list_presets()), gib=st.integers(1, 64), more=st.integers(0, 64))
def test_more_memory_never_holds_less_and_the_pool_never_overflows(name, gib, more):
    shape = load_preset(name)
    less = fit_kv_cache(shape, available_bytes=gib * GIB, context=32_768, kv_bytes=2)
    greater = fit_kv_cache(shape, available_bytes=(gib + more) * GIB, context=32_768, kv_bytes=2)
    assert greater.tokens_printed_to_0_20 >= less.tokens_printed_to_0_20
    assert greater.concurrency >= less.concurrency
    assert less.blocks * less.block_bytes <= gib * GIB < (less.blocks + 1) * less.block_bytes


def test_weights_workspace_and_cache_add_up_to_the_budget():
    request = PlanRequest(QWEN, "nvfp4", gpu_bytes=32 * GIB, utilization=0.9, batched_tokens=2048)
    found = plan(request)
    assert found.expert_bytes == 48 * 128 * 3 * 2048 * 768 * 9 // 16
    rows = 2048 * 8
    sums = 132 * 4 * 64 * 256 * 4  # Marlin's, in float32
    assert found.workspace.bytes == (rows * 2048 + rows * 2048 + 2048 * 2048) * 2 + sums
    total = found.on_device_bytes + found.workspace.bytes + found.available_kv_bytes
    assert total == found.budget_bytes == round(32 * GIB * 0.9)


def test_an_expert_cache_moves_the_misses_and_holds_its_slots():
    request = PlanRequest(QWEN, "bf16", gpu_bytes=32 * GIB, cache_slots=32, hit_rate=0.75, bandwidth=50e9)
    found = plan(request)
    expert = 3 * 2048 * 768 * 2
    assert found.on_host_bytes == 48 * 128 * expert
    assert found.on_device_bytes == found.other_bytes + 48 * 32 * expert
    moved = 48 * 8 * expert * 0.25 * 10 / 16  # packed, or the bound would be below what the cache reaches
    assert found.traffic.bytes_per_token == moved
    assert found.traffic.tokens_per_second == 50e9 / moved
    beside = replace(request, cpu_bandwidth=75e9, cpu_source="given with --cpu")
    assert plan(beside).traffic.both_tokens_per_second == pytest.approx(2.5 * found.traffic.tokens_per_second)
    assert "0.60 of the misses at 75.0 GB/s (given with --cpu)" in " ".join(_show(beside).split())


def tiny_shape(**change):
    """One layer. In BF16: embeddings and lm_head 2 x 100 x 64 x 2 = 25,600 bytes; attention of 4 heads of 16
    with as many for keys and values 4 x 64 x 64 x 2 = 32,768; router 64 x 8 x 2 = 1,024; 8 experts of
    3 x 64 x 32 x 2 = 12,288, of which a token takes 2."""
    values = {
        "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 1, "num_attention_heads": 4,
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32
    }  # fmt: skip
    return shape_of({**values, **change}, "tiny", "here")


@pytest.mark.parametrize(
    ("offloaded", "uva"),
    [
        (132_096, 58_368),  # all that can be: 32,768 + 1,024 + 2 x 12,288
        (66_048, 29_184),  # half of it
    ],
)
def test_uva_reads_active_experts_and_the_rest_of_a_layer_but_no_embeddings(offloaded, uva):
    request = PlanRequest(tiny_shape(), "bf16", gpu_bytes=GIB, context=16, offload_bytes=offloaded)
    found = plan(request)
    assert found.traffic.bytes_per_token == uva
    assert found.on_device_bytes == 25_600 + 132_096 - offloaded
    copy = plan(replace(request, offload_mode="copy"))
    assert copy.traffic.bytes_per_token == offloaded


def test_embeddings_cannot_be_offloaded_and_tied_ones_are_counted_once():
    shape = tiny_shape(tie_word_embeddings=True)
    request = PlanRequest(shape, "bf16", gpu_bytes=GIB, context=16, offload_bytes=132_096)
    assert plan(request).on_device_bytes == 12_800
    with pytest.raises(PlanError, match="the size of the decoder layers; embeddings and lm_head are not"):
        plan(replace(request, offload_bytes=132_097))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_bytes": None}, "neither --gpu-memory nor --available-kv"),
        ({"tensor_parallel": 3}, "--tensor-parallel-size 3: .* heads of 32, which 3 GPUs do not divide"),
        ({"cache_slots": 4}, "expected 8 .top_k. to 128"),
        ({"cache_slots": 16, "offload_bytes": 1}, "exclude each other"),
        ({"cpu_bandwidth": 75e9}, "--cpu and --measure are of an expert cache"),
        ({"offload_bytes": 900 * GIB}, "expected 0 to 16.90 GiB, the size of the decoder layers"),
        ({"checkpoint_bytes": GIB}, "give the right --scheme"),
        ({"checkpoint_bytes": 57 * GIB}, "holds 57.00 GiB, and with experts in nvfp4 it would be 15.9"),
    ],
)
def test_what_cannot_be_planned_says_what_to_give_instead(change, message):
    with pytest.raises(PlanError, match=message):
        plan(replace(PlanRequest(QWEN, "nvfp4", gpu_bytes=32 * GIB), **change))


def test_a_model_without_any_cache_is_refused():
    shape = replace(QWEN, attention=())
    with pytest.raises(PlanError, match="no KV cache to plan"):
        fit_kv_cache(shape, available_bytes=GIB, context=1, kv_bytes=2)


def test_a_model_that_does_not_fit_says_by_how_much_and_what_helps():
    request = PlanRequest(QWEN, "nvfp4", gpu_bytes=8 * GIB, context=8192)
    found = plan(request)
    needed = found.on_device_bytes + found.workspace.bytes
    assert found.missing_bytes == needed - found.budget_bytes > 0
    assert (found.available_kv_bytes, found.kv.concurrency) == (0, 0)
    missing = f"{found.missing_bytes / GIB:.2f} GiB"
    assert found.notes[0] == f"does not fit: the GPU lacks {missing} for weights and workspace alone"
    # Whatever it recommends was planned, and the next smaller value does not fit.
    words = found.notes[1].split()
    offload, gpus = (float(words[words.index(name) + 1]) for name in ("--offload", "--tensor-parallel-size"))
    for change, smaller in (
        ({"offload_bytes": round(offload * GIB)}, {"offload_bytes": round((offload - 0.02) * GIB)}),
        ({"tensor_parallel": int(gpus)}, {"tensor_parallel": int(gpus) // 2}),
    ):
        assert plan(replace(request, **change)).kv.concurrency >= 1
        assert plan(replace(request, **smaller)).kv.concurrency < 1
    tiny = plan(replace(request, gpu_bytes=GIB // 10))
    assert tiny.notes[1].startswith("no offload, expert cache or number of GPUs")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma-4-26b-a4b", "nemotron-3-super-120b"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_tensor_parallelism_divides_every_table(name, gpus):
    request = PlanRequest(load_preset(name), "nvfp4", available_kv_bytes=8 * GIB, context=8192)
    alone, part = plan(request), plan(replace(request, tensor_parallel=gpus))
    assert part.expert_bytes == pytest.approx(alone.expert_bytes / gpus, rel=1e-6)
    # Routers and some keys and values are on every GPU.
    assert alone.other_bytes / gpus <= part.other_bytes + 1 < alone.other_bytes
    assert alone.kv.bytes_per_token / gpus <= part.kv.bytes_per_token <= alone.kv.bytes_per_token
    assert part.kv.concurrency >= alone.kv.concurrency
    assert part.workspace.bytes <= alone.workspace.bytes


def test_the_parts_of_a_checkpoint_make_the_whole():
    """2 GPUs hold Qwen's 4 KV heads and 32 heads without a copy: only the routers are there twice."""
    size = 17 * GIB
    request = PlanRequest(QWEN, "nvfp4", available_kv_bytes=GIB, checkpoint_bytes=size, context=8192)
    found = plan(replace(request, tensor_parallel=2))
    routers = 48 * 2048 * 128 / QWEN.count_other_parameters() * (size - found.expert_bytes * 2)
    assert 2 * (found.expert_bytes + found.other_bytes) == pytest.approx(size + routers, rel=1e-6)
    assert found.kv.bytes_per_token * 2 == plan(request).kv.bytes_per_token


def test_only_a_known_hit_rate_gives_a_bound():
    """Routing of real texts hits an expert cache more often than uniform routing."""
    assert not plan(PlanRequest(QWEN, "bf16", gpu_bytes=32 * GIB, cache_slots=64)).traffic.is_bound
    known = plan(PlanRequest(QWEN, "bf16", gpu_bytes=32 * GIB, cache_slots=64, hit_rate=0.8))
    assert known.traffic.is_bound
    assert plan(PlanRequest(QWEN, "bf16", gpu_bytes=32 * GIB, offload_bytes=40 * GIB)).traffic.is_bound


def test_a_model_fits_before_a_workspace_that_is_not_known():
    request = PlanRequest(QWEN, "bf16", gpu_bytes=80 * GIB, context=1024)
    assert "fits before the workspace, which is not known: " in _show(request)
    assert any("upper bound" in note for note in plan(request).notes)
    assert "fits: " in _show(replace(request, workspace_bytes=GIB))


def _show(request: PlanRequest) -> str:
    from moedoctor.reporters.pages.plan import PlanDocument, make_plan_page
    from moedoctor.reporters.table import to_text

    return to_text(make_plan_page(PlanDocument(request, plan(request))), width=None)


def test_repacking_needs_memory_beside_the_weights_and_for_a_layer_that_is_offloaded():
    """48 layers of 128 experts of 3 x 2048 x 768 weights: 0.5625 bytes each in NVFP4."""
    request = PlanRequest(QWEN, "nvfp4", gpu_bytes=80 * GIB)
    made, layer, w13 = plan(request), 128 * 3 * 2048 * 768 * 9 // 16, 128 * 2 * 2048 * 768
    assert made.repack_bytes == w13 * 3 // 4 + 35 * w13 // 16
    assert not any("MD026" in note for note in made.notes)
    little = replace(request, gpu_bytes=made.on_device_bytes + made.repack_bytes - 1, utilization=1.0)
    (note,) = (note for note in plan(little).notes if "MD026" in note)
    assert note.startswith(f"loading: MARLIN needs {made.repack_bytes / GIB:.2f} GiB more while")
    assert "fits only after loading, which needs more than" in _show(replace(little, context=1024))
    enough = replace(little, gpu_bytes=little.gpu_bytes + 1)
    assert not any("MD026" in note for note in plan(enough).notes)
    for mode, more in {"uva": 0, "copy": layer}.items():
        offloaded = replace(request, offload_bytes=GIB, offload_mode=mode)
        assert plan(offloaded).repack_bytes == made.repack_bytes + more
    assert plan(replace(request, backend="TRITON", scheme="fp8")).repack_bytes == 0
    unknown = replace(request, backend="VLLM_CUTLASS")
    assert plan(unknown).repack_bytes is None
    assert re.search(r"for VLLM_CUTLASS +not known +.*: not computed for VLLM_CUTLASS", _show(unknown))


def test_the_host_holds_pinned_weights_as_torch_rounds_them_and_a_copy():
    """Sizes of 3 and 5 reach a limit of 7: blocks of 4 and 8, and the copy of 5. w13 of Qwen is 0.75 GiB."""
    assert compute_host_peak([3, 5, 6], 7) == 4 + 8 + 5
    assert compute_host_peak([8, 1], 8) == 8 + 8
    request = PlanRequest(QWEN, "bf16", gpu_bytes=80 * GIB)
    made, w13 = plan(request), 128 * 2 * 2048 * 768 * 2
    assert made.host_peak_bytes == w13
    cached = plan(replace(request, cache_slots=8))
    assert cached.host_peak_bytes == made.expert_bytes // 48 * 49
    assert "host while loading, at most" in _show(request)
    rest = made.other_bytes - QWEN.count_embedding_parameters() * 2
    everything = plan(replace(request, offload_bytes=made.expert_bytes + rest)).host_peak_bytes
    assert everything == pytest.approx(48 * (GIB + GIB // 2) + w13 + 2 * rest, rel=1e-2)


@pytest.mark.parametrize(
    ("backend", "scheme", "intermediate", "size"),
    [
        ("TRITON", "bf16", 512, 0),
        ("TRITON", "fp8", 512, 0),
        ("MARLIN", "fp8", 512, 68_157_440),
        ("MARLIN", "fp8", 512, 68_157_952),  # ModelOpt
        ("MARLIN", "nvfp4", 512, 98_566_656),
        ("HUMMING", "fp8", 512, 69_207_040),
        ("HUMMING", "nvfp4", 512, 39_847_936),
        # Counted by preflight: MXFP4, and sizes that MARLIN pads.
        ("MARLIN", "mxfp4", 512, 29_360_128),
        ("MARLIN", "fp8", 96, 29.62e6),
        ("MARLIN", "nvfp4", 96, 24.64e6),
    ],
)
def test_repacking_takes_what_an_h200_showed(backend, scheme, intermediate, size):
    """vLLM 0.33.0, 32 experts: torch rounds each tensor to 512 bytes."""
    computed = compute_repacking(backend, scheme, LayerShape(1024, intermediate, 32, 8)).bytes
    assert computed == pytest.approx(size, rel=2e-4)
