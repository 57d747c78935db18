# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What a hybrid target on the V2 runner allocates at start-up, and when."""

from __future__ import annotations

import _hybrid
from _v2 import check_tree, settings

import ddtree_cpu as cpu


def test_layer_inputs_count_as_loaded(tmp_path, monkeypatch):
    """Upstream takes memory for weights, or for what a profiling run adds.

    What is allocated after loading and before profiling is neither, and the KV cache
    would get it once more.
    """
    from vllm.utils.mem_utils import DeviceMemoryProfiler
    from vllm.v1.spec_decode.ddtree import tree_state

    counted = []
    leave = DeviceMemoryProfiler.__exit__

    def watched(self, *args):
        scratch = tree_state.current().gdn_scratch
        counted.append({name: s.x.data_ptr() for name, s in scratch.items()})
        return leave(self, *args)

    monkeypatch.setattr(DeviceMemoryProfiler, "__exit__", watched)
    target, drafter = _hybrid.write_pair(tmp_path)
    spec = {"method": "ddtree", "model": str(drafter), "tree_budget": 7}
    args = {"model": str(target), "enable_prefix_caching": False, **_hybrid.TEXT_ONLY}
    # The default kernel needs FlashInfer on some GPUs.
    args["additional_config"] = {"gdn_prefill_backend": "triton"}
    with cpu.engine(spec, **settings(**args)) as llm:
        runner = check_tree(llm, spec)
        used = {
            n: s.x.data_ptr() for n, s in runner.model_state.tree.gdn_scratch.items()
        }
        assert len(used) == _hybrid.LAYERS - 1
        assert counted == [used]
