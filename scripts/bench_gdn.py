# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project

"""Time the gated delta kernels on a GPU at the shapes of Qwen3.6-27B.

    python scripts/bench_gdn.py [--out FILE] [--rows 16,32,64,128] [--batches 1,8]
        [--tp 1] [--layers 48]

Microseconds a layer, replays of CUDA graphs: convolution, solve and outputs, and the
commit (one launch for all layers, here divided by them), beside upstream's chain
kernels over as many rows, which write a state for every row. Exit code 0, or 2 without
a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from bench_kernels import random_state, timed

KEY_HEADS, VALUE_HEADS, SIZE, WIDTH = 16, 48, 128, 4


# Of states, at most.
BYTES = 4 << 30


def each(time: dict[str, float], layers: int) -> dict[str, float]:
    """Microseconds of one layer, from those of several."""
    return {name: round(value / layers, 2) for name, value in time.items()}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def case(rows: int, batch: int, tp: int, layers: int, report) -> None:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
        causal_conv1d_update,
    )
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import (
        fused_sigmoid_gating_delta_rule_update,
    )
    from vllm.v1.spec_decode.ddtree.kernels import gdn, gdn_conv
    from vllm.v1.spec_decode.ddtree.kernels.gdn_commit import GDNCommitter, GDNLayer
    from vllm.v1.spec_decode.ddtree.kernels.step import prepare_step

    heads, value_heads = KEY_HEADS // tp, VALUE_HEADS // tp
    channels = (2 * heads + value_heads) * SIZE
    total = batch * rows
    device = torch.device("cuda")

    def rand(*shape, kind=torch.bfloat16):
        return torch.randn(*shape, device=device, dtype=torch.float32).to(kind)

    x, a, b = (rand(total, n) for n in (channels, value_heads, value_heads))
    weight = rand(channels, WIDTH)
    a_log, dt_bias = (rand(value_heads, kind=torch.float32) for _ in range(2))
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
    tree = random_state(batch, rows - 1)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    positions = torch.zeros(total, dtype=torch.int64, device=device)
    prepare_step(tree, slots, starts, starts, positions, batch, batch)
    table = torch.arange(1, batch + 1, dtype=torch.int32, device=device)[:, None]
    table = table.contiguous()
    conv = rand(batch + 1, WIDTH - 1, channels).transpose(1, 2)
    # States of many layers by turns: those of one would stay in the L2 cache.
    count = max(1, min(layers, 24, BYTES // (4 * (batch + 1) * value_heads * SIZE**2)))
    ssm = rand(count, batch + 1, value_heads, SIZE, SIZE, kind=torch.float32)
    out = torch.empty(total, value_heads, SIZE, dtype=x.dtype, device=device)

    def make_scratch():
        return gdn_conv.GDNScratch(
            batch, total, channels, value_heads, WIDTH, x.dtype, device
        )

    scratch = make_scratch()

    def convolve():
        gdn_conv.tree_conv(
            x, conv, table[:, 0], weight, None, starts, tree, batch, scratch
        )

    def solve():
        for state in ssm:
            gdn.tree_delta_rule(
                a, b, a_log, dt_bias, state, table[:, 0], starts, tree, batch,
                heads, out, scratch,
            )  # fmt: skip

    convolve()
    where = {"rows": rows, "batch": batch, "tp": tp}
    report("tree: convolution", where, timed(convolve))
    report("tree: solve and outputs", where, each(timed(solve), count))

    # The commit runs over all layers at once.
    kept = [
        GDNLayer(
            make_scratch(),
            conv.clone(),
            state,
            0,
        )
        for state in ssm
    ]
    mover = GDNCommitter([kept[i % count] for i in range(layers)], heads, 15)
    tree.b_path.copy_(torch.arange(16, device=device).clamp(max=rows - 1))
    for accepted in (4, 16):
        tree.b_num_sampled.fill_(min(accepted, rows))
        time = timed(
            lambda: mover.commit(
                [table], tree.b_path, tree.b_num_sampled, starts, starts, batch
            )
        )
        report(f"tree: commit of {accepted} rows", where, each(time, layers))

    # Upstream: a state for every row.
    blocks = 1 + batch * rows
    states = torch.arange(1, blocks, dtype=torch.int32, device=device)
    states = states.view(batch, rows)
    wide = rand(blocks, WIDTH - 1 + rows - 1, channels).transpose(1, 2)
    count = max(1, min(layers, 24, BYTES // (4 * blocks * value_heads * SIZE**2)))
    chain = torch.zeros(count, blocks, value_heads, SIZE, SIZE, device=device)
    accepted = torch.ones(batch, dtype=torch.int32, device=device)

    def chain_conv():
        return causal_conv1d_update(
            x.clone(), wide, weight, None, "silu",
            conv_state_indices=states[:, 0], num_accepted_tokens=accepted,
            query_start_loc=starts, max_query_len=rows, validate_data=False,
        )  # fmt: skip

    q, k, v = scratch.mixed.split(
        [heads * SIZE, heads * SIZE, value_heads * SIZE], dim=-1
    )
    q, k = (t.contiguous().view(1, total, heads, SIZE) for t in (q, k))
    v = v.contiguous().view(1, total, value_heads, SIZE)

    def chain_rule():
        for held in chain:
            fused_sigmoid_gating_delta_rule_update(
                A_log=a_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v,
                initial_state=held, inplace_final_state=True, cu_seqlens=starts,
                ssm_state_indices=states, num_accepted_tokens=accepted,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

    report("chain: convolution (with a copy)", where, timed(chain_conv))
    report("chain: delta rule", where, each(timed(chain_rule), count))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="write the results there as JSON")
    parser.add_argument("--rows", type=numbers, default=[16, 32, 64, 128])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--tp", type=int, default=1, choices=[1, 2, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=48)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gdn.py: needs a CUDA device; none is here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    results = []

    def report(name: str, where: dict, time: dict) -> None:
        results.append({"kernel": name, **where, **time})
        what = ", ".join(f"{key} {value}" for key, value in where.items())
        print(f"{name:34} {what:28} {time['us']:8.2f} us", flush=True)

    for batch in args.batches:
        for rows in args.rows:
            case(rows, batch, args.tp, args.layers, report)
    if args.out:
        document = {"device": torch.cuda.get_device_name(), "results": results}
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
