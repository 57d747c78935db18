# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Two ranks of the V2 runner in the interpreter: ``_tp2.py JOB.json RESULT.json``.

Workers are spawned and import this file again, which turns the interpreter on in each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import triton_interpreter

triton_interpreter.force()

import ddtree_cpu as cpu  # noqa: E402
from benchlib.child import worker_facts  # noqa: E402
from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402

topk_topp_sampler.HAS_TRITON = False


def spoil(worker) -> None:
    """Have rank 1 build trees with another first token."""
    if worker.rank != 1:
        return
    from vllm.v1.spec_decode.ddtree.kernels.build import TreeBuilder

    build = TreeBuilder.build

    def other(builder, logits, tokens, *args):
        build(builder, logits, tokens, *args)
        tokens[:, 0] += 1

    TreeBuilder.build = other


def main() -> None:
    from vllm.v1.spec_decode.ddtree.rank_check import steps_compared

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = {}
    with cpu.engine(job["speculative"], **job["engine"]) as llm:
        found["facts"] = llm.collective_rpc(worker_facts)
        run = cpu.decode(llm, job["prompts"], **job["params"])
        found |= {"tokens": run.tokens, "steps": run.steps}
        found["compared"] = llm.collective_rpc(steps_compared)
        llm.collective_rpc(spoil)
        try:
            cpu.decode(llm, job["prompts"], **job["params"])
        except Exception as error:
            found["error"] = str(error)
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
        # Its workers gone, an engine can wait for ever for its sockets to close.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
