"""Build targets (MD004) and backend settings (MD010)."""

from __future__ import annotations

from moedoctor.diagnose.triage.signature import Clue, Signature

_MOE_VARIABLE = (
    r"vllm_(?:use_flashinfer_moe_\w{2,14}|flashinfer_moe_backend|nvfp4_(?:moe|gemm)_backend"
    r"|mxfp4_use_marlin|test_force_fp8_marlin"
    r"|fused_moe_\w{2,24}|\w{0,16}moe_backend|use_trtllm_fp4_gemm|use_deep_gemm\w{0,12})"
)
_BACKEND_SETTING = rf"(?:{_MOE_VARIABLE}|vllm_\w{{0,24}}backend|--moe-backend|moe_backend)"
_NOT_TAKEN = (
    r"(?:silently|completely|is|are|being|gets?|was|were) ignored|silently (?:dropped|overrid\w{2,5})"
    r"|ha[sd] no effect|no effect"
    r"|not (?:being )?(?:honou?red|respected|recogni[sz]ed|picked up|read)|rejected as unknown|never read"
    r"|nothing reads it"
    r"|do(?:es)?(?: not|n't) (?:exist|take effect|do anything|work|change)|unrecogni[sz]ed"
    r"|unknown (?:vllm )?(?:environment )?variable"
    r"|(?:was|were|been|is|are|be) removed|no longer (?:read|exist|support|work)"
)

CLUES = (
    # 120a, 120f, 12.0f …: a target with a suffix of the 12.x family, not as part of a cache path or a call
    # of nvcc. Triton's own ptxas error (vllm#29469) has one too.
    Clue(
        "arch_suffix",
        "12",
        r"(?<!arch=)(?<!code=)(?:compute|sm|arch)[-_ ]?12[01][af]\b|(?<![\w/=])12[01][af]\b(?!/)"
        r"|\b12\.[01][af]\b|sm_?12x[af]",
    ),
    Clue("arch_list", "arch_list", r"flashinfer_cuda_arch_list"),
    Clue(
        "triton_ptxas",
        "gpu-name|triton_ptxas|ptx codegen",
        r"option 'gpu-name'|triton_ptxas_path|triton ptx codegen",
    ),
    Clue("ptxas_target", "not supported on", r"instruction .{0,60}not supported on \.target '?sm_1[012]\d"),
    Clue(
        "no_arch_found",
        "no supported cuda arch|requires cuda",
        # For 12 alone: a module that was never meant for 12.x is another matter (flashinfer#5237).
        r"no supported cuda architectures found for major versions \[(?:\d{1,2}, ?){0,6}12\b"
        r"|sm 12\.x requires cuda",
    ),
    Clue(
        "sm12x",
        "sm_12|sm12|sm 12|12.0|12.1|rtx 50|5080|5090|5070|5060|rtx pro|gb10|spark|[12]",
        r"sm_?-? ?12(?:\.?[01x])|compute capability\W{0,4}12\.[01]|rtx\W{0,3}50[5-9]0|\b50[5-9]0 ?d?\b"
        r"|rtx pro [456]\d00|gb10\b|dgx spark|\bspark\b"
        r"|major versions \[12\]",
    ),
    Clue(
        "build_trouble",
        (
            "illegal|no kernel image|invalid device|not support|unsupported|fail|crash|abort|invalid output"
            "|garb|wrong|incorrect|requires|misaligned|broken"
        ),
        r"illegal ?_?instruction|no kernel image|not support|unsupported|fail(?:s|ed|ure|ing)?\b|crash"
        r"|abort|invalid output|garbage|\bwrong|incorrect"
        r"|requires (?:cuda|sm|compute)|misaligned|broken",
    ),
    Clue(
        "wrong_build",
        "illegal|no kernel image|not supported on|garbage|requires cuda",
        r"illegal ?_?instruction|no kernel image|not supported on .target|garbage|requires cuda",
    ),
    Clue(
        "cutlass_or_flashinfer",
        "cutlass|flashinfer|fused_moe_120|grouped gemm|grouped-gemm",
        r"cutlass|flashinfer|fused_moe_120|grouped[- ]gemm",
    ),
    # The one choice of a backend in vLLM's log that says NVFP4.
    Clue("nvfp4_selected", "nvfp4 moe|nvfp4-moe", r"using '?\w{4,30}'? nvfp4 moe backend"),
    # vLLM's warning; the attention backend's variable is the most frequent one there and no concern of an
    # MoE.
    Clue(
        "unknown_variable",
        "environment variable",
        rf"unknown vllm environment variable(?: detected)?\W{{1,4}}{_MOE_VARIABLE}",
    ),
    # vLLM's env_with_choices, and a value that it refuses for its case.
    Clue(
        "invalid_choice",
        "invalid value|moe_backend|moe-backend",
        rf"invalid value\W{{1,4}}[\w.-]{{1,40}}\W{{1,4}}for {_BACKEND_SETTING}"
        r"|moe_backend ?= ?[\"']?\w{1,40}[\"']? is not supported for|argument --moe-backend: invalid choice"
        r"|moe_backend\W{1,20}input should be",
    ),
    Clue("upper_case_choice", "gemm_backend", r"VLLM_NVFP4_GEMM_BACKEND\W{1,3}[A-Z][A-Z_-]{3}", cased=True),
    # It never existed in any release (facts: 24 wheels).
    Clue("invented_variable", "nvfp4_moe_backend", r"vllm_nvfp4_moe_backend"),
    Clue(
        "setting_not_taken",
        "backend|vllm_use_flashinfer_moe|mxfp4_use_marlin|force_fp8_marlin|vllm_fused_moe",
        rf"{_BACKEND_SETTING}[^;]{{0,140}}?(?:{_NOT_TAKEN})|(?:{_NOT_TAKEN})[^;]{{0,60}}?{_BACKEND_SETTING}"
        r"|moe[- ]backend (?:setting|choice|override|selection|flag|option)[^;.]{0,60}(?:ignored|no effect"
        r"|not honou?red)",
    ),
    Clue(
        "setting_deprecated",
        "deprecat",
        rf"{_BACKEND_SETTING}[^;]{{0,100}}?deprecat|deprecat[^;]{{0,60}}?{_BACKEND_SETTING}",
    ),
    Clue(
        "no_choice",
        "backend",
        r"(?:\bno (?:way|option|flag|env\w{0,9}|override|means|possibility)|can ?not|can't|unable"
        r"|impossible|not possible|no override)\b[^.;]{0,70}?"
        r"(?:overrid|choos|select|forc|pick|switch|chang|pin)\w{0,4}[^.;]{0,70}?backend"
        r"|backend\b[^.;]{0,60}?(?:with )?no (?:override|way to (?:overrid|choos|chang|forc|select)"
        r"|env override)",
    ),
    Clue(
        "moe_variable_set",
        "vllm_",
        r"(?<!setting )(?:vllm_use_flashinfer_moe_(?:fp4|fp8|fp16|mxfp4_\w{4,14})"
        r"|vllm_flashinfer_moe_backend|vllm_nvfp4_gemm_backend|vllm_mxfp4_use_marlin)"
        r" ?[=:] ?[\"']?\w",
    ),
    Clue("consider_setting", "consider setting", r"not enabled, consider setting vllm_use_flashinfer_moe"),
)

SIGNATURES = (
    # flashinfer#1966, facts 1.4: ptxas has no e2m1 conversion for a plain 120 (FBGEMM#4975 has the same
    # message and is not it).
    Signature("MD004", ("ptxas_target",), 0.85, anywhere=(("flashinfer",),)),
    # vllm#38718 note 1, cutlass#3096, flashinfer#2723, #3294: the suffix and what goes wrong with it.
    Signature(
        "MD004",
        ("arch_suffix",),
        0.78,
        near=(("build_trouble",),),
        within=10,
        anywhere=(("cutlass_or_flashinfer",), ("nvfp4", "moe")),
        unless=("triton_ptxas",),
        unless_near=("other_cause", "attention"),
    ),
    # The variable that chooses the suffix, on a GPU of that family.
    Signature(
        "MD004",
        ("arch_list",),
        0.7,
        near=(("wrong_build",), ("sm12x", "arch_suffix")),
        within=15,
        unless_near=("other_cause",),
    ),
    # flashinfer#3633: no target at all, since the toolkit has none with the suffix that FlashInfer wants.
    Signature("MD004", ("no_arch_found",), 0.72, anywhere=(("flashinfer",), ("sm12x",))),
    # flashinfer#2065, #2776: only the symptom. From 0.6.8 on another cause must be behind it; missing GDC
    # flags are one (#2913).
    Signature(
        "MD004",
        ("illegal_instruction",),
        0.55,
        anywhere=(("sm12x",), ("nvfp4",), ("moe",), ("flashinfer",)),
        unless=("other_cause",),
        flashinfer_fixed="0.6.8",
    ),
    # Blackwellboy/model-serving-minefield#19, abliterix#20: vLLM's own warning.
    Signature("MD010", ("unknown_variable",), 0.88),
    # vllm#38971, facts 5: choices are in lower case, and the variable is about linear layers.
    Signature("MD010", ("invalid_choice",), 0.9),
    Signature("MD010", ("upper_case_choice",), 0.8, fixed="0.24.0"),
    Signature("MD010", ("invented_variable",), 0.85),
    # vllm#43148, #43487 and reports after 0.24.0: a setting and that it is not taken.
    Signature("MD010", ("setting_not_taken",), 0.72, anywhere=(("vllm",),)),
    Signature("MD010", ("setting_deprecated",), 0.58, anywhere=(("vllm",),), unless=("crash",)),
    Signature("MD010", ("no_choice",), 0.75, anywhere=(("moe",), ("vllm",))),
    # Facts 2.3: these variables went in 0.24.0; whoever sets one there sets nothing.
    Signature("MD010", ("moe_variable_set",), 0.7, since="0.24.0", needs_version=True),
    # QwenLM/Qwen3-VL#1699: set, and the log still asks for it.
    Signature("MD010", ("consider_setting",), 0.65, anywhere=(("moe_variable_set",),)),
)
