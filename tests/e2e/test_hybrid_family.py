# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The other targets with gated delta layers: Qwen3.5 with experts, and Qwen3-Next;
where the release has a class for it, Qwen3.5 without an image tower; Intern-S2.

As ``test_hybrid``: random weights, steered drafts, a CPU in float32.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import _hybrid
import pytest
import torch
from _refusals import refusal

import ddtree_cpu as cpu

SEED = 20261205
LENGTHS = (1, 3, 17, 60)
MAX_TOKENS = 40
CLASSES = {
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    # Qwen3.5 with experts by another name; transformers has no class for it.
    "interns2_preview": "InternS2PreviewForConditionalGeneration",
}
FLAT = ("qwen3_5_text", "qwen3_next")


def registered(name: str) -> bool:
    from vllm.model_executor.models.registry import ModelRegistry

    return name in ModelRegistry.models


@dataclass
class Family:
    """A random pair of one class, and what plain decoding gives.

    Attributes:
        kind: Of ``CLASSES``.
        target, drafter: Folders.
        texts: Prompts as token ids.
        plain: The run without a draft.
    """

    kind: str
    target: Path
    drafter: Path
    texts: list[list[int]]
    plain: cpu.Run

    def arguments(self) -> dict:
        return _arguments(self.kind, self.target)


def _arguments(kind: str, target: Path) -> dict:
    found = {"model": str(target), "enable_prefix_caching": False}
    return found if kind in FLAT else {**found, **_hybrid.TEXT_ONLY}


@pytest.fixture(scope="module", params=CLASSES)
def family(request, tmp_path_factory) -> Family:
    kind = request.param
    if not registered(CLASSES[kind]):
        pytest.skip(f"this release has no {CLASSES[kind]}")
    target, drafter = _hybrid.write_pair(tmp_path_factory.mktemp(kind), kind=kind)
    rng = random.Random(SEED)
    texts = [
        [10 + index] + [rng.randrange(10, 512) for _ in range(size - 1)]
        for index, size in enumerate(LENGTHS)
    ]
    with cpu.engine(None, **_arguments(kind, target)) as llm:
        model = _hybrid.runner_of(llm).get_model()
        assert type(model).__name__ == CLASSES[kind]
        plain = cpu.decode(llm, texts, max_tokens=MAX_TOKENS)
    return Family(kind, target, drafter, texts, plain)


def test_plain_equals_transformers(family):
    import transformers

    name = CLASSES[family.kind]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers has no {name}")
    model = getattr(transformers, name).from_pretrained(
        str(family.target), dtype=torch.float32
    )
    for prompt, want in zip(family.texts, family.plain.tokens, strict=True):
        got = model.generate(
            input_ids=torch.tensor([prompt]),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
        )
        assert got[0, len(prompt) :].tolist() == want[:16]


def test_tree_equals_plain(family, monkeypatch):
    _hybrid.Oracle(family.texts, family.plain.tokens, SEED).install(monkeypatch)
    spec = {"method": "ddtree", "model": str(family.drafter), "tree_budget": 16}
    with cpu.engine(spec, **family.arguments()) as llm:
        runner = _hybrid.runner_of(llm)
        model = runner.get_model()
        # What the pages are sized for is what the layers keep: one state, no drafts.
        pages = type(model).get_mamba_state_shape_from_config(runner.vllm_config)
        layers = [m for m in model.modules() if hasattr(m, "conv_kernel_size")]
        assert {tuple(m.get_state_shape()) for m in layers} == {tuple(pages)}
        run = cpu.decode(llm, family.texts, max_tokens=MAX_TOKENS)
    assert run.tokens == family.plain.tokens
    assert run.tokens_per_step > 1.5
    accepted = {size for steps in run.steps for size in steps}
    assert accepted >= {1, 2, 3}


def test_text_only_without_a_class(tmp_path):
    """0.26 takes the class with an image tower, which fails for want of its config."""
    if registered(CLASSES["qwen3_5_text"]):
        pytest.skip("this release has the class")
    target, drafter = _hybrid.write_pair(tmp_path, kind="qwen3_5_text")
    spec = {"method": "ddtree", "model": str(drafter), "tree_budget": 7}
    message = refusal(spec, model=str(target), enable_prefix_caching=False)
    for word in (f"model='{target}", CLASSES["qwen3_5_text"], "newer release"):
        assert word in message


def test_all_classes_are_known():
    """Every class with these layers that a DFlash drafter can read, and no other."""
    from vllm.model_executor.models.interfaces import is_hybrid, supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.spec_decode.ddtree.config_hybrid import GATED_DELTA_MODELS

    users = ("qwen3_5", "qwen3_next", "interns2_preview", "minicpmv4_6", "colqwen3_5")
    found = set()
    for name, model in ModelRegistry.models.items():
        module = getattr(model, "module_name", "").rsplit(".", 1)[-1]
        if module not in users:
            continue
        kind = model.load_model_cls()
        if is_hybrid(kind) and supports_eagle3(kind) and "Col" not in name:
            found.add(name)
    assert found == {name for name in GATED_DELTA_MODELS if registered(name)}
