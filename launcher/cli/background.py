"""Commands that go on without the terminal: `--detach`, `--slurm` and `--on-finish`."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.cli.options import Shared, answer
from launcher.errors import Exit, Finding, LaunchError, UsageError, launch_finding, usage

if TYPE_CHECKING:
    from launcher.runs.sbatch import Options

# options that would be taken and ignored beside --slurm
_APART = ("detach", "devices", "node_rank", "main_address", "cpu")


@dataclass(frozen=True, slots=True)
class AtEnd:
    """What is to happen once a run has ended, under the names that those that start it take."""

    on_finish: tuple[str, ...]
    on_finish_s: float
    allow_unproven: bool

    @classmethod
    def of(cls, shared: Shared) -> AtEnd:
        """From the options as they were given. Raises UsageError."""
        from launcher.lifecycle import on_finish

        if shared.on_finish_limit is not None and shared.on_finish is None:
            raise usage("useless-option", "--on-finish-limit says nothing without --on-finish")
        words = on_finish.parsed(shared.on_finish)
        return cls(words, on_finish.limit(shared.on_finish_limit), shared.allow_unproven)


def require_sense(shared: Shared, more: Mapping[str, object]) -> None:
    """Raise UsageError with every option that says nothing beside another one."""
    given = {**dataclasses.asdict(shared), **more}
    # 0 is a value
    named = {name for name, value in given.items() if value or (value == 0 and value is not False)}
    wrong = [
        launch_finding("error", "useless-option", f"--{one.replace('_', '-')} says nothing with --slurm")
        for one in _APART
        if {one, "slurm"} <= named
    ]
    if wrong:
        raise UsageError(wrong)


def several_runs(command: Callable[..., Exit]) -> Callable[..., Exit]:
    """A command that starts several runs: options beside each other are checked, `--on-finish` is called."""

    @functools.wraps(command)
    def run(shared: Shared, **given: Any) -> Exit:
        from launcher.lifecycle import background, on_finish

        require_sense(shared, given)
        at_end = AtEnd.of(shared)
        if shared.hands_over or shared.dry_run or not at_end.on_finish:
            return command(shared, **given)
        on_finish.require_here(at_end.on_finish)

        def finish(code: Exit) -> None:
            status = "pass" if code is Exit.OK else "fail"
            background.finish(at_end.on_finish, at_end.on_finish_s, command.__name__, code, status)

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
