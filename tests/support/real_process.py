"""Upstream's own functions as a process of tests/support: requests in, answers out."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, PATIENCE_S, SUPPORT


def ask_process(
    script: str,
    *arguments: str,
    requests: Sequence[Any],
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """One answer to each request; skips where the packages are not there."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / script), *arguments],
        input="".join(f"{json.dumps(request)}\n" for request in requests),
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr.strip().splitlines()[-1]}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests), done.stderr[-3000:]
    return answers
