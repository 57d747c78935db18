# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Decodes in a process of its own: another vLLM, or several ranks.

Run as a script: ``_decode.py JOB.json RESULT.json``. Used through ``run_jobs``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


def run_jobs(
    folder: Path,
    prompts: list,
    jobs: list[dict[str, Any]],
    environment: dict[str, str] | None = None,
    timeout: float = 600,
) -> dict[str, Any]:
    """Decode in a fresh interpreter, without any setting of this one.

    Args:
        folder: For the job and result files.
        prompts: Texts or token id lists.
        jobs: One engine each: ``speculative`` (or None), ``engine`` arguments and
            ``params``, a list of ``cpu.decode`` arguments.
        environment: Set for the process. Variables of vLLM, OpenMP and Python's
            path are otherwise not inherited.
        timeout: Seconds.

    Returns:
        ``vllm`` (path of the package), ``patched``, and ``runs``: per job a
        list with one ``cpu.Run`` per entry of ``params``.
    """
    import ddtree_cpu as cpu

    job, result = folder / "job.json", folder / "result.json"
    job.write_text(json.dumps({"prompts": prompts, "jobs": jobs}), encoding="utf-8")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "OMP_", "PYTHON", "LD_PRELOAD"))
    }
    done = subprocess.run(
        [sys.executable, __file__, str(job), str(result)],
        env={**kept, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads(result.read_text(encoding="utf-8"))
    found["runs"] = [[cpu.Run(**run) for run in runs] for runs in found["runs"]]
    return found


def main(job: str, result: str) -> None:
    import ddtree_cpu as cpu

    work = json.loads(Path(job).read_text(encoding="utf-8"))
    runs = []
    for one in work["jobs"]:
        with cpu.engine(one["speculative"], **one.get("engine", {})) as llm:
            runs.append(
                [
                    dataclasses.asdict(cpu.decode(llm, work["prompts"], **params))
                    for params in one["params"]
                ]
            )
    import vllm

    module = importlib.util.find_spec("vllm.v1.spec_decode.ddtree")
    found = {"vllm": vllm.__file__, "patched": module is not None, "runs": runs}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
