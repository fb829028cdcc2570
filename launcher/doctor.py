"""Is this machine ready for a plan: what is missing, each with the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator

from launcher import machine
from launcher.backends import BACKENDS
from launcher.errors import Finding, NotReady
from launcher.machine import Trainer
from launcher.plan import Plan


def require_ready(plan: Plan, trainer: Trainer) -> None:
    """Raises NotReady with everything that is missing."""
    found = [*checkout(plan), *packages(plan, trainer), *devices(plan), *local_files(plan)]
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


def packages(plan: Plan, trainer: Trainer) -> Iterator[Finding]:
    """Distributions that the trainer's Python lacks."""
    backend = BACKENDS[plan.stage.options.backend]
    needed = list(backend.NEEDS)
    if plan.values.get(plan.stage.entry.names.liger):
        needed.append("liger-kernel")
    if plan.gpus and backend.NAME == "open_instruct":
        # with CUDA and no such package its detection raises (model_utils.py:62)
        needed.append("flash-attn")
    lacking = [name for name in needed if name not in trainer.packages]
    if lacking:
        yield _missing(
            "missing-packages",
            f"{trainer.python} ({trainer.source}) lacks {', '.join(lacking)}",
            f"{trainer.python} -m pip install {' '.join(lacking)}, or -e '.[{backend.EXTRA}]' for all "
            "of them, or name another interpreter with --python",
        )


def devices(plan: Plan) -> Iterator[Finding]:
    """Fewer GPUs here than asked for."""
    present = len(machine.gpus()) if plan.gpus else 0
    if plan.gpus > present:
        yield _missing(
            "too-few-gpus",
            f"{plan.gpus} GPU(s) asked for, {present} here",
            f"--gpus {present}" if present else "--gpus 0 trains on the CPU",
        )


def local_files(plan: Plan) -> Iterator[Finding]:
    """Data files that validation only warned about."""
    for finding in plan.stage.findings:
        if finding.code == "missing-data":
            yield Finding(
                severity="error", layer="run", code=finding.code, key=finding.key,
                message=finding.message, help=finding.help, file=finding.file, line=finding.line,
            )  # fmt: skip
