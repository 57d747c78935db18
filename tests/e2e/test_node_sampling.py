# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""node_sampling, generators and the CPU expand kernel, without an engine."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from _stats import goodness_of_fit

SEED = int(os.environ.get("DDTREE_TEST_SEED", "0"))
VOCAB = 6
# Rows: root, two children, two below the first, one below the second.
PARENTS = [-1, 0, 0, 1, 1, 2]
DEPTHS = [0, 1, 1, 2, 2, 2]
TOKENS = [2, 4, 0, 3, 2]


def seeded(seed: int) -> torch.Generator:
    print(f"seed {SEED + seed} = DDTREE_TEST_SEED ({SEED}) + {seed}")
    return torch.Generator().manual_seed(SEED + seed)


def min_p_processor(values: list[float]):
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(values)))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    processor.min_p_count = sum(value > 0 for value in values)
    processor.min_p = torch.tensor(values).unsqueeze(1)
    return processor


def metadata(temperature, top_k=None, top_p=None, min_p=None, generators=None):
    """Sampling metadata of requests with these parameters, 0 for greedy."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    batch = len(temperature)
    processors = [min_p_processor(min_p or [0.0] * batch)]
    nothing = torch.zeros(batch)
    return SamplingMetadata(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        all_greedy=all(t == 0 for t in temperature),
        all_random=all(t > 0 for t in temperature),
        top_p=None if top_p is None else torch.tensor(top_p),
        top_k=None if top_k is None else torch.tensor(top_k, dtype=torch.int32),
        generators=generators or {},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing + 1,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )


def depth_noise(depths, generators=None, vocab=VOCAB):
    from vllm.v1.spec_decode.ddtree.node_sampling import DepthNoise

    return DepthNoise(depths, vocab, generators or {}, torch.device("cpu"))


def exponential(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.stack(
        [torch.empty(VOCAB).exponential_(generator=generator) for _ in range(count)]
    )


# Noise and generators


def test_seeded_noise_is_what_plain_decoding_would_draw():
    noise = depth_noise([3, 4], {1: seeded(1)}).noise
    assert torch.equal(noise[1, :4], exponential(seeded(1), 4))


def test_depths_and_requests_have_noise_of_their_own():
    noise = depth_noise([3, 3], {1: seeded(2)}).noise.flatten(0, 1)
    for one, other in itertools.combinations(noise, 2):
        assert not torch.equal(one, other)
    assert (noise > 0).all()


@pytest.mark.parametrize("emitted", [1, 2, 4])
def test_commit_leaves_the_emitted_draws_only(emitted):
    generator, plain = seeded(3), seeded(3)
    depth_noise([4], {0: generator}).commit([emitted])
    exponential(plain, emitted)
    assert torch.equal(generator.get_state(), plain.get_state())


def test_discarded_request_keeps_its_generator():
    generator, other = seeded(4), seeded(5)
    before = generator.get_state()
    noise = depth_noise([0, 2], {0: generator, 1: other})
    noise.commit([1, 2])
    assert torch.equal(generator.get_state(), before)
    assert not torch.equal(other.get_state(), seeded(5).get_state())
    assert torch.isfinite(noise.noise[0]).all()


def test_generators_rewind_by_state():
    from vllm.v1.spec_decode.ddtree.generators import rewind, save_states

    generators = {0: seeded(6), 2: seeded(7)}
    states = save_states(generators, [0, 1])
    assert set(states) == {0}
    exponential(generators[0], 1)
    rewind(generators[0], states[0])
    assert torch.equal(exponential(generators[0], 2), exponential(seeded(6), 2))


@pytest.mark.parametrize("device_state", [4, 40])
def test_device_generators_rewind_by_offset(device_state):
    from vllm.v1.spec_decode.ddtree.generators import rewind

    offsets = [device_state]
    generator = SimpleNamespace(
        get_offset=lambda: offsets[-1], set_offset=offsets.append
    )
    rewind(generator, None)
    assert offsets[-1] == device_state - 4


# Rows


PARAMETERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "all": {"temperature": 0.9, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_chain_of_rows_is_upstreams_sampler_token_by_token(case):
    """One seeded request, rows at depths 0 to 4: the draws of five plain steps."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.ddtree.node_sampling import sample_rows

    params = {name: [value] for name, value in PARAMETERS[case].items()}
    for seed in range(20):
        logits = torch.randn(5, VOCAB, generator=seeded(100 + seed)) * 2
        tree_generator, plain_generator = seeded(seed), seeded(seed)
        rows = torch.zeros(5, dtype=torch.int64)
        tokens = sample_rows(
            logits.clone(),
            rows,
            torch.arange(5),
            metadata(**params),
            depth_noise([5], {0: tree_generator}),
        )
        sampler = Sampler()
        plain = [
            int(
                sampler(
                    logits[depth : depth + 1].clone(),
                    metadata(**params, generators={0: plain_generator}),
                ).sampled_token_ids
            )
            for depth in range(5)
        ]
        assert tokens.tolist() == plain


def test_mixed_batch_keeps_every_requests_parameters():
    """Greedy, top_k 1, top_p near 0, min_p 1 and free requests, rows interleaved."""
    from vllm.v1.spec_decode.ddtree.node_sampling import sample_rows

    gen = seeded(8)
    count = 400
    request = torch.randint(0, 5, (count,), generator=gen)
    depth = torch.randint(0, 4, (count,), generator=gen)
    logits = torch.randn(count, VOCAB, generator=gen)
    tokens = sample_rows(
        logits.clone(),
        request,
        depth,
        metadata(
            [0.0, 1.0, 1.0, 1.0, 5.0],
            top_k=[VOCAB, 1, VOCAB, VOCAB, VOCAB],
            top_p=[1.0, 1.0, 1e-6, 1.0, 1.0],
            min_p=[0.0, 0.0, 0.0, 1.0, 0.0],
        ),
        depth_noise([4] * 5),
    )
    best = logits.argmax(1)
    assert torch.equal(tokens[request < 4], best[request < 4])
    assert not torch.equal(tokens[request == 4], best[request == 4])


def test_all_greedy_needs_no_noise():
    from vllm.v1.spec_decode.ddtree.node_sampling import sample_rows

    logits = torch.randn(7, VOCAB, generator=seeded(9))
    rows = torch.zeros(7, dtype=torch.int64)
    tokens = sample_rows(logits.clone(), rows, rows, metadata([0.0]), None)
    assert torch.equal(tokens, logits.argmax(1))


def test_bfloat16_logits_are_sampled_in_float32():
    from vllm.v1.spec_decode.ddtree.node_sampling import sample_rows

    logits = torch.randn(4, VOCAB, generator=seeded(10)).bfloat16()
    rows = torch.zeros(4, dtype=torch.int64)
    both = [
        sample_rows(
            values.clone(),
            rows,
            torch.arange(4),
            metadata([1.0]),
            depth_noise([4], {0: seeded(11)}),
        )
        for values in (logits, logits.float())
    ]
    assert torch.equal(*both)


# The distribution of a whole step


def node_probabilities(logits, temperature, top_k):
    """[rows, VOCAB] float64, written out."""
    scaled = logits.double() / temperature
    if top_k is not None:
        kth = scaled.topk(top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    return scaled.softmax(1)


def outcomes(probabilities: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Every emitted sequence of the tree and its exact probability."""
    found = {}

    def visit(row: int, emitted: tuple[int, ...], probability: float) -> None:
        children = {
            token: node
            for node, (token, parent) in enumerate(
                zip(TOKENS, PARENTS[1:], strict=True), 1
            )
            if parent == row
        }
        for token in range(VOCAB):
            p = probability * float(probabilities[row, token])
            if token in children:
                visit(children[token], (*emitted, token), p)
            else:
                found[(*emitted, token)] = p

    visit(0, (), 1.0)
    return found


def draw(logits, temperature, top_k, count, noise_of):
    """Emitted sequences of ``count`` requests with the same tree and parameters."""
    from vllm.v1.spec_decode.ddtree.node_sampling import sample_rows
    from vllm.v1.spec_decode.ddtree.sampler import walk
    from vllm.v1.spec_decode.ddtree.tree import TreeBatch

    rows = len(PARENTS)
    tree = TreeBatch.empty(count, rows - 1)
    tree.tokens[:] = torch.tensor(TOKENS)
    tree.parents[:] = torch.tensor(PARENTS, dtype=torch.int32)
    tree.depths[:] = torch.tensor(DEPTHS, dtype=torch.int32)
    tree.num_nodes[:] = rows - 1
    request, node = tree.valid.nonzero(as_tuple=True)
    depth = tree.depths[request, node].long()
    # Every other request is greedy, so that the batch is mixed.
    temperatures = [temperature if i % 2 else 0.0 for i in range(count)]
    tokens = sample_rows(
        logits.repeat(count, 1),
        request,
        depth,
        metadata(temperatures, top_k=top_k and [top_k] * count),
        noise_of(count),
    )
    sampled, num_sampled, _ = walk(tree, tokens.view(count, rows), 3)
    lists = [
        tuple(row[:n])
        for row, n in zip(sampled.tolist(), num_sampled.tolist(), strict=True)
    ]
    greedy = lists[0]
    assert all(one == greedy for one in lists[::2])
    return lists[1::2]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.6, None), (1.0, 4)])
def test_walk_has_the_targets_distribution(temperature, top_k):
    """200,000 steps of a fixed tree against the product of exact probabilities."""
    torch.manual_seed(SEED + 20)
    print(f"seed {SEED + 20}")
    logits = torch.randn(len(PARENTS), VOCAB, generator=seeded(21))
    expected = outcomes(node_probabilities(logits, temperature, top_k))
    drawn = []
    for _ in range(10):
        drawn += draw(
            logits, temperature, top_k, 40_000, lambda n: depth_noise([3] * n)
        )
    assert len(drawn) == 200_000
    assert {len(one) for one in drawn} == {1, 2, 3}
    p = goodness_of_fit(drawn, {o: q for o, q in expected.items() if q > 0})
    print(f"p = {p:.4g}")
    assert p > 1e-3


def test_noise_shared_between_depths_would_be_noticed():
    def shared(count):
        noise = depth_noise([3] * count)
        noise.noise[:] = noise.noise[:, :1]
        return noise

    torch.manual_seed(SEED + 22)
    logits = torch.randn(len(PARENTS), VOCAB, generator=seeded(21))
    expected = outcomes(node_probabilities(logits, 1.0, None))
    drawn = draw(logits, 1.0, None, 40_000, shared)
    assert goodness_of_fit(drawn, expected) < 1e-6


# The backport of the CPU expand kernel


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, [0.8, 1e-7, 1.3]),
        (torch.int32, [5, 0, 7]),
        (torch.int64, [5, 0, 7]),
    ],
)
def test_expand_writes_its_result(dtype, values):
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    source = torch.tensor(values, dtype=dtype)
    output = torch.full((6,), -1, dtype=dtype)
    _expand_kernel_impl(output, source, torch.tensor([2, 2, 6]), 0, 1)
    expected = torch.tensor(
        [values[0]] * 2 + [values[2]] * 4, dtype=dtype
    )  # the second request has no tokens
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_expand_replaces_one_value(dtype):
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    source = torch.tensor([0, 3, 0], dtype=dtype)
    output = torch.full((4,), -1, dtype=dtype)
    _expand_kernel_impl(output, source, torch.tensor([1, 3, 4]), 0, 1)
    assert output.tolist() == [1, 3, 3, 1]
    assert source.tolist() == [0, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_expand_batch_to_tokens(dtype, monkeypatch):
    """As the rejection sampler of stock speculative decoding calls it on a CPU."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(
        rejection_sampler, "expand_kernel", cpu_triton_utils.expand_kernel
    )
    expand_batch_to_tokens = rejection_sampler.expand_batch_to_tokens
    source = torch.tensor([2, 0, 9], dtype=dtype)
    cumulative = torch.tensor([3, 3, 5], dtype=torch.int32)
    out = expand_batch_to_tokens(source, cumulative, 5, replace_from=0, replace_to=1)
    assert out.tolist() == [2, 2, 2, 9, 9]
    assert out.dtype == dtype
