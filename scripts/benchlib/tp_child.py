# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What ``benchlib.child`` does for scripts/check_tp.py."""

from __future__ import annotations

from typing import Any

from benchlib.channel import emit

LOGPROBS = 5
PROBE_TOKENS = 32
REQUESTS = 8


def token_ids(engine: Any, texts: list[str]) -> list[list[int]]:
    tokenizer = engine.llm.get_tokenizer()
    return [tokenizer.encode(text) for text in texts]


def run_ranks(engine: Any, job: dict[str, Any]) -> None:
    """Decode groups of ``batch`` until every rank compared ``steps`` steps.

    A result for each group: prompts, texts as token ids, and what each rank compared.
    """
    from vllm.v1.spec_decode.ddtree.rank_check import steps_compared

    room = job["engine"]["max_model_len"] - job["tokens"]
    prompts = [ids[:room] for ids in token_ids(engine, job["texts"])]
    batch, done, at = job["batch"], 0, 0
    ranks = engine.llm.collective_rpc(steps_compared)
    before = [rank["steps"] for rank in ranks]
    while done < job["steps"]:
        group = [prompts[(at + i) % len(prompts)] for i in range(batch)]
        at += batch
        tokens = decode(engine, group, [job["tokens"]] * batch)[0]
        ranks = engine.llm.collective_rpc(steps_compared)
        for rank, begin in zip(ranks, before, strict=True):
            rank["steps"] -= begin
        emit(prompts=group, tokens=tokens, ranks=ranks)
        last, done = done, min(rank["steps"] for rank in ranks)
        if done <= last:  # no trees, or no check: for ever
            return


def decode(
    engine: Any, prompts: list[list[int]], counts: list[int], best: bool = False
) -> tuple[list[list[int]], list[list]]:
    """Greedy texts.

    Args:
        engine: ``child.Engine``.
        prompts: Token ids of B requests.
        counts: Tokens to decode of each.
        best: Also say what might have been taken instead.

    Returns:
        Texts as token ids, and for each token of each the ``LOGPROBS`` best as
        [token id, log probability], the best first (empty without ``best``).
    """
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            logprobs=LOGPROBS if best else None,
        )
        for count in counts
    ]
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = engine.llm.generate(asked, params, use_tqdm=False)
    parts = [output.outputs[0] for output in outputs]
    found = []
    for part in parts if best else ():
        rows = []
        for at in part.logprobs:
            pairs = [[token, round(each.logprob, 6)] for token, each in at.items()]
            rows.append(sorted(pairs, key=lambda pair: -pair[1])[:LOGPROBS])
        found.append(rows)
    return [list(part.token_ids) for part in parts], found


def run_decode(engine: Any, job: dict[str, Any]) -> None:
    """Texts of each of ``groups``, pairs of prompts and of tokens to decode."""
    for prompts, counts in job["groups"]:
        tokens, best = decode(engine, prompts, counts, job["best"])
        emit(tokens=tokens, best=best)


class Requests:
    """Requests of one case of ``run_hang``, stepped by hand.

    Args:
        engine: ``child.Engine``.
        prompts: Token ids; request i decodes prompt i.
        limit: Tokens of a prompt and its text at most, ``max_model_len``.
    """

    def __init__(self, engine: Any, prompts: list[list[int]], limit: int) -> None:
        self.core = engine.llm.llm_engine
        self.prompts = prompts
        self.limit = limit
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.aborted: set[int] = set()

    def add(self, *indices: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for index in indices:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=self.limit,  # more than fits
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": self.prompts[index]}
            self.core.add_request(str(index), prompt, params)

    def step(self, times: int | None = None) -> None:
        """Take so many steps, or all there are."""
        while times != 0 and self.core.has_unfinished_requests():
            for output in self.core.step():
                self.tokens[int(output.request_id)] += output.outputs[0].token_ids
            times = times and times - 1

    def abort(self, *indices: int) -> None:
        self.aborted |= set(indices)
        self.core.abort_request([str(index) for index in indices])

    def found(self) -> list[dict[str, Any]]:
        """Of each request its prompt, its text, and how long that should be."""
        return [
            {
                "prompt": prompt,
                "tokens": tokens,
                "expected": None if i in self.aborted else self.limit - len(prompt),
            }
            for i, (prompt, tokens) in enumerate(
                zip(self.prompts, self.tokens, strict=True)
            )
        ]


def length_case(engine: Any, stream: list[int], limit: int) -> Requests:
    """Requests that end at ``max_model_len``, where a tree no longer fits."""
    sizes = [limit - left for left in (1, 2, 5, 17, 33, 48, 80, 120)]
    prompts = [stream[7 * i : 7 * i + max(1, n)] for i, n in enumerate(sizes)]
    requests = Requests(engine, prompts, limit)
    requests.add(*range(len(prompts)))
    requests.step()
    return requests


def abort_case(engine: Any, stream: list[int], limit: int) -> Requests:
    """Aborts before the prefill, between steps, of the last one, and of all."""
    prompts = [stream[5 * i : 5 * i + 20 + 9 * i] for i in range(REQUESTS)]
    requests = Requests(engine, prompts, limit)
    requests.add(0, 1, 2, 3)
    requests.abort(3)
    requests.step(6)
    requests.abort(0)
    requests.step(1)
    requests.add(4, 5)
    requests.step(3)
    requests.abort(4, 1)
    requests.step()
    requests.add(6, 7)
    requests.step(5)
    requests.abort(6, 7)
    return requests


def preemption_case(engine: Any, stream: list[int], limit: int) -> Requests:
    """More requests than the pool of KV blocks holds at their full length."""
    sizes = [limit // 4 + 11 * i for i in range(REQUESTS)]
    prompts = [stream[9 * i : 9 * i + n] for i, n in enumerate(sizes)]
    requests = Requests(engine, prompts, limit)
    requests.add(*range(len(prompts)))
    requests.step()
    return requests


CASES = {"length": length_case, "abort": abort_case, "preemption": preemption_case}


def preemptions(engine: Any) -> int:
    name = "vllm:num_preemptions"
    return sum(m.value for m in engine.llm.get_metrics() if m.name == name)


def run_hang(engine: Any, job: dict[str, Any]) -> None:
    """One case, then a request alone, which has to be answered."""
    stream = [token for ids in token_ids(engine, job["texts"]) for token in ids]
    limit = job["engine"]["max_model_len"]
    before = preemptions(engine)
    requests = CASES[job["case"]](engine, stream, limit).found()
    probe = stream[3:27]
    tokens = decode(engine, [probe], [PROBE_TOKENS])[0][0]
    requests.append({"prompt": probe, "tokens": tokens, "expected": PROBE_TOKENS})
    emit(requests=requests, preemptions=preemptions(engine) - before)
