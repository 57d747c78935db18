# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Builds draft trees from the logits of one drafter pass.

The drafter gives one distribution for each of ``L`` positions. A node at depth ``d``
takes a token of position ``d``; its score is the sum of log-probabilities along its
path. The best ``N`` nodes are found with a frontier, as in Ringel and Romano,
arXiv 2604.12989: popping a node makes its next sibling and its first child available.

Order. The frontier yields the highest score; on equal scores, the entry that was
inserted first. One pop inserts the sibling, then the child. Within a position, tokens
are ranked by logit, then by lower token id. So the tree is a function of the logits
alone, and all tensor-parallel ranks build the same one.

This is the plain PyTorch version: the CPU path, and the oracle for kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import TreeBatch

BEST_FIRST = "best_first"
SPINE_FIRST = "spine_first"
POLICIES = (BEST_FIRST, SPINE_FIRST)

_NEG_INF = float("-inf")


def build_tree(
    logits: Tensor,
    budget: int,
    policy: str = BEST_FIRST,
    num_positions: Tensor | int | None = None,
    top_k: int | None = None,
) -> TreeBatch:
    """Builds one tree per request.

    Args:
        logits: Drafter logits of the L draft positions, [B, L, V], floating point.
            NaN and +inf count as -inf; a token with -inf is never drafted.
        budget: N, the number of nodes wanted, at least 1.
        policy: ``best_first`` takes nodes by score only. ``spine_first`` takes the
            chain of top-1 tokens first, then the best of what is left.
        num_positions: Usable positions per request, [B] integer or one int; all L by
            default. 0 gives a request without a tree.
        top_k: Tokens considered per position, ``min(budget, V)`` by default. No more
            than that can be of use.

    Returns:
        Trees of budget N with ``scores``. A tree has fewer than N nodes only where
        no further token with a finite score exists. The first ``n`` nodes are the
        tree that budget ``n`` would give.

    Raises:
        ValueError: ``logits`` is not [B, L, V] floating point, ``budget`` or
            ``top_k`` is below 1, ``num_positions`` has a wrong shape, or ``policy``
            is unknown.
    """
    if logits.dim() != 3 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be [B, L, V] floating point, got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    batch_size, num_draft, vocab_size = logits.shape
    if num_draft == 0 or batch_size == 0:
        return TreeBatch.empty(batch_size, budget, logits.device)

    width = min(budget, vocab_size, top_k or budget)
    log_probs, tokens = top_log_probs(logits, width)
    if num_positions is not None:
        limit = torch.as_tensor(num_positions, device=logits.device)
        if limit.dim() > 1 or (limit.dim() == 1 and limit.shape[0] != batch_size):
            raise ValueError(
                f"num_positions must be one int or [{batch_size}], got shape "
                f"{list(limit.shape)}"
            )
        position = torch.arange(num_draft, device=logits.device)
        unusable = position >= limit.reshape(-1, 1)
        log_probs = log_probs.masked_fill(unusable.unsqueeze(2), _NEG_INF)
    return grow_tree(log_probs, tokens, budget, policy)


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ranks the ``k`` best tokens of each position by logit, then by lower id.

    Reads one flag on the host.

    Args:
        logits: [..., V] floating point. NaN and +inf count as -inf.
        k: Tokens to keep, 1..V.

    Returns:
        Log-probabilities [..., k] float32 (-inf for tokens that cannot be drafted)
        and token ids [..., k] int64, both best first.
    """
    logits = logits.to(torch.float32)
    logits = torch.nan_to_num(logits, nan=_NEG_INF, posinf=_NEG_INF, neginf=_NEG_INF)
    values, ids = logits.topk(k, dim=-1)
    # topk may return any of the tokens that tie with the last one.
    last = values[..., -1:]
    tied = (logits == last).sum(-1) != (values == last).sum(-1)
    tied &= last.squeeze(-1) > _NEG_INF
    if tied.any():
        values[tied], ids[tied] = _top_k_by_id(logits[tied], k)
    # By id first; a stable sort by value then keeps lower ids first among equals.
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    log_probs = values - torch.logsumexp(logits, dim=-1, keepdim=True)
    # A position where everything is -inf gives NaN.
    return log_probs.nan_to_num(nan=_NEG_INF, neginf=_NEG_INF), ids


def _top_k_by_id(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the top ``k`` of [M, V] float32 rows, lower ids chosen on ties.

    Packs the value's order and the id into one int64 key. About 15 times slower than
    ``topk`` on floats, hence only for rows where ties cross the boundary.
    """
    bits = (logits + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    low = 0xFFFFFFFF - torch.arange(logits.shape[-1], device=logits.device)
    ids = 0xFFFFFFFF - (((ordered << 32) | low).topk(k, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids


def grow_tree(
    log_probs: Tensor, tokens: Tensor, budget: int, policy: str = BEST_FIRST
) -> TreeBatch:
    """Grows trees from ranked candidates, one node of every request per iteration.

    Args:
        log_probs: [B, L, K] float32, non-increasing over K; -inf marks what must not
            be drafted.
        tokens: [B, L, K] int64, distinct within a position.
        budget: N.
        policy: ``best_first`` or ``spine_first``.

    Returns:
        Trees of budget N with ``scores``.
    """
    batch_size, num_draft, width = log_probs.shape
    device = log_probs.device
    # A further position and a further rank, both -inf, stand for "no such candidate".
    padded = torch.nn.functional.pad(log_probs, (0, 1, 0, 1), value=_NEG_INF)
    padded = padded.reshape(batch_size, -1)
    stride = width + 1

    # A frontier entry's column is its insertion rank: pop i (1-based) inserts its
    # sibling in column 2i - 1 and its child in column 2i. The first maximal column is
    # therefore the earliest insertion.
    num_columns = 2 * budget + 1
    columns = torch.arange(num_columns, device=device)
    frontier = padded.new_full((batch_size, num_columns), _NEG_INF)
    # Where each entry's candidate is in `padded`, its parent row, and that row's score.
    place = torch.zeros((batch_size, num_columns), dtype=torch.int64, device=device)
    above = torch.zeros_like(place)
    base = torch.zeros_like(frontier)
    frontier[:, 0] = padded[:, 0]

    tree = TreeBatch.empty(batch_size, budget, device)
    scores = padded.new_full((batch_size, budget), _NEG_INF)
    places = torch.zeros_like(tree.tokens)
    on_spine = torch.full((batch_size, 1), policy == SPINE_FIRST, device=device)

    for row in range(1, budget + 1):
        # Not argmax: it does not promise the first index among equal maxima.
        best = frontier.amax(1, keepdim=True)
        column = torch.where(frontier == best, columns, num_columns)
        column = column.amin(1, keepdim=True)
        # The spine's next node is the child that the last pop inserted.
        newest = frontier[:, 2 * row - 2, None]
        on_spine = on_spine & (newest > _NEG_INF)
        column = torch.where(on_spine, 2 * row - 2, column)

        score = frontier.gather(1, column)
        here = place.gather(1, column)
        parent_score = base.gather(1, column)
        parent = above.gather(1, column)
        found = score > _NEG_INF

        scores[:, row - 1, None] = score
        places[:, row - 1, None] = here
        tree.parents[:, row, None] = parent.to(torch.int32).masked_fill(~found, -1)
        tree.num_nodes += found.squeeze(1)

        frontier.scatter_(1, column, _NEG_INF)
        if row == budget:
            break
        # An exhausted request has score -inf, and so have its new entries.
        sibling = here + 1
        child = (here // stride + 1) * stride
        # Clamped for exhausted requests, whose `here` may be anything in range.
        last_place = padded.shape[1] - 1
        sibling, child = sibling.clamp(max=last_place), child.clamp(max=last_place)
        new = slice(2 * row - 1, 2 * row + 1)
        place[:, new] = torch.cat((sibling, child), 1)
        above[:, new] = torch.cat((parent, torch.full_like(parent, row)), 1)
        base[:, new] = torch.cat((parent_score, score), 1)
        added = base[:, new] + padded.gather(1, place[:, new])
        frontier[:, new] = added.masked_fill(~found, _NEG_INF)

    padded_tokens = torch.nn.functional.pad(tokens, (0, 1, 0, 1), value=-1)
    picked = padded_tokens.reshape(batch_size, -1).gather(1, places)
    node = tree.valid[:, 1:]
    tree.tokens = picked.masked_fill(~node, -1)
    depth = (places // stride + 1).masked_fill(~node, 0)
    tree.depths[:, 1:] = depth.to(torch.int32)
    tree.scores = scores
    return tree
