#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Ask the container's server for /health; the image's HEALTHCHECK.

The port is what the server was started with (``--port``, 8000 if there is none).
Exit code 0 when it is healthy, 1 otherwise.
"""

import ssl
import sys
import urllib.error
import urllib.request


def value_of(arguments, flag, default):
    """The last value of ``--flag VALUE`` or ``--flag=VALUE``."""
    found = default
    for index, word in enumerate(arguments):
        if word == flag and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif word.startswith(flag + "="):
            found = word.partition("=")[2]
    return found


def address(arguments):
    """The URL to ask."""
    secure = value_of(arguments, "--ssl-certfile", None) is not None
    port = value_of(arguments, "--port", "8000")
    host = value_of(arguments, "--host", "127.0.0.1")
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http{'s' if secure else ''}://{host}:{port}/health"


def main():
    with open("/proc/1/cmdline", "rb") as file:
        arguments = file.read().decode("utf-8", "replace").split("\0")
    url = address(arguments)
    # Only whether it answers counts here, not whose certificate it shows.
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        with urllib.request.urlopen(url, timeout=4, context=context) as answer:
            return 0 if answer.status == 200 else 1
    except (urllib.error.URLError, OSError) as error:
        print(f"{url}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
