# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""attention: against a softmax written out, and trees against their own paths."""

import math

import pytest
import torch
from _load import load
from _oracle import generator, naive_ancestors, randint, random_parents

attention = load("attention")
tree_module = load("tree")

TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}


def softmax_attention(query, key, value, mask, scale):
    """Row by row in float64; mask [query_len, seq_len] bool or None."""
    query_len, num_heads, _ = query.shape
    groups = num_heads // key.shape[0]
    out = torch.zeros_like(query, dtype=torch.float64)
    for head in range(num_heads):
        k = key[head // groups].double()
        v = value[head // groups].double()
        for row in range(query_len):
            logits = k @ query[row, head].double() * scale
            if mask is not None:
                logits = logits.masked_fill(~mask[row], -math.inf)
            out[row, head] = torch.softmax(logits, 0) @ v
    return out


def qkv(gen, query_len, seq_len, num_heads=4, num_kv_heads=2, head_size=8):
    def rand(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    return (
        rand(query_len, num_heads, head_size),
        rand(num_kv_heads, seq_len, head_size),
        rand(num_kv_heads, seq_len, head_size),
    )


def ancestor_rows(parents):
    """[rows, rows] bool, written out."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row in range(len(parents)):
        mask[row, list(naive_ancestors(parents, row))] = True
    return mask


# request_mask


@pytest.mark.parametrize(("query_len", "seq_len"), [(2, 2), (5, 5), (3, 9), (7, 40)])
def test_causal_mask(query_len, seq_len):
    mask = attention.request_mask(query_len, seq_len)
    for row in range(query_len):
        for slot in range(seq_len):
            assert mask[row, slot] == (slot <= seq_len - query_len + row)


def test_no_mask_where_all_is_visible():
    assert attention.request_mask(1, 9) is None
    assert attention.request_mask(5, 9, causal=False) is None


@pytest.mark.parametrize("case", range(6))
def test_tree_mask_behind_a_prompt_tail(case):
    """Prompt rows in front of the tree stay causal and do not see the tree."""
    gen = generator(case)
    parents = random_parents(gen, randint(gen, 1, 12))
    tail, context = randint(gen, 0, 5), randint(gen, 0, 9)
    rows = len(parents)
    query_len, seq_len = tail + rows, context + tail + rows
    mask = attention.request_mask(query_len, seq_len, tree=ancestor_rows(parents))
    for row in range(query_len):
        if row < tail:
            visible = set(range(context + row + 1))
        else:
            ancestors = naive_ancestors(parents, row - tail)
            visible = set(range(context + tail))
            visible |= {context + tail + ancestor for ancestor in ancestors}
        assert set(mask[row].nonzero().flatten().tolist()) == visible


def test_a_tree_never_sees_more_than_a_chain():
    gen = generator(0)
    for _ in range(20):
        tree = ancestor_rows(random_parents(gen, 15))
        mask = attention.request_mask(18, 30, tree=tree)
        causal = attention.request_mask(18, 30)
        assert not (mask & ~causal).any()


def test_a_root_alone_is_plain_decoding():
    mask = attention.request_mask(1, 6, tree=torch.ones(1, 1, dtype=torch.bool))
    assert mask.all() and mask.shape == (1, 6)


def test_tree_larger_than_the_request_is_named():
    with pytest.raises(ValueError, match="tree of 4 rows in a request of 3 queries"):
        attention.request_mask(3, 9, tree=torch.ones(4, 4, dtype=torch.bool))


# masked_attention


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (5, 1)]
)
@pytest.mark.parametrize("masked", [True, False])
def test_against_softmax(num_heads, num_kv_heads, masked):
    gen = generator(num_heads)
    query, key, value = qkv(gen, 5, 11, num_heads, num_kv_heads)
    mask = torch.rand(5, 11, generator=gen) < 0.5 if masked else None
    if masked:
        mask[:, 0] = True
    out = attention.masked_attention(query, key, value, mask, 0.3)
    expected = softmax_attention(query, key, value, mask, 0.3)
    assert out.shape == query.shape
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    gen = generator(1)
    query, key, value = (x.to(dtype) for x in qkv(gen, 4, 20))
    out = attention.masked_attention(query, key, value, None, 0.3)
    assert out.dtype == dtype
    expected = softmax_attention(query, key, value, None, 0.3)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_heads_read_their_own_kv_head():
    """Only KV head 1 changes: heads 0 and 1 of four must not notice."""
    query, key, value = qkv(generator(2), 3, 7)
    before = attention.masked_attention(query, key, value, None, 0.3)
    value = value.clone()
    value[1] += 1
    after = attention.masked_attention(query, key, value, None, 0.3)
    assert torch.equal(before[:, :2], after[:, :2])
    torch.testing.assert_close(after[:, 2:], before[:, 2:] + 1, **TOLERANCE)


# Trees


@pytest.mark.parametrize("case", range(8))
def test_tree_row_equals_its_path_as_a_chain(case):
    """Row i sees exactly what it would see if its path had been decoded plainly."""
    gen = generator(100 + case)
    parents = random_parents(gen, randint(gen, 1, 16))
    tail, context = randint(gen, 0, 4), randint(gen, 1, 9)
    start, query_len = context + tail, tail + len(parents)
    query, key, value = qkv(gen, query_len, start + len(parents))
    mask = attention.request_mask(
        query_len, start + len(parents), tree=ancestor_rows(parents)
    )
    out = attention.masked_attention(query, key, value, mask, 0.3)
    for row in range(len(parents)):
        path = sorted(naive_ancestors(parents, row))
        slots = list(range(start)) + [start + node for node in path]
        queries = query[[tail + node for node in path]]
        chain = attention.masked_attention(
            queries,
            key[:, slots],
            value[:, slots],
            attention.request_mask(len(path), len(slots)),
            0.3,
        )
        torch.testing.assert_close(out[tail + row], chain[-1], **TOLERANCE)


def test_a_chain_shaped_tree_is_causal():
    query, key, value = qkv(generator(3), 6, 14)
    chain = ancestor_rows([-1, 0, 1, 2, 3, 4])
    tree_mask = attention.request_mask(6, 14, tree=chain)
    assert torch.equal(tree_mask, attention.request_mask(6, 14))


def test_sees_neither_siblings_nor_later_nodes():
    """Changing a row that is no ancestor changes nothing, to the last bit."""
    gen = generator(4)
    parents = [-1, 0, 0, 1, 2, 3]
    query, key, value = qkv(gen, 6, 10)
    mask = attention.request_mask(6, 10, tree=ancestor_rows(parents))
    before = attention.masked_attention(query, key, value, mask, 0.3)
    for node in range(6):
        changed = value.clone()
        changed[:, 4 + node] += 7
        after = attention.masked_attention(query, key, changed, mask, 0.3)
        for row in range(6):
            seen = node in naive_ancestors(parents, row)
            assert torch.equal(before[row], after[row]) != seen


# The paged cache


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("case", range(3))
def test_store_then_gather(case, block_size):
    """What is written to a request's slots is read back in order, others untouched."""
    gen = generator(200 + case)
    seq_len = randint(gen, 1, 3 * block_size)
    blocks = -(-seq_len // block_size)
    num_blocks = blocks + 3
    block_ids = torch.randperm(num_blocks, generator=gen)[:blocks].to(torch.int32)
    cache = torch.full((num_blocks, 2, block_size, 16), -5.0)
    key = torch.randn(seq_len, 2, 8, generator=gen)
    value = torch.randn(seq_len, 2, 8, generator=gen)
    position = torch.arange(seq_len)
    slots = block_ids[position // block_size].long() * block_size
    slots += position % block_size
    attention.store_kv(cache, key, value, slots)
    keys, values = attention.gather_kv(cache, block_ids, seq_len)
    assert torch.equal(keys, key.transpose(0, 1))
    assert torch.equal(values, value.transpose(0, 1))
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
    untouched[slots] = False
    rows = cache.transpose(1, 2).reshape(num_blocks * block_size, -1)
    assert (rows[untouched] == -5.0).all()


def test_negative_slots_are_padding():
    cache = torch.zeros(2, 1, 4, 4)
    key, value = torch.ones(3, 1, 2), torch.full((3, 1, 2), 2.0)
    attention.store_kv(cache, key, value, torch.tensor([1, -1, 6]))
    written = cache.transpose(1, 2).reshape(8, 4)
    expected = torch.zeros(8, 4)
    expected[[1, 6]] = torch.tensor([1.0, 1.0, 2.0, 2.0])
    assert torch.equal(written, expected)


def test_rows_past_the_mapping_are_padding():
    cache = torch.zeros(1, 1, 4, 4)
    attention.store_kv(
        cache, torch.ones(4, 1, 2), torch.ones(4, 1, 2), torch.tensor([2, 3])
    )
    assert cache[0, 0].sum(1).tolist() == [0, 0, 4, 4]


def test_store_converts_to_the_cache_dtype():
    cache = torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)
    key = torch.full((1, 1, 2), 1 / 3)
    attention.store_kv(cache, key, key, torch.tensor([0]))
    assert torch.equal(cache[0, 0, 0], torch.full((4,), 1 / 3).bfloat16())


@pytest.mark.parametrize("block_size", [4, 16])
def test_batch_of_unequal_trees(block_size):
    """Trees of 0, 1, 5 and 15 nodes and a plain prefill, each as if it were alone.

    One row after the other goes through the cache, the masks of the batch padded to
    the widest tree, so that a wrong request or a stale row would show.
    """
    gen = generator(300)
    nodes = [5, 0, 15, 1]
    tails = [0, 3, 2, 0]
    contexts = [7, 0, block_size, 2 * block_size - 1]
    all_parents = [random_parents(gen, n) for n in nodes]
    width = 1 + max(nodes)
    parents = torch.full((len(nodes), width), -1)
    for row, one in enumerate(all_parents):
        parents[row, : len(one)] = torch.tensor(one)
    masks = tree_module.ancestor_mask(parents.to(torch.int32), torch.tensor(nodes))
    batch = attention.TreeMask(masks, nodes)

    cache = torch.zeros(40, 2, block_size, 16, dtype=torch.float64)
    free = torch.randperm(40, generator=gen).to(torch.int32)
    for row, (n, tail, context) in enumerate(zip(nodes, tails, contexts, strict=True)):
        query_len = tail + 1 + n
        seq_len = context + query_len
        blocks, free = free[: -(-seq_len // block_size)], free[9:]
        query, key, value = qkv(gen, query_len, seq_len)
        position = torch.arange(seq_len)
        slots = blocks[position // block_size].long() * block_size
        slots += position % block_size
        attention.store_kv(cache, key.transpose(0, 1), value.transpose(0, 1), slots)
        tree = batch.mask[row, : n + 1, : n + 1] if n else None
        mask = attention.request_mask(query_len, seq_len, tree=tree)
        keys, values = attention.gather_kv(cache, blocks, seq_len)
        out = attention.masked_attention(query, keys, values, mask, 0.3)

        written_out = torch.ones(query_len, seq_len, dtype=torch.bool)
        written_out = written_out.tril(seq_len - query_len)
        written_out[tail:, context + tail :] = ancestor_rows(all_parents[row])
        expected = softmax_attention(query, key, value, written_out, 0.3)
        torch.testing.assert_close(out, expected, **TOLERANCE)
