#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Start ``vllm serve`` with DDTree's defaults: ``ddtree-entrypoint vllm serve ...``.

Fills in what neither the command line nor a ``--config`` file has, from environment
variables (docs/serving.md lists them), checks what would otherwise fail after minutes,
then replaces itself with vLLM, which so receives the container's signals. Any other
command is run as it is. Exit code 2, with one line, if something is missing.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

MODES = ("tree", "chain", "off")
MIB = 1024 * 1024
# (flags that say it, environment variable, default)
DEFAULTS = (
    (("--tensor-parallel-size", "-tp"), "DDTREE_TP", "2"),
    (("--max-model-len",), "DDTREE_MAX_MODEL_LEN", "32768"),
    (("--max-num-seqs",), "DDTREE_MAX_NUM_SEQS", "8"),
    (("--gpu-memory-utilization",), "DDTREE_GPU_MEMORY_UTILIZATION", "0.92"),
)
MODEL = "Qwen/Qwen3.6-27B"
DRAFTER = "z-lab/Qwen3.6-27B-DFlash"
# Flags of vllm serve that stand alone, so that the next word can be the model.
SWITCHES = re.compile(
    r"--(no-.*|enable-.*|disable-.*|enforce-eager|trust-remote-code)$"
)


class Missing(Exception):
    """One line for the user: field, value, remedy."""


def setting(name, default):
    """An environment variable; an empty one counts as unset."""
    return os.environ.get(name) or default


def flag_name(word):
    """``--max_model_len=5`` and ``--max-model-len`` give ``--max-model-len``."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def any_of(given, flags):
    """Whether one of the flags is given, whole or as ``--flag.key``."""
    return any(name.partition(".")[0] in flags for name in given)


def config_keys(arguments):
    """Flags that a ``--config`` file sets."""
    path = value_of(arguments, ("--config",))
    if path is None:
        return set()
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            held = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise Missing(f"--config {path} cannot be read: {error}") from None
    return {"--" + str(key).replace("_", "-") for key in held}


def value_of(arguments, flags):
    """The last value of any of ``flags``, or None."""
    found = None
    for index, word in enumerate(arguments):
        if flag_name(word) in flags:
            _, equals, value = word.partition("=")
            if equals:
                found = value
            elif index + 1 < len(arguments):
                found = arguments[index + 1]
    return found


def positional(arguments):
    """The model, where it is the first word, or follows a flag and its value."""
    before = None
    for word in arguments:
        if not word.startswith("-"):
            takes_it = before and "=" not in before and not SWITCHES.match(before)
            if not takes_it:
                return word
            before = None
        else:
            before = word
    return None


def fill_in(arguments):
    """Give the arguments of ``vllm serve`` with the defaults added.

    Args:
        arguments: Those of the user, after ``vllm serve``.

    Returns:
        The new list, the model, and the drafter or None.

    Raises:
        Missing: A variable has a value that cannot be used.
    """
    given = {flag_name(word) for word in arguments if word.startswith("-")}
    given |= config_keys(arguments)
    out = list(arguments)
    model = positional(arguments) or value_of(arguments, ("--model",))
    own_model = bool(model or "--model" in given or setting("DDTREE_MODEL", None))
    if model is None and "--model" not in given:
        model = setting("DDTREE_MODEL", MODEL)
        out.insert(0, model)
    for flags, name, default in DEFAULTS:
        if not given & set(flags):
            out += [flags[0], setting(name, default)]
    extra = shlex.split(setting("DDTREE_EXTRA_ARGS", ""))
    index = 0
    while index < len(extra):
        size = 1
        while index + size < len(extra) and not extra[index + size].startswith("-"):
            size += 1
        if flag_name(extra[index]) not in given:
            out += extra[index : index + size]
        index += size

    mode = setting("DDTREE", "tree")
    if mode not in MODES:
        raise Missing(f"DDTREE={mode!r} is unknown; set it to {', '.join(MODES)}")
    spec_flags = {"--speculative-config", "-sc", "--spec-config"}
    theirs = any(
        f in spec_flags or f.startswith("--speculative-config.") for f in given
    )
    if theirs:
        drafter = drafter_of(value_of(arguments, spec_flags))
    elif mode == "off":
        drafter = None
    else:
        drafter = setting("DDTREE_DRAFTER", None if own_model else DRAFTER)
        if drafter is None:
            raise Missing(
                f"no drafter for model {model!r}: set DDTREE_DRAFTER to its DFlash "
                "drafter, give --speculative-config, or set DDTREE=off to serve "
                "without one"
            )
        out += ["--speculative-config", json.dumps(speculation(mode, drafter))]
        # The default model reads images, too, which a tree does not serve.
        text_only = ("--language-model-only", "--limit-mm-per-prompt")
        if mode == "tree" and not own_model and not any_of(given, text_only):
            out.append("--language-model-only")
    return out, model, drafter


def drafter_of(text):
    """The drafter that a speculative config names, or None."""
    try:
        held = json.loads(text or "{}")
    except ValueError:
        raise Missing(f"--speculative-config {text!r} is no JSON") from None
    return held.get("model") if isinstance(held, dict) else None


def speculation(mode, drafter):
    """The speculative config of a tree or of stock DFlash."""
    if mode == "chain":
        config = {"method": "dflash", "model": drafter}
        name, field = "DDTREE_CHAIN", "num_speculative_tokens"
        default, most = "15", None
    else:
        config = {"method": "ddtree", "model": drafter}
        name, field, default, most = "DDTREE_BUDGET", "tree_budget", "31", 127
    text = setting(name, default)
    if not text.isdigit() or int(text) < 1 or (most and int(text) > most):
        upper = f" to {most}" if most else " or more"
        raise Missing(f"{name}={text!r}: set it to a whole number from 1{upper}")
    config[field] = int(text)
    return config


def count_gpus():
    """GPUs that the container sees; None if nvidia-smi is not there."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return 0
    found = sum(1 for line in done.stdout.splitlines() if line.startswith("GPU "))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        found = min(found, len([x for x in chosen.split(",") if x.strip()]))
    return found


def check_gpus(arguments):
    """Refuse to start without as many GPUs as tensor-parallel ranks."""
    if os.environ.get("DDTREE_DEVICE") == "cpu":
        return
    text = value_of(arguments, ("--tensor-parallel-size", "-tp")) or "1"
    ranks = int(text) if text.isdigit() else 1
    found = count_gpus()
    if not found:
        raise Missing(
            "no GPU is visible in the container: start it with --gpus all (Docker with "
            "the NVIDIA Container Toolkit) or --device nvidia.com/gpu=all (Podman)"
        )
    if found < ranks:
        raise Missing(
            f"--tensor-parallel-size={ranks} but {found} GPU(s) are visible: give the "
            f"container {ranks}, or set DDTREE_TP={found}"
        )
    if ranks > 1:
        try:
            size = os.statvfs("/dev/shm")
            free = size.f_frsize * size.f_blocks
        except OSError:
            return
        if free < 1024 * MIB:
            say(
                f"warning: /dev/shm has {free // MIB} MiB, which several ranks can "
                "exhaust; start the container with --ipc=host or --shm-size=8g"
            )


def check_model(what, name, variable):
    """Refuse a model whose config.json cannot be had, with the reason."""
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise Missing(f"{what} {name} has no config.json; mount its folder there")
        return
    if name.startswith(("/", ".", "~")):
        raise Missing(
            f"{what} {name} does not exist in the container; mount it with -v, or set "
            f"{variable}"
        )
    if "://" in name:
        return
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json")
    except hub.GatedRepoError:
        raise Missing(
            f"{what} {name} is gated: accept its terms on its page and pass a token of "
            "that account with -e HF_TOKEN"
        ) from None
    except hub.RepositoryNotFoundError:
        raise Missing(
            f"{what} {name} was not found: correct the name ({variable}), or pass "
            "-e HF_TOKEN if it is private"
        ) from None
    except hub.EntryNotFoundError as error:
        if not isinstance(error, hub.LocalEntryNotFoundError):
            raise Missing(f"{what} {name} has no config.json") from None
        raise Missing(
            f"{what} {name} is not in the cache {os.environ.get('HF_HOME', '')} and "
            "cannot be downloaded (offline?): mount a cache that has it, or give the "
            "container a network"
        ) from None
    except hub.HFValidationError:
        raise Missing(f"{what} {name!r} is no model name; correct {variable}") from None
    except Exception as error:  # whatever the network layer raises
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Missing(f"{what} {name} cannot be had: {line}") from None


def writable(path):
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def prepare_folders():
    """Move caches that cannot be written (read-only root, other user) below /tmp."""
    spare = os.path.join(tempfile.gettempdir(), "ddtree")
    if not writable(os.path.expanduser("~")):
        os.environ["HOME"] = os.path.join(spare, "home")
        os.makedirs(os.environ["HOME"], exist_ok=True)
    # PyTorch asks for a user name, which an arbitrary --user does not have.
    os.environ.setdefault("USER", "ddtree")
    os.environ.setdefault("LOGNAME", os.environ["USER"])
    for name in (
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "HF_HOME",
    ):
        path = os.environ.get(name)
        if path is None or writable(path):
            continue
        if name == "HF_HOME" and os.path.isdir(path):
            continue  # a cache that is mounted read-only is fine to read from
        os.environ[name] = os.path.join(spare, name.lower())
        os.makedirs(os.environ[name], exist_ok=True)
        say(f"note: {path} is not writable, {name} is {os.environ[name]}")


def say(text):
    print(f"ddtree: {text}", file=sys.stderr, flush=True)


def main(argv):
    if argv[:2] == ["vllm", "serve"] and not {"--help", "-h"} & set(argv):
        try:
            prepare_folders()
            arguments, model, drafter = fill_in(argv[2:])
            check_gpus(arguments)
            for what, name, variable in (
                ("model", model, "DDTREE_MODEL"),
                ("drafter", drafter, "DDTREE_DRAFTER"),
            ):
                if name is not None:
                    check_model(what, name, variable)
        except Missing as error:
            say(f"error: {error}")
            return 2
        argv = ["vllm", "serve", *arguments]
        say(shlex.join(argv))
    if not argv or shutil.which(argv[0]) is None:
        say(f"error: {argv[0] if argv else 'no command'}: not found in the image")
        return 2
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
