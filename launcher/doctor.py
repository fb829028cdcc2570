"""Is this machine ready for a plan: what is missing, each with the command that mends it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import machine
from launcher import situation as situations
from launcher.backends.context import Context
from launcher.errors import Finding, NotReady
from launcher.machine import Trainer
from launcher.plan import Plan

OLDEST = (3, 10)
# what a switch needs beside the backend's own packages
_OPTIONAL = {
    "use_peft": "peft",
    "use_qlora": "bitsandbytes",
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "dpo_use_paged_optimizer": "bitsandbytes",
}


def require_ready(plan: Plan, trainer: Trainer) -> None:
    """Raises NotReady with everything that is missing."""
    found = [
        *checkout(plan), *interpreter(trainer), *packages(plan, trainer), *devices(plan),
        *local_files(plan),
    ]  # fmt: skip
    if found:
        raise NotReady(found)


def _missing(code: str, message: str, help: str) -> Finding:
    return Finding(severity="error", layer="launch", code=code, message=message, help=help)


def checkout(plan: Plan) -> Iterator[Finding]:
    """open-instruct runs from a checkout; the snapshot only validates."""
    if plan.stage.upstream.root is None and plan.stage.options.backend == "open_instruct":
        yield _missing(
            "no-checkout",
            "there is no open-instruct checkout (external/open-instruct, /workspace/open-instruct, "
            "~/open-instruct)",
            "git submodule update --init external/open-instruct, or --open-instruct PATH",
        )


def interpreter(trainer: Trainer) -> Iterator[Finding]:
    """The probe and upstream need Python 3.10."""
    if trainer.version < OLDEST:
        version = ".".join(map(str, trainer.version))
        yield _missing(
            "old-python",
            f"{trainer.python} ({trainer.source}) is Python {version}",
            f"name Python {'.'.join(map(str, OLDEST))} or later with --python",
        )


def packages(plan: Plan, trainer: Trainer) -> Iterator[Finding]:
    """Distributions that the trainer's Python lacks."""
    backend = plan.stage.backend
    needed = list(backend.NEEDS)
    if plan.values.get(plan.stage.entry.names.liger):
        needed.append("liger-kernel")
    if plan.gpus and backend.NAME == "open_instruct":
        # with CUDA and no such package its detection raises (model_utils.py:69)
        needed.append("flash-attn")
    own = plan.values.get("zero_stage") is not None
    if plan.gpus and (own or plan.stage.options.deepspeed is not None):
        needed.append("deepspeed")
    needed += [name for key, name in _OPTIONAL.items() if plan.values.get(key) is True]
    lacking = [name for name in dict.fromkeys(needed) if name not in trainer.packages]
    if lacking:
        extra = f"{backend.EXTRA},gpu" if plan.gpus else backend.EXTRA
        yield _missing(
            "missing-packages",
            f"{trainer.python} ({trainer.source}) lacks {', '.join(lacking)}",
            f"{trainer.python} -m pip install {' '.join(lacking)}; in launch's own folder "
            f"`pip install -e '.[{extra}]'` installs all it needs; or name another interpreter "
            "with --python",
        )


def situation(
    plan: Plan, trainer: Trainer, output: Path | None, earlier: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """What is wrong on these GPUs, with these packages, in this folder; only what is new.

    `earlier` is the manifest of the newest run of ours into `output`.
    """
    stage = plan.stage
    deepspeed, _ = situations.deepspeed_of(stage.options)
    context = Context(
        values=plan.values, environ=os.environ, deepspeed=deepspeed,
        mixed_precision=plan.mixed_precision,
        gpus=plan.gpus * plan.nodes, per_device=plan.per_device, accumulation=plan.accumulation,
        cpus=os.cpu_count(), packages=trainer.packages, running=True, output=output,
        earlier=earlier,
    )  # fmt: skip
    said = {(finding.code, finding.key) for finding in stage.findings if finding.severity != "note"}
    for finding in situations.judged(stage.config, context):
        if finding.severity == "error" or (finding.code, finding.key) not in said:
            yield finding


def devices(plan: Plan) -> Iterator[Finding]:
    """Fewer GPUs to be seen here than asked for."""
    present = machine.visible_gpus() if plan.gpus else 0
    if plan.gpus > present:
        limit = os.environ.get("CUDA_VISIBLE_DEVICES")
        through = "" if limit is None else f" (CUDA_VISIBLE_DEVICES={limit})"
        yield _missing(
            "too-few-gpus",
            f"{plan.gpus} GPU(s) asked for, {present} here{through}",
            f"--gpus {present}" if present else "--gpus 0 trains on the CPU",
        )


def local_files(plan: Plan) -> Iterator[Finding]:
    """Data files that validation only warned about."""
    for finding in plan.stage.findings:
        if finding.code == "missing-data":
            yield replace(finding, severity="error")
