#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Fetch the pinned vLLM, apply the patch series, install it. See ``--help``."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Module name -> name of the package that brings it.
NEEDS = {
    "git": "GitPython",
    "packaging": "packaging",
    "pypi_simple": "pypi-simple",
    "requests": "requests",
    "rich": "rich",
    "tomlkit": "tomlkit",
    "tqdm": "tqdm",
}


def _missing():
    from importlib.util import find_spec

    return [name for name in NEEDS if find_spec(name) is None]


def _start():
    if sys.version_info < (3, 10):  # noqa: UP036
        found = ".".join(str(part) for part in sys.version_info[:3])
        # This file has to parse on an old Python, hence no f-string here.
        sys.stderr.write(
            "apply.py: needs Python 3.10 or newer, this is %s; "  # noqa: UP031
            "run `make setup`, then .venv/bin/python apply.py\n" % found
        )
        return 2
    missing = _missing()
    if missing:
        python = os.path.join(HERE, ".venv", "bin", "python")
        inside = os.path.realpath(sys.prefix) == os.path.realpath(
            os.path.join(HERE, ".venv")
        )
        if os.access(python, os.X_OK) and not inside:
            os.execv(python, [python, os.path.abspath(__file__), *sys.argv[1:]])
        wanted = ", ".join(NEEDS[name] for name in missing)
        sys.stderr.write(
            f"apply.py: {wanted} cannot be imported by {sys.executable}; "
            "run `make setup`\n"
        )
        return 2
    sys.path.insert(0, HERE)
    from patchset.cli import main

    return main(sys.argv[1:], root=HERE)


if __name__ == "__main__":
    sys.exit(_start())
