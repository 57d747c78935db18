# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Refused and accepted speculative configs, each refusal with field and remedy.

Configurations are built as an engine builds them, but no engine starts.
"""

from __future__ import annotations

import copy

import pytest
from _refusals import DRAFTER, POSITIONS, TARGET, build, refusal, spec, variant

CHAIN = {"method": "dflash", "model": DRAFTER, "num_speculative_tokens": 7}
BUDGET_RANGE = ["set it to 1..127"]

SPECULATIVE = {
    "ddtree without budget": (
        {"method": "ddtree", "model": DRAFTER},
        ["method='ddtree'", "tree_budget", "set tree_budget to 1..127"],
    ),
    "budget None": (spec(None), ["method='ddtree'", "set tree_budget to 1..127"]),
    "budget 0": (spec(0), ["tree_budget=0", *BUDGET_RANGE]),
    "budget 128": (spec(128), ["tree_budget=128", *BUDGET_RANGE]),
    "budget -1": (spec(-1), ["tree_budget=-1", *BUDGET_RANGE]),
    "budget text": (spec("x"), ["tree_budget", "valid integer", "'x'"]),
    "budget fraction": (spec(1.5), ["tree_budget", "valid integer", "1.5"]),
    "more than one budget": (
        spec(num_speculative_tokens=7),
        [
            "num_speculative_tokens=7",
            "tree_budget=31",
            "remove num_speculative_tokens",
        ],
    ),
    "unknown policy": (
        spec(tree_policy="widest"),
        ["tree_policy", "'best_first' or 'spine_first'", "'widest'"],
    ),
    "policy without budget": (
        {**CHAIN, "tree_policy": "best_first"},
        ["tree_policy='best_first'", "set tree_budget", "remove tree_policy"],
    ),
    "positions without budget": (
        {**CHAIN, "num_draft_positions": 3},
        ["num_draft_positions=3", "set tree_budget", "remove num_draft_positions"],
    ),
    "no positions": (
        spec(num_draft_positions=0),
        ["num_draft_positions=0", "block_size=16", f"set it to 1..{POSITIONS}"],
    ),
    "a position too many": (
        spec(num_draft_positions=POSITIONS + 1),
        ["num_draft_positions=16", "block_size=16", f"set it to 1..{POSITIONS}"],
    ),
    "no drafter": (
        {"method": "ddtree", "tree_budget": 31},
        ["tree_budget=31", "model", "DFlash drafter"],
    ),
    "another method": (
        spec(method="eagle"),
        ["tree_budget=31", "method='eagle'", "use method='ddtree'"],
    ),
    "ngram": (
        {"method": "ngram", "prompt_lookup_max": 3, "tree_budget": 31},
        ["tree_budget=31", "method='ngram'", "use method='ddtree'"],
    ),
    "target as drafter": (
        spec(model=TARGET),
        [f"model={TARGET!r}", "Qwen3ForCausalLM", "no DFlash drafter"],
    ),
    "sampled drafts": (
        spec(draft_sample_method="probabilistic"),
        ["draft_sample_method='probabilistic'", "set it to 'greedy'"],
    ),
    "block verification": (
        spec(rejection_sample_method="block"),
        ["rejection_sample_method='block'", "set it to 'standard'"],
    ),
    "synthetic acceptance": (
        spec(rejection_sample_method="synthetic", synthetic_acceptance_length=2.0),
        ["rejection_sample_method='synthetic'", "set it to 'standard'"],
    ),
    "synthetic rates": (
        spec(1, synthetic_acceptance_rates=[0.5]),
        ["synthetic_acceptance_rates=[0.5]", "remove it"],
    ),
    "synthetic length": (
        spec(synthetic_acceptance_length=2.0),
        ["synthetic_acceptance_length=2.0", "remove it"],
    ),
    "unpadded drafter batch": (
        spec(disable_padded_drafter_batch=True),
        ["disable_padded_drafter_batch=True", "set it to False"],
    ),
    "local argmax": (
        spec(use_local_argmax_reduction=True),
        ["use_local_argmax_reduction=True", "set it to False"],
    ),
    "other vocabulary": (
        spec(use_heterogeneous_vocab=True),
        ["use_heterogeneous_vocab=True", "set it to False"],
    ),
    "dynamic schedule": (
        spec(num_speculative_tokens_per_batch_size=[(1, 8, 31)]),
        ["num_speculative_tokens_per_batch_size=[(1, 8, 31)]", "remove it"],
    ),
    "drafter's KV dtype": (
        spec(kv_cache_dtype="fp8"),
        ["speculative_config.kv_cache_dtype='fp8'", "remove it"],
    ),
    "drafter's backend": (
        spec(attention_backend="FLASH_ATTN"),
        ["speculative_config.attention_backend='FLASH_ATTN'", "remove it"],
    ),
    "EAGLE's static tree": (
        spec(speculative_token_tree="[(0,)]"),
        ["speculative_token_tree", "Unexpected keyword argument"],
    ),
}


@pytest.mark.parametrize("case", SPECULATIVE)
def test_speculative_config(case):
    fields, words = SPECULATIVE[case]
    message = refusal(fields)
    for word in words:
        assert word in message, message


def test_drafter_without_block_size(tmp_path):
    drafter = variant(tmp_path, DRAFTER, drop=("block_size",))
    message = refusal(spec(model=drafter))
    for word in (f"model={drafter!r}", "no block_size", "set num_draft_positions"):
        assert word in message
    config = build(spec(model=drafter, num_draft_positions=7))
    assert config.speculative_config.num_draft_positions == 7


def test_drafter_of_block_size_1(tmp_path):
    message = refusal(spec(model=variant(tmp_path, DRAFTER, block_size=1)))
    assert "block_size=1" in message and "at least 2" in message


def test_sliding_window_drafter(tmp_path):
    drafter = variant(
        tmp_path,
        DRAFTER,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        use_sliding_window=True,
        sliding_window=64,
    )
    message = refusal(spec(model=drafter))
    for word in ("speculative_config.model", drafter, "sliding-window", "use a full"):
        assert word in message


def test_missing_drafter_is_upstreams_error(tmp_path):
    path = str(tmp_path / "absent")
    with pytest.raises(ValueError, match="Invalid repository ID or local directory"):
        build(spec(model=path))


# What is accepted.


def test_defaults():
    config = build()
    speculative = config.speculative_config
    assert speculative.method == "dflash"
    assert speculative.use_ddtree()
    assert speculative.tree_policy == "best_first"
    assert speculative.num_draft_positions == POSITIONS
    assert speculative.num_speculative_tokens == 31
    assert config.attention_config.backend.name == "TREE_ATTN"


@pytest.mark.parametrize("budget", [1, 127])
def test_budget_limits(budget):
    assert build(spec(budget)).speculative_config.num_speculative_tokens == budget


def test_dflash_with_a_budget_is_ddtree():
    fields = ("method", "tree_budget", "tree_policy", "num_draft_positions")
    ours, theirs, bare = (
        build(value).speculative_config
        for value in (
            spec(),
            spec(method="dflash"),
            {"model": DRAFTER, "tree_budget": 31},
        )
    )
    for name in fields:
        assert getattr(ours, name) == getattr(theirs, name) == getattr(bare, name)
    assert ours.compute_hash() == theirs.compute_hash()


def test_chain_is_untouched():
    config = build(CHAIN)
    assert not config.speculative_config.use_ddtree()
    assert config.speculative_config.num_draft_positions is None
    assert config.attention_config.backend is None
    # What DDTree refuses stays upstream's business without a tree.
    build(CHAIN, kv_cache_dtype="bfloat16", block_size=8)


def test_hash_tells_trees_from_chains():
    tree, wider, chain = (
        build(value).speculative_config.compute_hash()
        for value in (spec(7), spec(31), CHAIN)
    )
    assert len({tree, wider, chain}) == 3


def test_validation_is_idempotent():
    """Upstream builds configs again from their own fields, for the drafter too."""
    from dataclasses import replace

    fields = spec(tree_policy="spine_first", num_draft_positions=7)
    config = build(fields)
    assert fields == spec(tree_policy="spine_first", num_draft_positions=7)
    speculative = config.speculative_config
    again = copy.copy(speculative)
    again.__post_init__()
    drafter = replace(
        config, attention_config=replace(config.attention_config, backend=None)
    )
    for other in (again, drafter.speculative_config):
        for name in (
            "method",
            "tree_budget",
            "tree_policy",
            "num_draft_positions",
            "num_speculative_tokens",
        ):
            assert getattr(other, name) == getattr(speculative, name)
    assert again.num_draft_positions == 7
    assert drafter.attention_config.backend.name == "TREE_ATTN"


def test_explicit_tree_backend():
    assert build(attention_backend="TREE_ATTN").attention_config.backend is not None
    build(spec(attention_backend="TREE_ATTN"))


@pytest.mark.parametrize("asked", [True, False, None])
def test_async_scheduling_is_off_on_a_cpu(asked):
    """Upstream's platform switches it off, asked for or not: nothing to refuse."""
    config = build(async_scheduling=asked)
    assert config.scheduler_config.async_scheduling is False


def test_drafter_shorter_than_the_target():
    config = build(spec(max_model_len=64))
    assert config.speculative_config.draft_model_config.max_model_len == 64
