# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The model card of a pair, written from the facts of its training."""

from __future__ import annotations

from pathlib import Path

from .export import dump_json
from .presets import Preset

_CARD = """\
# {name}: a {family} target and its DFlash drafter

A test and demo pair for speculative decoding. The target writes text that looks like
Python's standard library and is of no other use.

## Data and licence

Text: {files} Python files and the `pydoc` help topics of the CPython {version} standard
library, under the PSF License 2.0, Copyright Python Software Foundation. Left out:
tests, encodings, idlelib, lib2to3, turtledemo, bundled wheels, generated build data. A
hash of its name puts each file or topic into one split; about one in ten is held out.
No held-out text was used for the tokenizer or in training.

- corpus sha256 (names and contents): `{corpus_sha256}`
- tokens: {train_tokens} training, {heldout_tokens} held out
- `heldout.jsonl`: {heldout_prompts} prompts of 8 to 200 tokens in the sets code, docs
  (docstrings) and topics (help). They are excerpts of held-out text, under its licence.

The weights and the tokenizer are licensed under Apache-2.0.

## Sizes

| | target | drafter |
|---|---|---|
| parameters | {target_parameters} | {drafter_parameters} |
| layers | {target_layers} | {drafter_layers} |

Hidden size {hidden_size}, MLP {intermediate_size}, {num_heads} query and {num_kv_heads}
KV heads of size {head_dim}, vocabulary {vocab_size} (byte-level BPE), tied embeddings,
RoPE theta {rope_theta:g}, {max_positions} positions. Block size {block_size}, so
L = {draft_length}; the drafter reads the residual stream after target layers
{layer_ids} (from 0). Weights are bfloat16. The target was rounded before the drafter's
last training; all figures below are of the rounded weights, in float32.{hybrid}

All drafter layers share one key norm weight: the CPU kernels of vLLM 0.26.0 apply the
first layer's to the context keys of every layer.

## Losses (nats a token)

| | |
|---|---|
| target, training text | {target_train_loss} |
| target, held-out text | {target_heldout_loss} |
| drafter, on the target's own text, weighted by depth | {drafter_train_loss} |

## Acceptance

Chain of {draft_length}, all held-out prompts, {eval_tokens} tokens each, end-of-text
ignored. Tokens a step are all tokens over all steps, bonus token included. T = 1 is
plain sampling; a draft counts when the sampled token equals it. Computed by simulation;
`scripts/check_pair.py` compares that with vLLM.

| | T = 0 | T = 1 |
|---|---|---|
{acceptance}

A continuation loops when its last half has a period of at most 16 tokens.

## How it was made

{runs}

Corpus split, tokenizer and held-out prompts repeat exactly anywhere; weights repeat
only on like hardware and software. `training.json` holds every figure and setting.

- target/model.safetensors sha256 `{target_sha256}`
- drafter/model.safetensors sha256 `{drafter_sha256}`
"""


def _acceptance(p: Preset, runs: dict) -> str:
    rows = [
        (label, runs["0"][key], runs["1"][key])
        for key, label in (
            ("tokens_per_step", "tokens a step"),
            ("tokens_per_step_without_looping_prompts", "without looping prompts"),
            ("looping_prompts", "looping prompts"),
            ("per_prompt_p10_p50_p90", "per prompt, 10th, 50th, 90th percentile"),
        )
    ]
    for name in runs["0"]["by_set"]:
        rows.append((f"set {name}", *(runs[t]["by_set"][name] for t in "01")))
    for depth in (1, 2, 4, 8, p.draft_length):
        if depth <= p.draft_length:
            shares = [runs[t]["accepted_at_least"][depth - 1] for t in "01"]
            rows.append((f"steps with {depth} or more drafts accepted", *shares))
    return "\n".join(f"| {a} | {b} | {c} |" for a, b, c in rows)


def _hybrid(p: Preset) -> str:
    """Say which target layers are gated delta layers; nothing of a dense target."""
    if not p.linear_key_heads:
        return ""
    return (
        f"\n\nOf every {p.full_attention_interval} target layers the last is full "
        "attention, the others are gated delta layers:\n"
        f"{p.linear_key_heads} key heads of size {p.linear_key_dim} and "
        f"{p.linear_value_heads} value heads of size {p.linear_value_dim}."
    )


def _runs(facts: dict) -> str:
    """Describe the run, after the runs that it continued."""
    text = ""
    if facts.get("continued"):
        text = _runs(facts["continued"]) + "\n\nThen, from that pair (PAIR):\n\n"
    steps = ", ".join(f"{n} {stage}" for stage, n in facts["steps"].items())
    note = f"\n{facts['note']}" if facts.get("note") else ""
    return (
        f"{text}    {facts['command']}\n\n"
        f"Seed {facts['seed']}, {facts['hardware']}, {facts['seconds']} s in all "
        f"(steps: {steps}), torch {facts['torch']},\n"
        f"tokenizers {facts['tokenizers']}; greedy tokens a step after it: "
        f"{facts['acceptance']['0']['tokens_per_step']}.{note}"
    )


def write_card(root: Path, p: Preset, facts: dict) -> None:
    """Write ``CARD.md``, and ``training.json`` with all of ``facts``."""
    dump_json(root / "training.json", facts)
    corpus = facts["corpus"]
    fields = {
        **facts["preset"],
        **{k: corpus[k] for k in ("files", "version", "train_tokens")},
        **{k: facts[k] for k in facts if isinstance(facts[k], (str, int, float))},
        "heldout_tokens": corpus["heldout_tokens"],
        "corpus_sha256": corpus["sha256"],
        "layer_ids": ", ".join(str(i) for i in p.target_layer_ids),
        "draft_length": p.draft_length,
        "family": "Qwen3.5" if p.linear_key_heads else "Qwen3",
        "hybrid": _hybrid(p),
        "acceptance": _acceptance(p, facts["acceptance"]),
        "runs": _runs(facts),
        "target_sha256": facts["weights_sha256"]["target"],
        "drafter_sha256": facts["weights_sha256"]["drafter"],
    }
    (root / "CARD.md").write_text(_CARD.format(**fields), encoding="utf-8")
