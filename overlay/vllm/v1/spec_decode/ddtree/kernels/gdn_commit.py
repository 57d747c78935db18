# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Moves the states of gated delta layers along the accepted paths, in one launch.

Reference: ``gdn.commit_path`` and ``gdn.commit_history``. The accepted rows are
replayed as a chain from the layer's inputs, in float32 (three TF32 products), so that
nothing of the tree's own solve stays in the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.triton_utils import tl, triton

from .gdn import NORM_EPSILON, dot_keys, dot_state, unit_inverse
from .gdn_conv import GDNScratch


@dataclass
class GDNLayer:
    """What the commit needs of one layer; all layers have the same shapes.

    Attributes:
        scratch: Inputs of the step.
        conv_state: [blocks, C, W - 1], oldest slot first, any strides.
        ssm_state: [blocks, Hv, Dv, Dk], contiguous but for the first dimension.
        group: KV-cache group, whose block table's first column is the state's index.
    """

    scratch: GDNScratch
    conv_state: torch.Tensor
    ssm_state: torch.Tensor
    group: int


@triton.jit
def _commit_kernel(
    layer_ptr,
    table_ptr,
    path_ptr,
    num_sampled_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    path_len,
    qk_chunk,
    NUM_FIELDS: tl.constexpr,
    X_DTYPE: tl.constexpr,
    CONV_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROUNDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    fields = layer_ptr + tl.program_id(0) * NUM_FIELDS
    req = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(VALUE_SIZE, BLOCK_V)
    head = tl.program_id(2) // tiles
    value = (tl.program_id(2) % tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    count = tl.load(num_sampled_ptr + req)
    group = tl.load(fields + 11)
    table = tl.load(table_ptr + 2 * group).to(tl.pointer_type(tl.int32))
    index = tl.load(table + req * tl.load(table_ptr + 2 * group + 1)).to(tl.int64)
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    length = tl.load(query_start_loc_ptr + req + 1) - start
    logits = tl.load(cu_num_logits_ptr + req + 1) - tl.load(cu_num_logits_ptr + req)
    # A prompt's rows have no logits but the last, and moved the state themselves.
    if (count == 0) | (length != logits) | (index <= 0):
        return

    x = tl.load(fields).to(tl.pointer_type(X_DTYPE))
    mixed = tl.load(fields + 2).to(tl.pointer_type(X_DTYPE))
    row_stride = tl.load(fields + 3)
    gates = tl.load(fields + 4).to(tl.pointer_type(tl.float32))
    conv = tl.load(fields + 5).to(tl.pointer_type(CONV_DTYPE))
    conv += index * tl.load(fields + 6)
    conv_channel = tl.load(fields + 7)
    conv_slot = tl.load(fields + 8)
    state = tl.load(fields + 9).to(tl.pointer_type(STATE_DTYPE))
    state += index * tl.load(fields + 10)
    path = path_ptr + req * path_len

    dim = tl.arange(0, BLOCK_K)
    in_key, in_value = dim < KEY_SIZE, value < VALUE_SIZE
    key_channel = (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_SIZE + dim
    value_channel = 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + value
    held = state + (head * VALUE_SIZE + value)[:, None] * KEY_SIZE + dim[None, :]
    mask = in_value[:, None] & in_key[None, :]
    s = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    at = tl.arange(0, BLOCK_P)
    walked = at < count
    token = start + tl.load(path + at, mask=walked, other=0)
    # A row beyond the path has no key and no strength, hence no part in anything.
    k = tl.load(
        mixed + (token * row_stride)[:, None] + key_channel[None, :],
        mask=walked[:, None] & in_key[None, :],
        other=0.0,
    )
    v = tl.load(
        mixed + (token * row_stride)[:, None] + value_channel[None, :],
        mask=walked[:, None] & in_value[None, :],
        other=0.0,
    ).to(tl.float32)
    gate = gates + token * 2 * VALUE_HEADS + head
    g = tl.load(gate, mask=walked, other=0.0)
    beta = tl.load(gate + VALUE_HEADS, mask=walked, other=0.0)
    norm = tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
    norm = 1.0 / tl.sqrt(norm + NORM_EPSILON)

    # The path is a chain: the solve of the forward pass with all earlier rows seen.
    seen = at[None, :] <= at[:, None]
    total = tl.sum(tl.where(seen, g[None, :], 0.0), axis=1)
    end = tl.sum(g, axis=0)
    decay = tl.where(seen, total[:, None] - total[None, :], float("-inf"))
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * tl.exp(decay)
    system = system * (beta * norm)[:, None] * norm[None, :]
    system = tl.where(at[None, :] < at[:, None], system, 0.0)
    inverse = unit_inverse(system, BLOCK_P, ROUNDS, PRECISION)
    u = (tl.exp(total) * norm)[:, None] * dot_state(k, s, PRECISION)
    u = beta[:, None] * (v - u)
    u = tl.dot(inverse, u, input_precision=PRECISION)
    u = u * (tl.exp(end - total) * norm)[:, None]
    s = s * tl.exp(end) + dot_keys(tl.trans(u), k, PRECISION)
    tl.store(held, s.to(STATE_DTYPE), mask=mask)

    # The history: a program moves its value channels and its share of q and k. It reads
    # the scratch, so no other program can have overwritten what it needs.
    first = tl.load(fields + 1) + start
    old = (req + 1) * (WIDTH - 1)
    other = tl.program_id(2) * qk_chunk + tl.arange(0, BLOCK_C)
    in_other = (tl.arange(0, BLOCK_C) < qk_chunk) & (other < 2 * KEY_HEADS * KEY_SIZE)
    for slot in tl.static_range(WIDTH - 1):
        position = count - (WIDTH - 1) + slot
        row = tl.load(path + tl.maximum(position, 0))
        kept = tl.where(position >= 0, first + row, old + position)
        new = tl.load(x + kept * row_stride + value_channel, mask=in_value, other=0)
        where = conv + value_channel * conv_channel + slot * conv_slot
        tl.store(where, new.to(CONV_DTYPE), mask=in_value)
        new = tl.load(x + kept * row_stride + other, mask=in_other, other=0)
        where = conv + other * conv_channel + slot * conv_slot
        tl.store(where, new.to(CONV_DTYPE), mask=in_other)


@triton.jit
def _reset_kernel(
    layer_ptr,
    index_ptr,
    channels,
    state_size,
    NUM_FIELDS: tl.constexpr,
    CONV_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    fields = layer_ptr + tl.program_id(0) * NUM_FIELDS
    index = tl.load(index_ptr + tl.load(fields + 11)).to(tl.int64)
    if index <= 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(fields + 9).to(tl.pointer_type(STATE_DTYPE))
    state += index * tl.load(fields + 10) + at
    tl.store(state, tl.zeros([BLOCK], dtype=STATE_DTYPE), mask=at < state_size)
    conv = tl.load(fields + 5).to(tl.pointer_type(CONV_DTYPE))
    conv += index * tl.load(fields + 6)
    for slot in tl.static_range(WIDTH - 1):
        where = conv + at * tl.load(fields + 7) + slot * tl.load(fields + 8)
        tl.store(where, tl.zeros([BLOCK], dtype=CONV_DTYPE), mask=at < channels)


_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def choose_tiles(value_size: int) -> tuple[int, int]:
    """Value dimensions of a program's tile, and its warps."""
    return min(64, max(16, triton.next_power_of_2(value_size))), 4


class GDNCommitter:
    """A device table of the layers, made once, and the launch.

    Args:
        layers: At least one, all of the same shapes and dtypes.
        key_heads: Hk.
        num_positions: L; a path has at most L + 1 rows.

    Raises:
        ValueError: The layers differ in shape or dtype.
    """

    NUM_FIELDS = 12

    def __init__(
        self,
        layers: list[GDNLayer],
        key_heads: int,
        num_positions: int,
    ) -> None:
        kinds = {
            (
                tuple(layer.scratch.x.shape),
                layer.scratch.x.dtype,
                layer.conv_state.shape[1:],
                layer.conv_state.dtype,
                layer.ssm_state.shape[1:],
                layer.ssm_state.dtype,
            )
            for layer in layers
        }
        if len(kinds) != 1:
            raise ValueError(
                f"gated delta layers of {len(kinds)} kinds cannot be committed in one "
                "launch; all must have the same shapes and dtypes"
            )
        self.first = layers[0]
        self.num_layers = len(layers)
        self.key_heads = key_heads
        self.path_len = num_positions + 1
        self.device = self.first.ssm_state.device
        rows = [self._fields(layer) for layer in layers]
        self.layers = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self._tables: torch.Tensor | None = None
        self._table_key: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def _fields(layer: GDNLayer) -> list[int]:
        scratch = layer.scratch
        return [
            scratch.x.data_ptr(),
            scratch.first,
            scratch.mixed.data_ptr(),
            scratch.mixed.stride(0),  # as of x
            scratch.gates.data_ptr(),
            layer.conv_state.data_ptr(),
            *layer.conv_state.stride(),
            layer.ssm_state.data_ptr(),
            layer.ssm_state.stride(0),
            layer.group,
        ]

    def commit(
        self,
        block_tables,
        path: torch.Tensor,
        num_sampled: torch.Tensor,
        query_start_loc: torch.Tensor,
        cu_num_logits: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Advance the states of the walked requests in all layers.

        A request with more tokens than rows of logits is a prompt, which moved its
        states in the forward pass; it is left alone.

        Args:
            block_tables: Per KV-cache group, [>= num_reqs, >= 1] int32; the first
                column is the index of the state, 0 for none.
            path: [>= num_reqs, L + 1] int32, accepted rows, root first.
            num_sampled: [>= num_reqs] int32, rows of the path; 0 where nothing was
                walked.
            query_start_loc: [>= num_reqs + 1] int32, first token of each request.
            cu_num_logits: [>= num_reqs + 1] int32, first row of logits of each.
            num_reqs: Requests in the batch.
        """
        key = tuple((t.data_ptr(), t.stride(0)) for t in block_tables)
        if self._tables is None or key != self._table_key:
            self._tables = torch.tensor(key, dtype=torch.int64, device=self.device)
            self._table_key = key
        first = self.first
        value_heads, value_size, key_size = first.ssm_state.shape[1:]
        width = first.conv_state.shape[2] + 1
        block_v, warps = choose_tiles(value_size)
        block_p = max(16, triton.next_power_of_2(self.path_len))
        programs = value_heads * triton.cdiv(value_size, block_v)
        chunk = triton.cdiv(2 * self.key_heads * key_size, programs)
        _commit_kernel[(self.num_layers, num_reqs, programs)](
            self.layers,
            self._tables,
            path,
            num_sampled,
            query_start_loc,
            cu_num_logits,
            self.path_len,
            chunk,
            NUM_FIELDS=self.NUM_FIELDS,
            X_DTYPE=_TRITON_DTYPES[first.scratch.x.dtype],
            CONV_DTYPE=_TRITON_DTYPES[first.conv_state.dtype],
            STATE_DTYPE=_TRITON_DTYPES[first.ssm_state.dtype],
            KEY_HEADS=self.key_heads,
            VALUE_HEADS=value_heads,
            KEY_SIZE=key_size,
            VALUE_SIZE=value_size,
            WIDTH=width,
            BLOCK_P=block_p,
            BLOCK_K=max(16, triton.next_power_of_2(key_size)),
            BLOCK_V=block_v,
            BLOCK_C=triton.next_power_of_2(chunk),
            ROUNDS=block_p.bit_length() - 1,
            PRECISION="tf32x3",
            num_warps=warps,
            num_stages=1,
        )

    def reset(self, indices: torch.Tensor) -> None:
        """Zero a new request's states in all layers.

        Upstream does so in the prefill, but takes a prompt's first chunk of one token
        for a decode, which reads what the slot's last request left.

        Args:
            indices: Per KV-cache group, [groups] int32, the index of the state.
        """
        first = self.first
        channels = first.conv_state.shape[1]
        size = first.ssm_state[0].numel()
        block = 1024
        _reset_kernel[(self.num_layers, triton.cdiv(max(size, channels), block))](
            self.layers,
            indices,
            channels,
            size,
            NUM_FIELDS=self.NUM_FIELDS,
            CONV_DTYPE=_TRITON_DTYPES[first.conv_state.dtype],
            STATE_DTYPE=_TRITON_DTYPES[first.ssm_state.dtype],
            WIDTH=first.conv_state.shape[2] + 1,
            BLOCK=block,
            num_warps=4,
        )
