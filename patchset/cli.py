# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Command line of apply.py."""

from __future__ import annotations

import argparse
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from patchset import __version__, commands, gitio, image, rebase
from patchset.errors import CANNOT_RUN, PatchsetError
from patchset.layout import Layout
from patchset.ui import Output

_EPILOG = """\
exit codes:
  0  done
  1  a patch or a check failed, or work would be lost
  2  could not run: network, disk, usage
  3  something is not what upstream.lock says
"""


_MORE = {
    "fetch": "The file is checked against upstream.lock before use; an interrupted "
    "download is resumed. PIP_INDEX_URL or pip's configuration names the index, "
    "DDTREE_CACHE another folder than build/cache.",
    "apply": "One commit for upstream, one per patch, one for the overlay. Local edits "
    "in the tree are never lost without --force.",
    "install": "Version, commit and every touched file are checked before the first "
    "write; the wheel's own files are kept in vllm/.ddtree.",
    "uninstall": "Byte for byte; refused when a file was edited since the install.",
    "export": "Commits on upstream files become patches, the others the overlay; "
    "upstream.lock follows.",
    "lock": "For edits made straight in patches/ or overlay/.",
    "rebase": "Pin and target in one repository, build/rebase-VERSION; patches one by "
    "one with three-way merges, the overlay's upstream names looked up. The pinned "
    "release is never touched. Run it again after conflicts were resolved.",
    "verify": "Names what no local file can confirm.",
    "build": "Makes build/image-RELEASE, the context with the patched files, then runs "
    "docker or podman on docker/Dockerfile. The base image is pinned by digest.",
}


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26)


class _Usage(Exception):
    """Wrong arguments; carries the message."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Usage(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument(
        "--json",
        action="store_true",
        help="one JSON document on stdout; prose and progress on stderr",
    )
    common.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="work on another checkout of this project",
    )
    common.add_argument(
        "--release",
        metavar="R",
        help="release in upstream.lock (default: the one that the lock names)",
    )
    parser = _Parser(
        prog="apply.py",
        description="DDTree for vLLM: fetch the pinned vLLM, apply the patch series "
        "and the overlay, install the result over a vLLM wheel.",
        epilog=_EPILOG,
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def verb(name: str, text: str, run: Callable[..., Any]):
        more = textwrap.fill(_MORE.get(name, ""), 78)
        sub = verbs.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.\n{more}".strip(),
            epilog=_EPILOG,
            parents=[common],
            formatter_class=_formatter,
        )
        sub.set_defaults(run=run)
        return sub

    sub = verb("fetch", "bring the pinned source into the cache", commands.fetch)
    sub.add_argument(
        "--source",
        default="sdist",
        metavar="sdist|git|PATH",
        help="sdist from the package index that pip uses (default), a git clone, or "
        "the path of an sdist file, an unpacked tree or a git checkout",
    )
    sub = verb("apply", "make the patched work tree under build/", commands.apply)
    sub.add_argument(
        "--dry-run", action="store_true", help="try everything, move nothing into place"
    )
    sub.add_argument(
        "--force", action="store_true", help="rebuild, throwing local edits away"
    )
    how = sub.add_mutually_exclusive_group()
    how.add_argument(
        "--continue",
        dest="resume",
        action="store_true",
        help="go on after a conflict was resolved",
    )
    how.add_argument(
        "--abort", action="store_true", help="throw the tree in conflict away"
    )
    verb("status", "show the pin, the work tree, patches and overlay", commands.status)
    verb("verify", "recompute everything in upstream.lock", commands.verify)
    for name, text, run in (
        ("install", "change an installed vLLM of the pinned version", commands.install),
        ("uninstall", "give an installed vLLM its own files back", commands.uninstall),
    ):
        sub = verb(name, text, run)
        where = sub.add_mutually_exclusive_group(required=True)
        where.add_argument(
            "--python", metavar="EXE", help="the interpreter that vLLM is installed for"
        )
        where.add_argument(
            "--site", type=Path, metavar="DIR", help="the folder that holds vllm/"
        )
        if name == "install":
            sub.add_argument(
                "--check",
                action="store_true",
                help="report only: 0 installed and intact, 3 otherwise",
            )
            sub.add_argument(
                "--bundle",
                type=Path,
                metavar="DIR",
                help="take the patched files from a bundle that build made; needs "
                "neither git nor the source",
            )
    sub = verb("export", "write the work tree's commits back", commands.export)
    sub.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="DIR",
        help="another git work tree that starts at the pinned upstream",
    )
    sub.add_argument(
        "--force",
        action="store_true",
        help="overwrite what changed under patches/ or overlay/ since the last apply",
    )
    sub = verb(
        "lock", "write upstream.lock anew from patches/ and overlay/", commands.lock
    )
    sub.add_argument("--check", action="store_true", help="only compare")
    verb("lint", "check the patch files and the overlay", commands.lint)
    sub = verb("rebase", "try the series on another release", rebase.run)
    sub.add_argument(
        "--onto",
        metavar="VERSION|latest|PATH",
        required=True,
        help="a version of the package index, its newest stable one, or the path of "
        "an sdist, an unpacked tree or a git checkout",
    )
    sub.add_argument(
        "--save",
        action="store_true",
        help="write patches/vVERSION and a lock entry once all apply and lint passes",
    )
    sub.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write rebase-VERSION.json and .md there",
    )
    sub.add_argument(
        "--pre", action="store_true", help="latest: count pre-releases too"
    )
    sub.add_argument(
        "--commit",
        metavar="SHA",
        help="--save: the full upstream commit, where its git server cannot be asked",
    )
    how = sub.add_mutually_exclusive_group()
    how.add_argument(
        "--force",
        action="store_true",
        help="begin anew, throwing a tree with resolved conflicts away",
    )
    how.add_argument(
        "--abort", action="store_true", help="remove the work tree of a rebase"
    )
    sub = verb("build", "build the serving image", image.run)
    sub.add_argument(
        "--cpu", action="store_true", help="the CPU image with the bundled pair"
    )
    sub.add_argument(
        "--builder", metavar="B", help="docker (default) or podman; BUILDER says it too"
    )
    sub.add_argument(
        "--base-image",
        metavar="NAME[@DIGEST]",
        help="default: the one in upstream.lock, or a slim Python for --cpu",
    )
    sub.add_argument("--tag", help="default: ddtree-vllm[-cpu]:RELEASE")
    sub.add_argument("--platform", metavar="OS/ARCH")
    sub.add_argument("--network", metavar="MODE", help="of the build, such as host")
    sub.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="ID=FILE",
        help="cacerts=FILE (certificates) or pipconf=FILE (a pip.conf) for the build "
        "only; repeatable",
    )
    sub.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override an argument of the Dockerfile; repeatable",
    )
    sub.add_argument(
        "--opt",
        action="append",
        default=[],
        metavar="WORDS",
        help="more words for the builder, such as --opt=--no-cache; repeatable",
    )
    sub.add_argument(
        "--print",
        action="store_true",
        help="make the context and print the command, build nothing",
    )
    return parser


def main(argv: list[str], root: str | Path) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name.
        root: The folder that holds apply.py.

    Returns:
        The exit code.
    """
    as_json = "--json" in argv
    name = next((a for a in argv if not a.startswith("-")), "")
    out = Output(name, as_json)
    try:
        args = _parser().parse_args(argv)
    except _Usage as err:
        return _end(out, CANNOT_RUN, str(err), {})
    out = Output(args.command, args.json)
    try:
        # An image has no git, and a bundle or a check needs none.
        if args.command != "install" or not (args.bundle or args.check):
            gitio.prepare_environment()
        code, data = args.run(args, Layout.at(args.root or root), out)
    except PatchsetError as err:
        return _end(out, err.exit_code, str(err), err.details)
    except KeyboardInterrupt:
        return _end(out, CANNOT_RUN, "interrupted; run the command again", {})
    except OSError as err:
        where = f" ({err.filename})" if err.filename else ""
        return _end(out, CANNOT_RUN, f"{err.strerror or err}{where}", {})
    except gitio.git.GitCommandError as err:
        return _end(out, CANNOT_RUN, f"git: {gitio.message_of(err)}", {})
    except Exception as err:
        traceback.print_exc(file=sys.stderr)
        return _end(out, CANNOT_RUN, f"a defect in apply.py: {err!r}", {})
    out.document(code, data)
    return code


def _end(out: Output, code: int, message: str, details: dict[str, Any]) -> int:
    out.fail(message)
    out.document(code, {}, {"message": message, **details})
    return code
