#!/bin/sh
# Runs the tests marked `upstream` against real releases of vLLM, each with the FlashInfer and Humming that it requires.
# No GPU is needed. Everything is kept in .venv-upstream, about 1 GB a release; what is there is not fetched again.
#
# VLLM    the releases, with spaces between
# TORCH   the torch release to install; empty: any that pyproject.toml allows
# ARGS    more arguments for pytest
set -eu
cd "$(dirname "$0")/.."
home=.venv-upstream
stamp=$home/.moedoctor-installed
wanted="$(pwd) torch==${TORCH:-any} $(cat pyproject.toml scripts/upstream-requirements.txt | cksum)"

fail() {
    echo "test-upstream: $*" >&2
    exit 1
}

pip() {
    "$home/bin/python" -m pip "$@" --quiet --disable-pip-version-check --no-input >&2
}

# The release of package $2 that the vLLM in folder $1 requires, or nothing.
pinned() {
    sed -n "s/^Requires-Dist: $2\(\[[a-z0-9]*\]\)\{0,1\} *==\([0-9a-z.]*\).*/\2/p" "$1"/vllm-*.dist-info/METADATA | head -n 1
}

if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    rm -f "$stamp"
    echo "test-upstream: making $home; the first time this takes minutes" >&2
    [ -x "$home/bin/python" ] || .venv/bin/python -m venv "$home" || fail ".venv/bin/python -m venv $home failed"
    pip install ${TORCH:+"torch==$TORCH"} --editable '.[dev]' -r scripts/upstream-requirements.txt ||
        fail "installing failed: see above; mend it and run make again"
    echo "$wanted" >"$stamp"
fi

failed=
for release in ${VLLM:-0.21.0}; do
    folder=$home/releases/$release
    if [ ! -e "$folder/.complete" ]; then
        echo "test-upstream: fetching vllm $release" >&2
        rm -rf "$folder"
        pip install --no-deps --target "$folder" "vllm==$release" || fail "vllm $release cannot be installed: see above"
        set --
        for package in flashinfer-python humming-kernels; do # no CUTLASS DSL: FlashInfer's use of it needs CUDA
            version=$(pinned "$folder" "$package")
            [ -z "$version" ] || set -- "$@" "$package==$version"
        done
        pip install --no-deps --target "$folder" "$@" || fail "$* cannot be installed: see above"
        touch "$folder/.complete"
    fi
    echo "test-upstream: vllm $release, flashinfer-python $(pinned "$folder" flashinfer-python)" >&2
    # Python finds packages and their metadata there first.
    PYTHONPATH="$(pwd)/$folder" "$home/bin/python" -m pytest -m upstream ${ARGS:-} || failed="$failed $release"
done
[ -z "$failed" ] || fail "failed with vllm$failed"
