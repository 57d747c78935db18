#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Train a small Qwen3 or Qwen3.5 target and its DFlash drafter on Python's sources.

Needs torch, tokenizers, safetensors and tqdm. Exit codes: 0 done, 1 a check of the
result failed, 2 could not run (usage, corpus, device).
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import tokenizers
import torch

from pairlib import export
from pairlib.card import write_card
from pairlib.corpus import (
    MASK,
    encode_documents,
    heldout_prompts,
    load_corpus,
    train_tokenizer,
)
from pairlib.model import round_to_bfloat16
from pairlib.presets import PRESETS, Preset
from pairlib.simulate import chain_acceptance, summarise
from pairlib.train import stream_loss, train_drafter, train_target, write_drafter_data


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="standard library folder (default: this Python's; the bundled pair's "
        "is CPython 3.12.1)",
    )
    parser.add_argument(
        "--corpus-version",
        default=platform.python_version(),
        help="CPython version of --corpus, for the card (default: this Python's)",
    )
    parser.add_argument(
        "--expect-corpus", metavar="SHA256", help="refuse a corpus of another hash"
    )
    parser.add_argument(
        "--out", type=Path, help="result folder (default: models/<pair name>)"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an existing result folder"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=20260)
    parser.add_argument(
        "--compile", action="store_true", help="use torch.compile (faster on a GPU)"
    )
    for stage in ("target", "drafter"):
        parser.add_argument(
            f"--{stage}-seconds",
            type=float,
            metavar="S",
            help=f"shorten the {stage}'s schedule to about S seconds of training",
        )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--from-target",
        type=Path,
        metavar="PAIR",
        help="keep the target in this folder and train a new drafter for it",
    )
    start.add_argument(
        "--from-pair",
        type=Path,
        metavar="PAIR",
        help="keep the target in this folder and train its drafter further",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of the preset; repeatable (see pairlib/presets.py)",
    )
    return parser


def _override(preset: Preset, assignments: list[str]) -> Preset:
    """Apply ``FIELD=VALUE`` strings, each parsed to the field's own type."""
    kinds = {f.name: type(getattr(preset, f.name)) for f in fields(preset)}
    for text in assignments:
        name, found, value = text.partition("=")
        if not found or name not in kinds:
            raise ValueError(
                f"--set {text}: write FIELD=VALUE with one of {', '.join(kinds)}"
            )
        try:
            if kinds[name] is tuple:
                parsed = tuple(int(part) for part in value.split(","))
            else:
                parsed = kinds[name](value)
        except ValueError:
            raise ValueError(
                f"--set {text}: {value!r} is no {kinds[name].__name__} for {name}"
            ) from None
        preset = replace(preset, **{name: parsed})
    preset.check()
    return preset


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device {name} cannot be used here: try cpu") from None
    return device


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def train(args: argparse.Namespace, preset: Preset, work: Path) -> dict:
    """Run every stage; write the pair and its card into ``work``.

    Returns:
        The facts that the card states.
    """
    begun = time.monotonic()
    device = _device(args.device)
    corpus = load_corpus(args.corpus)
    if args.expect_corpus and args.expect_corpus != corpus.sha256:
        raise ValueError(
            f"--corpus {args.corpus} has sha256 {corpus.sha256}, not "
            f"{args.expect_corpus}: use the sources that --expect-corpus was made from"
        )
    _say(f"corpus: {corpus.files} files, {corpus.characters} characters")
    target = drafter = None
    source = args.from_pair or args.from_target
    if source:
        _, _, tokenizer = export.load_pair(source, preset, [0])
        sample = encode_documents(tokenizer, corpus.train[:1])[: preset.gen_length]
        target, drafter, _ = export.load_pair(source, preset, sample)
        target = target.to(device)
        if args.from_target:
            drafter = None
        elif drafter is None:
            raise ValueError(f"--from-pair {source} has no drafter: use --from-target")
        else:
            drafter = drafter.to(device).requires_grad_(True)
    else:
        tokenizer = train_tokenizer(corpus, preset.vocab_size)
    mask_id = tokenizer.token_to_id(MASK)
    rows = heldout_prompts(corpus, tokenizer, preset.heldout_prompts, args.seed)
    streams = {
        split: torch.tensor(
            encode_documents(tokenizer, getattr(corpus, split)),
            dtype=torch.int16,
            device=device,
        )
        for split in ("train", "heldout")
    }
    marks = {"data": time.monotonic() - begun}
    target_loss, steps = None, {}
    if target is None:
        target, drafter, target_loss, steps["target"] = train_target(
            preset,
            streams["train"],
            mask_id,
            args.seed,
            args.compile,
            args.target_seconds,
        )
        round_to_bfloat16(target)
    target.requires_grad_(False)
    export.save_target(work, preset, target, tokenizer)
    heldout_loss = stream_loss(target, streams["heldout"])
    marks["target"] = time.monotonic() - begun
    train_loss = stream_loss(target, streams["train"])
    _say(f"target: training text {train_loss:.4f}, held-out text {heldout_loss:.4f}")
    texts, lengths = write_drafter_data(preset, target, streams["train"], args.seed)
    marks["text"] = time.monotonic() - begun
    drafter, drafter_loss, steps["drafter"] = train_drafter(
        preset,
        target,
        drafter,
        texts,
        lengths,
        mask_id,
        args.seed,
        args.compile,
        args.drafter_seconds,
    )
    round_to_bfloat16(drafter)
    export.save_drafter(work, preset, drafter, tokenizer)
    marks["drafter"] = time.monotonic() - begun
    prompts = [tokenizer.encode(row["text"]).ids for row in rows]
    acceptance = {}
    for temperature in (0, 1):
        result = chain_acceptance(
            target,
            drafter,
            prompts,
            preset.eval_tokens,
            mask_id,
            temperature,
            args.seed + 5,
            device,
        )
        acceptance[str(temperature)] = summarise(result, rows)
        _say(
            f"T = {temperature}: "
            f"{acceptance[str(temperature)]['tokens_per_step']} tokens a step"
        )
    marks["acceptance"] = time.monotonic() - begun
    export.write_jsonl(work / "heldout.jsonl", rows)
    facts = {
        "schema_version": 1,
        "name": preset.name,
        "command": shlex.join(["python", *_public(sys.argv)]),
        "seed": args.seed,
        "preset": asdict(preset),
        "hardware": _hardware(device),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "steps": steps,
        "continued": _earlier(source),
        "seconds": round(time.monotonic() - begun),
        "seconds_after_stage": {name: round(t, 1) for name, t in marks.items()},
        "corpus": {
            "version": args.corpus_version,
            "files": corpus.files,
            "sha256": corpus.sha256,
            "characters": corpus.characters,
            "train_tokens": len(streams["train"]),
            "heldout_tokens": len(streams["heldout"]),
        },
        "heldout_prompts": len(rows),
        **export.describe_sizes(target, drafter),
        "joint_loss": None if target_loss is None else round(target_loss, 4),
        "target_train_loss": round(train_loss, 4),
        "target_heldout_loss": round(heldout_loss, 4),
        "drafter_train_loss": round(drafter_loss, 4),
        "acceptance": acceptance,
        "weights_sha256": {
            part: export.sha256_of(work / part / "model.safetensors")
            for part in ("target", "drafter")
        },
    }
    write_card(work, preset, facts)
    export.check_pair(work, preset, target, drafter)
    return facts


def _earlier(source: Path | None) -> dict | None:
    """The facts of the run that a continued pair comes from."""
    path = source and source / "training.json"
    return json.loads(path.read_text()) if path and path.exists() else None


def _public(argv: list[str]) -> list[str]:
    """The command line with folders of this machine replaced by what they are."""
    shown, hide = ["scripts/train_pair.py"], None
    names = {
        "--corpus": "LIB",
        "--out": "OUT",
        "--from-target": "PAIR",
        "--from-pair": "PAIR",
    }
    for word in argv[1:]:
        flag, equals, _ = word.partition("=")
        if hide:
            word, hide = hide, None
        elif flag in names:
            hide = None if equals else names[flag]
            word = f"{flag}={names[flag]}" if equals else flag
        shown.append(word)
    return shown


def main() -> int:
    """Parse, train beside the destination, check, move."""
    args = _parser().parse_args()
    try:
        preset = _override(PRESETS[args.preset], args.set)
        out = args.out or Path("models") / preset.name
        if out.exists() and not args.force:
            raise ValueError(f"--out {out} exists: add --force to replace it")
        if args.seed < 0:
            raise ValueError(f"--seed is {args.seed}: use 0 or more")
        if not args.corpus.is_dir():
            raise ValueError(f"--corpus {args.corpus} is no folder: name a Lib folder")
        out.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        _say(f"train_pair.py: error: {error}")
        return 2
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        facts = train(args, preset, work)
        work.chmod(0o755)
        export.replace_folder(work, out)
    except (export.CheckFailed, FloatingPointError) as error:
        _say(f"train_pair.py: failed: {error}")
        return 1
    except (ValueError, OSError) as error:
        _say(f"train_pair.py: error: {error}")
        return 2
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(
        f"{out}: {export.folder_size(out)} bytes, "
        f"{facts['acceptance']['0']['tokens_per_step']} tokens a step (greedy), "
        f"{facts['seconds']} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
