# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Backports that have no test elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def test_context_keys_take_each_layers_norm():
    """On the CPU stock 0.26.0 normalises all layers with the first one's weight."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    keys = torch.randn(3, 5, 2, 32)
    weights = 1 + torch.rand(3, 32)
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    got = DFlashQwen3Model._normalize_context_k(model, keys)
    scale = torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + 1e-6)
    want = keys * scale * weights[:, None, None]
    torch.testing.assert_close(got, want)


def test_amx_packs_convolutions_of_bfloat16_alone(monkeypatch):
    """Upstream's kernel takes no other dtype, and a float32 hybrid failed to load."""
    from vllm.model_executor.layers import utils

    packed = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(
        utils.ops, "causal_conv1d_weight_pack", lambda w: packed.append(w) or w
    )
    for dtype in (torch.float32, torch.bfloat16):
        before = torch.randn(32, 1, 4).to(dtype)
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(before.clone(), requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        if dtype == torch.float32:
            assert not packed
            assert not hasattr(layer, "_cpu_unpacked_conv_weight")
            torch.testing.assert_close(layer.weight, before, rtol=0, atol=0)
        else:
            assert len(packed) == 1
            torch.testing.assert_close(
                layer._cpu_unpacked_conv_weight, before[:, 0], rtol=0, atol=0
            )
