# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Engine configurations with a tree, built as an engine builds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ddtree_cpu as cpu

DRAFTER = str(cpu.PAIR / "drafter")
TARGET = str(cpu.PAIR / "target")
POSITIONS = 15  # the bundled drafter's block size minus 1


def spec(budget: Any = 31, **fields: Any) -> dict[str, Any]:
    return {"method": "ddtree", "model": DRAFTER, "tree_budget": budget, **fields}


def build(speculative: dict[str, Any] | None = None, **args: Any):
    from vllm.engine.arg_utils import EngineArgs

    settings = {
        "model": TARGET,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "speculative_config": spec() if speculative is None else speculative,
        **args,
    }
    return EngineArgs(**settings).create_engine_config()


def refusal(*args: Any, **kwargs: Any) -> str:
    """The message of the refusal, in one line and without pydantic's frame."""
    with pytest.raises(ValueError) as error:
        build(*args, **kwargs)
    if hasattr(error.value, "errors"):
        found = error.value.errors()
        assert len(found) == 1, found
        place = ".".join(map(str, found[0]["loc"]))
        message = f"{place}: {found[0]['msg']} (got {found[0]['input']!r:.200})"
        message = message if place else found[0]["msg"]
    else:
        message = str(error.value)
    assert "\n" not in message
    return message


def variant(
    tmp_path: Path, source: str, drop: tuple[str, ...] = (), **changes: Any
) -> str:
    """A model directory with a changed config.json and nothing else."""
    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    config.update(changes)
    for name in drop:
        config.pop(name, None)
        config.get("dflash_config", {}).pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)
