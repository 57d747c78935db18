# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What the image's entrypoint fills in and refuses, and the health check's address."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


entrypoint, health = load("entrypoint"), load("health")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("DDTREE") or name == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(name)


def spec_of(arguments: list[str]) -> dict:
    return json.loads(arguments[arguments.index("--speculative-config") + 1])


def test_defaults():
    arguments, model, drafter = entrypoint.fill_in([])
    assert arguments[0] == model == "Qwen/Qwen3.6-27B"
    assert drafter == "z-lab/Qwen3.6-27B-DFlash"
    assert entrypoint.value_of(arguments, ("--tensor-parallel-size",)) == "2"
    assert spec_of(arguments) == {
        "method": "ddtree",
        "model": drafter,
        "tree_budget": 31,
    }
    assert arguments[-1] == "--language-model-only"


@pytest.mark.parametrize(
    "arguments",
    [["a/m"], ["--limit-mm-per-prompt.image", "0"], ["--limit-mm-per-prompt", "{}"]],
)
def test_text_only_is_for_the_default_model_alone(monkeypatch, arguments):
    monkeypatch.setenv("DDTREE_DRAFTER", "a/d")
    assert "--language-model-only" not in entrypoint.fill_in(arguments)[0]


def test_a_chain_serves_images(monkeypatch):
    monkeypatch.setenv("DDTREE", "chain")
    assert "--language-model-only" not in entrypoint.fill_in([])[0]


def test_flags_win_over_environment(monkeypatch):
    monkeypatch.setenv("DDTREE_TP", "4")
    monkeypatch.setenv("DDTREE_MAX_MODEL_LEN", "9000")
    monkeypatch.setenv("DDTREE_DRAFTER", "a/d")
    arguments, model, _ = entrypoint.fill_in(
        ["a/m", "-tp", "1", "--max_model_len=5", "--enforce-eager"]
    )
    assert model == "a/m"
    assert arguments.count("a/m") == 1
    assert "--tensor-parallel-size" not in arguments
    assert "--max-model-len" not in arguments
    assert spec_of(arguments)["model"] == "a/d"


def test_environment_wins_over_defaults(monkeypatch):
    values = {"DDTREE_TP": "1", "DDTREE_BUDGET": "63", "DDTREE_MODEL": "a/m"}
    for name, value in {**values, "DDTREE_DRAFTER": "a/d"}.items():
        monkeypatch.setenv(name, value)
    arguments, model, drafter = entrypoint.fill_in(["--port", "9"])
    assert (model, drafter) == ("a/m", "a/d")
    assert entrypoint.value_of(arguments, ("--tensor-parallel-size",)) == "1"
    assert spec_of(arguments)["tree_budget"] == 63


def test_empty_variables_count_as_unset(monkeypatch):
    """Compose passes variables that nobody set as empty ones."""
    for name in ("DDTREE", "DDTREE_MODEL", "DDTREE_DRAFTER", "DDTREE_EXTRA_ARGS"):
        monkeypatch.setenv(name, "")
    assert entrypoint.fill_in([])[1:] == ("Qwen/Qwen3.6-27B", entrypoint.DRAFTER)


@pytest.mark.parametrize(
    "words, model",
    [
        (["--port", "8000", "a/m"], "a/m"),
        (["--enforce-eager", "a/m"], "a/m"),
        (["--port=8000", "a/m"], "a/m"),
        (["--model", "a/m"], "a/m"),
        (["--port", "8000"], "Qwen/Qwen3.6-27B"),
    ],
)
def test_where_the_model_is(words, model, monkeypatch):
    monkeypatch.setenv("DDTREE_DRAFTER", "a/d")
    assert entrypoint.fill_in(words)[1] == model


def test_modes(monkeypatch):
    monkeypatch.setenv("DDTREE", "chain")
    monkeypatch.setenv("DDTREE_CHAIN", "7")
    spec = spec_of(entrypoint.fill_in([])[0])
    assert spec["method"] == "dflash"
    assert spec["num_speculative_tokens"] == 7
    monkeypatch.setenv("DDTREE", "off")
    arguments, _, drafter = entrypoint.fill_in(["a/m"])
    assert drafter is None
    assert "--speculative-config" not in arguments


def test_a_speculative_config_of_ones_own():
    text = '{"method": "ddtree", "model": "a/d", "tree_budget": 7}'
    arguments, _, drafter = entrypoint.fill_in(["a/m", "--speculative-config", text])
    assert drafter == "a/d"
    assert arguments.count("--speculative-config") == 1


def test_a_config_file_wins(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: a/m\ntensor-parallel-size: 1\nmax_num_seqs: 3\n")
    with pytest.raises(entrypoint.Missing, match="DDTREE_DRAFTER"):
        entrypoint.fill_in(["--config", str(file)])
    os.environ["DDTREE"] = "off"
    try:
        arguments, model, _ = entrypoint.fill_in(["--config", str(file)])
    finally:
        del os.environ["DDTREE"]
    assert model is None
    assert "--tensor-parallel-size" not in arguments
    assert "--max-num-seqs" not in arguments


def test_extra_arguments_give_way(monkeypatch):
    extra = "--dtype float32 --enforce-eager --seed=3"
    monkeypatch.setenv("DDTREE_EXTRA_ARGS", extra)
    arguments, _, _ = entrypoint.fill_in(["--dtype", "bfloat16"])
    assert entrypoint.value_of(arguments, ("--dtype",)) == "bfloat16"
    assert {"--enforce-eager", "--seed=3"} <= set(arguments)
    assert "float32" not in arguments


@pytest.mark.parametrize(
    "variables, words, says",
    [
        ({"DDTREE": "yes"}, [], "DDTREE='yes' is unknown; set it to tree, chain, off"),
        ({"DDTREE_BUDGET": "0"}, [], "DDTREE_BUDGET='0'.*1 to 127"),
        ({"DDTREE_BUDGET": "x"}, [], "DDTREE_BUDGET='x'"),
        ({"DDTREE": "chain", "DDTREE_CHAIN": "-1"}, [], "DDTREE_CHAIN='-1'"),
        ({}, ["a/m"], "no drafter for model 'a/m'"),
        ({}, ["a/m", "--speculative-config", "{"], "is no JSON"),
        ({}, ["--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read"),
    ],
)
def test_refused(monkeypatch, variables, words, says):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(entrypoint.Missing, match=says):
        entrypoint.fill_in(words)


@pytest.mark.parametrize(
    "listed, visible, ranks, says",
    [
        (0, None, "1", "no GPU is visible"),
        (None, None, "1", "no GPU is visible"),
        (1, None, "2", "--tensor-parallel-size=2 but 1 GPU"),
        (2, "1", "2", "--tensor-parallel-size=2 but 1 GPU"),
        (2, "0,1", "2", None),
        (4, None, "2", None),
    ],
)
def test_gpus(monkeypatch, tmp_path, listed, visible, ranks, says):
    if listed is not None:
        tool = tmp_path / "nvidia-smi"
        lines = "".join(f"echo 'GPU {i}: NVIDIA RTX A6000'\n" for i in range(listed))
        tool.write_text(f"#!/bin/sh\n{lines}")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = ["--tensor-parallel-size", ranks]
    if says is None:
        entrypoint.check_gpus(words)
    else:
        with pytest.raises(entrypoint.Missing, match=says):
            entrypoint.check_gpus(words)


@pytest.mark.parametrize(
    "kind, says",
    [
        ("GatedRepoError", "is gated: accept its terms"),
        ("RepositoryNotFoundError", "was not found"),
        ("RemoteEntryNotFoundError", "has no config.json"),
        ("LocalEntryNotFoundError", "is not in the cache"),
    ],
)
def test_models_of_the_hub(monkeypatch, kind, says):
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")
    made = getattr(errors, kind)

    def fail(*args, **kwargs):
        # The constructors want a reply of the server.
        raise made.__new__(made)

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(entrypoint.Missing, match=f"drafter a/d {says}"):
        entrypoint.check_model("drafter", "a/d", "DDTREE_DRAFTER")


def test_local_models(tmp_path):
    with pytest.raises(entrypoint.Missing, match="has no config.json"):
        entrypoint.check_model("model", str(tmp_path), "DDTREE_MODEL")
    (tmp_path / "config.json").write_text("{}")
    entrypoint.check_model("model", str(tmp_path), "DDTREE_MODEL")
    with pytest.raises(entrypoint.Missing, match="does not exist in the container"):
        entrypoint.check_model("model", "/nowhere/m", "DDTREE_MODEL")


def run(words: list[str], tmp_path: Path, **more: str):
    """The real script with a vllm that prints its arguments."""
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DDTREE_DEVICE": "cpu", **more}
    return subprocess.run(
        [sys.executable, str(DOCKER / "entrypoint.py"), *words],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_script_becomes_vllm(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = run(
        ["vllm", "serve", str(tmp_path), "--port", "9"],
        tmp_path,
        DDTREE="off",
        HOME="/proc/none",
        VLLM_CACHE_ROOT="/proc/none/cache",
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout)[:4] == ["serve", str(tmp_path), "--port", "9"]
    assert "/proc/none/cache is not writable" in done.stderr


def test_other_commands_are_run_as_they_are(tmp_path):
    assert run(["vllm", "bench", "x"], tmp_path).stdout == "bench x\n"
    assert run(["vllm", "serve", "--help"], tmp_path).stdout == "serve --help\n"
    done = run(["nothing-such"], tmp_path)
    assert done.returncode == 2
    assert "nothing-such: not found in the image" in done.stderr


def test_compose_file():
    """Every variable is one that the entrypoint reads; GPUs are as many as ranks."""
    yaml = pytest.importorskip("yaml")
    held = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    service = held["services"]["vllm"]
    source = (DOCKER / "entrypoint.py").read_text()
    for name in service["environment"]:
        assert name == "HF_TOKEN" or f'"{name}"' in source, name
    device = service["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["count"] == service["environment"]["DDTREE_TP"] == "${DDTREE_TP:-2}"
    assert service["ipc"] == "host"


@pytest.mark.parametrize(
    "words, url",
    [
        ([], "http://127.0.0.1:8000/health"),
        (["--port", "81"], "http://127.0.0.1:81/health"),
        (["--port=82", "--host", "0.0.0.0"], "http://127.0.0.1:82/health"),
        (["--host=10.0.0.3"], "http://10.0.0.3:8000/health"),
        (["--ssl-certfile", "c"], "https://127.0.0.1:8000/health"),
    ],
)
def test_health_address(words, url):
    assert health.address(["vllm", "serve", "m", *words]) == url
