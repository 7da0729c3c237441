#!/usr/bin/env bash
# Makes the reports of one GPU and vLLM release: evidence/reports.sh NAME...; "all" makes every one, and without a name it
# lists them with what each needs and how long it took.
#
# Needs an NVIDIA GPU, and moedoctor and vLLM in one environment, since vLLM finds the plug-in through moedoctor's entry
# point. A report that is marked "idle" measures times, or starts a dozen engines at once: nothing else may use the GPU or the
# CPU. A report that is there, whole and of the installed release is skipped, so a run that was cut goes on where it stopped.
#
# OUT         the folder to write to; default reports/GPU-vllm-RELEASE, where GPU is the name of the first GPU in small letters
#             without its memory, such as nvidia-h100. The first folder, of an H200 and 0.21.0, is named reports/nvidia-h200.
# FRESH       1 makes reports again that are there
# LIMIT       seconds for all of them: what does not end in time is cut, and what finished is kept. A recorded_ report is not
#             cut, but does not start late.
# SHARE       1/2 takes the first, third, … of the names and 2/2 the others: one list for each of two GPUs
# PYTHON      the interpreter; default python3
# KERNELS     a folder with the wheel or the _moe_C shared object of other vLLM releases, each in a folder named by version;
#             without it, claims about those releases are untested
# RAY         HOST:PORT of the Ray cluster that the reports of a fleet ask; without it, Ray is started here for each
# FLASHINFER  a folder with FlashInfer releases, each unpacked in a folder named by version
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tokens=1,8,64,512,4096
decode=1,2,4,8,16,32,64 # as many as a step has
prefill=128,256,512,1024,2048,4096

doctor() { "$python" -m moedoctor "$@"; }

release() { "$python" -c 'import importlib.metadata as m; print(m.version("vllm"))'; }

# gpu: the name of the first GPU of the machine as a folder has it. "NVIDIA H100 80GB HBM3" is nvidia-h100.
gpu() {
    "$python" -c 'from moedoctor.environment import collect; print(collect()["gpus"][0]["name"])' 2>/dev/null |
        sed 's/[ -][0-9]*GB.*//; s/[^A-Za-z0-9]\{1,\}/-/g' | tr '[:upper:]' '[:lower:]'
}

# late NAME: whether LIMIT leaves no time to start a report
late() {
    [[ -n ${LIMIT:-} ]] && ((LIMIT <= SECONDS + 15)) && echo "evidence: no time is left for $1" >&2
}

# limited COMMAND...: runs it, and cuts it at LIMIT
limited() {
    if [[ -n ${LIMIT:-} ]]; then
        timeout --signal INT --kill-after 20 $((LIMIT - SECONDS)) "$@"
    else
        "$@"
    fi
}

# complete NAME: whether the report is there, was not cut, has no errors, and is of the installed release
complete() {
    [[ -z ${FRESH:-} ]] && "$python" - "$out/$1.json" "$vllm" <<'PYTHON'
import json, sys
try:
    report = json.load(open(sys.argv[1], encoding="utf-8"))
except (OSError, ValueError):
    sys.exit(1)
summary = report.get("summary", {})
cut = summary.get("interrupted") or any(reason.startswith("interrupted") for reason in summary.get("reasons", ()))
whole = not cut and not summary.get("error")
environment = report.get("environment", {})
sys.exit(0 if whole and (environment.get("vllm") or "none") == sys.argv[2] else 1)
PYTHON
}

# write NAME COMMAND...: one report in both formats. Exit code 1 means that something was found, which is a result too.
write() {
    local name=$1 status=0 started=$SECONDS
    shift
    if complete "$name"; then
        echo "evidence: $name is there" >&2
        return 0
    fi
    ! late "$name" || return 1
    echo "evidence: $name" >&2
    mkdir -p "$out"
    limited "$python" -m moedoctor "$@" --format json -o "$out/$name.json" || status=$?
    echo "evidence: $name took $((SECONDS - started)) s, exit code $status" >&2
    [[ ! -s $out/$name.json ]] || doctor show "$out/$name.json" --format markdown --full -o "$out/$name.md"
    [[ $status -le 1 ]] || return "$status"
}

# fleet NAME COMMAND...: a fleet's report, the reports of its nodes in NAME.nodes, and the Markdown
fleet() {
    local name=$1 status=0 started=$SECONDS reports
    shift
    reports=$out/$name.nodes
    if [[ -z ${FRESH:-} && -s $out/$name.json ]] && grep -q '"interrupted": false' "$out/$name.json"; then
        echo "evidence: $name is there" >&2
        return 0
    fi
    ! late "$name" || return 1
    echo "evidence: $name" >&2
    mkdir -p "$out"
    [[ -z ${FRESH:-} ]] || rm -f "$reports"/*.json
    if [[ -e $reports/question.json ]]; then set -- "$@" --resume "$reports"; else set -- "$@" --reports "$reports"; fi
    limited "$python" -m moedoctor fleet "$@" --address "${RAY:-local}" --format json -o "$out/$name.json" || status=$?
    echo "evidence: $name took $((SECONDS - started)) s, exit code $status" >&2
    [[ ! -s $out/$name.json ]] || doctor show "$out/$name.json" --format markdown --full -o "$out/$name.md"
    [[ $status -le 1 ]] || return "$status"
}

# kernels RELEASE...: the arguments that name them as subjects
kernels() {
    local release files
    for release in "$@"; do
        [[ -n ${KERNELS:-} ]] || return 0
        files=("$KERNELS/$release"/*moe_C*.so "$KERNELS/$release"/*.whl)
        echo "--vllm-kernels=$release=${files[0]}"
    done
}

# checkpoint_engines NAME ID [BACKEND...]: damaged and repaired checkpoints in engines, by default with each backend for
# NVFP4 that an H200 has
checkpoint_engines() {
    local failed=0 backend backends=("${@:3}")
    [[ ${#backends[@]} -gt 0 ]] || backends=(marlin humming emulation)
    [[ $vllm != 0.21.0 ]] || backends=(marlin emulation)
    for backend in "${backends[@]}"; do
        write "$1_$backend" run "$2" --only tier=engine --only "moe_backend=$backend" || failed=1
    done
    return "$failed"
}

# recorded CASE: a call that an engine recorded after a fault was planted, replayed on the GPU and on the CPU
recorded() {
    if complete "recorded_$1"; then
        echo "evidence: recorded_$1 is there" >&2
        return 0
    fi
    ! late "recorded_$1" || return 1
    echo "evidence: recorded_$1" >&2
    "$python" evidence/record_engines.py "$out" "$1" >&2
}

flashinfer() {
    local sources=() release
    for release in 0.6.6 0.6.8.post1 0.6.13 0.7.2.post1; do
        sources+=("$release=${FLASHINFER:?}/$release")
        # Compile the probes side by side, before anything waits for one.
        "$python" -c 'import pathlib, sys
from moedoctor.upstream.flashinfer.probe_build import build, plan_build
from moedoctor.upstream.flashinfer.source import find_source
build(plan_build(find_source(sys.argv[1], pathlib.Path(sys.argv[2])), "90a"))' "$release" "$FLASHINFER/$release" &
    done
    wait
    write duplicate_ids run duplicate_ids "${sources[@]/#/--flashinfer=}"
}

# Without the kernels of other releases no claim is measured, so nothing is timed.
nan_routing() {
    local sources=($(kernels 0.18.0 0.19.1 0.20.0 0.21.0 0.33.0))
    [[ ${#sources[@]} -gt 0 ]] || sources=(--subject faulty --subject fixed --subject installed)
    write nan_routing run MD001 "${sources[@]}"
}

own_model() {
    local status=0
    "$python" -c "from pathlib import Path
from moedoctor.reference import checkpoints
checkpoints.write_tokenizer(checkpoints.write_qwen3_moe(Path('tiny-nvfp4-moe'), scheme='nvfp4', layers=4), 512)"
    write offload_own_model run scenarios/engine/own_model.yaml || status=$?
    rm -r tiny-nvfp4-moe
    return "$status"
}

nemotron() {
    local status=0
    "$python" -c "from pathlib import Path
from moedoctor.bench.random_model import RandomModel
from moedoctor.reference.checkpoints import write_tokenizer
write_tokenizer(RandomModel('nemotron_h', 'nvfp4').write(Path('tiny-nemotron-h')), 512)"
    write offload_nemotron run scenarios/engine/nemotron_offload.yaml || status=$?
    rm -r tiny-nemotron-h
    return "$status"
}

# all_models: fills `models` with --model and each preset
all_models() {
    local model
    models=()
    while read -r model; do models+=(--model "$model"); done < <("$python" -c 'from moedoctor.models.presets import list_presets; print(*list_presets(), sep="\n")')
}

# Triton's kernels are compiled for each size, Marlin's FP8 kernels by the driver. They are compiled first, side by side; the
# times of these runs are thrown away.
moe_backends() {
    local models scratch
    all_models
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

# What vLLM's rule for tiles costs, without the files that vLLM has for some layers, and with better ones. As above, compiled first.
moe_tiles() {
    local models scratch
    all_models
    scratch=$(mktemp -d)
    tune() { doctor bench --backend "$@" --tokens "$tokens" --tune "$scratch" --timeout 170 --format json -o "$(mktemp -p "$scratch")" 2>> "$scratch/log" & }
    for ((i = 1; i < ${#models[@]}; i += 2)); do
        tune TRITON:bf16 --model "${models[i]}"
        tune TRITON:fp8 --model "${models[i]}"
    done
    wait
    write moe_tiles bench --backend TRITON:bf16,TRITON:fp8 "${models[@]}" --tokens "$tokens" --timeout 1500 --tune "$scratch"
}

# backends_of_all NAME BACKENDS TOKENS: layers of all models. HUMMING compiles for more than a minute a model.
backends_of_all() {
    local models
    all_models
    write "$1" bench --backend "$2" "${models[@]}" --tokens "$3" --timeout 600
}

# The order is that of "all": crashes and cache first. The comment says what a report needs, and the seconds that it took on an
# H200 with 0.21.0, alone, and with 0.33.0, mostly beside other engines; "-" if it has not been made there.
make_report() {
    case $1 in
        offload_engines) write offload_engines run MD005 --only tier=engine ;;                    # 137 s, 155 s
        offload_table_eager) write offload_table_eager run MD003 --only tier=engine --only engine=eager ;; # 110 s, 214 s
        offload_table_compiled) write offload_table_compiled run MD003 --only tier=engine --only engine=compiled ;; # 140 s, 247 s
        offload_table) complete offload_table_eager && complete offload_table_compiled || write offload_table run MD003 ;; # 309 s, -
        offload_parity) write offload_parity run MD008 ;;                                         # idle; 152 s, 253 s
        nan_padding) write nan_padding run scenarios/engine/nan_padding.yaml ;;                   # 143 s, 199 s
        backend_parity) write backend_parity run PARITY ;;                                        # 405 s, 240 s
        offload_bytes) write offload_bytes run MD009 MD013 ;;                                     # 117 s, 169 s
        global_scale_mismatch) checkpoint_engines global_scale_mismatch MD014 marlin emulation ;; # 343 s, 300 s
        gate_up_order) checkpoint_engines gate_up_order MD017 ;;                                  # 341 s, -
        scale_layout) checkpoint_engines scale_layout MD018 ;;                                    # 336 s, 600 s
        kv_scales_missing) checkpoint_engines kv_scales_missing MD012 ;;                          # 340 s, 520 s
        input_scale_missing) write input_scale_missing run MD015 ;;                               # 103 s, 204 s
        offload_own_model) own_model ;;                                                           # 175 s, 240 s
        offload_nemotron) nemotron ;;                                                             # -, -
        nan_routing) nan_routing ;;                                                               # idle; 172 s and claims, -
        nan_padding_dp) write nan_padding_dp run scenarios/engine/nan_padding_dp.yaml ;;          # two GPUs, or both ranks on one; 150 s, -
        recorded_nan_graphs) recorded nan_graphs ;;                                               # -, 174 s
        recorded_nan_eager) recorded nan_eager ;;                                                 # 76 s, 91 s
        recorded_call_graphs) recorded call_graphs ;;                                             # 118 s, 150 s
        recorded_crash_graphs) recorded crash_graphs ;;                                           # 95 s, 138 s
        recorded_crash_eager) recorded crash_eager ;;                                             # -, 96 s
        recorded_scale_graphs) recorded scale_graphs ;;                                           # 125 s, 148 s
        recorded_swap_eager) recorded swap_eager ;;                                               # -, 101 s
        recorded_halves_graphs) recorded halves_graphs ;;                                         # -, 135 s
        crash_engines) "$python" evidence/crash_engines.py "$out" --seconds "${LIMIT:-270}" >&2 ;; # ten engines at once; -, -
        sentinel_ids) write sentinel_ids run MD016 ;;                                             # 13 s, 415 s
        logits_stride) write logits_stride run MD024 $(kernels 0.19.1 0.20.0 0.21.0 0.27.1 0.33.0) ;;  # -
        backend_override) write backend_override run MD010 ;;                                     # 143 s, 59 s
        weight_layouts) write weight_layouts run MD017 MD018 --only tier=kernel ;;                # 263 s, 61 s
        moe_backends_nvfp4) backends_of_all moe_backends_nvfp4 OURS:nvfp4,MARLIN:nvfp4 "$decode" ;;     # idle; -, 79 s
        moe_backends_fp8) backends_of_all moe_backends_fp8 OURS:fp8,TRITON:fp8,MARLIN:fp8 "$decode" ;; # idle; -, 114 s
        moe_backends_fp8_block) backends_of_all moe_backends_fp8_block OURS:fp8-block,TRITON:fp8-block,MARLIN:fp8-block "$decode" ;; # idle; -, 104 s
        moe_backends_humming) backends_of_all moe_backends_humming OURS:nvfp4,MARLIN:nvfp4,HUMMING:nvfp4 "$decode" ;; # idle; -, 339 s
        moe_backends_bf16) backends_of_all moe_backends_bf16 OURS:bf16,TRITON:bf16 "$decode,$prefill" ;; # idle; -, 87 s
        moe_tiles) moe_tiles ;;                                                                   # idle
        moe_backends) moe_backends ;;                                                             # idle
        offload_copies) write offload_copies run MD002 MD020 ;;                                   # idle; 57 s, -
        offload_kernels) write offload_kernels run MD003 MD008 --only tier=kernel ;;              # 10 s, -
        duplicate_ids) flashinfer ;;                                                              # 141 s, -
        expert_cache_faults) write expert_cache_faults run MD006 MD007 MD019 ;;                   # idle; 189 s, -
        fleet_check) fleet fleet_check check ;;                                                   # two GPUs and Ray; -, 69 s
        fleet_parity) fleet fleet_parity run parity ;;                                            # two GPUs and Ray; -, 26 s on one
        fleet_bench) fleet fleet_bench bench --backend OURS:bf16,OURS:nvfp4 --model qwen3-30b-a3b --tokens 1,64 ;; # idle, two GPUs and Ray; -, -
        *) echo "evidence: no report is named '$1'" >&2; return 2 ;;
    esac
}

# The names of all reports, or with "notes" also what each needs.
listed() { sed -n "s/^        \([a-z0-9_]*\)) .*;;\( *# \(.*\)\)\{0,1\}\$/\1${1:+\t\3}/p" evidence/reports.sh; }

if [[ $# -eq 0 ]]; then
    listed notes
    exit 0
fi
[[ $1 == all ]] && set -- $(listed)
vllm=$(release 2>/dev/null || echo none)
out=${OUT:-}
if [[ -z $out ]]; then
    gpu=$(gpu) || true
    [[ -n $gpu ]] || { echo "evidence: NVML names no GPU here; set OUT to the folder for the reports" >&2; exit 2; }
    out=reports/$gpu-vllm-$vllm
    [[ $out != reports/nvidia-h200-vllm-0.21.0 ]] || out=reports/nvidia-h200
fi
echo "evidence: reports go to $out" >&2
part=${SHARE:-1/1}
failed=
place=0
for name in "$@"; do
    place=$((place + 1))
    [[ $(((place - 1) % ${part#*/} + 1)) == "${part%/*}" ]] || continue
    make_report "$name" || failed="$failed $name"
done
[[ -z $failed ]] || { echo "evidence: failed:$failed" >&2; exit 1; }
