#!/bin/sh
# What the tests of HTML reports need: says how to install a browser, and fetches axe-core into .browser/.
set -eu
AXE=4.14.1
cd "$(dirname "$0")/.."

found=
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then found=$name; break; fi
done
if [ -z "$found" ]; then
    echo "no browser: the tests in a browser are skipped; install one, such as: apt-get install chromium" >&2
fi
if [ ! -f .browser/package/axe.min.js ]; then
    if ! command -v npm >/dev/null 2>&1; then
        echo "no npm: the accessibility test is skipped; install it, such as: apt-get install npm" >&2
        exit 0
    fi
    mkdir -p .browser
    (cd .browser && npm pack --silent "axe-core@$AXE" >/dev/null && tar -xzf "axe-core-$AXE.tgz")
fi
