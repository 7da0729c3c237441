"""Quantisation: MD012, MD014, MD015, MD017 and MD018."""

from __future__ import annotations

from moedoctor.diagnose.triage.signature import Clue, Signature, either

_GLOBAL_SCALE = r"weight_scale_2|global[-_ ]scales?|scale_2\b|\bgs_(?:gate|up)|per-tensor (?:weight )?scales?"
_INPUT_SCALE = (
    r"input[-_ ](?:global[-_ ])?scales?|w(?:13|2)_input_scale|a13_scale|a2_scale|a[12]_gscale"
    r"|activation[-_ ](?:global[-_ ])?scales?"
)
_SF = (
    r"(?:block[-_ ]?|activation |weight |mxfp8 |input )?scales?\b|blockscale|\bsf\b|input_sf"
    r"|scaling factors?|scale factors?"
)
_LAYOUT = (
    r"(?:un|de-?|pre-?)?swizzl\w{1,4}|interleav\w{1,4}|128x4|row-?major"
    r"|linear(?:ly| layout| order| scale)?\b(?! (?:layer|module|method|weight|attention|path))"
)
_KV = (
    r"kv[-_ ]?(?:cache)?[-_ ]?(?:scales?|scaling factors?)|[kv]_scale|k/v[-_ ]scales?"
    r"|scaling factors? for (?:the )?kv"
)

CLUES = (
    # The warning of vLLM's kv_cache.py. The one on a missing q scale is another thing.
    Clue("kv_scale_one", "scaling factor 1.0", r"using kv cache scaling factor 1\.0"),
    Clue(
        "kv_scale_missing",
        "scale|scaling",
        rf"(?:without|\bno|missing|lacks?|not (?:provide|include|ship|contain|load|carry)\w{{0,3}}"
        rf"|never loads?|uncalibrated|absent)\b[^.;]{{0,50}}?(?:{_KV})"
        rf"|(?:{_KV})[^;]{{0,60}}?(?:\bmissing|absent"
        r"|(?:are|were|is) (?:not|never) (?:in\b|part|ship|stor|there|available)|not (?:found|present"
        rf"|provided|included|loaded|shipped)"
        r"|never loaded|(?:silently )?dropped|default\w{0,3} to 1|fall\w{0,4} back to (?:a scale of )?1"
        r"|= ?1\.0|at (?:scale )?1\.0|to 1\.0)"
        r"|(?:absence of|without|no) (?:\w{1,12} ){0,2}(?:scale|scaling) factors?\b[^.;]{0,40}checkpoint"
        r"|default\w{0,3} (?:the )?(?:scale|scaling) factors? to 1\b",
    ),
    Clue("fp8_kv", "kv", either(r"fp8", r"kv", 50) + r"|kv_cache_(?:quant_algo|scheme)"),
    Clue("fp8", "fp8|mxfp8", r"fp8"),
    Clue(
        "misleading",
        "misleading|nvfp4 kv|kv-cache-dtype nvfp4",
        r"misleading|nvfp4 kv cache|kv-cache-dtype nvfp4",
    ),
    # The warning of vLLM's modelopt.py and compressed_tensors_moe.
    Clue(
        "w1_w3_warning",
        "weight_scale_2|global_scale|w3",
        r"w1_weight_(?:scale_2|global_scale) must match w3|w1_weight_\w{5,14} must match w3_weight",
    ),
    Clue(
        "global_scale_mismatch",
        "scale|gs_",
        either(
            _GLOBAL_SCALE,
            r"mismatch\w{0,4}|differ\w{0,4}|disagree|must match|not (?:equal|match|the same)|unequal"
            r"|don't match|\b10x\b",
            110,
        ),
    ),
    Clue(
        "gate_and_up",
        "w1|w13|gate",
        r"\bw1\b.{0,40}\bw3\b|\bw13|w1/w3|gate(?:_proj)?\b.{0,60}\bup(?:_proj)?\b|gate_up|w1_weight",
    ),
    Clue("qkv", "qkv|q_proj|k_proj", r"qkv|[qk]_proj"),
    Clue(
        "input_scale_bad",
        "scale|calibrat|dead expert",
        either(
            _INPUT_SCALE,
            r"missing|absent|omit\w{0,4}|torch\.empty|undefined|\bzeros?\b|\b0\.0\b|uninitiali[sz]ed"
            r"|1(?:\.0)? ?/ ?0|\binf\b"
            r"|infinit\w{1,2}|denormal|near-zero|subnormal"
            r"|not (?:present|provided|calibrated|in the checkpoint|filled)|never (?:activated|calibrated"
            r"|filled|loaded|routed)|\bnull\b|all-zero",
            130,
        )
        + r"|experts? (?:\w{1,12} ){0,3}(?:skipped|never (?:routed|activated|seen)|unseen)\b.{0,80}calibrat"
        r"|calibrat\w{0,4}\b.{0,60}(?:never|skip\w{0,4}|not) (?:\w{1,12} ){0,4}experts?|dead experts",
    ),
    Clue(
        "zero_scale_effect",
        "nan|inf|empty|garb|gibberish|pad token|zero|degenerat|blank|wrong",
        r"\bnans?\b|\binf\b|empty|garbage|gibberish|pad[- ]token|zeroe?s every|multiplied by zero|degenerat"
        r"|blank|1(?:\.0)? ?/ ?0|wrong",
    ),
    Clue(
        "gate_up_order",
        "w3|w31|gate|halves|silu",
        r"\[?w1[,;|] ?w3\]?.{0,120}\[?w3[,;|] ?w1\]?|\[?w3[,;|] ?w1\]?.{0,120}\[?w1[,;|] ?w3\]?"
        r"|\[gate ?[,;|] ?up\].{0,160}\[?up ?[,;|] ?gate|\[up ?[,;|] ?gate\].{0,160}\[?gate ?[,;|] ?up"
        r"|w13_?to_?w31|w1w3_to_w3w1"
        r"|(?:gate|up)[-_ /]{0,2}(?:and |& )?(?:up|gate)(?:_proj)?\b.{0,60}(?:swap\w{0,4}|wrong (?:order"
        r"|way)|revers\w{1,3}|flipped|reorder\w{0,3}|row order)"
        r"|(?:swap\w{0,4}|revers\w{1,3}|flipp\w{1,3}|reorder\w{0,3}|transpos\w{1,3}"
        r"|order of) (?:the )?(?:\w{1,12} )?gate[-_ /]{0,2}(?:and |& )?up"
        r"|silu\(up\) ?\* ?gate|halves (?:are )?(?:in the wrong order|swapped|reversed|the wrong way)"
        r"|(?:wrong|swapped) (?:order of (?:the )?)?halves"
        r"|expects (?:the )?up (?:first|half first|before gate)|load_up_proj_weight_first",
    ),
    Clue("scale_layout", "scal|sf|blockscale|swizzl|interleav|128x4", either(_SF, _LAYOUT, 80)),
    Clue(
        "layout_mismatch",
        (
            "expect|requir|need|restor|hardcod|unswizzl|row-major|wrong|mismatch|instead|not swizzl"
            "|without swizzl|linear|un-swizzl|de-swizzl|as if"
        ),
        r"expects?|requires?|needs?\b|restor|hardcod|unswizzled|row-major|wrong (?:layout|order|block|e8m0)"
        r"|mismatch|instead of|not swizzled|without swizzl"
        r"|linear consumer|passed linear|un-swizzled|as if (?:they|it)",
    ),
    Clue(
        "scale_padding",
        "torch.empty|stale|padding rows|zero-fill|zero_fill|padded",
        r"torch\.empty|stale (?:gpu )?memory|padding rows|zero[-_]fill",
    ),
    Clue(
        "attention",
        "attention|kv cache|kv-cache| mha|xqa|fmha|reshape_and_cache|fp4 kv|nvfp4 kv",
        r"attention|kv[- ]cache|\bmha\b|\bxqa\b|fmha|reshape_and_cache|fp4 kv\b",
    ),
)

SIGNATURES = (
    # vllm#38718, note 2; vllm#54623; llm-compressor#2176. A warning that also stands above crashes of
    # every kind.
    Signature("MD012", ("kv_scale_one",), 0.66, unless_near=("misleading",), silent=True),
    Signature(
        "MD012",
        ("kv_scale_one",),
        0.8,
        near=(("wrong", "kv_scale_missing"),),
        within=25,
        unless=("misleading",),
    ),
    Signature(
        "MD012",
        ("kv_scale_missing",),
        0.78,
        near=(("fp8_kv", "fp8"),),
        within=10,
        unless_near=("misleading",),
        silent=True,
    ),
    # vllm#54974: the warning, and nothing else done about it.
    Signature("MD014", ("w1_w3_warning",), 0.9, silent=True),
    # vllm#54974, #56095 in words; a fused q, k and v have a global scale each too, and are no experts.
    Signature(
        "MD014",
        ("global_scale_mismatch",),
        0.82,
        near=(("gate_and_up",),),
        within=8,
        anywhere=(("moe",), ("nvfp4", "quantised")),
        unless_near=("qkv",),
    ),
    # vllm#45212, #45320, #54189, #42601, compressed-tensors#595: no scale for an expert that the
    # calibration never met.
    Signature(
        "MD015",
        ("input_scale_bad",),
        0.85,
        near=(("zero_scale_effect",),),
        within=15,
        anywhere=(("moe",), ("nvfp4",)),
    ),
    # sglang#32430, Megatron-LM#6045, vllm#40082 (comment of May 2026): [gate; up] where [up; gate] is read.
    Signature("MD017", ("gate_up_order",), 0.82, near=(("wrong",),), within=14, anywhere=(("moe",),)),
    # vllm#42089, #42118, #49335: row-major scales at a kernel that reads them swizzled. The KV cache has
    # such a case of its own (vllm#50085).
    Signature(
        "MD018",
        ("scale_layout",),
        0.82,
        near=(("layout_mismatch",), ("wrong", "nan", "illegal_access")),
        within=8,
        anywhere=(("moe",),),
        unless_near=("attention", "scale_padding"),
    ),
)
