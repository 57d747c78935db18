# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Moves the states of gated delta layers along the accepted paths, in one launch.

Reference: ``gdn.commit_path`` and ``gdn.commit_history``. The accepted rows are
replayed one by one from the layer's inputs, with the arithmetic of upstream's recurrent
kernel, so that nothing of the tree's solve stays in the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.triton_utils import tl, triton

from .gdn import NORM_EPSILON, GDNScratch


@dataclass
class GDNLayer:
    """What the commit needs of one layer; all layers have the same shapes.

    Attributes:
        scratch: Inputs of the step.
        conv_state: [blocks, C, W - 1], oldest slot first, any strides.
        ssm_state: [blocks, Hv, Dv, Dk], contiguous but for the first dimension.
        weight: [C, W], of the convolution.
        bias: [C] or None.
        group: KV-cache group, whose block table's first column is the state's index.
    """

    scratch: GDNScratch
    conv_state: torch.Tensor
    ssm_state: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    group: int


@triton.jit
def _channels(x_ptr, taps_ptr, bias_ptr, row_stride, first, old, channel, mask, at,
              path_ptr, weight_stride, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
              SILU: tl.constexpr):  # fmt: skip
    """The convolution of some channels at the path's row number ``at``; float32."""
    total = tl.zeros(channel.shape, dtype=tl.float32)
    for back in tl.static_range(WIDTH):
        position = at - back
        row = tl.load(path_ptr + tl.maximum(position, 0))
        place = tl.where(position >= 0, first + row, old + position)
        value = tl.load(x_ptr + place * row_stride + channel, mask=mask, other=0.0)
        tap = tl.load(
            taps_ptr + channel * weight_stride + (WIDTH - 1 - back),
            mask=mask,
            other=0.0,
        )
        total += value.to(tl.float32) * tap.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    # The forward pass stored its result in the model's dtype.
    return total.to(x_ptr.dtype.element_ty).to(tl.float32)


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
    WEIGHT_DTYPE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    fields = layer_ptr + tl.program_id(0) * NUM_FIELDS
    req = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(VALUE_SIZE, BLOCK_V)
    head = tl.program_id(2) // tiles
    value = (tl.program_id(2) % tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    count = tl.load(num_sampled_ptr + req)
    group = tl.load(fields + 13)
    table = tl.load(table_ptr + 2 * group).to(tl.pointer_type(tl.int32))
    index = tl.load(table + req * tl.load(table_ptr + 2 * group + 1)).to(tl.int64)
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    length = tl.load(query_start_loc_ptr + req + 1) - start
    logits = tl.load(cu_num_logits_ptr + req + 1) - tl.load(cu_num_logits_ptr + req)
    # A prompt's rows have no logits but the last, and moved the state themselves.
    if (count == 0) | (length != logits) | (index <= 0):
        return

    x = tl.load(fields).to(tl.pointer_type(X_DTYPE))
    row_stride = tl.load(fields + 1)
    # In the scratch: the path's row 0, and the row after the history's newest.
    first = tl.load(fields + 2) + start
    old = (req + 1) * (WIDTH - 1)
    gates = tl.load(fields + 3).to(tl.pointer_type(tl.float32))
    gates += start * 2 * VALUE_HEADS + head
    conv = tl.load(fields + 4).to(tl.pointer_type(CONV_DTYPE))
    conv += index * tl.load(fields + 5)
    conv_channel = tl.load(fields + 6)
    conv_slot = tl.load(fields + 7)
    state = tl.load(fields + 8).to(tl.pointer_type(STATE_DTYPE))
    state += index * tl.load(fields + 9)
    taps = tl.load(fields + 10).to(tl.pointer_type(WEIGHT_DTYPE))
    weight_stride = tl.load(fields + 11)
    bias = tl.load(fields + 12).to(tl.pointer_type(WEIGHT_DTYPE))
    path = path_ptr + req * path_len

    dim = tl.arange(0, BLOCK_K)
    in_key, in_value = dim < KEY_SIZE, value < VALUE_SIZE
    held = state + (head * VALUE_SIZE + value)[:, None] * KEY_SIZE + dim[None, :]
    mask = in_value[:, None] & in_key[None, :]
    s = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    key_channel = (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_SIZE + dim
    value_channel = 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + value
    for at in range(0, count):
        row = tl.load(path + at)
        k = _channels(x, taps, bias, row_stride, first, old, key_channel, in_key, at,
                      path, weight_stride, WIDTH, HAS_BIAS, SILU)  # fmt: skip
        v = _channels(x, taps, bias, row_stride, first, old, value_channel, in_value,
                      at, path, weight_stride, WIDTH, HAS_BIAS, SILU)  # fmt: skip
        k = k / tl.sqrt(tl.sum(tl.where(in_key, k * k, 0.0), axis=0) + NORM_EPSILON)
        k = tl.where(in_key, k, 0.0)
        g = tl.load(gates + row * 2 * VALUE_HEADS)
        beta = tl.load(gates + row * 2 * VALUE_HEADS + VALUE_HEADS)
        s = s * tl.exp(g)
        write = beta * (v - tl.sum(s * k[None, :], axis=1))
        s += write[:, None] * k[None, :]
    tl.store(held, s.to(STATE_DTYPE), mask=mask)

    # The history: a program moves its value channels and its share of q and k. It reads
    # the scratch, so no other program can have overwritten what it needs.
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
    index = tl.load(index_ptr + tl.load(fields + 13)).to(tl.int64)
    if index <= 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(fields + 8).to(tl.pointer_type(STATE_DTYPE))
    state += index * tl.load(fields + 9) + at
    tl.store(state, tl.zeros([BLOCK], dtype=STATE_DTYPE), mask=at < state_size)
    conv = tl.load(fields + 4).to(tl.pointer_type(CONV_DTYPE))
    conv += index * tl.load(fields + 5)
    for slot in tl.static_range(WIDTH - 1):
        where = conv + at * tl.load(fields + 6) + slot * tl.load(fields + 7)
        tl.store(where, tl.zeros([BLOCK], dtype=CONV_DTYPE), mask=at < channels)


_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class GDNCommitter:
    """A device table of the layers, made once, and the launch.

    Args:
        layers: At least one, all of the same shapes and dtypes.
        key_heads: Hk.
        num_positions: L; a path has at most L + 1 rows.
        silu: Whether SiLU comes after the convolution.

    Raises:
        ValueError: The layers differ in shape or dtype.
    """

    NUM_FIELDS = 14

    def __init__(
        self,
        layers: list[GDNLayer],
        key_heads: int,
        num_positions: int,
        silu: bool = True,
    ) -> None:
        kinds = {
            (
                tuple(layer.scratch.x.shape),
                layer.scratch.x.dtype,
                layer.conv_state.shape[1:],
                layer.conv_state.dtype,
                layer.ssm_state.shape[1:],
                layer.ssm_state.dtype,
                tuple(layer.weight.shape),
                layer.weight.dtype,
                layer.bias is None,
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
        self.silu = silu
        self.device = self.first.ssm_state.device
        rows = [self._fields(layer) for layer in layers]
        self.layers = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self._tables: torch.Tensor | None = None
        self._table_key: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def _fields(layer: GDNLayer) -> list[int]:
        bias = layer.bias if layer.bias is not None else layer.weight
        return [
            layer.scratch.x.data_ptr(),
            layer.scratch.x.stride(0),
            layer.scratch.first,
            layer.scratch.gates.data_ptr(),
            layer.conv_state.data_ptr(),
            *layer.conv_state.stride(),
            layer.ssm_state.data_ptr(),
            layer.ssm_state.stride(0),
            layer.weight.data_ptr(),
            layer.weight.stride(0),
            bias.data_ptr(),
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
        width = first.weight.shape[1]
        block_v = min(32, triton.next_power_of_2(value_size))
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
            WEIGHT_DTYPE=_TRITON_DTYPES[first.weight.dtype],
            KEY_HEADS=self.key_heads,
            VALUE_HEADS=value_heads,
            KEY_SIZE=key_size,
            VALUE_SIZE=value_size,
            WIDTH=width,
            HAS_BIAS=first.bias is not None,
            SILU=self.silu,
            BLOCK_K=triton.next_power_of_2(key_size),
            BLOCK_V=block_v,
            BLOCK_C=triton.next_power_of_2(chunk),
            num_warps=4,
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
            WIDTH=first.weight.shape[1],
            BLOCK=block,
            num_warps=4,
        )
