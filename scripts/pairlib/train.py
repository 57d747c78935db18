# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Training loops: the target on text, the drafter on what the target writes."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from .hybrid import HybridTarget, make_target
from .model import Drafter, Target, block_embeddings
from .presets import Preset
from .simulate import generate

# A GPU's queue lets the host run ahead of the work by this many steps at most.
_SYNC_STEPS = 20
_PROGRESS_SECONDS = 10.0


def _optimizer(model: nn.Module, lr: float, device: torch.device):
    matrices = [w for w in model.parameters() if w.dim() >= 2]
    vectors = [w for w in model.parameters() if w.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )


def _autocast(device: torch.device):
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _compile(loss: Callable, p: Preset, device: torch.device) -> Callable:
    """Compile a function of a batch that ``_fit`` calls under autocast."""
    if not p.linear_key_heads:
        return torch.compile(loss)

    # A backward that is traced takes on the autocast around the compiled function.
    # The delta rule's gradients would so be bfloat16, while eager ones are float32;
    # inside the function autocast ends with the forward.
    def cast(*batch: Tensor) -> Tensor:
        with _autocast(device):
            return loss(*batch)

    run = torch.compile(cast)

    def without(*batch: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            return run(*batch)

    return without


def _fit(
    label: str,
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    steps: int,
    lr: float,
    device: torch.device,
    seconds: float | None,
) -> tuple[float, int]:
    """Run AdamW with a short warm-up and a linear decay.

    Args:
        label: shown beside the progress bar.
        model: trained in place.
        loss_of: draws a batch and returns its loss.
        steps: how many, at most.
        lr: peak rate.
        device: of the model.
        seconds: where given, the training ends after this time, compilation included,
            and the decay follows the clock. ``steps`` stays the upper bound.

    Returns:
        The mean loss of the last 50 steps, and the steps made.

    Raises:
        FloatingPointError: the loss stopped being finite.
    """
    optimizer = _optimizer(model, lr, device)
    warmup = max(1, min(200, steps // 20))
    model.train()
    recent: list[Tensor] = []
    bar = tqdm(total=steps, desc=label, mininterval=_PROGRESS_SECONDS)
    begun, step = time.monotonic(), 0
    said, timed = begun, None
    while step < steps:
        left = (steps - step) / max(1, steps - warmup)
        if seconds is not None and step:
            if step % _SYNC_STEPS == 1:
                recent[-1].item()  # Waits for the device, so that the clock is true.
            now = time.monotonic()
            if now - begun >= seconds:
                break
            # The first step compiles; the decay is over what is left after it.
            timed = now if timed is None else timed
            left = min(left, (begun + seconds - now) / (begun + seconds - timed))
            if now - said >= _PROGRESS_SECONDS:
                said, mean = now, torch.stack(recent).mean().item()
                bar.write(
                    f"{label}: {now - begun:.0f} of {seconds:g} s, step {step}, "
                    f"loss {mean:.4f}",
                    file=sys.stderr,
                )
        rate = lr * min((step + 1) / warmup, left)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with _autocast(device):
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-49:], loss.detach()]
        step += 1
        bar.update()
        if step % 500 == 0 or step == steps:
            mean = torch.stack(recent).mean().item()
            bar.set_postfix(loss=f"{mean:.4f}")
            if not math.isfinite(mean):
                break
    bar.close()
    model.eval()
    mean = torch.stack(recent).mean().item()
    if not math.isfinite(mean):
        raise FloatingPointError(
            f"{label}: loss is {mean} at step {step}; lower the rate ({lr:g})"
        )
    return mean, step


def _windows(
    stream: Tensor, count: int, length: int, generator: torch.Generator
) -> Tensor:
    """``[count, length]`` int64 windows at random places of a token stream."""
    first = torch.randint(
        0, len(stream) - length, (count, 1), generator=generator, device=stream.device
    )
    return stream[first + torch.arange(length, device=stream.device)].long()


def _block_loss(
    target: Target | HybridTarget,
    drafter: Drafter,
    ids: Tensor,
    features: Tensor,
    starts: Tensor,
    mask_id: int,
) -> Tensor:
    """Weighted loss of blocks at ``starts`` ``[B, A]`` of the texts ``ids`` ``[B, T]``.

    The label of mask row i is the token at that row's position; its weight is
    ``exp(-i / loss_decay)``, since row i only counts where all rows before it hit.
    """
    p = drafter.p
    offsets = torch.arange(1, p.block_size, device=ids.device)
    weights = torch.exp(-(offsets - 1) / p.loss_decay)
    embeds = block_embeddings(target, ids.gather(1, starts), mask_id)
    hidden = drafter(embeds, starts, features)
    wanted = (starts[..., None] + offsets).flatten(1)
    labels = ids.gather(1, wanted).unflatten(1, (starts.shape[1], -1))
    losses = F.cross_entropy(
        target.logits(hidden).float().flatten(0, 2), labels.flatten(), reduction="none"
    )
    return (losses.view_as(labels) * weights).mean() / weights.mean()


def _anchors(begin: Tensor, end: int, count: int, generator: torch.Generator) -> Tensor:
    """``[B, count]`` random anchors from ``begin`` ``[B, 1]`` to ``end`` exclusive."""
    draw = torch.rand(len(begin), count, generator=generator, device=begin.device)
    return begin + (draw * (end - begin)).long()


def train_target(
    p: Preset,
    stream: Tensor,
    mask_id: int,
    seed: int,
    compiled: bool,
    seconds: float | None,
) -> tuple[Target | HybridTarget, Drafter, float, int]:
    """Train the target on text, and with it a first drafter on blocks of that text.

    The drafter's loss, times ``joint_weight``, also reaches the target, whose states so
    come to hold more about the tokens after the next one.

    Args:
        p: sizes and schedule.
        stream: ``[N]`` token ids on the training device.
        mask_id: the drafter's mask token.
        seed: of weights and batches.
        compiled: use ``torch.compile``.
        seconds: see :func:`_fit`.

    Returns:
        Both models (float32), the last summed loss in nats a token, the steps made.
    """
    torch.manual_seed(seed)
    device = stream.device
    target, drafter = make_target(p).to(device), Drafter(p).to(device)
    generator = torch.Generator(device).manual_seed(seed + 1)
    begin = torch.full((p.target_batch, 1), 8, device=device)

    def batch_loss(ids: Tensor, starts: Tensor) -> Tensor:
        hidden, features = target(ids[:, :-1])
        logits = target.logits(hidden).float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        blocks = _block_loss(target, drafter, ids, features, starts, mask_id)
        return loss + p.joint_weight * blocks

    run = _compile(batch_loss, p, device) if compiled else batch_loss

    def loss_of() -> Tensor:
        ids = _windows(stream, p.target_batch, p.target_length + 1, generator)
        end = p.target_length - p.block_size + 2
        return run(ids, _anchors(begin, end, p.drafter_anchors, generator))

    both = nn.ModuleList([target, drafter])
    loss, steps = _fit(
        "target", both, loss_of, p.target_steps, p.target_lr, device, seconds
    )
    return target, drafter, loss, steps


@torch.no_grad()
def stream_loss(
    model: Target | HybridTarget, stream: Tensor, limit: int = 262144
) -> float:
    """Mean next-token loss (nats) over a token stream, in float32."""
    length = min(model.p.target_length, len(stream) - 1)
    losses = []
    for first in range(0, min(limit, len(stream) - 1 - length) + 1, length * 16):
        last = min(first + length * 16, (len(stream) - 1) // length * length)
        ids = stream[first:last].long().unflatten(0, (-1, length))
        labels = stream[first + 1 : last + 1].long()
        logits = model.logits(model(ids)[0])
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels, reduction="none"))
    return torch.cat(losses).mean().item()


def write_drafter_data(
    p: Preset, target: Target | HybridTarget, stream: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Let the target continue prompts from the training text.

    Of every eight sequences five are greedy, two start with up to 64 sampled tokens and
    go on greedily, and one is sampled throughout (temperature 1).

    Returns:
        ``[gen_sequences, gen_length]`` int16 tokens and ``[gen_sequences]`` int64
        prompt lengths (8 to 200, log-uniform as for the held-out prompts).
    """
    device = stream.device
    generator = torch.Generator(device).manual_seed(seed + 2)
    # The precision in which a GPU serves the target, and several times faster.
    if device.type == "cuda":
        target = copy.deepcopy(target).bfloat16()
    longest = min(200, p.gen_length - p.block_size - 8)
    texts, prompt_lengths = [], []
    for first in tqdm(
        range(0, p.gen_sequences, p.gen_batch), desc="text", mininterval=2.0
    ):
        count = min(p.gen_batch, p.gen_sequences - first)
        draw = torch.rand(2, count, generator=generator, device=device)
        lengths = (8 * (longest / 8) ** draw[0]).round().long()
        kind = torch.arange(count, device=device) % 8
        until = torch.where(kind < 5, 0, lengths + (draw[1] * 64).long())
        until = torch.where(kind == 7, p.gen_length, until)
        prompts = _windows(stream, count, p.gen_length, generator)
        texts.append(generate(target, prompts, lengths, until, generator).short())
        prompt_lengths.append(lengths)
    return torch.cat(texts), torch.cat(prompt_lengths)


def train_drafter(
    p: Preset,
    target: Target | HybridTarget,
    drafter: Drafter | None,
    texts: Tensor,
    prompt_lengths: Tensor,
    mask_id: int,
    seed: int,
    compiled: bool,
    seconds: float | None,
) -> tuple[Drafter, float, int]:
    """Train the drafter on blocks at random anchors of the frozen target's own text.

    Args:
        p: sizes and schedule.
        target: the verifier, float32, rounded.
        drafter: where to begin, or None for new weights.
        texts: ``[N, gen_length]`` tokens of :func:`write_drafter_data`.
        prompt_lengths: ``[N]``; anchors come after the prompt.
        mask_id: the drafter's mask token.
        seed: of weights and batches.
        compiled: use ``torch.compile``.
        seconds: see :func:`_fit`.

    Returns:
        The model (float32), its last weighted loss in nats a token, the steps made.
    """
    torch.manual_seed(seed + 3)
    device = texts.device
    drafter = Drafter(p).to(device) if drafter is None else drafter
    generator = torch.Generator(device).manual_seed(seed + 4)
    target.requires_grad_(False)
    # On a GPU autocast would cast all weights anew in every step.
    reader = copy.deepcopy(target).bfloat16() if device.type == "cuda" else target

    def batch_loss(ids: Tensor, starts: Tensor) -> Tensor:
        with torch.no_grad():
            features = reader(ids)[1]
        return _block_loss(target, drafter, ids, features, starts, mask_id)

    run = _compile(batch_loss, p, device) if compiled else batch_loss

    def loss_of() -> Tensor:
        chosen = torch.randint(
            0, len(texts), (p.drafter_batch,), generator=generator, device=device
        )
        begin, end = prompt_lengths[chosen][:, None], p.gen_length - p.block_size + 1
        starts = _anchors(begin, end, p.drafter_anchors, generator)
        return run(texts[chosen].long(), starts)

    loss, steps = _fit(
        "drafter", drafter, loss_of, p.drafter_steps, p.drafter_lr, device, seconds
    )
    return drafter, loss, steps
