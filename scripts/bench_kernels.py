# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
# ruff: noqa: B023 - the closures are called before the loop goes on
"""Time DDTree's kernels on a GPU, as replays of CUDA graphs.

    python scripts/bench_kernels.py [--out FILE] [--only build,walk,attention]

Prints one line per case: the median and the middle half of 20 measurements, each the
mean of 20 replays, in microseconds. Attention is timed beside FlashAttention's causal
pass over as many rows, which is what a chain costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch

REPLAYS, SAMPLES = 20, 20
VOCAB = 151_936


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Median and quartiles of a captured call, microseconds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    samples = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000 / REPLAYS)
    low, middle, high = statistics.quantiles(samples, n=4)
    return {"us": round(middle, 2), "low": round(low, 2), "high": round(high, 2)}


def random_state(batch: int, budget: int, positions: int = 15):
    """Buffers with random best-first-like trees in every slot."""
    from vllm.v1.spec_decode.ddtree.tree_state import TreeState

    state = TreeState(batch, budget, positions, torch.device("cuda"))
    for r in range(batch):
        depths = [0]
        for i in range(1, budget + 1):
            low = max(0, i - 12)
            parent = int(torch.randint(low, i, ()))
            while depths[parent] >= positions:
                parent = int(torch.randint(0, i, ()))
            depths.append(depths[parent] + 1)
            state.parents[r, i] = parent
            state.depths[r, i] = depths[i]
    state.num_nodes.fill_(budget)
    return state


def bench_build(report: Callable) -> None:
    from vllm.v1.spec_decode.ddtree.kernels.build import TreeBuilder

    for batch in (1, 8, 32):
        logits = torch.randn(batch * 15, VOCAB, device="cuda", dtype=torch.bfloat16)
        logits *= 3
        for budget in (15, 31, 63, 127):
            state = random_state(batch, budget)
            out = state.d_tokens, state.d_parents, state.d_depths, state.d_num_nodes
            builder = TreeBuilder(batch, 15, budget, VOCAB, "best_first", logits.device)
            case = {"batch": batch, "budget": budget}
            builder.build(logits, *out)
            report("rank", case, timed(lambda b=builder: b.rank(logits)))
            report("grow", case, timed(lambda b=builder, o=out: b.grow(batch, *o)))

            def plain(k=budget):
                torch.logsumexp(logits.float(), -1)
                logits.topk(k, dim=-1)

            report("torch top-k and log-sum-exp", case, timed(plain))


def bench_walk(report: Callable) -> None:
    from vllm.v1.spec_decode.ddtree.kernels import kv_compact, step, walk

    for batch in (1, 8):
        for budget in (31, 63, 127):
            state = random_state(batch, budget)
            rows = budget + 1
            slots = torch.arange(batch, dtype=torch.int32, device="cuda")
            starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * rows
            positions = torch.zeros(batch * rows, dtype=torch.int64, device="cuda")
            tokens = torch.zeros(batch * rows, dtype=torch.int64, device="cuda")
            lens = torch.full((batch,), 1000, dtype=torch.int32, device="cuda")
            caches = [
                torch.zeros(batch * 80, 4, 16, 512, dtype=torch.bfloat16, device="cuda")
                for _ in range(64)
            ]
            table = torch.arange(batch * 80, dtype=torch.int32, device="cuda")
            table = table.view(batch, 80)
            mover = kv_compact.KVCompactor([caches], 15, torch.device("cuda"))
            case = {"batch": batch, "budget": budget}

            def prepare(s=state, i=slots, q=starts, p=positions, b=batch):
                step.prepare_step(s, i, q, q, p, b, b)

            report("step", case, timed(prepare))
            # All tokens are equal, so the walk goes down to the deepest first child.
            report(
                "walk",
                case,
                timed(lambda s=state, t=tokens, q=starts: walk.walk(t, t, q, s)),
            )
            deepest = int(state.b_num_sampled.max())
            state.b_path.copy_(torch.arange(16, device="cuda") * 2)
            state.b_path[:, 0] = 0
            for moved in (6, 15):
                state.b_num_sampled.fill_(moved + 1)

                def compact(m=mover, t=table, n=lens, q=starts, s=state, b=batch):
                    m.compact([t], n, q, s.b_path, s.b_num_sampled, b)

                more = {"layers": 64, "moved": moved, "walked": deepest}
                report("compaction", case | more, timed(compact))


def bench_attention(report: Callable) -> None:
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )
    from vllm.v1.spec_decode.ddtree.kernels.attention import (
        merge_new_rows,
        split_kv_attention,
    )

    heads, kv_heads, dim, page = 24, 4, 256, 16
    version = get_flash_attn_version(head_size=dim)
    for batch in (1, 8):
        for context in (512, 4096, 32768):
            for rows in (16, 32, 64):
                pages = -(-(context + rows) // page)
                cache = torch.randn(
                    batch * pages, page, kv_heads, 2 * dim, device="cuda"
                ).to(torch.bfloat16)
                cache = cache.transpose(1, 2)
                k, v = cache.transpose(1, 2).split(dim, dim=-1)
                table = torch.arange(
                    batch * pages, dtype=torch.int32, device="cuda"
                ).view(batch, pages)
                total = batch * rows
                q = torch.randn(total, heads, dim, device="cuda").to(torch.bfloat16)
                new = torch.randn(2, total, kv_heads, dim, device="cuda")
                key, value = new.to(torch.bfloat16)
                starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
                starts *= rows
                full = torch.full((batch,), context + rows, dtype=torch.int32).cuda()
                before = full - rows
                out = torch.empty_like(q)
                state = random_state(batch, rows - 1)
                from vllm.v1.spec_decode.ddtree.kernels.step import prepare_step

                slots = torch.arange(batch, dtype=torch.int32, device="cuda")
                prepare_step(
                    state, slots, starts, starts,
                    torch.zeros(total, dtype=torch.int64, device="cuda"), batch, batch,
                )  # fmt: skip

                def plan(lens, causal):
                    if version != 3:
                        return None
                    return get_scheduler_metadata(
                        batch_size=batch, max_seqlen_q=rows,
                        max_seqlen_k=context + rows,
                        num_heads_q=heads, num_heads_kv=kv_heads, headdim=dim,
                        cache_seqlens=lens, qkv_dtype=torch.bfloat16,
                        cu_seqlens_q=starts, page_size=page, causal=causal,
                        window_size=(-1, -1), num_splits=32,
                    )  # fmt: skip

                def flash(lens, causal, metadata, lse):
                    return flash_attn_varlen_func(
                        q=q, k=k, v=v, cu_seqlens_q=starts,
                        max_seqlen_q=rows, seqused_k=lens,
                        max_seqlen_k=context + rows,
                        softmax_scale=dim**-0.5, causal=causal, block_table=table,
                        return_softmax_lse=lse, scheduler_metadata=metadata,
                        fa_version=version, num_splits=32,
                    )  # fmt: skip

                chain_plan, context_plan = plan(full, True), plan(before, False)

                def merged():
                    got, lse = flash(before, False, context_plan, True)
                    merge_new_rows(
                        q, key, value, cache, out, got, lse, starts, full,
                        table, state, batch, rows, dim**-0.5,
                    )  # fmt: skip

                def split():
                    split_kv_attention(
                        q, key, value, cache, out, starts, full, table,
                        state, batch, rows, total, dim**-0.5,
                    )  # fmt: skip

                case = {"batch": batch, "context": context, "rows": rows}
                report(
                    f"chain, FlashAttention {version}",
                    case,
                    timed(lambda: flash(full, True, chain_plan, False)),
                )
                report(
                    "context alone",
                    case,
                    timed(lambda: flash(before, False, context_plan, True)),
                )
                report("tree, context by FlashAttention", case, timed(merged))
                report("tree, split KV", case, timed(split))


PARTS = {"build": bench_build, "walk": bench_walk, "attention": bench_attention}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the results there as JSON")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by comma")
    args = parser.parse_args()
    chosen = args.only.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"--only {unknown[0]!r} is none of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("bench_kernels.py: needs a CUDA device; none is here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    results = []

    def report(name: str, case: dict, time: dict) -> None:
        results.append({"kernel": name, **case, **time})
        what = ", ".join(f"{key} {value}" for key, value in case.items())
        print(
            f"{name:34} {what:44} {time['us']:8.1f} us "
            f"({time['low']:.1f} to {time['high']:.1f})",
            flush=True,
        )

    for name in chosen:
        PARTS[name](report)
    if args.out:
        device = torch.cuda.get_device_name()
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"device": device, "results": results}, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
