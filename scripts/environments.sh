# Environments of other releases, for scripts that source this file: made once, kept, and completed if a run was cut off.
# TORCH is the torch release of .venv-upstream; empty: any that pyproject.toml allows.
home=.venv-upstream

fail() {
    echo "$(basename "$0" .sh): $*" >&2
    exit 1
}

say() {
    echo "$(basename "$0" .sh): $*" >&2
}

# The releases of vLLM that are tested, oldest first.
vllm_releases() {
    sed -n 's/^vllm //p' scripts/releases.txt
}

# Installs with the pip of environment $1.
install() {
    environment=$1
    shift
    "$environment/bin/python" -m pip install "$@" --quiet --disable-pip-version-check --no-input >&2
}

# The release of package $2 that the vLLM in folder $1 requires, or nothing.
pinned() {
    sed -n "s/^Requires-Dist: $2\(\[[a-z0-9]*\]\)\{0,1\} *==\([0-9a-z.]*\).*/\2/p" "$1"/vllm-*.dist-info/METADATA | head -n 1
}

# Makes the environment $1 unless it is there for what $2 says; the rest are arguments of pip install.
environment() {
    place=$1 wanted="$(pwd) $2 $(cat pyproject.toml scripts/upstream-requirements.txt | cksum)"
    shift 2
    [ "$(cat "$place/.moedoctor-installed" 2>/dev/null || true)" != "$wanted" ] || return 0
    rm -f "$place/.moedoctor-installed"
    say "making $place; the first time this takes minutes"
    [ -x "$place/bin/python" ] || .venv/bin/python -m venv "$place" || fail ".venv/bin/python -m venv $place failed"
    install "$place" "$@" || fail "installing failed: see above; mend it and run make again"
    echo "$wanted" >"$place/.moedoctor-installed"
}

# Makes .venv-upstream, with what vLLM and FlashInfer import.
upstream_environment() {
    environment "$home" "torch==${TORCH:-any}" ${TORCH:+"torch==$TORCH"} --editable '.[dev]' -r scripts/upstream-requirements.txt
}

# Makes an environment with torch $1 and with what vLLM and FlashInfer import: for this torch, and for each vLLM that pins it.
torch_environment() {
    environment ".venv-releases/torch-$1" "torch==$1" "torch==$1" --editable . -r scripts/upstream-requirements.txt
}

# Fetches vLLM $1 with what it requires of the packages that decide its answers into $home/releases/$1, about 1 GB.
vllm_folder() {
    folder=$home/releases/$1
    [ ! -e "$folder/.complete" ] || return 0
    say "fetching vllm $1"
    rm -rf "$folder"
    install .venv --no-deps --target "$folder" "vllm==$1" || fail "vllm $1 cannot be installed: see above"
    set --
    for package in compressed-tensors flashinfer-python humming-kernels; do # no CUTLASS DSL: FlashInfer's use of it needs CUDA
        version=$(pinned "$folder" "$package")
        [ -z "$version" ] || set -- "$@" "$package==$version"
    done
    install .venv --no-deps --target "$folder" "$@" || fail "$* cannot be installed: see above"
    # transformers checks what it requires when it is imported, so that comes with it.
    set -- "$(sed -n 's/^Requires-Dist: \(transformers[^;]*\).*/\1/p' "$folder"/vllm-*.dist-info/METADATA)"
    install .venv --target "$folder" "$1" || fail "$1 cannot be installed: see above"
    touch "$folder/.complete"
}

# Prints the path of the wheel of vLLM $1; fetches it if it is not there, about 0.5 GB.
vllm_wheel() {
    wheels=.venv-releases/wheels
    set -- "$1" "$wheels/vllm-$1"-*.whl
    if [ ! -e "$2" ]; then
        say "fetching the wheel of vllm $1"
        .venv/bin/python -m pip download --no-deps --dest "$wheels" "vllm==$1" --quiet --disable-pip-version-check --no-input >&2 ||
            fail "the wheel of vllm $1 cannot be fetched: see above"
        set -- "$1" "$wheels/vllm-$1"-*.whl
    fi
    echo "$2"
}
