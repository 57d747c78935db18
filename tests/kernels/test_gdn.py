# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Gated delta kernels against the PyTorch reference, in the interpreter or on a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _gdn import (
    WIDTH,
    Layer,
    close,
    forward,
    make_batch,
    make_layer,
    random_tree,
    reference,
)

from vllm.v1.spec_decode.ddtree import gdn, gdn_v2
from vllm.v1.spec_decode.ddtree.kernels import gdn_conv
from vllm.v1.spec_decode.ddtree.kernels.gdn_commit import GDNCommitter, GDNLayer

SEED = int(os.environ.get("DDTREE_TEST_SEED", "0"))
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "gdn_tree.npz"
ON_GPU = torch.cuda.is_available()
# bfloat16 products are silently wrong in the interpreter.
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]


CASES = [
    # dims (Hk, Hv, Dk, Dv), budget, positions, nodes (None: no tree), lengths, bias
    ((1, 1, 16, 16), 3, 3, [3], [4], True),
    ((2, 4, 16, 24), 7, 3, [7, 5, None, 1], [8, 6, 3, 2], False),
    ((1, 3, 64, 32), 31, 15, [31, None, 20], [32, 1, 21], True),
    ((2, 2, 20, 16), 40, 8, [40, 33], [41, 34], True),
    # Two blocks of rows.
    ((1, 2, 16, 16), 80, 15, [80, 70, None, 9], [81, 71, 66, 10], False),
]
if ON_GPU:
    CASES += [
        ((16, 48, 128, 128), 63, 15, [63] * 7 + [None], [64] * 7 + [64], False),
        ((2, 4, 128, 128), 127, 31, [127, 100, 127], [128, 101, 128], True),
        ((1, 2, 256, 256), 63, 15, [63, 10], [64, 11], True),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims, budget, positions, nodes, lengths, bias", CASES)
def test_forward_and_commit(
    device, dims, budget, positions, nodes, lengths, bias, dtype
):
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED + budget)
    reqs = len(lengths)
    parents = [None if n is None else random_tree(gen, n, positions) for n in nodes]
    blocks = (torch.randperm(reqs, generator=gen) + 1).tolist()
    batch = make_batch(device, budget, positions, parents, lengths, blocks)
    layers = [
        make_layer(gen, dims, sum(lengths), reqs + 1, dtype, device, bias, last)
        for last in ((True, True) if bias else (False, False))
    ]
    scratches = []
    for layer in layers:
        before = layer.conv_state.clone(), layer.ssm_state.clone()
        mixed, out, scratch = forward(layer, batch)
        scratches.append(scratch)
        for r in range(reqs):
            first, last = batch.starts[r : r + 2].tolist()
            want = reference(layer, batch, r)
            close(mixed[first:last], want[0], dtype)
            close(out[first:last], want[1], dtype)
        # The forward pass only reads.
        assert torch.equal(layer.conv_state, before[0])
        assert torch.equal(layer.ssm_state, before[1])

    # Every request accepts a random path; the last one was not walked.
    paths = []
    for r in range(reqs):
        row = int(torch.randint(0, lengths[r], (), generator=gen))
        path = [row]
        while batch.parents[r][path[-1]] >= 0:
            path.append(batch.parents[r][path[-1]])
        paths.append(path[::-1][: positions + 1])
    walked = [reqs == 1 or r != reqs - 1 for r in range(reqs)]
    counts = [len(p) if w else 0 for p, w in zip(paths, walked, strict=True)]
    path = torch.zeros(reqs, positions + 1, dtype=torch.int32)
    for r, mine in enumerate(paths):
        path[r, : len(mine)] = torch.tensor(mine)
    before = [(x.conv_state.clone(), x.ssm_state.clone()) for x in layers]
    committer = GDNCommitter(
        [
            GDNLayer(s, x.conv_state, x.ssm_state, 1)
            for x, s in zip(layers, scratches, strict=True)
        ],
        dims[0],
        positions,
    )
    unused = torch.zeros(reqs, 3, dtype=torch.int32, device=device)
    committer.commit(
        [unused, batch.indices],
        path.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        batch.starts,
        batch.starts,
        reqs,
    )
    for layer, (conv, ssm) in zip(layers, before, strict=True):
        assert torch.equal(layer.ssm_state[0], ssm[0])
        assert torch.equal(layer.conv_state[0], conv[0])
        for r in range(reqs):
            block = blocks[r]
            if not walked[r]:
                assert torch.equal(layer.ssm_state[block], ssm[block])
                assert torch.equal(layer.conv_state[block], conv[block])
                continue
            _, _, k, v, gate = reference_before(layer, batch, r, conv, ssm)
            mine = torch.tensor(paths[r])
            want = gdn.commit_path(k, v, gate, ssm[block].cpu(), mine)
            close(layer.ssm_state[block], want, dtype, 0.3)
            first, last = batch.starts[r : r + 2].tolist()
            history = gdn.commit_history(
                layer.x[first:last].cpu(), conv[block].T.cpu(), mine
            )
            assert torch.equal(layer.conv_state[block].T.cpu(), history)


def reference_before(layer, batch, r, conv, ssm):
    """The reference from the states before the commit."""
    now = layer.conv_state, layer.ssm_state
    layer.conv_state, layer.ssm_state = conv, ssm
    found = reference(layer, batch, r)
    layer.conv_state, layer.ssm_state = now
    return found


@pytest.mark.parametrize("index", range(6))
def test_golden(device, index):
    held = np.load(GOLDEN)

    def get(name):
        return torch.from_numpy(held[f"{index}_{name}"])

    parents = get("parents").tolist()
    rows = len(parents)
    batch = make_batch(
        device, max(1, rows - 1), 31, [parents if rows > 1 else None], [rows], [1]
    )
    zeros = torch.zeros_like(get("conv_hist").T[None])
    layer = Layer(
        tuple(get("dims").tolist()),
        get("conv_weight").to(device),
        get("conv_bias").to(device),
        get("A_log").to(device),
        get("dt_bias").to(device),
        torch.cat([zeros, get("conv_hist").T[None]]).contiguous().to(device),
        torch.stack([torch.zeros_like(get("S0")), get("S0")])
        .mT.contiguous()
        .to(device),
        get("x").to(device),
        get("a").to(device),
        get("b").to(device),
    )
    _, out, scratch = forward(layer, batch)
    torch.testing.assert_close(out.cpu(), get("out"), rtol=1e-4, atol=1e-4)
    kept = GDNLayer(scratch, layer.conv_state, layer.ssm_state, 0)
    committer = GDNCommitter([kept], layer.dims[0], 31)
    path = torch.zeros(1, 32, dtype=torch.int32)
    count = len(get("path"))
    path[0, :count] = get("path")
    committer.commit(
        [batch.indices],
        path.to(device),
        torch.tensor([count], dtype=torch.int32, device=device),
        batch.starts,
        batch.starts,
        1,
    )
    torch.testing.assert_close(
        layer.ssm_state[1].mT.cpu(), get("state_after_path"), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(layer.conv_state[1].T.cpu(), get("conv_state_after_path"))


def test_rows_that_must_not_be_touched(device):
    """Padded requests (state 0), prefills, and empty ones keep output and scratch."""
    gen = torch.Generator().manual_seed(SEED)
    batch = make_batch(
        device, 3, 3, [random_tree(gen, 3, 3), None, None, None], [4, 9, 2, 0],
        [1, 2, 0, 3],
    )  # fmt: skip
    layer = make_layer(gen, (1, 2, 16, 16), 15, 4, torch.float32, device)
    mixed, out, scratch = forward(layer, batch)
    assert out[:4].abs().sum() > 0
    assert out[4:].abs().sum() == 0
    assert mixed[4:].abs().sum() == 0
    # The tree's own history and rows alone.
    assert scratch.x[: WIDTH - 1].abs().sum() > 0
    assert scratch.x[WIDTH - 1 : scratch.first].abs().sum() == 0
    assert scratch.x[scratch.first + 4 :].abs().sum() == 0
    assert scratch.gates[4:].abs().sum() == 0


def test_prompts_are_not_replayed_and_new_requests_start_at_zero(device):
    """Fewer rows of logits than tokens: the state is the prefill's. ``reset``."""
    gen = torch.Generator().manual_seed(SEED)
    parents = [random_tree(gen, 3, 3), None, None]
    batch = make_batch(device, 3, 3, parents, [4, 3, 1], [1, 2, 3])
    layer = make_layer(gen, (1, 2, 16, 16), 8, 5, torch.float32, device)
    scratch = forward(layer, batch)[2]
    mover = GDNCommitter(
        [GDNLayer(scratch, layer.conv_state, layer.ssm_state, 1)],
        1,
        3,
    )
    before = layer.conv_state.clone(), layer.ssm_state.clone()
    logits = torch.tensor([0, 4, 5, 6], dtype=torch.int32, device=device)
    path = torch.zeros(3, 4, dtype=torch.int32, device=device)
    ones = torch.ones(3, dtype=torch.int32, device=device)
    mover.commit([batch.indices] * 2, path, ones, batch.starts, logits, 3)
    for states, old in zip((layer.conv_state, layer.ssm_state), before, strict=True):
        moved = [not torch.equal(states[i], old[i]) for i in range(5)]
        assert moved == [False, True, False, True, False]
    mover.reset(torch.tensor([4, 2], dtype=torch.int32, device=device))
    for states, old in zip((layer.conv_state, layer.ssm_state), before, strict=True):
        assert states[2].abs().sum() == 0
        assert torch.equal(states[4], old[4])


@pytest.mark.parametrize("rows", [32, 64])
def test_identical_keys_do_not_cancel(device, rows):
    """A chain of one token over and over: powers of the system would lose digits."""
    gen = torch.Generator().manual_seed(SEED)
    chain = [i - 1 for i in range(rows)]
    batch = make_batch(device, rows - 1, 31, [chain], [rows], [1])
    layer = make_layer(gen, (1, 1, 16, 16), rows, 2, torch.float32, device)
    layer.x = layer.x[:1].expand(rows, -1).contiguous()
    layer.a.fill_(-20.0)  # no decay
    layer.b.fill_(20.0)  # full strength
    _, out, _ = forward(layer, batch)
    close(out, reference(layer, batch, 0)[1], torch.float32)


def test_layers_of_different_shapes(device):
    gen = torch.Generator().manual_seed(SEED)
    made = []
    for dims in ((1, 1, 16, 16), (1, 2, 16, 16)):
        layer = make_layer(gen, dims, 4, 2, torch.float32, device)
        scratch = gdn_conv.GDNScratch(
            1, 4, layer.channels, dims[1], WIDTH, torch.float32, device
        )
        made.append(GDNLayer(scratch, layer.conv_state, layer.ssm_state, 0))
    with pytest.raises(ValueError, match="2 kinds"):
        GDNCommitter(made, 1, 3)


def as_upstream(layer, batch, monkeypatch) -> SimpleNamespace:
    """The layer with upstream's names; its step is the forward context's."""
    heads, value_heads, dk, dv = layer.dims
    found = SimpleNamespace(
        prefix="layer",
        _forward_core=None,  # for prompts, of which there are none
        kv_cache=(layer.conv_state.transpose(-1, -2), layer.ssm_state),
        conv1d=SimpleNamespace(weight=layer.weight[:, None], bias=layer.bias),
        activation="silu",
        A_log=layer.a_log,
        dt_bias=layer.dt_bias,
        num_k_heads=heads,
        num_v_heads=value_heads,
        tp_size=1,
        conv_dim=layer.channels,
        conv_kernel_size=WIDTH,
        model_config=SimpleNamespace(dtype=layer.x.dtype),
    )
    trees = gdn.GDNTrees(len(batch.blocks), batch.starts, batch.indices[:, 0], None)
    context = SimpleNamespace(attn_metadata={"layer": SimpleNamespace(tree=trees)})
    monkeypatch.setattr(gdn_v2, "get_forward_context", lambda: context)
    monkeypatch.setattr(gdn_v2.tree_state, "_current", batch.tree)
    batch.tree.gdn_scratch = gdn_v2.make_scratch(
        [found], len(batch.blocks), len(layer.x), layer.x.device
    )
    return found


def test_gates_of_one_projection(device, monkeypatch):
    """As many value as key heads in Qwen3-Next: b and a of a head are neighbours."""
    gen = torch.Generator().manual_seed(0)
    parents = [random_tree(gen, 3, 3), None, None]
    batch = make_batch(device, 3, 3, parents, [4, 3, 1], [3, 1, 2])
    layer = make_layer(gen, (2, 2, 16, 16), 8, 4, torch.float32, device)
    both = torch.stack([layer.b, layer.a], dim=-1).flatten(1)  # b0 a0 b1 a1
    grouped = both.view(8, 2, 2)
    b, a = (part.reshape(8, 2) for part in grouped.split([1, 1], dim=2))
    assert a.stride() == (4, 2)
    out = torch.zeros(8, 2, 16, device=device)
    gdn_v2.forward_core(as_upstream(layer, batch, monkeypatch), layer.x, b, a, out)
    for r, (first, last) in enumerate(((0, 4), (4, 7), (7, 8))):
        close(out[first:last], reference(layer, batch, r)[1], torch.float32)
