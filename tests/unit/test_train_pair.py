# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Tests of ``scripts/train_pair.py`` and of the pair in models/ that it made."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the pair's scripts need torch")
pytest.importorskip("tokenizers", reason="the pair's scripts need tokenizers")
safetensors = pytest.importorskip(
    "safetensors.torch", reason="the pair's scripts need safetensors"
)

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"
PAIR = REPOSITORY / "models" / "tiny-qwen3"
sys.path.insert(0, str(SCRIPTS))

import train_pair  # noqa: E402
from pairlib import corpus, export, simulate  # noqa: E402
from pairlib import train as train_stages  # noqa: E402
from pairlib.model import (  # noqa: E402
    Target,
    block_embeddings,
    parameters_of,
)
from pairlib.presets import PRESETS  # noqa: E402
from pairlib.simulate import chain_acceptance  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Keep the machine's other cores free; tiny models are no faster with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A small standard library: some thirty files of this Python's own."""
    root = tmp_path_factory.mktemp("lib")
    source = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.name for path in source.glob("[a-d]*.py"))[:30]
    for name in names:
        (root / name).write_bytes((source / name).read_bytes())
    assert len(names) == 30
    return root


@pytest.fixture(scope="module")
def pair():
    """The bundled pair as float32 models, its tokenizer and held-out prompts."""
    preset = export.preset_of(PAIR, PRESETS["tiny"])
    rows = [json.loads(x) for x in (PAIR / "heldout.jsonl").read_text().splitlines()]
    return preset, *export.load_pair(PAIR, preset), rows


def run_main(monkeypatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["train_pair.py", *map(str, words)])
    return train_pair.main()


def test_smoke_run_writes_a_pair(library, tmp_path, monkeypatch, capsys):
    out = tmp_path / "pair"
    words = ["--preset", "smoke", "--corpus", library, "--device", "cpu", "--out", out]
    assert run_main(monkeypatch, *words) == 0
    assert "tokens a step" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    drafter = json.loads((out / "drafter" / "config.json").read_text())
    assert drafter["architectures"] == ["DFlashDraftModel"]
    assert drafter["model_type"] == "qwen3"
    assert drafter["block_size"] == 16
    assert drafter["dflash_config"] == {"mask_token_id": 1, "target_layer_ids": [0, 1]}
    assert set(drafter["layer_types"]) == {"full_attention"}
    names = safetensors.load_file(out / "drafter" / "model.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert {tensor.dtype for tensor in names.values()} == {torch.bfloat16}
    facts = json.loads((out / "training.json").read_text())
    assert str(tmp_path) not in (out / "CARD.md").read_text()
    assert str(tmp_path) not in json.dumps(facts)
    # The same seed gives the same weights, and an existing result is kept.
    assert run_main(monkeypatch, *words) == 2
    assert "--force" in capsys.readouterr().err
    assert run_main(monkeypatch, *words, "--force") == 0
    again = json.loads((out / "training.json").read_text())
    assert again["weights_sha256"] == facts["weights_sha256"]
    # Training further keeps the target.
    more = tmp_path / "more"
    words[words.index(out)] = more
    assert run_main(monkeypatch, *words, "--from-pair", out) == 0
    hashes = json.loads((more / "training.json").read_text())["weights_sha256"]
    assert hashes["target"] == facts["weights_sha256"]["target"]
    assert hashes["drafter"] != facts["weights_sha256"]["drafter"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "vocab_size"], "--set vocab_size: write FIELD=VALUE"),
        (["--set", "target_steps=many"], "'many' is no int for target_steps"),
        (["--set", "vocab_size=321"], "vocab_size is 321: use a multiple of 64"),
        (["--set", "num_kv_heads=1"], "num_kv_heads is 1: use a multiple of 2"),
        (["--set", "target_layer_ids=0,7"], "target_layer_ids is (0, 7)"),
        (["--device", "abacus"], "--device abacus cannot be used here"),
        (["--expect-corpus", "00ff"], "not 00ff"),
        (["--corpus", "nowhere"], "--corpus nowhere is no folder"),
        (["--set", "vocab_size=32704"], "the corpus gives only"),
        (["--seed", "-1"], "--seed is -1"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    words, said, library, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "pair"
    base = ["--preset", "smoke", "--corpus", library, "--out", out]
    assert run_main(monkeypatch, *base, *words) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if "error" in x]
    assert len(lines) == 1
    assert said in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_pair_over_its_size_limit_fails(library, tmp_path, monkeypatch, capsys):
    out = tmp_path / "pair"
    words = ["--preset", "smoke", "--corpus", library, "--out", out]
    assert run_main(monkeypatch, *words, "--set", "size_limit=9999") == 1
    assert "more than size_limit 9999" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_presets_are_usable_and_100m_has_100_million_parameters():
    for preset in PRESETS.values():
        preset.check()
    with torch.device("meta"):
        assert parameters_of(Target(PRESETS["100m"])) >= 100_000_000


def test_split_is_by_file(library):
    loaded = corpus.load_corpus(library)
    train, heldout = ({n for n, _ in part} for part in (loaded.train, loaded.heldout))
    assert train and heldout and not train & heldout
    tokenizer = corpus.train_tokenizer(loaded, 512)
    rows = corpus.heldout_prompts(loaded, tokenizer, 40, seed=7)
    assert rows == corpus.heldout_prompts(loaded, tokenizer, 40, seed=7)
    assert {row["source"] for row in rows} <= heldout
    assert {row["set"] for row in rows} == {"code", "docs"}
    assert all(8 <= row["tokens"] <= 200 for row in rows)


def test_bundled_pair_is_what_its_card_says(pair):
    preset, _, drafter, tokenizer, rows = pair
    facts = json.loads((PAIR / "training.json").read_text())
    for part, digest in facts["weights_sha256"].items():
        assert export.sha256_of(PAIR / part / "model.safetensors") == digest
        assert digest in (PAIR / "CARD.md").read_text()
    assert export.folder_size(PAIR) <= 6_000_000
    assert facts["acceptance"]["0"]["tokens_per_step"] >= 2.5
    assert len(rows) == facts["heldout_prompts"] >= 400
    for row in rows:
        assert len(tokenizer.encode(row["text"]).ids) == row["tokens"]
        assert corpus._is_heldout(row["source"])
    norms = [layer.self_attn.k_norm.weight for layer in drafter.layers]
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    assert preset.draft_length == 15


@torch.no_grad()
def test_simulation_equals_drafting_step_by_step(pair):
    """The one-pass count equals a loop that drafts only where a step begins."""
    preset, target, drafter, tokenizer, rows = pair
    mask_id, tokens = tokenizer.token_to_id(corpus.MASK), 24
    prompts = [tokenizer.encode(row["text"]).ids for row in rows[::97]]
    whole = chain_acceptance(
        target, drafter, prompts, tokens, mask_id, 0, 0, torch.device("cpu"), rows=2
    )
    for index, prompt in enumerate(prompts):
        ids, steps, emitted = list(prompt), 0, 0
        first = target.logits(target(torch.tensor([ids]))[0])[0, -1].argmax()
        ids.append(int(first))
        while len(ids) - len(prompt) < tokens:
            _, features = target(torch.tensor([ids[:-1]]))
            bonus, start = torch.tensor([[ids[-1]]]), torch.tensor([[len(ids) - 1]])
            hidden = drafter(block_embeddings(target, bonus, mask_id), start, features)
            draft = target.logits(hidden)[0, 0].argmax(-1).tolist()
            truth = target.logits(target(torch.tensor([ids + draft]))[0])[0]
            truth = truth[len(ids) - 1 :].argmax(-1).tolist()
            hits = 0
            while hits < len(draft) and draft[hits] == truth[hits]:
                hits += 1
            ids += truth[: hits + 1]
            steps, emitted = steps + 1, emitted + hits + 1
        assert (steps, emitted) == (whole.steps[index], whole.tokens[index])
        assert ids[len(prompt) :][:tokens] == whole.text[index]
    assert whole.tokens_per_step() > 2


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
def test_simulation_equals_vllm():
    """vLLM's own DFlash: same text, same steps, same acceptance at every depth."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "check_pair.py", PAIR, "--prompts", "16"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "all equal" in done.stdout


def test_a_timed_fit_ends_by_the_clock_and_decays_to_nothing(monkeypatch):
    model, clock, rates = torch.nn.Linear(2, 1), [0.0], []
    step = torch.optim.AdamW.step

    def record(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        clock[0] += 40.0 if len(rates) == 1 else 0.5  # The first step compiles.
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    monkeypatch.setattr(train_stages.time, "monotonic", lambda: clock[0])
    _, steps = train_stages._fit(
        "fit",
        model,
        lambda: model(torch.ones(3, 2)).square().mean(),
        10_000,
        1e-3,
        torch.device("cpu"),
        240.0,
    )
    # 200 s are left after the first step: 400 steps of half a second.
    assert steps == len(rates) == 401
    assert clock[0] == 240.0
    assert rates[-1] == pytest.approx(1e-3 / 400)
    # A warm-up of 200 steps meets the decay after a third of the time.
    assert max(rates) == pytest.approx(1e-3 * 2 / 3, rel=0.01)
    assert 130 <= rates.index(max(rates)) <= 136


def test_a_bfloat16_target_continues_prompts():
    torch.manual_seed(0)
    target = Target(PRESETS["smoke"]).bfloat16()
    prompts = torch.arange(3, 43).expand(2, -1)
    lengths, until = torch.tensor([8, 20]), torch.tensor([0, 30])
    generator = torch.Generator().manual_seed(0)
    text = simulate.generate(target, prompts, lengths, until, generator)
    for row, length in zip(text, lengths, strict=True):
        assert torch.equal(row[:length], prompts[0, :length])
    # The last token is greedy: the best one of a run without cache, up to rounding.
    with torch.no_grad():
        logits = target.logits(target(text[:, :-1])[0])[:, -1].float()
    chosen = logits.gather(1, text[:, -1:])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 0.05
