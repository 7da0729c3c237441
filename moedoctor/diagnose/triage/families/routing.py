"""Routing: NaN logits (MD001), duplicate ids (MD011), ids of -1 used as an index (MD016)."""

from __future__ import annotations

from moedoctor.diagnose.triage.signature import Clue, Signature, either

_ROUTER = r"rout(?:er|ing)|gating|gate logits|top-?_?k\w{0,12}|topk_softmax|moe_fused_gate"
_EXPERT_ID = (
    r"(?:topk[-_ ]?ids?|top-?k (?:ids|indices)|expert[-_ ]?(?:ids?|ind(?:ex|ices)|map)|routing indices)"
)

CLUES = (
    Clue("nan_router", "nan", either(r"\bnans?\b", _ROUTER, 160)),
    Clue("nan", "nan", r"\bnans?\b"),
    Clue(
        "same_expert",
        "expert|duplicate|top|out-of-range|[0, 0, 0|[0,0,0",
        r"(?:same|duplicated?|repeated|identical|repeating) (?:top-?k )?experts?\b(?! (?:weight|replica"
        r"|group))"
        r"|duplicate (?:top-?_?k|token_selected|routing)[-_ ]?\w{0,16}|experts? (?:ids? )?(?:more than once"
        r"|twice|k times)"
        r"|expert 0 (?:for (?:every|all|each)|k times|\w{1,10} times)|\[0(?:, ?0){2,15}\]"
        r"|out-of-range (?:expert|ids?\b)|(?:non-|not )distinct experts?|distinct expert"
        r"|unique experts? \[0, ?1, ?2",
    ),
    Clue("padding", "padd", r"padd(?:ed|ing)"),
    # The backend at work, not a list of candidates: `'FLASHINFER_CUTLASS', …` in quotes and brackets is a
    # list.
    Clue(
        "flashinfer_cutlass_moe",
        "flashinfer|finalizemoe|cutlass_fused_moe",
        r"using '?flashinfer_cutlass'? (?:backend|unquantized|fp8)"
        r"|(?<![',\[] )(?<!['\[])flashinfer[-_ ]cutlass(?!')"
        r"|flashinfer_cutlass_moe|cutlass_fused_moe|finalizemoerouting|vllm_use_flashinfer_moe_fp(?:16"
        r"|8) ?= ?1"
        r"|flashinfer (?:cutlass )?moe backend|flashinfer'?s? (?:cutlass )?(?:fused )?moe\b",
    ),
    # Crashes of the same look whose cause was found to be another one: vllm#34948, flashinfer#4036, #5438.
    Clue(
        "other_cause",
        "allreduce|all_reduce|utmaldg|tensormap|tma desc|tma_desc|griddepcontrol|gdc",
        r"fuse_allreduce_rms|allreduce_fusion|utmaldg|tensormap|tma descriptor|griddepcontrol|enable_gdc"
        r"|\bgdc\b",
    ),
    Clue("finalize_kernel", "finalize", r"finalizemoerouting|finalize ?_?moe ?_?routing|moe finalize path"),
    Clue(
        "three_step",
        "three|3-step|unpermuted|prefixsum|finalize|uninitiali|unwritten|never written|wild pointer",
        r"three[- ]?step|3-step (?:sort|moe)|threestep|unpermuted_row_to|blockexpertprefixsum"
        r"|finalizemoerouting"
        r"|uninitiali[sz]ed (?:row|memory|entr|index|perm)|never written|unwritten (?:row|entr|slot)"
        r"|wild pointer",
    ),
    Clue(
        "minus_one",
        "-1|negative|skip_padding|sentinel|expert_id|eid|topk_id",
        either(_EXPERT_ID, r"(?<![\w.])-1\b(?!\.|[-/]\d)", 70)
        + r"|negative (?:expert|topk|top-k|\W?eid)\w{0,3}[ _]?(?:ids?)?\b|negative entr\w{1,3} in \W?topk_ids"
        r"|(?:missing|never checks|no check for)\W{1,3}(?:expert_id|eid|topk_id) ?< ?0"
        r"|vllm_moe_skip_padding|padding sentinel"
        r"|-1 (?:sentinel|expert|slots?\b)"
        r"|(?:masked|sentinel) [\"']?-1|expert_map ?\[-1\]",
    ),
    Clue(
        "raw_index",
        (
            "index|outside|raw|wrap|deref|out-of-bound|out of bound|unguarded|before the|gather|negative"
            "|from above|guard|only|bounds|bound"
        ),
        r"(?<!-)index(?:es|ed|ing)? (?:\w{1,15} ){0,4}(?:with|by|the|into|expert|directly|raw)"
        r"|as an? (?:raw |array )?index|raw (?:expert )?(?:id|index)|negative offset"
        r"|bounds?[- ]checks? (?:\w{1,8} ){0,3}from above|missing (?:\W{0,2}\w{1,12}\W{1,4}){0,5}guard"
        r"|only (?:bounds[- ])?(?:checks|guards)"
        r"|wraps?\b|dereferenc|out[- ]of[- ]bounds?|outside the|unguarded|unbounded gather"
        r"|before the (?:expert|weight)|use(?:d|s)? as an index",
    ),
)

SIGNATURES = (
    # vllm#39593, #39391, #39288 (June comment): the explanation, NaN logits and one expert taken K times.
    Signature("MD001", ("nan_router",), 0.92, near=(("same_expert",),), anywhere=(("moe",),), fixed="0.20.0"),
    # The same told from the crash: padding rows of a CUDA graph, NaN at the router, an illegal access
    # (vllm#39244, sglang#30079).
    Signature(
        "MD001",
        ("nan_router",),
        0.8,
        near=(("illegal_access",), ("padding", "cuda_graph")),
        within=20,
        anywhere=(("moe",),),
        fixed="0.20.0",
    ),
    # Only the crash (vllm#39288, #37758, #30579): FlashInfer's CUTLASS MoE in BF16 or FP8, CUDA graphs or
    # data parallelism.
    # NVFP4 takes another path, 0.20.0 clamps (facts: measured on the binaries), and some such crashes had
    # another cause.
    Signature(
        "MD001",
        ("illegal_access",),
        0.62,
        near=(("flashinfer_cutlass_moe", "finalize_kernel"),),
        within=80,
        anywhere=(("cuda_graph", "data_parallel"), ("bf16_or_fp8",), ("vllm",)),
        unless=("other_cause", "nvfp4_selected", "minus_one", "offload_set"),
        fixed="0.20.0",
    ),
    # flashinfer#3011, vllm#39391: duplicate ids and what the sort leaves behind.
    Signature(
        "MD011",
        ("same_expert",),
        0.88,
        near=(("three_step",),),
        within=15,
        anywhere=(("moe",), ("flashinfer", "finalize_kernel")),
    ),
    # vllm#39593: duplicates and an illegal access in FlashInfer's kernels.
    Signature(
        "MD011",
        ("same_expert",),
        0.75,
        near=(("illegal_access", "raw_index"), ("flashinfer_cutlass_moe",)),
        anywhere=(("moe",),),
    ),
    # flashinfer#2219: the GPU core dump names the kernel that reads the unwritten row.
    Signature(
        "MD011", ("finalize_kernel",), 0.75, near=(("illegal_access",),), within=30, unless=("other_cause",)
    ),
    # vllm#57036, #57946, #46408, #42034, vllm-gguf-plugin#130: -1 marks padding and somebody indexes with it.
    Signature(
        "MD016", ("minus_one",), 0.85, near=(("raw_index", "illegal_access"),), within=8, anywhere=(("moe",),)
    ),
)
