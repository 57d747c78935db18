# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Git through GitPython, with nothing of the user's configuration in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from patchset.errors import CannotRun

os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
import git

NAME = "DDTree for vLLM"
EMAIL = "ddtree@example.invalid"
# Midnight UTC of the day upstream released 0.26.0: one date for every commit that
# this tool makes, so that commit ids repeat.
DATE = "1784937600 +0000"
BRANCH = "ddtree"
_OLDEST_GIT = "2.32"  # the first that reads GIT_CONFIG_GLOBAL
# A user may need these to reach a server; everything else named GIT_* is dropped.
_KEEP = re.compile(
    r"GIT_(PYTHON_.*|SSL_.*|SSH.*|ASKPASS|PROXY_.*|HTTP_.*|CURL_.*|EXEC_PATH)"
)
_LOCAL_CONFIG = {
    "am.keepcr": "true",
    "apply.whitespace": "nowarn",
    "commit.gpgsign": "false",
    "core.abbrev": "12",
    "core.attributesfile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesfile": os.devnull,
    "core.filemode": "true",
    "core.fsmonitor": "false",
    "core.hookspath": os.devnull,
    "core.quotepath": "true",
    "core.safecrlf": "false",
    "core.symlinks": "true",
    "diff.algorithm": "myers",
    "gc.auto": "0",
    "i18n.commitencoding": "utf-8",
    "merge.conflictstyle": "merge",
    "merge.renames": "false",
    "rerere.enabled": "false",
    "user.email": EMAIL,
    "user.name": NAME,
    "user.useconfigonly": "false",
}
_FORMAT = (
    "--stdout",
    "--zero-commit",
    "--no-signature",
    "--full-index",
    "--no-stat",
    "--no-numbered",
    "--subject-prefix=PATCH",
    "--no-renames",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-attach",
    "--no-thread",
    "--no-cover-letter",
    "--no-base",
    "--no-notes",
    "--no-to",
    "--no-cc",
    "--no-add-header",
    "--no-relative",
    "--no-indent-heuristic",
    "--diff-algorithm=myers",
    "--encode-email-headers",
    "--unified=3",
    "--inter-hunk-context=0",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--submodule=short",
    "--no-function-context",
)

_user_environment: dict[str, str] = {}


# `apply` and `rebase` must read a patch file in the same way.
AM_FLAGS = (
    "--3way",
    "--keep-cr",
    "--keep-non-patch",
    "--no-scissors",
    "--no-signoff",
    "--no-message-id",
    "--quoted-cr=nowarn",
    "--whitespace=nowarn",
    "--no-gpg-sign",
    "--patch-format=mbox",
)


def prepare_environment() -> None:
    """Shut the user's git configuration out of this process and its children.

    Raises:
        CannotRun: git is missing or too old.
    """
    if not _user_environment:
        _user_environment.update(
            {k: v for k, v in os.environ.items() if k.startswith("GIT_")}
        )
    for key in [k for k in os.environ if k.startswith("GIT_")]:
        if not _KEEP.fullmatch(key):
            del os.environ[key]
    os.environ.update(
        {
            "GIT_AUTHOR_DATE": DATE,
            "GIT_AUTHOR_EMAIL": EMAIL,
            "GIT_AUTHOR_NAME": NAME,
            "GIT_COMMITTER_DATE": DATE,
            "GIT_COMMITTER_EMAIL": EMAIL,
            "GIT_COMMITTER_NAME": NAME,
            # What this tool commits can be made again, so it need not wait for disks.
            "GIT_CONFIG_COUNT": "2",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_KEY_1": "core.fsync",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_VALUE_0": "*",
            "GIT_CONFIG_VALUE_1": "none",
            "GIT_EDITOR": "true",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_PAGER": "cat",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
            "TZ": "UTC",
        }
    )
    if shutil.which("git") is None:
        raise CannotRun("git is not on PATH; install git 2.32 or newer")
    git.refresh()
    found = git.Git().version_info
    if Version(".".join(str(part) for part in found)) < Version(_OLDEST_GIT):
        shown = ".".join(str(part) for part in found)
        raise CannotRun(f"git is {shown}; install git {_OLDEST_GIT} or newer")


@contextlib.contextmanager
def user_configuration() -> Iterator[None]:
    """Let git read the user's own configuration: proxies, mirrors, credentials."""
    ours = {k: os.environ.pop(k) for k in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM")}
    os.environ.update({k: v for k, v in _user_environment.items() if k in ours})
    try:
        yield
    finally:
        os.environ.update(ours)


def create(folder: Path) -> git.Repo:
    """Make an empty repository with every setting that matters written down."""
    folder.mkdir(parents=True, exist_ok=True)
    git.Git(folder).init("--quiet", "--template=", f"--initial-branch={BRANCH}")
    repo = git.Repo(folder)
    with repo.config_writer() as config:
        for key, value in _LOCAL_CONFIG.items():
            section, option = key.split(".", 1)
            config.set_value(section, option, value)
    info = folder / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "exclude").write_text("__pycache__/\n*.py[co]\n/vllm/_version.py\n")
    return repo


def open_repo(folder: Path) -> git.Repo:
    """Open a repository.

    Raises:
        CannotRun: The folder is none.
    """
    try:
        return git.Repo(folder)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError):
        raise CannotRun(
            f"{folder} is no git work tree; move it away, then run this again"
        ) from None


def message_of(err: git.GitCommandError) -> str:
    """Give what git printed, without GitPython's framing."""
    parts = []
    for text in (err.stdout, err.stderr):
        text = (text or "").strip()
        text = re.sub(r"^std(out|err): '(.*)'$", r"\2", text, flags=re.S)
        if text:
            parts.append(text)
    return "\n".join(parts)


def reason(err: git.GitCommandError) -> str:
    """Give the line of git's output that says what is wrong."""
    lines = message_of(err).splitlines()
    first = ("error:", "fatal:", "Patch is empty")
    for line in lines:
        if line.startswith(first):
            return line
    plain = [line for line in lines if not line.startswith("hint:")]
    return plain[-1] if plain else f"exit status {err.status}"


def fast_import(
    repo: git.Repo,
    files: Iterable[tuple[str, str, bytes]],
    subject: str,
    *,
    parent: str | None = None,
) -> str:
    """Write files as one commit on `BRANCH` without touching the work tree.

    Args:
        files: Path, mode (``100644`` or ``100755``) and content of each file.
        subject: The commit message.
        parent: Commit that the new one follows; its files stay.

    Returns:
        The commit id.
    """
    process = subprocess.Popen(
        ["git", "fast-import", "--quiet", "--done", "--force"],
        cwd=repo.git_dir,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stderr is not None
    entries = []
    try:
        for mark, (path, mode, data) in enumerate(files, start=1):
            process.stdin.write(b"blob\nmark :%d\ndata %d\n" % (mark, len(data)))
            process.stdin.write(data)
            process.stdin.write(b"\n")
            entries.append(f"M {mode} :{mark} {_quoted(path)}\n".encode())
        message = subject.encode() + b"\n"
        who = f"{NAME} <{EMAIL}> {DATE}\n".encode()
        process.stdin.write(b"commit refs/heads/%s\n" % BRANCH.encode())
        process.stdin.write(b"author " + who + b"committer " + who)
        process.stdin.write(b"data %d\n" % len(message) + message)
        if parent:
            process.stdin.write(b"from %s\n" % parent.encode())
        process.stdin.writelines(entries)
        process.stdin.write(b"\ndone\n")
        process.stdin.close()
    except BrokenPipeError:
        pass
    except BaseException:
        process.kill()
        process.wait()
        raise
    problem = process.stderr.read().decode(errors="replace").strip()
    if process.wait() != 0:
        raise CannotRun(f"git fast-import failed: {problem}")
    return repo.git.rev_parse(f"refs/heads/{BRANCH}")


def _quoted(path: str) -> str:
    plain = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{plain}"' if plain != path or " " in path else path


def tree_files(repo: git.Repo, rev: str) -> dict[str, tuple[str, str]]:
    """Map every path of a commit to its mode and object id."""
    found = {}
    for line in repo.git.ls_tree("-r", "-z", "--full-tree", rev).split("\0"):
        if line:
            head, path = line.split("\t", 1)
            mode, _, oid = head.split(" ")
            found[path] = (mode, oid)
    return found


def read_blobs(repo: git.Repo, oids: Iterable[str]) -> Iterator[bytes]:
    """Give the contents of objects, in the order asked for."""
    for oid in oids:
        yield bytes(repo.odb.stream(bytes.fromhex(oid)).read())


def changes(repo: git.Repo, commit: str) -> list[tuple[str, str, str, str, str, str]]:
    """List what a commit changes against its parent.

    Returns:
        Per file: status letter, path, blob before, blob after, mode before, after.
    """
    raw = repo.git.diff_tree(
        "-r", "-z", "--no-commit-id", "--no-renames", "--root", commit
    )
    parts = raw.split("\0")
    rows = []
    for head, path in zip(parts[0::2], parts[1::2], strict=False):
        old_mode, new_mode, old, new, status = head.lstrip(":").split(" ")
        rows.append((status[0], path, old, new, old_mode, new_mode))
    return rows


def format_patch(repo: git.Repo, commit: str) -> bytes:
    """Give a commit as a patch file whose bytes depend on the commit alone."""
    with repo.git.custom_environment(GIT_DIFF_OPTS=""):
        return repo.git.format_patch(
            "-1",
            *_FORMAT,
            commit,
            stdout_as_string=False,
            strip_newline_in_stdout=False,
        )


def am(repo: git.Repo, patch: Path) -> None:
    """Apply one patch file with a three-way fall-back.

    Raises:
        git.GitCommandError: It does not apply; the work tree is left as git left it.
    """
    repo.git.am(*AM_FLAGS, str(patch))


def in_progress(repo: git.Repo) -> bool:
    """Say whether an am, rebase, merge or cherry-pick waits to be finished."""
    names = ("rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD")
    return any((Path(repo.git_dir) / name).exists() for name in names)


def dirty(repo: git.Repo) -> list[str]:
    """List paths with edits that are in no commit."""
    raw = repo.git.status("--porcelain", "-z", "--untracked-files=all", "--no-renames")
    return [entry[3:] for entry in raw.split("\0") if entry]
