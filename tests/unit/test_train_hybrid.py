# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Tests of hybrid (Qwen3.5) pairs: the delta rule, the target, a whole run."""

from __future__ import annotations

import importlib.util
import json
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
sys.path.insert(0, str(REPOSITORY / "scripts"))

import train_pair  # noqa: E402
from pairlib import export, hybrid, simulate  # noqa: E402
from pairlib import train as train_stages  # noqa: E402
from pairlib.presets import PRESETS  # noqa: E402

SMOKE = PRESETS["smoke-hybrid"]
# Longer than two chunks, and no multiple of one.
LENGTH = 150


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def gdn():
    """The overlay's delta rule, where vLLM (or the overlay's package) is at hand."""
    return pytest.importorskip("vllm.v1.spec_decode.ddtree.gdn")


def steep_target(preset=SMOKE) -> hybrid.HybridTarget:
    """A target whose weights are large enough for every part to show in its logits."""
    torch.manual_seed(3)
    target = hybrid.make_target(preset).eval().requires_grad_(False)
    for name, weight in target.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            weight.mul_(8.0)
        elif name.endswith(("layernorm.weight", "norm.weight")):
            weight.add_(torch.randn_like(weight) * 0.2)
    target.embed_tokens.weight.mul_(10.0)
    return target


def rule_inputs(rows: int, length: int, share: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    heads, size = 2, 16
    q, k = torch.randn(2, rows, length, heads, size).unbind(0)
    v = torch.randn(rows, length, heads * share, size)
    # From heads that keep everything to heads that keep next to nothing.
    reach = torch.tensor([1e-3, 0.05, 1.0, 12.0])
    g = -torch.rand(rows, length, heads * share) * reach
    beta = torch.rand(rows, length, heads * share)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def chain(gdn, x: dict, row: int, state: torch.Tensor):
    gates = gdn.Gates(x["g"][row], x["beta"][row])
    out, states = gdn.chain_delta_rule(
        x["q"][row], x["k"][row], x["v"][row], gates, state.mT
    )
    return out, states[-1].mT


@pytest.mark.parametrize("length", [1, 5, 64, LENGTH])
def test_chunks_equal_the_chain(gdn, length):
    x, state = rule_inputs(3, length), torch.randn(3, 4, 16, 16)
    out, after = hybrid.chunk_delta_rule(**x, state=state)
    for row in range(3):
        want, last = chain(gdn, x, row, state[row])
        torch.testing.assert_close(out[row], want, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(after[row], last, atol=2e-5, rtol=1e-4)


def test_single_steps_equal_the_chain(gdn):
    x, state = rule_inputs(2, 12), torch.randn(2, 4, 16, 16)
    moving = state.clone()
    steps = [
        hybrid.step_delta_rule(*(t[:, i] for t in x.values()), moving)
        for i in range(12)
    ]
    for row in range(2):
        want, last = chain(gdn, x, row, state[row])
        torch.testing.assert_close(torch.stack(steps, 1)[row], want)
        torch.testing.assert_close(moving[row], last)


def test_gradients_equal_the_chains(gdn):
    """Also where keys repeat and nothing is forgotten, the worst case of a solver."""
    x = rule_inputs(1, 100)
    x["k"][:, 20:90] = x["k"][:, 20:21]
    x["g"][:, :, 0], x["beta"][:, :, 0] = 0.0, 1.0
    x = {name: t.requires_grad_(True) for name, t in x.items()}
    aim = torch.randn(100, 4, 16)
    out, _ = hybrid.chunk_delta_rule(**x, state=None)
    got = torch.autograd.grad((out[0] * aim).sum(), list(x.values()))
    rows = gradient_chain(gdn, x)
    want = torch.autograd.grad((rows * aim).sum(), list(x.values()))
    torch.testing.assert_close(out[0], rows, atol=2e-5, rtol=1e-4)
    for name, a, b in zip(x, got, want, strict=True):
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(a, b, atol=5e-4, rtol=1e-3, msg=name)


def gradient_chain(gdn, x: dict) -> torch.Tensor:
    """``gdn.chain_delta_rule`` row by row, as it writes its outputs in place."""
    state, rows = torch.zeros(4, 16, 16), []
    for i in range(x["v"].shape[1]):
        one = {name: t[:, i : i + 1] for name, t in x.items()}
        out, state = chain(gdn, one, 0, state)
        rows.append(out)
    return torch.cat(rows)


def test_joined_blocks_are_the_inverse():
    """What a GPU takes in the place of a solver."""
    torch.manual_seed(5)
    for a in (torch.rand(8, 64, 64), torch.ones(1, 64, 64), torch.rand(8, 4, 4)):
        a = a.tril(-1)
        want = torch.linalg.inv(torch.eye(a.shape[-1]).double() + a.double())
        error = (hybrid.join_blocks(a) - want).abs().max() / want.abs().max()
        assert error < 1e-5
        torch.testing.assert_close(
            hybrid.unit_lower_inverse(a), want.float(), atol=1e-4, rtol=1e-4
        )


def test_long_decay_gives_finite_gradients():
    x = rule_inputs(1, 130)
    x = {name: t.requires_grad_(True) for name, t in x.items()}
    out, state = hybrid.chunk_delta_rule(**{**x, "g": x["g"] * 50}, state=None)
    for grad in torch.autograd.grad(out.sum() + state.sum(), list(x.values())):
        assert torch.isfinite(grad).all()


@torch.no_grad()
def test_autocast_leaves_the_rule_in_float32():
    x = rule_inputs(1, 70)
    plain, _ = hybrid.chunk_delta_rule(**x, state=None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = hybrid.chunk_delta_rule(**x, state=None)
    assert torch.equal(plain, cast)


def test_a_compiled_loss_has_float32_gradients(monkeypatch):
    """As the eager one has, whose backward is outside of autocast."""
    x = rule_inputs(1, 70)
    x = {name: t.requires_grad_(True) for name, t in x.items()}

    def bfloat16(device):
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def loss(*values):
        return hybrid.chunk_delta_rule(*values, None)[0].square().sum()

    def gradients(function):
        with bfloat16(None):
            total = function(*x.values())
        return torch.autograd.grad(total, list(x.values()))

    compiler = torch.compile
    monkeypatch.setattr(train_stages, "_autocast", bfloat16)
    monkeypatch.setattr(torch, "compile", lambda f: compiler(f, backend="aot_eager"))
    compiled = train_stages._compile(loss, SMOKE, torch.device("cpu"))
    for got, want in zip(gradients(compiled), gradients(loss), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_cached_runs_equal_one_run():
    """Prompts of any split, then single tokens; states and histories move along."""
    target = steep_target()
    ids = torch.randint(0, SMOKE.vocab_size, (2, 90))
    want, wanted_features = target(ids)
    for cuts in ([1, 2, 40, 41], [3, 67, *range(68, 90)]):
        cache, start, parts = target.new_cache(2, 90), 0, []
        for end in [*cuts, 90]:
            parts.append(target(ids[:, start:end], cache, start))
            start = end
        hidden, features = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        torch.testing.assert_close(hidden, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(features, wanted_features, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_generation_is_greedy_by_the_full_run():
    target = steep_target()
    prompts = torch.randint(0, SMOKE.vocab_size, (4, 100))
    lengths, until = torch.tensor([1, 3, 10, 70]), torch.tensor([0, 60, 80, 70])
    generator = torch.Generator().manual_seed(0)
    text = simulate.generate(target, prompts, lengths, until, generator)
    chosen = target.logits(target(text)[0]).argmax(-1)
    for row, (length, first) in enumerate(zip(lengths, until, strict=True)):
        first = max(first, length)
        assert torch.equal(text[row, :length], prompts[row, :length])
        assert torch.equal(text[row, first:], chosen[row, first - 1 : -1])


def test_a_bfloat16_target_continues_prompts():
    """On a GPU the text is written in that type; states stay float32."""
    torch.manual_seed(0)
    target = hybrid.make_target(SMOKE).bfloat16()
    prompts = torch.arange(3, 43).expand(2, -1)
    lengths, until = torch.tensor([8, 20]), torch.tensor([0, 30])
    generator = torch.Generator().manual_seed(0)
    text = simulate.generate(target, prompts, lengths, until, generator)
    with torch.no_grad():
        logits = target.logits(target(text[:, :-1])[0])[:, -1].float()
    chosen = logits.gather(1, text[:, -1:])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 0.05


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("lib")
    source = Path(sysconfig.get_path("stdlib"))
    small = [path for path in source.glob("*.py") if path.stat().st_size < 12_000]
    for path in sorted(small)[:40]:
        (root / path.name).write_bytes(path.read_bytes())
    return root


@pytest.fixture(scope="module")
def smoke(library, tmp_path_factory) -> Path:
    """A pair as ``train_pair.py`` writes it."""
    out = tmp_path_factory.mktemp("smoke") / "pair"
    words = ["--preset", "smoke-hybrid", "--corpus", library, "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["train_pair.py", *map(str, words), "--out", str(out)]
        )
        assert train_pair.main() == 0
    return out


def test_a_run_writes_a_pair_that_reads_back(smoke):
    config = json.loads((smoke / "target" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    text = config["text_config"]
    assert text["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert sum(text["rope_parameters"]["mrope_section"]) == SMOKE.head_dim // 4
    weights = safetensors.load_file(smoke / "target" / "model.safetensors")
    assert {name.split(".layers.")[0] for name in weights if "layers" in name} == {
        "model.language_model"
    }
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    preset = export.preset_of(smoke, PRESETS["smoke"])
    assert preset.linear_key_heads == 2
    target, drafter, tokenizer = export.load_pair(smoke, preset)
    assert isinstance(target, hybrid.HybridTarget)
    assert drafter is not None
    assert tokenizer.get_vocab_size() == SMOKE.vocab_size
    assert "Qwen3.5 target" in (smoke / "CARD.md").read_text()


def test_a_drafter_is_trained_for_an_old_target(smoke, library, tmp_path, monkeypatch):
    out = tmp_path / "more"
    words = ["--preset", "smoke-hybrid", "--corpus", library, "--device", "cpu"]
    words += ["--from-target", smoke, "--out", out]
    monkeypatch.setattr(sys, "argv", ["train_pair.py", *map(str, words)])
    assert train_pair.main() == 0
    old, new = (
        json.loads((root / "training.json").read_text())["weights_sha256"]
        for root in (smoke, out)
    )
    assert old["target"] == new["target"]


def test_layers_of_another_pattern_are_refused(smoke, tmp_path):
    path = tmp_path / "pair"
    for part in ("target", "drafter"):
        (path / part).mkdir(parents=True)
        config = json.loads((smoke / part / "config.json").read_text())
        if part == "target":
            config["text_config"]["layer_types"].reverse()
        (path / part / "config.json").write_text(json.dumps(config))
    with pytest.raises(export.CheckFailed, match="layer_types"):
        export.preset_of(path, SMOKE)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.models.qwen3_5") is None
    if importlib.util.find_spec("transformers")
    else True,
    reason="transformers with Qwen3.5 is not installed",
)
@torch.no_grad()
def test_logits_equal_transformers(smoke, tmp_path):
    """Both of the trained target and of one with large weights, features included."""
    from transformers import Qwen3_5ForConditionalGeneration

    preset = export.preset_of(smoke, SMOKE)
    tokenizer = export.load_pair(smoke, preset)[2]
    export.save_target(tmp_path, preset, steep_target(), tokenizer)
    ids = torch.randint(0, preset.vocab_size, (2, LENGTH))
    for root, spread in ((smoke, 0.01), (tmp_path, 0.5)):
        target = export.load_pair(root, preset)[0]
        model = Qwen3_5ForConditionalGeneration.from_pretrained(
            root / "target", dtype=torch.float32
        )
        hidden, features = target(ids)
        theirs = model(input_ids=ids, output_hidden_states=True)
        ours = target.logits(hidden)
        assert ours.std() > spread
        torch.testing.assert_close(ours, theirs.logits, atol=1e-4, rtol=1e-4)
        # transformers' state i is the stream before layer i; the last one is normed.
        for layer, own in zip(
            preset.target_layer_ids, features.chunk(3, -1), strict=True
        ):
            if layer + 1 < preset.target_layers:
                torch.testing.assert_close(
                    own, theirs.hidden_states[layer + 1], atol=1e-4, rtol=1e-4
                )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("linear_key_heads=3", "linear_key_heads is 3: use a multiple of 2"),
        ("linear_value_heads=3", "linear_value_heads is 3: use a multiple of 2"),
        ("linear_key_dim=24", "linear_key_dim is 24: use a multiple of 16"),
        ("head_dim=24", "head_dim is 24: use a multiple of 16"),
        ("full_attention_interval=5", "full_attention_interval is 5: use 2 to"),
    ],
)
def test_bad_sizes_are_named(change, said):
    with pytest.raises(ValueError, match=said):
        train_pair._override(SMOKE, [change])
