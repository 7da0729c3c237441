"""Weights on the host: refused (MD009), without effect (MD013), or with wrong output (MD008)."""

from __future__ import annotations

from moedoctor.diagnose.triage.signatures import Clue, Signature, either

CLUES = (
    Clue(
        "reinit_batch",
        ("input batch", "inputbatch", "input_batch"),
        r"re-?initiali[sz]e the input batch when cpu (?:weight )?offload",
    ),
    Clue("reinit_frame", ("may_reinitialize",), r"may_reinitialize_input_batch"),
    Clue("assertion", ("assert",), r"assert(?:ion(?:error)?|s|ed|ing)?\b"),
    Clue("offload_zero_assert", ("offload_gb",), r"(?:uva\.|cache_config\.|self\.)?cpu_offload_gb == 0"),
    Clue(
        "block_size",
        ("block", "hybrid", "input batch", "inputbatch", "input_batch", "mamba", "qwen3-next", "qwen3.5"),
        r"block[-_ ]?sizes?|hybrid|input[-_ ]?batch|mamba|qwen3-next|qwen3\.5",
    ),
    Clue(
        "uva_lifetime",
        (
            "deleter",
            "use-after-free",
            "use after free",
            "dangling",
            "aliasing",
            "lifetime",
            "keep-alive",
            "gc'd",
            "garbage-collected",
            "garbage collected",
            "reuse",
            "re-use",
        ),
        either(
            r"\buva\b|pinned|cpu_data|host (?:block|buffer|memory)",
            r"no-?op (?:c\+\+ )?deleter|use[- ]after[- ]free|dangling|aliasing|lifetime|keep-?alive deleter"
            r"|gc'?d\b|garbage[- ]collected"
            r"|re-?used (?:by|for) (?:a |the )?(?:later|another|next|inputbatch|new)",
            160,
        ),
    ),
    Clue("noop_offloader", ("noopoffloader",), r"noopoffloader"),
    Clue(
        "no_effect",
        (
            "no-op",
            "noop",
            "silently",
            "effect",
            "ignored",
            "does",
            "did",
            "honor",
            "honour",
            "never",
            "nothing",
            "accepted",
            "fully on",
            "no weights",
            "no use",
            "not offload",
        ),
        r"no-?ops?\b|silently (?:ignored?|no-?ops?|does nothing|skipped|a no)|(?:no|any|without) effect"
        r"|take effect"
        r"|do(?:es)?(?: not|n't) (?:do anything|reduce|offload|seem|appear|save|change|help|lower)"
        r"|did(?: not|n't) (?:reduce|offload|change|help)"
        r"|not honou?red|is ignored|are ignored|being ignored|gets ignored|never (?:installed|offloaded"
        r"|called|applied|wired)|nothing (?:is|gets|was) offloaded"
        r"|accepted (?:but|and then)|fully on[- ](?:the )?gpu|no weights? (?:is|are|were|get)|\bno use\b"
        r"|not offload(?:ed|ing)?\b",
    ),
    Clue(
        "v2_runner",
        ("v2", "runnerv2", "gpu/model_runner"),
        r"v2 (?:gpu )?model[- ]?runner|model[- ]?runner[- ]?v2|v2 runner|gpumodelrunnerv2"
        r"|worker/gpu/model_runner|use_v2_model_runner",
    ),
)

SIGNATURES = (
    # vllm#38718 and the review of #36461: wrong text only with weights on the host. An expert cache fails
    # in its own ways.
    Signature(
        "MD008",
        ("wrong",),
        0.8,
        near=(("offload", "offload_set"),),
        within=16,
        anywhere=(("moe", "quantised"), ("offload_set", "uva_frame", "vllm")),
        unless_near=("expert_cache", "kv_offload", "noop_offloader"),
        silent=True,
    ),
    # vllm#45528: the view of a pinned block outlives the block.
    Signature("MD008", ("uva_lifetime",), 0.72, near=(("offload",),), within=15, unless_near=("kv_offload",)),
    # vllm#36279, #26206: the assertion's own words, from gpu_model_runner.py of 0.9 to 0.19.1.
    Signature("MD009", ("reinit_batch",), 0.97, fixed="0.20.0"),
    Signature(
        "MD009",
        ("offload_zero_assert",),
        0.9,
        near=(("assertion", "reinit_frame"),),
        within=25,
        fixed="0.20.0",
    ),
    Signature(
        "MD009", ("reinit_frame",), 0.8, near=(("assertion",), ("offload",)), within=25, fixed="0.20.0"
    ),
    # vllm#36461 and note 3 of #38718: the same in words.
    Signature(
        "MD009",
        ("assertion",),
        0.75,
        near=(("offload", "offload_set"), ("block_size",)),
        within=6,
        anywhere=(("vllm", "offload_set"),),
        unless_near=("kv_offload",),
        fixed="0.20.0",
    ),
    # vllm#56283: the log says which offloader is at work.
    Signature(
        "MD013", ("noop_offloader",), 0.9, anywhere=(("offload_set",),), since="0.17.1", fixed="0.28.0"
    ),
    # vllm#51396, #48468: the V2 runner and no offload.
    Signature(
        "MD013",
        ("no_effect",),
        0.82,
        near=(("offload", "offload_set"),),
        within=6,
        anywhere=(("v2_runner",), ("offload_set",)),
        unless_near=("kv_offload",),
        since="0.17.1",
        fixed="0.28.0",
    ),
    # The user's side of it: the flag changes nothing. Reports of the first engine (vllm#9339, #13714) are
    # older and other.
    Signature(
        "MD013",
        ("no_effect",),
        0.58,
        near=(("offload_set",),),
        within=3,
        anywhere=(("vllm", "moe"),),
        unless=("legacy_engine",),
        unless_near=("kv_offload", "assertion"),
        since="0.17.1",
        fixed="0.28.0",
    ),
)
