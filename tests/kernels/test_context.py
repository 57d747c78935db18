# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The drafter's inputs against a plain Python loop."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.spec_decode.ddtree.kernels.context import prepare_tree_inputs
from vllm.v1.spec_decode.ddtree.tree_state import TreeState

SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))
PAD, MASK, STALE = -1, 999, -5


@dataclass
class Request:
    """One request of the target's step, after the walk.

    Attributes:
        slot: In the persistent buffers.
        query: Rows in the batch.
        rows: Rows with logits.
        seq_len: Slots in use, this step's included.
        path: What the walk accepted, root first.
        num_sampled: 0 for a prefill that goes on.
    """

    slot: int
    query: int
    rows: int
    seq_len: int
    path: list[int] = field(default_factory=lambda: [0])
    num_sampled: int | None = None

    @property
    def has_path(self) -> bool:
        return self.rows > 1 and self.rows == self.query

    @property
    def sampled(self) -> int:
        return len(self.path) if self.num_sampled is None else self.num_sampled

    @property
    def rejected(self) -> int:
        """As upstream's get_num_sampled_and_rejected has it."""
        return self.rows - self.sampled if self.sampled else 0


@dataclass
class Sizes:
    """Of the buffers; ``length`` is L."""

    length: int = 3
    block_size: int = 4
    max_blocks: int = 16
    max_model_len: int = 64
    max_num_reqs: int = 6
    max_num_tokens: int = 90


def expect(requests, sizes, table, last_sampled, next_prefill):
    """Every output as a list; None where the value is not used by anyone."""
    length, limit = sizes.length, sizes.max_model_len
    limit = min(limit, sizes.max_blocks * sizes.block_size)

    def slot(r, position):
        if position >= limit:
            return PAD
        block, offset = divmod(position, sizes.block_size)
        return int(table[r, block]) * sizes.block_size + offset

    names = "ids positions query_slots rows ctx_positions ctx_slots indices pos mapping"
    out = {name: [] for name in names.split()}
    start_loc, seq_lens = [], []
    start = 0
    for r, q in enumerate(requests):
        final = q.seq_len - q.rejected  # tokens whose K/V is final
        count = min(q.rows, length + 1) if q.has_path else q.query
        for j in range(count):
            position = q.seq_len - q.query + j
            if q.has_path:
                valid = j < len(q.path)
                row = q.path[j] if valid else 0
            else:
                valid, row = position < final, j
            out["rows"].append(start + row)
            out["ctx_positions"].append(position if valid else 0)
            out["ctx_slots"].append(slot(r, position) if valid else PAD)
        bonus = last_sampled[q.slot] if q.sampled else next_prefill[q.slot]
        for i in range(length + 1):
            position = final + i
            out["ids"].append(bonus if i == 0 else MASK)
            out["positions"].append(min(position, sizes.max_model_len - 1))
            out["query_slots"].append(slot(r, position))
            if i > 0:
                out["indices"].append(r * (length + 1) + i)
                out["pos"].append(position)
                out["mapping"].append(q.slot)
        start_loc.append(r * (length + 1))
        seq_lens.append(final + length + 1)
        start += q.query
    # Padding, read by captured graphs of more requests.
    num_reqs, most = len(requests), sizes.max_num_reqs
    start_loc += [num_reqs * (length + 1)] * (most + 1 - num_reqs)
    seq_lens += [0] * (most - num_reqs)
    missing = (most - num_reqs) * length
    for name, value in (("indices", 0), ("pos", 0), ("mapping", -1)):
        out[name] += [value] * missing
    out["query_slots"] += [PAD] * (sizes.max_num_tokens - len(out["query_slots"]))
    return out | {"start_loc": start_loc, "seq_lens": seq_lens}


def check(device, requests, sizes):
    """Run the kernel on buffers of stale values, and compare all of them."""
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED)

    def ints(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    def stale(n, dtype=torch.int64):
        return torch.full((n,), STALE, dtype=dtype, device=device)

    def offsets(lengths):
        return [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    most, tokens, length = sizes.max_num_reqs, sizes.max_num_tokens, sizes.length
    num_query = length + 1
    table = torch.randperm(most * sizes.max_blocks, generator=gen) + 1
    table = table.view(most, sizes.max_blocks).to(torch.int32)
    last_sampled, next_prefill = (
        torch.randint(0, 900, (most,), generator=gen).tolist() for _ in range(2)
    )
    want = expect(requests, sizes, table, last_sampled, next_prefill)
    counts = [min(q.rows, num_query) if q.has_path else q.query for q in requests]

    state = TreeState(most, 40, length, device)
    state.b_path.fill_(7)
    state.b_num_sampled.fill_(7)
    for r, q in enumerate(requests):
        state.b_path[r] = ints(q.path + [-1] * (num_query - len(q.path)))
        state.b_num_sampled[r] = len(q.path)
    buffers = SimpleNamespace(
        input_ids=stale(tokens, torch.int32),
        positions=stale(tokens),
        query_start_loc=stale(most + 1, torch.int32),
        seq_lens=stale(most, torch.int32),
    )
    batch = SimpleNamespace(
        num_reqs=len(requests),
        query_start_loc=ints(offsets([q.query for q in requests])),
        cu_num_logits=ints(offsets([q.rows for q in requests])),
        seq_lens=ints([q.seq_len for q in requests]),
        idx_mapping=ints([q.slot for q in requests]),
    )
    query_slots, rows, ctx_positions, ctx_slots = (stale(tokens) for _ in range(4))
    indices, pos = stale(most * length), stale(most * length)
    mapping = stale(most * length, torch.int32)
    prepare_tree_inputs(
        buffers,
        query_slots,
        rows,
        ctx_positions,
        ctx_slots,
        indices,
        pos,
        mapping,
        batch,
        ints(offsets(counts)),
        max(counts),
        state,
        ints([q.sampled for q in requests]),
        ints([q.rejected for q in requests]),
        ints(last_sampled, torch.int64),
        ints(next_prefill),
        table.to(device),
        sizes.block_size,
        MASK,
        num_query,
        length,
        most,
        tokens,
        sizes.max_model_len,
    )
    got = {
        "ids": buffers.input_ids,
        "positions": buffers.positions,
        "start_loc": buffers.query_start_loc,
        "seq_lens": buffers.seq_lens,
        "query_slots": query_slots,
        "rows": rows,
        "ctx_positions": ctx_positions,
        "ctx_slots": ctx_slots,
        "indices": indices,
        "pos": pos,
        "mapping": mapping,
    }
    for name, tensor in got.items():
        n = len(want[name])
        assert tensor[:n].tolist() == want[name], name
        assert (tensor[n:] == STALE).all(), f"{name} beyond the end"
    return want


def test_paths(device):
    """Full, partial and empty paths, and a tree with fewer rows than L + 1."""
    requests = [
        Request(4, 9, 9, 30, [0, 4, 7, 8]),
        Request(0, 12, 12, 25, [0, 11]),
        Request(5, 5, 5, 5, [0]),
        Request(1, 2, 2, 17, [0, 1]),
        Request(3, 3, 3, 11, [0]),
    ]
    want = check(device, requests, Sizes())
    assert want["rows"][:6] == [0, 4, 7, 8, 9, 20]
    assert want["ctx_slots"][6:8] == [PAD, PAD]


def test_rows_without_a_path(device):
    """A decode, drafts without a tree, a prompt tail before drafts, a last chunk."""
    requests = [
        Request(2, 1, 1, 30),
        Request(0, 6, 6, 22),
        # The walk of a causal row accepts the root: its token is the bonus.
        Request(5, 9, 6, 14),
        Request(1, 7, 1, 7),
    ]
    want = check(device, requests, Sizes())
    # The tail's drafts were rejected: 4 of its 9 rows are final.
    assert want["ctx_slots"][5:14].count(PAD) == 5


def test_chunked_prefill(device):
    """Chunks that go on take the next prompt token, wherever they start."""
    requests = [
        Request(3, 10, 1, 10, num_sampled=0),
        Request(0, 5, 1, 21, num_sampled=0),
        Request(2, 9, 9, 33, [0, 2, 5]),
        Request(1, 1, 1, 40, num_sampled=0),
    ]
    check(device, requests, Sizes())


@pytest.mark.parametrize("num_reqs", [1, 5, 6])
def test_padding(device, num_reqs):
    """Few requests, all but one, and all of them."""
    slots = [5, 3, 1, 0, 2, 4]
    requests = [Request(slots[r], 6, 6, 20 + r, [0, 3]) for r in range(num_reqs)]
    check(device, requests, Sizes(max_num_tokens=40))


@pytest.mark.parametrize(("max_model_len", "pads"), [(29, 12), (32, 5), (1000, 5)])
def test_end_of_the_model(device, max_model_len, pads):
    """Positions beyond the length or the block table get no slot."""
    sizes = Sizes(max_model_len=max_model_len, max_blocks=8)
    requests = [
        Request(1, 9, 9, 29, [0, 1]),
        Request(2, 9, 9, 32, [0, 2, 4, 6]),
        # The tree's rows reach beyond the end; the path may, too.
        Request(0, 9, 9, 38, [0, 2, 4, 6]),
        Request(3, 1, 1, 27),
        Request(4, 4, 1, 29),
    ]
    want = check(device, requests, sizes)
    assert want["ctx_slots"].count(PAD) > 2
    assert want["query_slots"][:20].count(PAD) == pads


def test_more_rows_than_a_program(device):
    """A long chunk beside a tree: several programs a request, shared borders."""
    sizes = Sizes(
        length=15,
        block_size=16,
        max_blocks=40,
        max_model_len=640,
        max_num_reqs=20,
        max_num_tokens=700,
    )
    requests = [
        Request(7, 250, 1, 300, num_sampled=0),
        Request(2, 33, 33, 90, [0, 1, 2, 30, 31, 32]),
        Request(19, 300, 1, 300),
    ]
    check(device, requests, sizes)


def test_random_batches(device):
    gen = torch.Generator().manual_seed(SEED + 2)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=gen))

    for _ in range(4):
        requests = []
        for slot in torch.randperm(6, generator=gen)[: draw(1, 7)].tolist():
            kind = draw(0, 3)
            if kind == 0:
                n = draw(2, 12)
                order = (torch.randperm(n - 1, generator=gen) + 1).tolist()
                path = [0, *sorted(order[: draw(0, 4)])]
                requests.append(Request(slot, n, n, n + draw(0, 50), path))
            else:
                n = draw(1, 12)
                more = {} if kind == 1 else {"num_sampled": 0}
                requests.append(Request(slot, n, 1, n + draw(0, 50), **more))
        check(device, requests, Sizes(max_model_len=draw(40, 64)))
