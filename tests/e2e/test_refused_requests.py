# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Requests that a tree cannot serve exactly are refused, one by one, by name."""

from __future__ import annotations

import pytest
import torch

import ddtree_cpu as cpu
from vllm.exceptions import VLLMValidationError

# The second is a kind of the first in 0.26, and none in later releases.
REFUSAL = (ValueError, VLLMValidationError)


@pytest.fixture(scope="module")
def few(prompts) -> list[str]:
    return prompts[:4]


@pytest.fixture(scope="module")
def expected(few, plain) -> list[list[int]]:
    return plain(few, max_tokens=24).tokens


@pytest.fixture(scope="module")
def llm(expected):  # after the plain engine: two in one process do not work
    with cpu.engine(cpu.ddtree(31)) as engine:
        yield engine


@pytest.fixture
def still_serves(llm, few, expected):
    """After the refusal: nothing is left in the engine and it decodes as before."""
    yield
    assert not llm.llm_engine.has_unfinished_requests()
    run = cpu.decode(llm, few, max_tokens=8)
    assert run.tokens == [tokens[:8] for tokens in expected]


def structured(**kind):
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**kind)}


def detection():
    from vllm.sampling_params import RepetitionDetectionParams

    return {
        "repetition_detection": RepetitionDetectionParams(
            max_pattern_size=4, min_pattern_size=1, min_count=3
        )
    }


REFUSED = {
    "presence_penalty": [{"presence_penalty": 0.5}, {"presence_penalty": -0.5}],
    "frequency_penalty": [{"frequency_penalty": 0.5}],
    "repetition_penalty": [{"repetition_penalty": 1.1}],
    "min_tokens": [{"min_tokens": 2}],
    "logprobs": [{"logprobs": 0}, {"logprobs": 5}],
    "prompt_logprobs": [{"prompt_logprobs": 0}, {"prompt_logprobs": 5}],
    "logprob_token_ids": [{"logprob_token_ids": [5, 6]}],
    "bad_words": [{"bad_words": ["the"]}],
    "logit_bias": [{"logit_bias": {5: 1.0}}],
    "allowed_token_ids": [{"allowed_token_ids": [5, 6]}],
    "structured_outputs": [
        lambda: structured(json={"type": "object"}),
        lambda: structured(regex="[a-z]+"),
        lambda: structured(choice=["yes", "no"]),
        lambda: structured(grammar='root ::= "yes"'),
        lambda: structured(json_object=True),
    ],
    "extra_args": [{"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}],
    "thinking_token_budget": [{"thinking_token_budget": 4}],
    "routed_experts_prompt_start": [{"routed_experts_prompt_start": 1}],
    "repetition_detection": [detection],
}
CASES = [(name, params) for name, several in REFUSED.items() for params in several]


def test_every_sampling_parameter_is_served_or_refused():
    """A field that a new upstream release adds must be put into one of the tables."""
    from vllm import SamplingParams
    from vllm.v1.spec_decode.ddtree.params import SUPPORTED_SAMPLING_FIELDS

    fields = set(SamplingParams.__struct_fields__)
    assert SUPPORTED_SAMPLING_FIELDS - fields <= {"stream_interval"}  # not in 0.26
    assert fields - SUPPORTED_SAMPLING_FIELDS == set(REFUSED)


@pytest.mark.parametrize(
    ("name", "params"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
)
def test_refused_parameter(llm, few, still_serves, name, params):
    from vllm import SamplingParams

    params = params() if callable(params) else params
    sampling = SamplingParams(max_tokens=8, **params)
    with pytest.raises(REFUSAL, match=name) as error:
        llm.generate(few, sampling, use_tqdm=False)
    message = str(error.value)
    assert "tree" in message and "remove it from the request" in message
    assert repr(getattr(sampling, name)) in message


def test_refused_beside_live_requests(llm, few, expected):
    from vllm import SamplingParams

    core = llm.llm_engine
    for index, prompt in enumerate(few):
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        core.add_request(str(index), prompt, sampling)
    outputs = {}
    for step in range(200):
        if step == 3:
            with pytest.raises(REFUSAL, match="presence_penalty=0.5"):
                core.add_request("bad", few[0], SamplingParams(presence_penalty=0.5))
        for output in core.step():
            outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
        if not core.has_unfinished_requests():
            break
    assert [outputs[i] for i in range(len(few))] == expected


def test_parallel_sampling_with_a_refused_parameter(llm, few, still_serves):
    from vllm import SamplingParams

    sampling = SamplingParams(n=3, logprobs=1)
    with pytest.raises(REFUSAL, match="logprobs=1"):
        llm.generate(few, sampling, use_tqdm=False)


def test_neutral_values_are_no_refusal(llm, few, still_serves):
    """What clients send by default: zeros, ones and empty lists."""
    cpu.decode(
        llm,
        few,
        max_tokens=8,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        logprobs=None,
        bad_words=[],
        logit_bias={},
        extra_args={},
    )


def test_beam_search(llm, few, still_serves):
    from vllm.sampling_params import BeamSearchParams

    with pytest.raises(REFUSAL, match="logprobs"):
        llm.beam_search(
            [{"prompt": few[0]}], BeamSearchParams(beam_width=2, max_tokens=4)
        )


def test_lora_request(llm, few, still_serves):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    with pytest.raises(REFUSAL, match="LoRA"):
        llm.generate(
            few[0],
            SamplingParams(max_tokens=4),
            lora_request=LoRARequest("adapter", 1, "adapter"),
            use_tqdm=False,
        )


def test_prompt_embeddings(llm, still_serves):
    from vllm import SamplingParams

    with pytest.raises(REFUSAL, match="enable.prompt.embeds"):
        llm.generate(
            {"prompt_embeds": torch.zeros(4, 192)},
            SamplingParams(max_tokens=4),
            use_tqdm=False,
        )


def test_pooling(llm, few, still_serves):
    with pytest.raises(REFUSAL, match="pooling"):
        llm.embed(few[:1], use_tqdm=False)
