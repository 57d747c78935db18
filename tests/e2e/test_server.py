# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""A real ``vllm serve`` with DDTree and the OpenAI client, one server for all tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

import ddtree_cpu as cpu

pytestmark = pytest.mark.server

MODEL = "tiny"
TOKENS = 48
START_SECONDS = 420
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS}
IGNORE_EOS = {"ignore_eos": True}


@dataclass
class Server:
    """A running server: its process group leader, URL and log file."""

    process: subprocess.Popen
    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as reply:
            return reply.read().decode()

    def group_is_alive(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def counter(self, name: str) -> float:
        """Sum of a Prometheus counter over its labels."""
        lines = [x for x in self.get("/metrics").splitlines() if x.startswith(name)]
        assert lines, f"/metrics has no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with suppress(OSError):
            server.get("/health")
            return
        time.sleep(0.5)
    tail = server.log.read_text(errors="replace")[-3000:]
    pytest.fail(f"the server did not come up (code {server.process.poll()}):\n{tail}")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    template = folder / "chat.jinja"
    # The bundled target is no chat model: the prompt is what the user says.
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
        str(cpu.PAIR / "target"),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "2048"),
        *("--chat-template", str(template), "--generation-config", "vllm"),
        *("--speculative-config", json.dumps(cpu.ddtree(31))),
    ]
    environment = {**os.environ, **cpu.ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO"}
    # Here the engine has a process of its own, as in service.
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = folder / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    running = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_ready(running)
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return cpu.heldout(8)


@pytest.fixture(scope="module")
def expected(texts, plain) -> list[str]:
    """What plain decoding in this process makes of the prompts."""
    return plain(texts, max_tokens=TOKENS).texts


def complete(client, prompt, **params) -> openai.types.Completion:
    extra = {**IGNORE_EOS, **params.pop("extra_body", {})}
    return client.completions.create(
        model=MODEL, prompt=prompt, extra_body=extra, **{**GREEDY, **params}
    )


def test_start_up_log_names_the_tree(server):
    log = server.log.read_text(errors="replace")
    assert "DDTree is on: tree_budget=31, tree_policy=best_first" in log
    assert "TREE_ATTN" in log


def test_completion_equals_plain_decoding(client, texts, expected):
    for prompt, want in zip(texts[:3], expected, strict=False):
        reply = complete(client, prompt)
        assert reply.choices[0].text == want
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens == TOKENS


def test_parallel_requests_equal_plain_decoding(client, texts, expected):
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda text: complete(client, text), texts))
    assert [reply.choices[0].text for reply in replies] == expected


def test_one_request_with_several_prompts(client, texts, expected):
    reply = complete(client, texts[:4])
    assert [choice.text for choice in reply.choices] == expected[:4]


def test_completion_stream(client, texts, expected):
    chunks = list(complete(client, texts[0], stream=True))
    parts = [c.choices[0].text for c in chunks if c.choices]
    assert "".join(parts) == expected[0]
    assert 2 < sum(map(bool, parts)) <= TOKENS


def test_chat_stream(client, texts, expected):
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": texts[1]}],
        stream=True,
        extra_body={**IGNORE_EOS, "add_special_tokens": True},
        **GREEDY,
    )
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(parts) == expected[1]
    assert sum(map(bool, parts)) > 2


def test_several_choices(client, texts, expected):
    # Greedy requests may not have n; one candidate left makes sampling greedy.
    only = {"temperature": 1.0, "extra_body": {"top_k": 1}}
    reply = complete(client, texts[2], n=3, **only)
    assert [choice.text for choice in reply.choices] == [expected[2]] * 3
    sampled = complete(client, texts[2], n=4, temperature=1.0)
    assert len({choice.text for choice in sampled.choices}) > 1


def test_stop_strings_inside_accepted_paths(client, texts, expected):
    """Every place of the text is some step's inside; the text ends right before."""
    want = expected[0]
    for at in range(4, len(want) - 3, max(1, len(want) // 8)):
        stop = want[at : at + 3]
        choice = complete(client, texts[0], stop=[stop]).choices[0]
        assert choice.text == want[: want.index(stop)]
        assert choice.finish_reason == "stop"
        assert choice.model_extra["stop_reason"] == stop


def test_max_tokens_inside_accepted_paths(client, texts):
    whole = complete(client, texts[0], extra_body={"return_token_ids": True})
    ids = whole.choices[0].model_extra["token_ids"]
    for count in range(1, 14):
        reply = complete(
            client, texts[0], max_tokens=count, extra_body={"return_token_ids": True}
        )
        assert reply.choices[0].model_extra["token_ids"] == ids[:count]
        assert reply.usage.completion_tokens == count


def test_seeded_sampling_repeats(client, texts):
    params = {
        "temperature": 0.9,
        "top_p": 0.95,
        "extra_body": {"top_k": 50, "min_p": 0.01},
    }

    def text(seed: int) -> str:
        return complete(client, texts[3], seed=seed, **params).choices[0].text

    first = [text(seed) for seed in range(4)]
    assert [text(seed) for seed in range(4)] == first
    assert len(set(first)) > 1
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(text, range(4)))
    assert together == first, "a seed's text depends on the batch"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# name in the message, request fields
REFUSED = [
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("repetition_penalty", {"repetition_penalty": 1.2}),
    ("logprobs", {"logprobs": 1}),
    ("logprobs", {"logprobs": 0}),
    ("prompt_logprobs", {"prompt_logprobs": 1}),
    ("logit_bias", {"logit_bias": {"5": 2.0}}),
    ("min_tokens", {"min_tokens": 4}),
    ("bad_words", {"bad_words": ["the"]}),
    ("allowed_token_ids", {"allowed_token_ids": [5, 6, 7]}),
    ("structured_outputs", {"structured_outputs": {"choice": ["yes", "no"]}}),
    ("structured_outputs", {"structured_outputs": {"regex": "[ab]+"}}),
    ("structured_outputs", {"response_format": {"type": "json_object"}}),
    (
        "structured_outputs",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
    ),
    ("extra_args", {"vllm_xargs": {"some_processor": 1}}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_unsupported_parameter_is_refused(client, texts, expected, name, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, texts[0], extra_body=fields)
    assert caught.value.status_code == 400
    message = caught.value.body["message"]
    assert name in message
    assert "tree_budget" in message
    assert complete(client, texts[0]).choices[0].text == expected[0]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("logprobs", {"logprobs": True, "top_logprobs": 2}),
        ("structured_outputs", {"response_format": {"type": "json_object"}}),
        ("presence_penalty", {"presence_penalty": -1.0}),
    ],
)
def test_unsupported_chat_parameter_is_refused(client, texts, name, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": texts[0]}],
            extra_body=fields,
            **GREEDY,
        )
    assert name in caught.value.body["message"]


def test_healthy_and_counting(server, client, texts, expected):
    names = [
        f"vllm:spec_decode_num_{what}_total"
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    before = [server.counter(name) for name in names]
    assert complete(client, texts[0]).choices[0].text == expected[0]
    deadline = time.monotonic() + 10
    while True:
        drafts, nodes, accepted = (
            server.counter(name) - old for name, old in zip(names, before, strict=True)
        )
        # Metrics follow the reply by a moment.
        if drafts and drafts + accepted >= TOKENS - 1:
            break
        assert time.monotonic() < deadline, (drafts, nodes, accepted)
        time.sleep(0.2)
    assert nodes > 15 * drafts, "a tree of 31 nodes is more than a chain of 15"
    assert accepted > 0
    assert server.counter("vllm:num_requests_running") == 0
    assert server.get("/health") == ""


def test_sigterm_ends_the_server(server):
    """Last: nothing runs on the server after it."""
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(60)
    assert code in (0, -signal.SIGTERM), code
    deadline = time.monotonic() + 20
    while server.group_is_alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not server.group_is_alive(), "a process of the server is left over"
