"""Clues that several families share: what the text is about, which settings, which kind of trouble."""

from __future__ import annotations

from moedoctor.diagnose.triage.signature import Clue

_WRONG = (
    r"(?<!not )(?<!no )(?<!not just )(?:garbage|gibberish|garbled)(?! collect)|incoheren|nonsens"
    r"|word salad|token soup|!{8}"
    r"|outputs? (?:is |are |was |were |comes? out |becomes? |gets? |looks? ){1,2}(?:\w{1,12} ){0,2}"
    r"(?:wrong|incorrect|corrupt\w{0,4}|broken|empty|meaningless|random|!!!)"
    r"|(?:results?|answers?|completions?|tokens) (?:is |are |comes? out )(?:\w{1,12} ){0,2}(?:wrong"
    r"|incorrect|corrupt)"
    r"|(?:broken|degenerate|invalid|mangled|meaningless) (?:\w{1,12} )?outputs?\b"
    r"|(?:incorrect|wrong|corrupt\w{0,4}|empty|random|degenerate) (?:\w{1,12} )?"
    r"(?:outputs?|answers?|tokens?|text|characters|results?|completions?|generations?|strings?|words|logits"
    r"|sums?)\b"
    r"|silent(?:ly)?,? (?:\w{1,15} ){0,2}(?:wrong|incorrect|corrupt\w{0,4}|numerical|garbage)"
    r"|numerically (?:wrong|incorrect)"
    r"|silent (?:numerical )?corruption|(?:completely|totally|silently) wrong|wrong (?:numbers|values|tiles"
    r"|weights)"
    r"|(?:accuracy|gsm8k|score[ds]?|exact_match)\W{1,4}(?:\w{1,12}\W{1,3}){0,3}0(?:\.0{1,4})?(?:%"
    r"|\b(?![.\d]))"
    r"|pad[- ]tokens?|single repeated token|talks? nonsense|repeats? the same (?:token|word|character)"
    r"|degrad\w{1,4} (?:\w{1,15} ){0,2}(?:accuracy|quality)|accuracy (?:\w{1,15} ){0,2}(?:drop|degrad|loss"
    r"|issue|problem|regress|is poor|suffer)"
    r"|(?:poor|low|bad|noticeable) accuracy"
)

CLUES = (
    # Model families whose names alone say that a model has experts; `-A3B` is the active part of one.
    Clue(
        "moe",
        "moe|expert|a1|a2|a3|a4|a5|a6|a9|mixtral|gpt-oss|deepseek|qwen3-next|nemotron|minimax",
        r"moe(?!doctor)|(?:\b|_)experts?\b|\db-a\d{1,3}(?:\.\d)?b|mixtral|gpt-oss|deepseek[-_ ]?(?:v[234]"
        r"|r1|coder-v2)"
        r"|qwen3-next|nemotron[-_ ](?:3|cascade)|minimax-m",
    ),
    Clue("vllm", "vllm|flashinfer|sglang", r"vllm|flashinfer|sglang"),
    Clue("flashinfer", "flashinfer", r"flashinfer"),
    # Other engines have flags and failures of their own with the same words.
    Clue(
        "foreign",
        "llama.cpp|ggml|llama-server|koboldcpp|ollama|lm studio|exllama|mlx",
        r"llama\.cpp|ggml|llama-server|koboldcpp|ollama|lm studio|exllama|\bmlx",
    ),
    Clue(
        "quantised",
        "fp4|nvfp4|mxfp4|mxfp8|fp8|gptq|awq|int4|w4a|w8a|marlin|compressed|modelopt|quantiz|quantis",
        r"fp4|fp8|gptq|\bawq|int4|w4a\d|w8a\d|marlin|compressed[-_]tensors|modelopt|quanti[sz]",
    ),
    Clue("nvfp4", "fp4|nvfp4|mxfp4|modeloptnvfp4", r"fp4"),
    Clue(
        "bf16_or_fp8",
        "bf16|bfloat16|fp8|moe_fp16|unquantized",
        r"bf16|bfloat16|\bfp8|moe_fp(?:16|8)|unquantized",
    ),
    # Weights on the host through vLLM's own flags; the offload of the KV cache is another thing, and 0 is
    # none.
    Clue(
        "offload",
        "offload",
        r"(?<!kv )(?<!kv-)(?<!kvcache )(?<!cache )(?:cpu[-_ ]?offload(?!er)(?:ing|ed)?"
        r"(?![-_]?gb[\"']?[\s:=]{1,3}(?:0(?:\.0)?\b(?!\.\d)|none"
        r"|null))(?![-_]params[\"']?[\s:=]{1,3}(?:set\(|\[\]|\{\}|none))"
        r"|(?:cpu )?weight[- ]offload|uvaoffloader|offloader/uva"
        r"|offload[-_]backend[\s=:\"']{1,4}(?:uva|prefetch)|offload\w{0,3} (?:\w{1,15} ){0,3}(?:weights?"
        r"|experts|parameters|params|layers)\b"
        r"(?!.{0,30}gpu cache)|(?:weights|experts|parameters|layers) (?:\w{1,15} ){0,3}offloaded"
        r"|cpuoffloadgb|uva offload)",
    ),
    Clue(
        "offload_set",
        "offload",
        r"cpu[-_]?offload[-_]?gb[\"'`]{0,2}[\s:=]{1,4}[\"']?(?!0\b(?!\.[1-9]))\d|cpuoffloadgb\W{1,4}[1-9]"
        r"|--cpu-offload-gb\b(?! ?=? ?0\b(?!\.))|total cpu offloaded parameters|offloader set to uva",
    ),
    Clue(
        "kv_offload",
        "offload",
        r"kv[-_ ]?(?:cache )?[-_]?offload(?!ing_(?:size|backend)[\"']?[=:] ?(?:none|null|[\"']native))"
        r"|offloading_?connector|kvcache cpu offload",
    ),
    Clue(
        "no_uva",
        "wsl|pin|uva|pageable",
        r"\bwsl ?2?\b|microsoft-standard|pin_memory ?= ?false|pin_memory[`'\" ]{1,3}is (?:unavailable"
        r"|disabled|off)"
        r"|disable_uva|disable_pin_memory|non-uva|without uva|\bunpinned|un-pinned|not pinned|non-pinned"
        r"|pageable"
        r"|(?:without|no|unavailable) pinned|pinned memory is (?:not|un)",
    ),
    Clue("wsl", "wsl|microsoft-standard", r"\bwsl ?2?\b|microsoft-standard"),
    Clue(
        "wrong",
        (
            "garb|gibberish|incoheren|nonsens|wrong|incorrect|corrupt|!!!!!!|accuracy|silent|gsm8k|degenerat"
            "|salad|soup|pad token|pad-token|repeat|broken|invalid o|mangled|meaningless|random|empty"
        ),
        _WRONG,
    ),
    Clue(
        "illegal_access",
        "illegal|xid|fault| ima|(ima|cuda error",
        r"illegal memory access|illegal ?_?address|\bima\b|xid.{0,60}\b31\b|mmu fault|memory access fault"
        r"|cuda error:? 700",
    ),
    Clue(
        "illegal_instruction",
        "illegal|715",
        r"illegal ?_?instr(?:uction)?\b|illegalinstruction|\berror 715\b",
    ),
    Clue(
        "crash",
        "traceback|error|outofmemory|memory|fault|illegal",
        r"traceback \(most recent|(?:cuda|runtime|value|assertion|key|type)_?error\b|outofmemoryerror"
        r"|out of memory"
        r"|enginedeaderror|core initialization failed|segmentation fault|nccl (?:error|timeout)",
    ),
    Clue("cuda_graph", "graph|capture", r"cuda[- _]?graphs?|captur(?:e|ing) (?:cuda )?graph|graph capture"),
    Clue(
        "data_parallel",
        "parallel|dp|ep ",
        r"data[-_ ]parallel|expert[-_ ]parallel|\bd?ep[ =]?size|\bdp ?= ?[2-9]|\bdp/e?p|\bdep ?= ?\d",
    ),
    Clue(
        "legacy_engine",
        "worker/|llm_engine.py|model_runner.py",
        r"vllm/worker/|engine/llm_engine\.py|\] ?(?:#|initializing an llm engine)",
    ),
)
