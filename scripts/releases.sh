#!/bin/sh
# Runs the CPU tiers against releases of vLLM and torch, each in an environment of its own, and writes reports/releases/.
# By hand, after a release: add a line to scripts/releases.txt first. The first time it fetches 1 to 5 GB a release.
# A vLLM release runs with the torch that it pins, because some failures depend on torch. It is the build that pip installs: one
# for CUDA also runs without a GPU.
#
# RELEASES  the lines to run, such as "torch 2.14.0"; empty: all of scripts/releases.txt
set -eu
cd "$(dirname "$0")/.."
. scripts/environments.sh
out=reports/releases
# A torch release runs the failure that depends on torch, a vLLM release the scenarios whose CPU tiers run its code.
torch_scenarios="untraceable_offload"
vllm_scenarios="arch_suffix untraceable_offload offload_reinit backend_override offload_noop gate_up_order"
function_scenarios="offload_reinit offload_noop"

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
        vllm_folder "$release"
        torch=$(pinned "$home/releases/$release" torch)
        [ -n "$torch" ] || fail "vllm $release pins no torch: $home/releases/$release has no 'Requires-Dist: torch==…'"
        torch_environment "$torch"
        report "vllm-$release" ".venv-releases/torch-$torch" "$(pwd)/$home/releases/$release" $vllm_scenarios
        ;;
    functions) # MD009 and MD013 read them out of the wheels; no vLLM is installed
        set --
        for version in $release; do
            [ "$version" != newest ] || version=$(vllm_releases | tail -n 1)
            wheel=$(vllm_wheel "$version")
            set -- "$@" --vllm-kernels "$version=$wheel"
        done
        report offload .venv "" $function_scenarios "$@"
        ;;
    *) fail "'$package $release': expected torch or vllm and a release, or functions and releases of vLLM" ;;
    esac
done <<EOF
${RELEASES:-$(cat scripts/releases.txt)}
EOF
