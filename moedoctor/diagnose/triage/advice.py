"""The names of the known failures and what to do next about each."""

from __future__ import annotations

from collections.abc import Mapping

NAMES: Mapping[str, str] = {
    "MD001": "nan_routing",
    "MD002": "unpinned_copy",
    "MD003": "offloaded_scales",
    "MD004": "arch_suffix",
    "MD005": "untraceable_offload",
    "MD006": "self_evicting_cache",
    "MD007": "cache_overflow",
    "MD008": "offload_garbage",
    "MD009": "offload_reinit",
    "MD010": "backend_override",
    "MD011": "duplicate_ids",
    "MD012": "kv_scales_missing",
    "MD013": "offload_noop",
    "MD014": "global_scale_mismatch",
    "MD015": "input_scale_missing",
    "MD016": "sentinel_ids",
    "MD017": "gate_up_order",
    "MD018": "scale_layout",
    "MD019": "workspace_aliasing",
    "MD020": "stale_parameter",
}

NEXT_STEPS: Mapping[str, str] = {
    "MD001": "upgrade vLLM to 0.20.0 or later, or use --moe-backend triton; `moedoctor run MD001`",
    "MD002": "run without CPU offload; on WSL2 use vLLM 0.24.0 or later with VLLM_WSL2_ENABLE_PIN_MEMORY=1",
    "MD003": "try --cpu-offload-params w13_weight w2_weight, which leaves the scales on the GPU",
    "MD004": "see what was built: `moedoctor check`; take FlashInfer 0.6.8 and CUDA 12.9 or later",
    "MD005": "add --enforce-eager, or allow pinned memory, so that the UVA path is taken",
    "MD006": "make the cache hold all experts, or protect what the running call needs; `moedoctor run MD006`",
    "MD007": "give the cache as many slots as a batch has unique experts, or make batches smaller",
    "MD008": "compare the output with and without --cpu-offload-gb; run without it until they agree",
    "MD009": "upgrade vLLM to 0.20.0 or later, where the assertion is gone; then check the output (MD008)",
    "MD010": "use the flag --moe-backend; `moedoctor backends` says what counts in which release",
    "MD011": "let the router give distinct ids: vLLM 0.20.0 or later; `moedoctor run MD011`",
    "MD012": "use --kv-cache-dtype bfloat16, or a checkpoint with KV scales; `moedoctor lint CHECKPOINT`",
    "MD013": "upgrade vLLM to 0.28.0 or later, or set VLLM_USE_V2_MODEL_RUNNER=0",
    "MD014": "run `moedoctor lint CHECKPOINT`; export again with one global scale for w1 and w3",
    "MD015": "run `moedoctor lint CHECKPOINT`; calibrate those experts, or use --moe-backend marlin",
    "MD016": "set VLLM_MOE_SKIP_PADDING=0, or choose another --moe-backend; `moedoctor run MD016`",
    "MD017": "run `moedoctor bench --backend NAME`; swap the halves of w13 where they are loaded",
    "MD018": "run `moedoctor bench --backend NAME`; give it the scales in the layout that it reads",
    "MD019": "give every group of experts an output of its own and add up outside the workspace",
    "MD020": "try --cpu-offload-params w13_weight w2_weight, or run without offload",
}
