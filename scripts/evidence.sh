#!/usr/bin/env bash
# Makes reports of reports/nvidia-h200 again: scripts/evidence.sh NAME...; without a name it lists them.
#
# Needs an NVIDIA GPU, and moedoctor and vLLM 0.21.0 in one environment, since vLLM finds the plug-in through moedoctor's
# entry point. A report that is marked "idle" measures times, or starts a dozen engines at once: nothing else may use the GPU
# or the CPU.
#
# OUT         the folder to write to; default reports/nvidia-h200
# KERNELS     a folder with the wheel or the _moe_C shared object of other vLLM releases, each in a folder named by version
# FLASHINFER  a folder with FlashInfer releases, each unpacked in a folder named by version
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
out=${OUT:-reports/nvidia-h200}
tokens=1,8,64,512,4096

doctor() { python3 -m moedoctor "$@"; }

# write NAME COMMAND...: one report in both formats. Exit code 1 means that something was found, which is a result too.
write() {
    local name=$1 status=0
    shift
    echo "evidence: $name" >&2
    doctor "$@" --format json -o "$out/$name.json" || status=$?
    [[ $status -le 1 ]] || return "$status"
    doctor show "$out/$name.json" --format markdown -o "$out/$name.md"
}

# kernels RELEASE...: the arguments that name them as subjects
kernels() {
    local release files
    for release in "$@"; do
        files=("${KERNELS:?}/$release"/*moe_C*.so "$KERNELS/$release"/*.whl)
        echo "--vllm-kernels=$release=${files[0]}"
    done
}

# checkpoint_engines NAME ID: damaged and repaired checkpoints in engines, with MARLIN and EMULATION
checkpoint_engines() {
    local failed=0 backend
    for backend in marlin emulation; do
        write "$1_$backend" run "$2" --only tier=engine --only "moe_backend=$backend" || failed=1
    done
    return "$failed"
}

flashinfer() {
    local sources=() release
    for release in 0.6.6 0.6.8.post1 0.6.13 0.7.2.post1; do sources+=("$release=${FLASHINFER:?}/$release"); done
    python3 -m moedoctor.upstream.flashinfer.probe_build "${sources[@]}" # side by side, before anything waits for one
    write duplicate_ids run duplicate_ids "${sources[@]/#/--flashinfer=}"
}

own_model() {
    python3 -c 'from pathlib import Path
from moedoctor.reference import checkpoints
folder = checkpoints.write_qwen3_moe(Path("tiny-nvfp4-moe"), scheme="nvfp4", layers=4)
checkpoints.write_tokenizer(folder, 512)'
    write offload_own_model run scenarios/engine/own_model.yaml || { rm -r tiny-nvfp4-moe; return 1; }
    rm -r tiny-nvfp4-moe
}

# Triton's kernels are compiled for each size, Marlin's FP8 kernels by the driver. They are compiled first, side by side; the
# times of these runs are thrown away.
moe_backends() {
    local models=() scratch model
    while read -r model; do models+=(--model "$model"); done < <(python3 -c 'from moedoctor.models.presets import names; print(*names(), sep="\n")')
    scratch=$(mktemp -d)
    compile() { doctor bench --backend "$@" --format json -o "$(mktemp -p "$scratch")" 2>> "$scratch/log" & }
    compile MARLIN:fp8 --hidden 1024 --intermediate 1024 --experts 8 --top-k 2 --tokens 1,4096
    for ((i = 1; i < ${#models[@]}; i += 2)); do
        compile TRITON,OURS:nvfp4,OURS:bf16 --model "${models[i]}" --tokens "$tokens"
    done
    wait
    rm -r "$scratch"
    write moe_backends bench --backend all "${models[@]}" --tokens "$tokens" --timeout 600
}

make_report() {
    case $1 in
        nan_routing) write nan_routing run MD001 $(kernels 0.18.0 0.19.1 0.20.0 0.21.0 0.33.0) ;;              # idle
        nan_padding) write nan_padding run scenarios/engine/nan_padding.yaml $(kernels 0.19.1) ;;
        nan_padding_dp) write nan_padding_dp run scenarios/engine/nan_padding_dp.yaml ;;                       # two GPUs
        nan_overhead) write nan_overhead run scenarios/engine/nan_overhead.yaml ;;                             # idle
        duplicate_ids) flashinfer ;;
        sentinel_ids) write sentinel_ids run MD016 ;;
        backend_override) write backend_override run MD010 ;;
        backend_parity) write backend_parity run PARITY ;;
        weight_layouts) write weight_layouts run MD017 MD018 --only tier=kernel ;;
        kv_scales_missing) checkpoint_engines kv_scales_missing MD012 ;;
        global_scale_mismatch) checkpoint_engines global_scale_mismatch MD014 ;;
        input_scale_missing) write input_scale_missing run MD015 ;;
        gate_up_order) checkpoint_engines gate_up_order MD017 ;;
        scale_layout) checkpoint_engines scale_layout MD018 ;;
        moe_backends) moe_backends ;;                                                                          # idle
        offload_speed) write offload_speed run scenarios/engine/offload_speed.yaml ;;                          # idle
        offload_table) write offload_table run MD003 ;;                                                        # idle
        offload_parity) write offload_parity run MD008 ;;                                                      # idle
        # Subjects are named so that the claims on speed, which offload_speed holds, are not measured again.
        offload_engines) write offload_engines run MD005 --subject faulty --subject fixed --subject installed ;;
        offload_bytes) write offload_bytes run MD009 MD013 ;;
        offload_copies) write offload_copies run MD002 MD020 ;;                                                # idle
        offload_kernels) write offload_kernels run MD003 MD008 --only tier=kernel ;;
        offload_own_model) own_model ;;
        expert_cache) write expert_cache run scenarios/engine/expert_cache.yaml ;;                             # idle
        expert_cache_memory) write expert_cache_memory run scenarios/engine/expert_cache_memory.yaml ;;
        expert_cache_qwen) write expert_cache_qwen run scenarios/engine/expert_cache_qwen.yaml ;;              # idle
        expert_cache_faults) write expert_cache_faults run MD006 MD007 MD019 ;;                                # idle
        expert_cache_speed) write expert_cache_speed bench --cache --speed --capacity 16,32,64,128 ;;          # idle, 140 GB
        expert_cache_speed_batch8) write expert_cache_speed_batch8 bench --cache --speed --batch 8 --capacity 16,32,64,128 ;;
        *) echo "evidence: no report is named '$1'" >&2; return 2 ;;
    esac
}

if [[ $# -eq 0 ]]; then
    sed -n 's/^        \([a-z0-9_]*\)) .*;;\( *# \(.*\)\)\{0,1\}$/\1\t\3/p' "$0"
    exit 0
fi
failed=
for name in "$@"; do make_report "$name" || failed="$failed $name"; done
[[ -z $failed ]] || { echo "evidence: failed:$failed" >&2; exit 1; }
