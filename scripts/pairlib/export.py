# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Write a pair in the formats that vLLM loads, read it back, and describe it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .corpus import EOS, MASK, write_jsonl
from .hybrid import HybridTarget, layer_types, make_target, target_config
from .model import Drafter, Target, parameters_of, share_key_norms
from .presets import Preset


class CheckFailed(Exception):
    """A finished pair did not pass its checks; the message is one line."""


def _qwen3_config(p: Preset, layers: int, eos: int) -> dict:
    return {
        "model_type": "qwen3",
        "vocab_size": p.vocab_size,
        "hidden_size": p.hidden_size,
        "intermediate_size": p.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": p.num_heads,
        "num_key_value_heads": p.num_kv_heads,
        "head_dim": p.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": p.rms_norm_eps,
        "max_position_embeddings": p.max_positions,
        "rope_theta": p.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": p.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "torch_dtype": "bfloat16",
    }


def _target_prefix(p: Preset) -> str:
    """What the file puts before a target's weight names."""
    return "model.language_model." if p.linear_key_heads else "model."


def dump_json(path: Path, value: dict) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _save_weights(folder: Path, module: torch.nn.Module, prefix: str) -> None:
    weights = {
        prefix + name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def save_target(
    root: Path, p: Preset, target: Target | HybridTarget, tokenizer: Tokenizer
) -> None:
    """Write the target, dense or hybrid, and its tokenizer into ``root/target``."""
    folder = root / "target"
    folder.mkdir(parents=True, exist_ok=True)
    eos = tokenizer.token_to_id(EOS)
    config = _qwen3_config(p, p.target_layers, eos)
    if p.linear_key_heads:
        config = target_config(p, config)
    else:
        config = {"architectures": ["Qwen3ForCausalLM"], **config}
    dump_json(folder / "config.json", config)
    dump_json(
        folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos}
    )
    dump_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": p.max_positions,
            # The model knows no roles: a chat is its messages, one after the other.
            "chat_template": "{% for message in messages %}{{ message['content'] }}"
            "\n{% endfor %}",
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _save_weights(folder, target, _target_prefix(p))


def save_drafter(root: Path, p: Preset, drafter: Drafter, tokenizer: Tokenizer) -> None:
    """Write ``DFlashDraftModel`` into ``root/drafter``."""
    folder = root / "drafter"
    folder.mkdir(parents=True, exist_ok=True)
    config = _qwen3_config(p, p.drafter_layers, tokenizer.token_to_id(EOS))
    config |= {
        "block_size": p.block_size,
        "num_target_layers": p.target_layers,
        "dflash_config": {
            "mask_token_id": tokenizer.token_to_id(MASK),
            "target_layer_ids": list(p.target_layer_ids),
        },
    }
    dump_json(folder / "config.json", {"architectures": ["DFlashDraftModel"], **config})
    _save_weights(folder, drafter, "")


def load_pair(
    root: Path, p: Preset, sample: list[int] | None = None
) -> tuple[Target | HybridTarget, Drafter | None, Tokenizer]:
    """Read a pair back as float32 models; the drafter is None where it is missing.

    Args:
        root: folder of the pair.
        p: its sizes.
        sample: token ids of some text. Where given, a drafter whose layers have key
            norm weights of their own is rewritten to share one; else it is refused.

    Raises:
        CheckFailed: a file is missing, or does not fit the preset's sizes.
    """
    tokenizer_path = root / "target" / "tokenizer.json"
    if not tokenizer_path.exists():
        raise CheckFailed(f"{tokenizer_path} is missing: name a folder with a target")
    target = _read(root / "target", make_target(p), _target_prefix(p))
    drafter = None
    if (root / "drafter" / "model.safetensors").exists():
        features = None
        if sample is not None:
            with torch.no_grad():
                features = target(torch.tensor([sample]))[1]
        drafter = _read(root / "drafter", Drafter(p), "", features)
    return target, drafter, Tokenizer.from_file(str(tokenizer_path))


def _read(folder: Path, model, prefix: str, features: torch.Tensor | None = None):
    path = folder / "model.safetensors"
    try:
        state = {
            name.removeprefix(prefix): tensor.float()
            for name, tensor in load_file(path).items()
        }
        if features is not None:
            share_key_norms(model.p, state, features)
        model.load_state_dict(state)
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise CheckFailed(
            f"{path} does not fit preset {model.p.name}: {reason}"
        ) from error
    if any(not torch.equal(state[n], w) for n, w in model.state_dict().items()):
        raise CheckFailed(
            f"{path} has key norm weights that differ from layer to layer: train it "
            "further with --from-pair, which makes them one"
        )
    return model.eval().requires_grad_(False)


def preset_of(root: Path, base: Preset) -> Preset:
    """Shapes of a saved pair from its config files, the rest from ``base``."""
    target = json.loads((root / "target" / "config.json").read_text())
    target = target.get("text_config", target)
    drafter = json.loads((root / "drafter" / "config.json").read_text())
    found = replace(
        base,
        name=root.name,
        vocab_size=target["vocab_size"],
        hidden_size=target["hidden_size"],
        intermediate_size=target["intermediate_size"],
        num_heads=target["num_attention_heads"],
        num_kv_heads=target["num_key_value_heads"],
        head_dim=target["head_dim"],
        target_layers=target["num_hidden_layers"],
        drafter_layers=drafter["num_hidden_layers"],
        target_layer_ids=tuple(drafter["dflash_config"]["target_layer_ids"]),
        block_size=drafter["block_size"],
        rope_theta=target["rope_parameters"]["rope_theta"],
        rms_norm_eps=target["rms_norm_eps"],
        max_positions=target["max_position_embeddings"],
        linear_key_heads=target.get("linear_num_key_heads", 0),
        linear_value_heads=target.get("linear_num_value_heads", 0),
        linear_key_dim=target.get("linear_key_head_dim", 0),
        linear_value_dim=target.get("linear_value_head_dim", 0),
        full_attention_interval=target.get(
            "full_attention_interval", base.full_attention_interval
        ),
    )
    if found.linear_key_heads and target["layer_types"] != layer_types(found):
        raise CheckFailed(
            f"{root}/target/config.json: layer_types does not repeat every "
            f"{found.full_attention_interval} layers: no preset describes that"
        )
    return found


def folder_size(root: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def check_pair(
    root: Path, p: Preset, target: Target | HybridTarget, drafter: Drafter
) -> None:
    """Read the files back and compare them with the models in memory.

    Raises:
        CheckFailed: a weight differs or is not finite, or the folder is too large.
    """
    for kept, read in zip((target, drafter), load_pair(root, p)[:2], strict=True):
        for (name, a), b in zip(
            kept.state_dict().items(), read.state_dict().values(), strict=True
        ):
            if not torch.isfinite(b).all():
                raise CheckFailed(f"weight {name} is not finite: lower the rates")
            if not torch.equal(a.cpu(), b):
                raise CheckFailed(f"weight {name} changed on its way through the file")
    size = folder_size(root)
    if p.size_limit and size > p.size_limit:
        raise CheckFailed(
            f"the pair takes {size} bytes, more than size_limit {p.size_limit}: "
            "choose smaller sizes"
        )


def sha256_of(path: Path) -> str:
    """Hash of one file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe_sizes(target: Target | HybridTarget, drafter: Drafter) -> dict:
    """Parameter counts for the card."""
    return {
        "target_parameters": parameters_of(target),
        "drafter_parameters": parameters_of(drafter),
    }


def replace_folder(fresh: Path, final: Path) -> None:
    """Move a finished folder into place; an older one goes only after that."""
    final.parent.mkdir(parents=True, exist_ok=True)
    old = None
    if final.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}-old-", dir=final.parent))
        os.replace(final, old / final.name)
    os.replace(fresh, final)
    if old is not None:
        shutil.rmtree(old)


__all__ = [
    "CheckFailed",
    "check_pair",
    "describe_sizes",
    "dump_json",
    "folder_size",
    "load_pair",
    "preset_of",
    "replace_folder",
    "save_drafter",
    "save_target",
    "sha256_of",
    "write_jsonl",
]
