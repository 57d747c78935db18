# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The training text: the Python standard library's own sources and help topics."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS, MASK = "<|endoftext|>", "<|mask|>"
SPECIALS = (EOS, MASK)

# Tests, generated tables, vendored packages and other people's text stay out.
_SKIPPED_PARTS = {
    "__pycache__",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "lib-dynload",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_TOPICS = "pydoc_data/topics.py"
_HELD_OUT_ONE_IN = 10


@dataclass
class Corpus:
    """Documents by split; each is a pair of a name and its text."""

    train: list[tuple[str, str]] = field(default_factory=list)
    heldout: list[tuple[str, str]] = field(default_factory=list)
    sha256: str = ""
    files: int = 0

    @property
    def characters(self) -> dict[str, int]:
        """Characters in each split."""
        return {
            split: sum(len(text) for _, text in getattr(self, split))
            for split in ("train", "heldout")
        }


def _is_heldout(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0


def _topics(source: str) -> dict[str, str]:
    """Read the dictionary of help texts without running the module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            value = ast.literal_eval(node.value)
            if isinstance(value, dict):
                return value
    return {}


def load_corpus(root: Path) -> Corpus:
    """Read a standard library folder into documents, split by file name.

    Args:
        root: the folder that holds ``abc.py`` and its siblings.

    Returns:
        The documents in sorted order of name. A file belongs to one split as a whole;
        the choice depends on its name alone. ``sha256`` covers names and contents.

    Raises:
        ValueError: the folder holds no usable Python source.
    """
    corpus, digest = Corpus(), hashlib.sha256()
    paths = sorted(
        (path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")
    )
    for name, path in paths:
        if _SKIPPED_PARTS & set(name.split("/")) or name.startswith("_sysconfigdata"):
            continue
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest.update(name.encode() + b"\0" + raw + b"\0")
        corpus.files += 1
        documents = [(name, text)]
        if name == _TOPICS:
            documents = [
                (f"{name}:{key}", value) for key, value in sorted(_topics(text).items())
            ]
        for document in documents:
            if document[1].strip():
                split = corpus.heldout if _is_heldout(document[0]) else corpus.train
                split.append(document)
    if not corpus.train or not corpus.heldout:
        raise ValueError(
            f"corpus {root} holds too few Python files ({corpus.files}): name the "
            "standard library folder of a CPython 3.12.1"
        )
    corpus.sha256 = digest.hexdigest()
    return corpus


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on the training documents only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in corpus.train), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size} but the corpus gives only "
            f"{tokenizer.get_vocab_size()} tokens: use a larger corpus or fewer tokens"
        )
    return tokenizer


def encode_documents(
    tokenizer: Tokenizer, documents: list[tuple[str, str]]
) -> list[int]:
    """Concatenate documents as token ids, each ended by the end-of-text token."""
    eos, ids = tokenizer.token_to_id(EOS), []
    for encoding in tokenizer.encode_batch([text for _, text in documents]):
        ids += encoding.ids
        ids.append(eos)
    return ids


def _docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return found
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and len(text) >= 80:
            found.append(text)
    return found


def heldout_prompts(
    corpus: Corpus, tokenizer: Tokenizer, count: int, seed: int
) -> list[dict]:
    """Cut prompts of mixed lengths out of held-out documents.

    Args:
        corpus: documents; only ``heldout`` is used.
        tokenizer: measures lengths.
        count: prompts in all: half from code, a quarter each from docstrings and from
            help topics, less when a set runs short.
        seed: decides documents, places and lengths.

    Returns:
        Rows with ``id``, ``set`` (code, docs or topics), ``source``, ``tokens`` and
        ``text``. Lengths are log-uniform over 8 to 200 tokens.
    """
    rng = random.Random(seed)
    code = [d for d in corpus.heldout if ":" not in d[0]]
    topics = [d for d in corpus.heldout if ":" in d[0]]
    docs = [(name, text) for name, body in code for text in _docstrings(body)]
    rows: list[dict] = []
    seen: set[str] = set()
    for label, pool, share in (
        ("code", code, count - 2 * (count // 4)),
        ("docs", docs, count // 4),
        ("topics", topics, count // 4),
    ):
        made = 0
        for _ in range(share * 40):
            if made == share or not pool:
                break
            name, text = rng.choice(pool)
            length = round(math.exp(rng.uniform(math.log(8), math.log(200))))
            starts = [0] + [i + 1 for i, c in enumerate(text[:-1]) if c == "\n"]
            piece = text[rng.choice(starts) :][: length * 12]
            ids = tokenizer.encode(piece).ids[:length]
            prompt = tokenizer.decode(ids)
            # A cut inside a character would not survive the way through text.
            if len(ids) < 8 or "\ufffd" in prompt or not prompt.strip():
                continue
            tokens = len(tokenizer.encode(prompt).ids)
            if prompt in seen or not 8 <= tokens <= 200:
                continue
            seen.add(prompt)
            rows.append(
                {
                    "id": len(rows),
                    "set": label,
                    "source": name,
                    "tokens": tokens,
                    "text": prompt,
                }
            )
            made += 1
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Write one JSON object a line."""
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        encoding="utf-8",
    )
