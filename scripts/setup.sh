#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
#
# Makes the virtual environment: `setup.sh tools` for the apply tool and the tests,
# `setup.sh vllm` for the pinned CPU wheel besides. Run by the Makefile.
#
# Environment: VENV (.venv), PYTHON (the newest of 3.12, 3.11, 3.10 that is here),
# INSTALLER (uv if there is one, else pip), TORCH_BACKEND (empty, or cpu; needs uv),
# RELEASE (the one that upstream.lock names). Exit codes: 0 done, 2 could not run.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-}
TORCH_BACKEND=${TORCH_BACKEND:-}
INSTALLER=${INSTALLER:-$(command -v uv >/dev/null 2>&1 && echo uv || echo pip)}
venv_python=$VENV/bin/python
# This script made the environment, and may make it anew.
made=$VENV/.ddtree-made
# A release on another torch than the default one has a file of its own.
torch=requirements/torch-${RELEASE:-}.txt
[ -f "$torch" ] || torch=requirements/torch.txt
# While this file is there, an installation was killed on its way.
unfinished=$VENV/.ddtree-unfinished

fail() {
    echo "error: $*" >&2
    exit 2
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
        >/dev/null 2>&1
}

find_python() {
    if [ -n "$PYTHON" ]; then
        supported "$PYTHON" && return
        version=$("$PYTHON" -V 2>&1) || version="cannot be run"
        fail "PYTHON=$PYTHON ($version): want Python 3.10, 3.11 or 3.12"
    fi
    for PYTHON in python3.12 python3.11 python3.10 python3; do
        supported "$PYTHON" && return
    done
    # uv can bring one.
    PYTHON=3.12
    [ "$INSTALLER" = uv ] ||
        fail "no Python 3.10, 3.11 or 3.12 found; install one and set PYTHON=/path/to/it"
}

make_venv() {
    if [ -e "$made" ] && [ -e "$unfinished" ]; then
        echo "$VENV: an installation was cut short, making it anew" >&2
        rm -rf "$VENV"
    fi
    if [ -d "$VENV" ] && [ -n "$(ls -A "$VENV")" ]; then
        [ -f "$VENV/pyvenv.cfg" ] ||
            fail "VENV=$VENV is a folder but no virtual environment; set VENV= to another"
        supported "$venv_python" ||
            fail "VENV=$VENV has no working Python 3.10 to 3.12; remove it"
        return
    fi
    find_python
    mkdir -p "$VENV"
    : >"$made"
    : >"$unfinished"
    if [ "$INSTALLER" = uv ]; then
        uv venv --quiet --allow-existing --python "$PYTHON" "$VENV"
    else
        "$PYTHON" -m venv "$VENV" ||
            fail "$PYTHON -m venv failed; install the venv package of this Python, or uv"
    fi
}

install() {
    : >"$unfinished"
    if [ "$INSTALLER" = uv ]; then
        set -- uv pip install --python "$venv_python" "$@"
    else
        set -- "$venv_python" -m pip install --disable-pip-version-check "$@"
    fi
    # A failure that the installer reports itself leaves nothing half written.
    "$@" || { rm -f "$unfinished" && fail "the installation failed, see above"; }
    rm -f "$unfinished"
}

install_vllm() {
    "$venv_python" scripts/pins.py check
    pinned=$VENV/pinned-wheel.txt
    "$venv_python" scripts/pins.py wheel "${RELEASE:-}" >"$pinned"
    if [ "$INSTALLER" = uv ]; then
        set -- -r "$pinned" --override "$torch"
        [ -z "$TORCH_BACKEND" ] || set -- "$@" --torch-backend "$TORCH_BACKEND"
        install "$@"
    else
        # pip has no overrides: torch first, the wheel alone, then the rest.
        install -r "$torch"
        install --no-deps --require-hashes -r "$pinned"
        "$venv_python" scripts/pins.py depends >"$VENV/depends.txt"
        install -r "$VENV/depends.txt" -c "$torch"
    fi
}

case $INSTALLER in
uv | pip) ;;
*) fail "INSTALLER=$INSTALLER: want uv or pip" ;;
esac
[ -z "$TORCH_BACKEND" ] || [ "$INSTALLER" = uv ] ||
    fail "TORCH_BACKEND=$TORCH_BACKEND needs uv; install uv, or unset it"
make_venv
install -r requirements/tools.txt
case ${1:-vllm} in
tools) ;;
vllm) install_vllm ;;
*) fail "setup.sh $1: want tools or vllm" ;;
esac
