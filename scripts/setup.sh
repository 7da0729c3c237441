#!/bin/sh
# Makes .venv and installs moedoctor with its development tools into it. Does and says nothing where that is done.
#
# PYTHON  the interpreter to make .venv with; empty: python3, or whatever .venv was made with
# TORCH   the torch release to install; empty: any that pyproject.toml allows
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
stamp=.venv/.moedoctor-installed
oldest="(3, 10)"

fail() {
    echo "setup: $*" >&2
    exit 1
}

# The first interpreter on the path that is new enough, or nothing.
newer_python() {
    for name in python3.13 python3.12 python3.11 python3.10 python3.14 python3 python; do
        if new_enough "$name"; then
            echo "$name"
            return
        fi
    done
}

new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info[:2] < $oldest)" >/dev/null 2>&1
}

release_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# One line that says what is wrong with the interpreter $1 and what to do.
refuse_python() {
    if found=$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null); then
        problem="'$1' is Python $found"
    else
        problem="there is no working '$1'"
    fi
    other=$(newer_python)
    if [ -n "$other" ]; then
        fail "moedoctor needs Python 3.10 or newer, and $problem; choose one that is: make ${GOAL:-test} PYTHON=$other"
    fi
    fail "moedoctor needs Python 3.10 or newer, and $problem; install one, or name it: make ${GOAL:-test} PYTHON=/path/to/python3"
}

usable() {
    [ -x .venv/bin/python ] && new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1
}

make_venv() {
    python=${PYTHON:-python3}
    new_enough "$python" || refuse_python "$python"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "'$python' cannot make virtual environments (no ensurepip);" \
        "install it (Debian, Ubuntu: apt-get install python$(release_of "$python")-venv), then run make again"
    if [ -e .venv ] && [ ! -e .venv/pyvenv.cfg ]; then
        fail "$root/.venv is there and is no virtual environment; move it away, then run make again"
    fi
    # `python3` may be the very .venv that is about to go: take the interpreter that it was made with.
    python=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)')
    rm -rf .venv
    "$python" -m venv .venv || fail "'$python' -m venv .venv failed: see above"
}

# Everything that decides what is in .venv. A clone that was moved has scripts that point to where it was.
wanted="$root torch==${TORCH:-any} $(cksum <pyproject.toml)"

if [ -e "$stamp" ] && [ -x .venv/bin/python ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    if [ -z "${PYTHON:-}" ] || [ "$(release_of "$PYTHON")" = "$(release_of .venv/bin/python)" ]; then
        exit 0
    fi
fi

moved=
[ ! -e "$stamp" ] || case $(cat "$stamp") in "$root "*) ;; *) moved=yes ;; esac
rm -f "$stamp" # from here on, an interruption leaves .venv to be completed by the next call
if [ -n "$moved" ] || ! usable ||
    { [ -n "${PYTHON:-}" ] && [ "$(release_of "$PYTHON")" != "$(release_of .venv/bin/python)" ]; }; then
    make_venv
fi

echo "setup: installing moedoctor${TORCH:+ with torch==$TORCH} into .venv; the first time this takes minutes" >&2
quiet=--quiet
[ -t 2 ] && quiet=
.venv/bin/python -m pip install $quiet --no-compile --disable-pip-version-check --no-input ${TORCH:+"torch==$TORCH"} \
    --editable '.[dev]' >&2 || fail "installing failed: see above; mend it and run make again"
# To compile all of torch takes pip a minute; what is imported is compiled once, though later calls may not write it.
PYTHONDONTWRITEBYTECODE= .venv/bin/python -c 'import torch' || true
echo "$wanted" >"$stamp"
