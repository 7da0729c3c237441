#!/bin/sh
# Runs the tests marked `upstream` against real releases of vLLM, each with the FlashInfer and Humming that it requires.
# No GPU is needed. Everything is kept in .venv-upstream, about 1 GB a release; what is there is not fetched again.
#
# VLLM    the releases, with spaces between; empty: those of scripts/releases.txt
# TORCH   the torch release to install; empty: any that pyproject.toml allows
# ARGS    more arguments for pytest
set -eu
cd "$(dirname "$0")/.."
. scripts/environments.sh

upstream_environment
failed=
for release in ${VLLM:-$(vllm_releases)}; do
    vllm_folder "$release"
    say "vllm $release, flashinfer-python $(pinned "$home/releases/$release" flashinfer-python)"
    # Python finds packages and their metadata there first. The files without such tests would be collected for a minute.
    PYTHONPATH="$(pwd)/$home/releases/$release" "$home/bin/python" -m pytest -m upstream ${ARGS:-} \
        $(grep -rl --include='test_*.py' mark.upstream tests) || failed="$failed $release"
done
[ -z "$failed" ] || fail "failed with vllm$failed"
