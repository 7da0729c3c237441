"""Expert caches and grouped execution: MD006, MD007 and MD019."""

from __future__ import annotations

from moedoctor.diagnose.triage.signature import Clue, Signature, either

CLUES = (
    Clue(
        "expert_cache",
        "cache|lfru",
        r"experts?[-_ ](?:weight[-_ ])?(?:lru[-_ ]|lfru[-_ ]|gpu[-_ ])?cache|cachedweightprovider"
        r"|expertlrucache|\blfru\b"
        r"|gpu cache\b.{0,60}experts?|cache[sd]?\b (?:\w{1,12} ){0,4}experts\b|moe[-_ ]cache"
        r"|experts than (?:\w{1,12} ){0,2}(?:cache|slots)",
    ),
    Clue(
        "evicts_needed",
        "evict",
        either(
            r"evict(?:s|ed|ing|ion)?\b",
            r"still (?:need|require|in use)\w{0,3}|needed (?:by|in|for) (?:the |this )?(?:same|current"
            r"|this)|(?:same|current|this) (?:call|batch|forward|step|prepare)\b"
            r"|(?:freshly|just|newly)[- ]loaded|about to (?:be )?use|it (?:just|also) (?:loaded|needs)",
            140,
        ),
    ),
    Clue(
        "lfru_score",
        "freq|lowest",
        r"freq\w{0,8} ?/ ?\(?(?:1 ?\+ ?)?(?:age|recency)|lowest (?:freq\w{0,8}|lfru|score)\b.{0,20}(?:score"
        r"|age|recency)?",
    ),
    Clue("evict", "evict", r"evict"),
    Clue(
        "overflow",
        "unique expert|distinct expert|overflow|capacity|cache size|slots|cache-size",
        r"(?:unique|distinct) experts?\b.{0,120}(?:request|exceed|\bthan\b|capacity|slots|cache[- ]size)"
        r"|(?:more|exceed\w{0,3}|larger|greater) (?:\w{1,12} ){0,4}experts? than (?:\w{1,12} ){0,3}(?:cache"
        r"|slots|capacity|fit)"
        r"|cache (?:is |was |gets )?overflow\w{0,4}|overflow\w{0,4} (?:the |of the )?(?:expert )?cache"
        r"|(?:unique_ids|num_unique|unique experts?)\b.{0,20}> ?(?:self\.)?(?:gpu_)?capacity",
    ),
    Clue("unique_requested", "unique expert", r"\d unique experts? requested|unique experts? requested but"),
    Clue(
        "truncates",
        "truncat|dropped|silent|stale|wrong|incorrect|suffix|runtimeerror|arbitrary",
        r"truncat|dropped|silent|stale|wrong|incorrect|suffix|runtimeerror|arbitrary",
    ),
    Clue(
        "workspace",
        "workspace|alias|clobber",
        either(
            r"workspace\w{0,4}|intermediate[-_ ]cache\w{0,4}|fused_out",
            r"alias\w{0,4}|overwr\w{2,6}|clobber\w{0,4}",
            120,
        ),
    ),
    Clue(
        "expert_groups",
        "group|fused_experts|fused_moe|modular|mini-ep|partition|chunk|accumulat",
        r"(?:expert|n|\d) groups?|groups? of experts|per[- ]group|fused_experts|fused_moe"
        r"|modular (?:moe )?kernel|mini-ep|partition|chunk|accumulat",
    ),
    Clue(
        "wrong_sum",
        "overwr|clobber|incorrect|wrong|corrupt|correctness|stale|lost",
        r"overwr|clobber|incorrect|wrong|corrupt|correctness|stale|\blost\b",
    ),
)

SIGNATURES = (
    # vllm#50562: a freshly loaded expert has the lowest score and goes first, though the same call needs it.
    Signature("MD006", ("evicts_needed",), 0.85, near=(("expert_cache",),), within=15, anywhere=(("moe",),)),
    # vllm#37190: the policy itself, in a thread that is about its failures: nothing in it protects what
    # the call needs.
    Signature(
        "MD006",
        ("lfru_score",),
        0.58,
        near=(("expert_cache",), ("evict",)),
        within=10,
        anywhere=(("moe",), ("overflow", "unique_requested")),
    ),
    # vllm#37190 since 1a8df90: the error in place of the truncation.
    Signature("MD007", ("unique_requested",), 0.95),
    # vllm#37190, the thread: more unique experts than slots, the rest computed with what the slots held.
    Signature(
        "MD007",
        ("overflow",),
        0.82,
        near=(("expert_cache",), ("truncates",)),
        within=12,
        anywhere=(("moe",),),
    ),
    # vllm#37190 (modular kernel, mini-EP) and the review of #29219: output and scratch are one buffer.
    Signature(
        "MD019",
        ("workspace",),
        0.75,
        near=(("expert_groups",), ("wrong_sum",)),
        within=10,
        anywhere=(("moe",),),
        unless_near=("attention",),
    ),
)
