# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Loads modules of the ddtree package from overlay/, without importing vLLM.

The unit tests must test the files of this repository, whether the installed vLLM is
stock, patched, or absent. Only modules that need nothing but torch can be loaded.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "vllm.v1.spec_decode.ddtree"
REPOSITORY = Path(__file__).resolve().parents[2]
DIRECTORY = REPOSITORY / "overlay" / Path(*PACKAGE.split("."))
GOLDEN = REPOSITORY / "tests" / "golden"

_loaded: dict[str, ModuleType] = {}


def load(name: str) -> ModuleType:
    """Returns the module ``name`` of the package, under its real dotted name.

    ``sys.modules`` is as before afterwards, so that other tests of the same process
    can import an installed vLLM.
    """
    full_name = f"{PACKAGE}.{name}"
    if full_name in _loaded:
        return _loaded[full_name]
    if not _loaded:
        # A bare package: its __init__ may import vLLM.
        package = ModuleType(PACKAGE)
        package.__path__ = [str(DIRECTORY)]
        _loaded[PACKAGE] = package
    kept = {key: sys.modules.pop(key) for key in list(sys.modules) if _is_ours(key)}
    sys.modules.update(_loaded)
    try:
        module = importlib.import_module(full_name)
        _loaded.update({k: m for k, m in sys.modules.items() if _is_ours(k)})
    finally:
        for key in [key for key in sys.modules if _is_ours(key)]:
            del sys.modules[key]
        sys.modules.update(kept)
    return module


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(PACKAGE + ".")
