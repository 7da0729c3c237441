"""Crashes with weights on the host: MD002, MD003, MD005 and MD020."""

from __future__ import annotations

from moedoctor.diagnose.triage.signature import Clue, Signature, either

_SCALES = (
    r"(?:scales?|scale[-_ ](?:tensors?|params?|parameters?|factors?)|scaling factors?"
    r"|quanti[sz]ation metadata)"
)

CLUES = (
    Clue(
        "async_copy",
        "non_blocking|non-blocking|async",
        r"non[-_]blocking ?= ?true|non[-_]blocking|cudamemcpyasync|memcpy_async"
        r"|cop(?:y|ies|ied) (?:\w{1,12} ){0,2}asynchronously"
        r"|async(?:hronous(?:ly)?)? (?:\w{1,15} ){0,3}(?:cop(?:y|ies|ied)|transfers?|memcpy|h2d|d2h)",
    ),
    Clue(
        "race",
        "undefined|race|stale|overwrit|corrupt|before the|not guaranteed|unsafe|illegal",
        r"undefined behaviou?r|\brac(?:e|es|y)\b|stale|overwrit|corrupt|before the (?:copy|transfer|kernel)"
        r"|not guaranteed"
        r"|unsafe|illegal memory access",
    ),
    Clue("uva_frame", "uva", r"offloader/uva\.py|\buva\.py[\":,]|uva\.py line|uvaoffloader"),
    Clue(
        "scales_off_gpu",
        "not on gpu|not on cuda|not on the",
        r"\b\w{0,24}(?:scales?|scale_inv|_zeros|qzeros|_zp)(?:_\w{1,12})? is not on (?:the )?(?:gpu|cuda"
        r"|device)",
    ),
    Clue(
        "scales_on_cpu",
        "scal|metadata",
        either(
            _SCALES,
            r"offloaded (?:to|on|by)|offload(?:s|ing)? (?:the )?(?:\w{1,15} )?scales?|on (?:the )?(?:cpu"
            r"|host)\b|to (?:the )?(?:cpu|host)\b"
            r"|(?:cpu|host) memory|not on (?:the )?gpu|from (?:cpu )?offload",
            90,
        ),
    ),
    Clue("marlin", "marlin|wna16", r"marlin|wna16"),
    Clue(
        "fails",
        (
            "crash|fail|error|exception|cannot|can not|unable|raise|unsupported|not know how|abort|break"
            "|broke|reject|refuse"
        ),
        r"crash|fail|error|exception|can ?not\b|unable|raises?\b|unsupported|not know how|abort|\bbreaks?\b"
        r"|broken?\b|reject|refuse",
    ),
    Clue(
        "setattr_ordereddict",
        "ordereddict|_metadata",
        either("setattr", "ordereddict", 120) + r"|destination\._metadata",
    ),
    Clue(
        "tracing",
        "dynamo|trac|graph break",
        r"dynamo|untraceable|(?:can ?not|can't|not|fails? to|failed to|unable to) (?:be )?trac(?:e|ed)\b"
        r"|trac(?:e|ing) errors?|graph break",
    ),
    Clue(
        "state_dict_forward",
        "state_dict|functional_call|uva",
        r"state_dict ?\(|state_dict inside|functional_call|uvaoffloader|uva\.py|without uva",
    ),
    Clue(
        "stale_reference",
        "quant_config|quantconfig|quant config|fusedmoequantconfig|moequantconfig|stale|reference",
        r"(?:moe_?quant_?config|fusedmoequantconfig|quant[-_ ]config)\b.{0,140}(?:keep|kept|hold|held"
        r"|cache[sd]?\b|captur|retain|stale|still|outside)"
        r"|(?:held|cached|captured|kept|retained|references?)\b.{0,120}(?:quant_?config|quantconfig"
        r"|quant[-_ ]config)"
        r"|stale (?:cpu |offloaded )?(?:parameter|pointer|reference|tensor)|references? held outside",
    ),
    Clue(
        "on_cpu",
        "cpu|host",
        r"(?:on|to|at) (?:the )?(?:cpu|host)\b|cpu (?:parameter|tensor|pointer|memory|storage)"
        r"|offloaded (?:cpu )?(?:parameter|tensor)",
    ),
    Clue(
        "reinit_batch",
        "input batch|inputbatch|input_batch",
        r"re-?initiali[sz]e the input batch when cpu (?:weight )?offload",
    ),
    Clue("reinit_frame", "may_reinitialize", r"may_reinitialize_input_batch"),
    Clue("assertion", "assert", r"assert(?:ion(?:error)?|s|ed|ing)?\b"),
    Clue("offload_zero_assert", "offload_gb", r"(?:uva\.|cache_config\.|self\.)?cpu_offload_gb == 0"),
    Clue(
        "block_size",
        "block|hybrid|input batch|inputbatch|input_batch|mamba|qwen3-next|qwen3.5",
        r"block[-_ ]?sizes?|hybrid|input[-_ ]?batch|mamba|qwen3-next|qwen3\.5",
    ),
    Clue(
        "uva_lifetime",
        (
            "deleter|use-after-free|use after free|dangling|aliasing|lifetime|keep-alive|gc'd"
            "|garbage-collected|garbage collected|reuse|re-use"
        ),
        either(
            r"\buva\b|pinned|cpu_data|host (?:block|buffer|memory)",
            r"no-?op (?:c\+\+ )?deleter|use[- ]after[- ]free|dangling|aliasing|lifetime|keep-?alive deleter"
            r"|gc'?d\b|garbage[- ]collected"
            r"|re-?used (?:by|for) (?:a |the )?(?:later|another|next|inputbatch|new)",
            160,
        ),
    ),
    Clue("noop_offloader", "noopoffloader", r"noopoffloader"),
    Clue(
        "no_effect",
        (
            "no-op|noop|silently|effect|ignored|does|did|honor|honour|never|nothing|accepted|fully on"
            "|no weights|no use|not offload"
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
        "v2|runnerv2|gpu/model_runner",
        r"v2 (?:gpu )?model[- ]?runner|model[- ]?runner[- ]?v2|v2 runner|gpumodelrunnerv2"
        r"|worker/gpu/model_runner|use_v2_model_runner",
    ),
)

SIGNATURES = (
    # vllm#37883, crash 3, as it is explained there: an asynchronous copy out of memory that is not pinned.
    Signature(
        "MD002",
        ("async_copy",),
        0.85,
        near=(("no_uva",), ("race",)),
        within=10,
        anywhere=(("offload", "wsl"), ("vllm", "moe", "offload_set")),
    ),
    # Its traceback: the illegal access shows at the copy in uva.py, on a machine without pinned memory.
    Signature(
        "MD002",
        ("illegal_access",),
        0.78,
        near=(("uva_frame",),),
        within=40,
        anywhere=(("no_uva",), ("offload",)),
    ),
    # Only the symptom: WSL, weights on the host, an illegal access. `UVA is not available` (vllm#43381 …)
    # is none of it.
    Signature("MD002", ("illegal_access",), 0.6, anywhere=(("wsl",), ("offload_set",), ("moe", "quantised"))),
    # vllm#37883, crash 2, and #43453. `b_q_weight is not on GPU` (vllm#6952, #56118) is about weights, not
    # scales.
    Signature("MD003", ("scales_off_gpu",), 0.95, anywhere=(("offload", "marlin", "vllm"),)),
    Signature(
        "MD003",
        ("scales_on_cpu",),
        0.7,
        near=(("fails",), ("marlin", "offload_set", "no_uva")),
        within=8,
        anywhere=(("offload",), ("quantised",), ("moe", "marlin")),
        unless_near=("expert_cache",),
    ),
    # vllm#37883, crash 1, and #36796: Dynamo's message; state_dict() sets _metadata on an OrderedDict.
    Signature("MD005", ("setattr_ordereddict",), 0.95, anywhere=(("offload", "uva_frame", "vllm"),)),
    # vllm#29054, #29072: the same in words.
    Signature(
        "MD005",
        ("tracing",),
        0.75,
        near=(("state_dict_forward",), ("fails",), ("offload", "uva_frame")),
        within=10,
        anywhere=(("vllm", "offload_set"),),
    ),
    # vllm#43453: the quant config still refers to the parameter that went to the host.
    Signature(
        "MD020",
        ("stale_reference",),
        0.8,
        near=(("on_cpu", "scales_off_gpu", "illegal_access"),),
        within=8,
        anywhere=(("offload",), ("moe", "quantised")),
        unless_near=("expert_cache",),
    ),
    # Its symptom away from WSL: weights on the host, a quantised MoE and an illegal access.
    Signature(
        "MD020",
        ("illegal_access",),
        0.55,
        anywhere=(("offload_set",), ("moe",), ("quantised",)),
        unless=("wsl", "kv_offload", "other_cause", "minus_one", "nan_router"),
    ),
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
