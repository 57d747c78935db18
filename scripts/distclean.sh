#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
#
# Removes build/ and the virtual environment. Refuses while a work tree under build/
# holds commits or edits of its own, unless FORCE=1. Exit codes: 0 done, 1 refused.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}

edited() {
    "$VENV/bin/python" - "$1" <<'PY'
import json, subprocess, sys

done = subprocess.run(
    [sys.executable, "apply.py", "status", "--json", "--release", sys.argv[1]],
    capture_output=True,
    text=True,
)
try:
    found = json.loads(done.stdout)
    keep = found["edited"] or found["extra_commits"] or found["conflict"]
except (ValueError, KeyError):
    keep = True
sys.exit(0 if keep else 1)
PY
}

for tree in build/vllm-*/; do
    release=v${tree#build/vllm-}
    release=${release%/}
    [ -d "$tree" ] || continue
    if [ "${FORCE:-}" != 1 ] &&
        { [ ! -x "$VENV/bin/python" ] || edited "$release"; }; then
        echo "error: ${tree%/} may hold edits that are not exported; run" \
            "\`make export\`, or FORCE=1 make distclean to lose them" >&2
        exit 1
    fi
done
rm -rf build
# Only an environment that setup.sh made; VENV= may name somebody's own.
[ ! -e "$VENV/.ddtree-made" ] || rm -rf "$VENV"
