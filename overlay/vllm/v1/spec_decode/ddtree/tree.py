# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""A batch of draft trees and the ancestor masks that follow from it.

Words: ``B`` requests, ``N`` node budget, ``Q = 1 + N`` rows per request. Row 0 is
the root, the last sampled token; row ``i >= 1`` is draft node ``i``. Parents come
before children, so every prefix of the rows is a tree as well.

The source of the algorithm is Ringel and Romano, arXiv 2604.12989. Only PyTorch is
needed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BITS = 32


@dataclass(slots=True)
class TreeBatch:
    """Trees of ``B`` requests, all stored with the same budget ``N``.

    Rows beyond ``num_nodes`` are invalid: token -1, parent -1, depth 0, score -inf.
    Test ``num_nodes`` (or ``valid``) for validity, never a token value.

    Attributes:
        tokens: Draft token ids, [B, N] int64; node ``i`` is in column ``i - 1``.
        parents: Parent row of every row, [B, Q] int32; the root has -1.
        depths: Distance to the root, [B, Q] int32; the root has 0.
        num_nodes: Valid nodes per request without the root, [B] int32. 0 means no
            tree: the request is verified as plain causal.
        scores: Log-probability (natural log) of the path to each node under the
            drafter, [B, N] float32, or None where it is unknown.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    scores: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of requests B."""
        return self.tokens.shape[0]

    @property
    def budget(self) -> int:
        """Number of node columns N."""
        return self.tokens.shape[1]

    @property
    def valid(self) -> Tensor:
        """Whether a row belongs to its tree, [B, Q] bool; the root always does."""
        return _valid_rows(self.num_nodes, self.parents.shape[1])

    @classmethod
    def empty(
        cls, batch_size: int, budget: int, device: torch.device | str = "cpu"
    ) -> TreeBatch:
        """Returns ``batch_size`` requests without a tree (``num_nodes`` is 0)."""
        rows = (batch_size, budget + 1)
        return cls(
            tokens=torch.full((batch_size, budget), -1, device=device),
            parents=torch.full(rows, -1, dtype=torch.int32, device=device),
            depths=torch.zeros(rows, dtype=torch.int32, device=device),
            num_nodes=torch.zeros(batch_size, dtype=torch.int32, device=device),
        )

    @classmethod
    def chain(cls, tokens: Tensor, num_nodes: Tensor | int | None = None) -> TreeBatch:
        """Builds chain-shaped trees: the parent of row ``i`` is row ``i - 1``.

        Args:
            tokens: Drafted tokens in order, [B, L] integer.
            num_nodes: Usable tokens per request, [B] integer or one int; all ``L``
                by default.

        Returns:
            Trees with budget ``L`` and ``depths[:, i] == i`` on valid rows.
        """
        batch_size, length = tokens.shape
        rows = torch.arange(length + 1, dtype=torch.int32, device=tokens.device)
        full = cls(
            tokens=tokens.to(torch.int64, copy=True),
            parents=(rows - 1).repeat(batch_size, 1),
            depths=rows.repeat(batch_size, 1),
            num_nodes=torch.full(
                (batch_size,), length, dtype=torch.int32, device=tokens.device
            ),
        )
        return full if num_nodes is None else full.truncate(num_nodes)

    def truncate(self, num_nodes: Tensor | int) -> TreeBatch:
        """Returns the trees cut to their first ``num_nodes`` nodes.

        A prefix of a tree is a tree, because parents come before children.

        Args:
            num_nodes: Upper bounds, [B] integer or one int. A bound above a tree's
                size leaves that tree as it is; one below 0 counts as 0.

        Returns:
            New trees of the same budget N.
        """
        if isinstance(num_nodes, int):
            kept = self.num_nodes.clamp(max=num_nodes)
        else:
            kept = torch.minimum(self.num_nodes, num_nodes.to(self.num_nodes))
        kept = kept.clamp(min=0)
        valid = _valid_rows(kept, self.parents.shape[1])
        nodes = valid[:, 1:]
        scores = self.scores
        if scores is not None:
            scores = scores.masked_fill(~nodes, float("-inf"))
        return TreeBatch(
            tokens=self.tokens.masked_fill(~nodes, -1),
            parents=self.parents.masked_fill(~valid, -1),
            depths=self.depths.masked_fill(~valid, 0),
            num_nodes=kept,
            scores=scores,
        )

    def select(self, rows: Tensor) -> TreeBatch:
        """Returns the trees of the requests ``rows`` [M] (integer), in that order."""
        rows = rows.to(torch.int64)
        return TreeBatch(
            tokens=self.tokens[rows],
            parents=self.parents[rows],
            depths=self.depths[rows],
            num_nodes=self.num_nodes[rows],
            scores=None if self.scores is None else self.scores[rows],
        )


def _valid_rows(num_nodes: Tensor, num_rows: int) -> Tensor:
    rows = torch.arange(num_rows, device=num_nodes.device)
    return rows <= num_nodes.unsqueeze(1)


def depths_from_parents(parents: Tensor) -> Tensor:
    """Computes depths from parent rows.

    Args:
        parents: [B, Q] integer; -1 on the root and on invalid rows.

    Returns:
        [B, Q] int32, the number of edges to the row without a parent. Takes
        ceil(log2 Q) steps (pointer doubling), whatever the trees' shapes.
    """
    hop = parents.to(torch.int64)
    depths = (hop >= 0).to(torch.int32)
    # Before each step, hop is the ancestor 2**k up, and depths is min(depth, 2**k).
    for _ in range((parents.shape[1] - 1).bit_length()):
        up = hop.clamp(min=0)
        depths = depths + depths.gather(1, up).masked_fill(hop < 0, 0)
        hop = hop.gather(1, up).masked_fill(hop < 0, -1)
    return depths


def ancestor_mask(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Says which rows each row may see.

    Args:
        parents: [B, Q] integer, parent rows.
        num_nodes: [B] integer, valid nodes per request.

    Returns:
        [B, Q, Q] bool; ``[b, i, j]`` is True if row ``j`` is an ancestor of row
        ``i`` or row ``i`` itself. An invalid row sees only itself, so that its
        softmax is never empty. Lower triangular.
    """
    batch_size, num_rows = parents.shape
    hop = parents.to(torch.int64)
    hop = hop.masked_fill(~_valid_rows(num_nodes, num_rows), -1)
    eye = torch.eye(num_rows, dtype=torch.bool, device=parents.device)
    mask = eye.repeat(batch_size, 1, 1)
    # Before each step, mask holds the ancestors less than 2**k up, hop the one at 2**k.
    for _ in range((num_rows - 1).bit_length()):
        up = hop.clamp(min=0)
        theirs = mask.gather(1, up.unsqueeze(2).expand(-1, -1, num_rows))
        mask = mask | (theirs & (hop >= 0).unsqueeze(2))
        hop = hop.gather(1, up).masked_fill(hop < 0, -1)
    return mask


def ancestor_bitmask(parents: Tensor, num_nodes: Tensor) -> Tensor:
    """Packs ``ancestor_mask`` into words.

    Args:
        parents: [B, Q] integer, parent rows.
        num_nodes: [B] integer, valid nodes per request.

    Returns:
        [B, Q, ceil(Q / 32)] int32. Row ``j`` is bit ``j % 32`` (least significant
        first) of word ``j // 32``; bit 31 is the sign bit.
    """
    return pack_mask(ancestor_mask(parents, num_nodes))


def pack_mask(mask: Tensor) -> Tensor:
    """Packs the last dimension of a bool mask, little-endian, into int32 words.

    Args:
        mask: [..., Q] bool.

    Returns:
        [..., ceil(Q / 32)] int32.
    """
    padding = -mask.shape[-1] % WORD_BITS
    bits = torch.nn.functional.pad(mask, (0, padding)).unflatten(-1, (-1, WORD_BITS))
    shifts = torch.arange(WORD_BITS, device=mask.device)
    words = (bits.to(torch.int64) << shifts).sum(-1)
    # int64 -> int32 with an explicit sign, because an overflowing cast is undefined.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_mask(words: Tensor, num_rows: int) -> Tensor:
    """Undoes ``pack_mask``.

    Args:
        words: [..., ceil(num_rows / 32)] int32.
        num_rows: Bits to keep, Q.

    Returns:
        [..., num_rows] bool.
    """
    shifts = torch.arange(WORD_BITS, device=words.device)
    bits = (words.to(torch.int64).unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :num_rows].to(torch.bool)


def check_tree(tree: TreeBatch, vocab_size: int | None = None) -> None:
    """Checks every property that later stages rely on. For tests and debugging.

    Args:
        tree: The trees to check.
        vocab_size: If given, tokens must be below it.

    Raises:
        ValueError: A tensor has the wrong shape or dtype, or a row breaks a rule.
            The message names the tensor, or the request and the row.
    """
    batch_size, budget = tree.tokens.shape
    expected = {
        "tokens": ((batch_size, budget), torch.int64),
        "parents": ((batch_size, budget + 1), torch.int32),
        "depths": ((batch_size, budget + 1), torch.int32),
        "num_nodes": ((batch_size,), torch.int32),
    }
    if tree.scores is not None:
        expected["scores"] = ((batch_size, budget), torch.float32)
    for name, (shape, dtype) in expected.items():
        value = getattr(tree, name)
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise ValueError(
                f"{name} is {value.dtype} {list(value.shape)}, "
                f"expected {dtype} {list(shape)}"
            )

    num_nodes = tree.num_nodes
    bad = (num_nodes < 0) | (num_nodes > budget)
    if bad.any():
        b = int(bad.nonzero()[0])
        raise ValueError(
            f"request {b}: num_nodes {int(num_nodes[b])} not in 0..{budget}"
        )

    valid = tree.valid
    rows = torch.arange(budget + 1, device=valid.device)
    is_root = (rows == 0).expand_as(valid)
    node = valid & ~is_root
    parents = tree.parents.to(torch.int64)
    up = parents.clamp(0, budget)
    root_token = tree.tokens.new_full((batch_size, 1), -1)
    tokens = torch.cat((root_token, tree.tokens), dim=1)
    twin = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (
        tokens.unsqueeze(2) == tokens.unsqueeze(1)
    )
    twin &= node.unsqueeze(2) & node.unsqueeze(1)
    has_earlier_twin = twin.tril(-1).any(2)
    too_large = torch.zeros_like(valid) if vocab_size is None else tokens >= vocab_size
    blank = (tokens == -1) & (parents == -1) & (tree.depths == 0)
    rules = (
        (is_root & (parents != -1), "the root's parent is not -1"),
        (is_root & (tree.depths != 0), "the root's depth is not 0"),
        (node & ((parents < 0) | (parents >= rows)), "parent is not an earlier row"),
        (
            node & (tree.depths != tree.depths.gather(1, up) + 1),
            "depth is not the parent's depth + 1",
        ),
        (node & ((tokens < 0) | too_large), "token is outside the vocabulary"),
        (node & has_earlier_twin, "an earlier sibling has the same token"),
        (~valid & ~blank, "invalid row without token -1, parent -1, depth 0"),
    )
    for broken, why in rules:
        if broken.any():
            b, i = broken.nonzero()[0].tolist()
            raise ValueError(
                f"request {b}, row {i}: {why} (token {int(tokens[b, i])}, "
                f"parent {int(parents[b, i])}, depth {int(tree.depths[b, i])})"
            )
