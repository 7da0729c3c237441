#!/bin/sh
# Runs the CPU tiers against releases of vLLM and torch, each in an environment of its own, and writes reports/releases/.
# By hand, after a release: add a line to scripts/releases.txt first. The first time it fetches 1 to 5 GB a release.
#
# RELEASES  the releases to run, such as "torch 2.14.0"; empty: all of scripts/releases.txt
# TORCH     the torch beside a vLLM release; empty: any that pyproject.toml allows
set -eu
cd "$(dirname "$0")/.."
. scripts/environments.sh
out=reports/releases
torch_scenarios="untraceable_offload"
vllm_scenarios="arch_suffix untraceable_offload offload_reinit backend_override offload_noop gate_up_order"

# Writes the report $1 with the python of environment $2 on PYTHONPATH $3; the rest are arguments of moedoctor run.
report() {
    name=$1 python=$2/bin/python path=$3 status=0
    shift 3
    say "$name"
    PYTHONPATH=$(pwd)${path:+:$path} "$python" -m moedoctor run "$@" --format json -o "$out/$name.json" || status=$?
    [ "$status" -le 1 ] || fail "$name: moedoctor ended with $status" # 1: something was found, which is a result too
    PYTHONPATH=$(pwd) "$python" -m moedoctor show "$out/$name.json" --format markdown --full -o "$out/$name.md"
}

mkdir -p "$out"
while read -r package release; do
    case $package in
    "" | "#"*) ;;
    torch)
        torch_environment "$release"
        report "torch-$release" ".venv-releases/torch-$release" "" $torch_scenarios --only tier=model
        ;;
    vllm)
        upstream_environment
        vllm_folder "$release"
        report "vllm-$release" "$home" "$(pwd)/$home/releases/$release" $vllm_scenarios
        ;;
    *) fail "'$package $release': expected torch or vllm and a release" ;;
    esac
done <<EOF
${RELEASES:-$(cat scripts/releases.txt)}
EOF
