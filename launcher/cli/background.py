"""Commands that go on without the terminal: `--detach`, `--slurm` and `--on-finish`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from launcher.cli.options import Shared, answer
from launcher.errors import Exit, Finding, LaunchError, UsageError, launch_finding, usage

if TYPE_CHECKING:
    from launcher.runs.slurm import Options

# options that would be taken and ignored beside --slurm
_NOT_WITH_SLURM = ("detach", "devices", "node_rank", "main_address", "cpu")


class AtEnd(TypedDict):
    """What is to happen once a run has ended, under the names that those that start it take."""

    on_finish: tuple[str, ...]
    on_finish_s: float
    allow_unproven: bool


def at_end(shared: Shared) -> AtEnd:
    """From the options as they were given. Raises UsageError."""
    from launcher.lifecycle import on_finish

    if shared.on_finish_limit is not None and shared.on_finish is None:
        raise usage("useless-option", "--on-finish-limit says nothing without --on-finish")
    words, seconds = on_finish.parsed(shared.on_finish), on_finish.limit(shared.on_finish_limit)
    return {"on_finish": words, "on_finish_s": seconds, "allow_unproven": shared.allow_unproven}


def require_sense(shared: Shared, more: Mapping[str, object]) -> None:
    """Raise UsageError with every option that says nothing beside --slurm."""
    given = {name: more.get(name, getattr(shared, name, None)) for name in _NOT_WITH_SLURM if shared.slurm}
    # 0 is a value
    names = [name for name, value in given.items() if value or (value == 0 and value is not False)]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    if flags:
        raise UsageError(
            launch_finding("error", "useless-option", f"{flag} says nothing with --slurm") for flag in flags
        )


def several_runs(command: Callable[..., Exit]) -> Callable[..., Exit]:
    """A command that starts several runs: options beside each other are checked, `--on-finish` is called."""

    @functools.wraps(command)
    def run(shared: Shared, **given: Any) -> Exit:
        from launcher.lifecycle import background, on_finish

        require_sense(shared, given)
        ending = at_end(shared)
        if shared.hands_over or shared.dry_run or not ending["on_finish"]:
            return command(shared, **given)
        on_finish.require_here(ending["on_finish"])

        def finish(code: Exit) -> None:
            status = "pass" if code is Exit.OK else "fail"
            background.finish(ending["on_finish"], ending["on_finish_s"], command.__name__, code, status)

        try:
            code = command(shared, **given)
        except LaunchError as error:
            # nobody reads what it is refused with
            if background.FOLDER in os.environ:
                finish(error.exit_code)
            raise
        finish(code)
        return code

    return run


def hand_over(
    shared: Shared, command: str, name: str, *, gpus: int, options: Options, findings: Sequence[Finding] = ()
) -> Exit:
    """Have the command run elsewhere, once it has been checked."""
    from launcher.lifecycle import background

    words = sys.argv[1:]
    if shared.slurm:
        started = background.queue(command, name, words, gpus=gpus, options=options)
    else:
        started = background.detach(command, name, words)
    return answer(command, shared.format, started._asdict(), started.lines(), findings)
