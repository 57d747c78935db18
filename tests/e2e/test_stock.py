# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Stock vLLM loads the bundled pair and decodes as the patched one: a fair baseline."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _decode import ROOT, run_jobs
from conftest import assert_same

import ddtree_cpu as cpu

LARGE = 1 << 20  # bytes; libraries are linked, not copied
CHAIN = cpu.chain(15)
GREEDY = {"max_tokens": 48}


def link_or_copy(source: str, target: str) -> None:
    path = Path(source)
    if path.suffix != ".py" and path.stat().st_size > LARGE:
        Path(target).symlink_to(path)
    else:
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def stock_site(tmp_path_factory) -> Path:
    """A copy of the installed vLLM with its own files given back."""
    installed = Path(importlib.util.find_spec("vllm").origin).parents[1]
    site = tmp_path_factory.mktemp("stock")
    for source in [installed / "vllm", *installed.glob("vllm*.dist-info")]:
        shutil.copytree(source, site / source.name, copy_function=link_or_copy)
    done = subprocess.run(
        [sys.executable, str(ROOT / "apply.py"), "uninstall", "--site", str(site)]
        + (["--release", os.environ["RELEASE"]] if os.environ.get("RELEASE") else []),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (site / "vllm" / "v1" / "spec_decode" / "ddtree").exists()
    return site


def test_stock_vllm_runs_the_pair_like_the_patched_one(
    stock_site, tmp_path, prompts, plain
):
    found = run_jobs(
        tmp_path,
        prompts,
        [
            {"speculative": None, "params": [GREEDY]},
            {"speculative": CHAIN, "params": [GREEDY]},
        ],
        {"PYTHONPATH": str(stock_site)},
    )
    assert Path(found["vllm"]).is_relative_to(stock_site)
    assert not found["patched"]
    (stock_plain,), (stock_chain,) = found["runs"]

    assert_same(stock_plain, plain(prompts, **GREEDY))
    with cpu.engine(CHAIN) as llm:
        chain = cpu.decode(llm, prompts, **GREEDY)
    assert_same(chain, stock_chain)
    assert_same(stock_chain, stock_plain)
    # Not only the text: the drafter is fed and read in the same way.
    assert chain.steps == stock_chain.steps
    print(f"stock DFlash: {stock_chain.tokens_per_step:.2f} tokens a step")
    assert stock_chain.tokens_per_step >= 2.5
