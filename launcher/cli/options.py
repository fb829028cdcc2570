"""What the commands share: the app, their options, and what names on the command line stand for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import typer
from typer import Argument, Option

from launcher import __version__
from launcher.cli import help
from launcher.errors import Exit, Finding, LaunchError, UsageError, launch_finding, usage
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_dir, is_file
from launcher.redaction import Redactor
from launcher.report import console

if TYPE_CHECKING:
    # only for annotations: validation must not pay for importing what starts a run
    from launcher.planning.collect import Facts
    from launcher.planning.request import Request
    from launcher.runs.rundir import RunFolder
    from launcher.runs.slurm import Options
    from launcher.upstream.locate import Locator

app = help.App(
    cls=help.Group,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Run SFT and DPO stages from YAML files, and prove that what ran is what was asked for.",
)


def _print_version(requested: bool) -> None:
    if requested:
        from launcher.upstream import open_instruct, trl

        typer.echo(
            f"launch {__version__} (pinned: open-instruct {open_instruct.PIN[:7]}, {trl.PIN})"
        )
        raise typer.Exit


@app.callback()
def _launch(
    version: bool = Option(
        False,
        "--version",
        is_eager=True,
        callback=_print_version,
        help="Show the versions and exit.",
    ),
) -> None:
    """The options of `launch` itself."""


Format = Literal["text", "json"]
Findings = Literal["text", "json", "github"]
"""The formats of a command whose answer is findings alone."""

# What several commands have: `Shared` holds those from which a request is made.
FORMAT = Option("text", "--format", help="print text, or one JSON object")


def run_names(incomplete: str) -> list[str]:
    """The names that a shell offers for RUN, the newest first."""
    from launcher.runs import rundir

    names = ["last"]
    for run in reversed(rundir.list_known_runs()):
        names.append(run.path.name)
    return [name for name in names if name.startswith(incomplete)]


_RUN = "a run, its name or the beginning of it, or `last`, the newest of this folder"
RUN = Argument(..., metavar="RUN", help=_RUN, autocompletion=run_names)
LAST_RUN = Argument("last", metavar="RUN", help=_RUN, autocompletion=run_names)
OVERRIDES = Argument(
    None,
    metavar="[KEY=VALUE]...",
    show_default=False,
    help="replace an argument or an option of the file: learning_rate=1e-5 batch.global=64",
)
STAGE_FILE = Argument(None, metavar="CONFIG", help="the stage file", show_default=False)
UNPROVEN = Option(False, "--allow-unproven", help="treat an unproven verdict as success")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options that several commands have: `takes` adds those that a command names."""

    config: Path = Argument(..., metavar="CONFIG", help="the stage file", show_default=False)
    overrides: list[str] | None = OVERRIDES
    stage: Literal["sft", "dpo"] | None = Option(
        None, "--stage", help="training stage", show_default="as the file says"
    )
    backend: Literal["open_instruct", "trl"] | None = Option(
        None, "--backend", help="trainer", show_default="as the file says, else each"
    )
    gpus: int | None = Option(
        None,
        "--gpus",
        metavar="N",
        min=0,
        help="GPUs on each machine; 0 trains on the CPU",
        show_default="num_gpus of the file",
    )
    nodes: int = Option(1, "--nodes", metavar="N", min=1, help="number of machines")
    devices: str | None = Option(
        None,
        "--devices",
        metavar="2,3",
        help="use these GPUs",
        show_default="free ones, as many as --gpus",
    )
    dry_run: bool = Option(False, "--dry-run", help="print the plan and the command; start nothing")
    price: float | None = Option(None, "--price", metavar="X", help="price per GPU-hour")
    rows: int | None = Option(
        None, "--rows", metavar="N", min=1, help="rows of the data set", show_default="counted"
    )
    row_tokens: str | None = Option(
        None, "--row-tokens", metavar="MEAN:MAX", help="tokens per row, mean and longest"
    )
    python: Path | None = Option(
        None,
        "--python",
        metavar="PATH",
        help="Python with the trainer's packages",
        show_default="LAUNCH_PYTHON, .venv of the checkout, this one",
    )
    open_instruct: Path | None = Option(
        None,
        "--open-instruct",
        metavar="DIR",
        help="checkout of open-instruct",
        show_default="LAUNCH_OPEN_INSTRUCT, external/, ~/",
    )
    allow_unpinned: bool = Option(
        False, "--allow-unpinned", help="accept a checkout at a commit that is not known, or edited"
    )
    allow_unproven: bool = UNPROVEN
    strict: bool = Option(False, "--strict", help="treat warnings as errors")
    no_probe: bool = Option(
        False, "--no-probe", help="start the training script alone: nothing is measured or enforced"
    )
    rehearse: bool | None = Option(
        None,
        "--rehearse/--no-rehearse",
        help="run two steps on the CPU with a tiny model first",
        show_default="as the file says",
    )
    fresh: bool = Option(False, "--fresh", help="start over in a new folder (NAME-2)")
    allow_changed_resume: list[str] | None = Option(
        None,
        "--allow-changed-resume",
        metavar="NAME",
        help="continue although NAME has changed (repeatable)",
    )
    detach: bool = Option(False, "--detach", help="start it in a tmux session and return at once")
    on_finish: str | None = Option(
        None, "--on-finish", metavar="CMD", help="command to run when it has ended, without a shell"
    )
    on_finish_limit: str | None = Option(
        None,
        "--on-finish-limit",
        metavar="TIME",
        help="time limit of that command: 90s, 2h",
        show_default="10m",
    )
    slurm: bool = Option(False, "--slurm", help="queue it as a Slurm job")
    cpu: bool = Option(False, "--cpu", help="run on the CPU, to try the command out")
    node_rank: int | None = Option(
        None, "--node-rank", metavar="N", min=0, help="number of this machine among several, from 0"
    )
    main_address: str | None = Option(
        None, "--main-address", metavar="HOST[:PORT]", help="address of machine 0 of several"
    )
    format: Format = FORMAT

    @property
    def hands_over(self) -> bool:
        return self.detach or self.slurm

    @functools.cached_property
    def locator(self) -> Locator:
        """Finds the trainers' source, of the Python that is named.

        Raises NotReady if that Python does not run.
        """
        from launcher.upstream import locate

        interpreter = None
        if self.python is not None or os.environ.get("LAUNCH_PYTHON"):
            from launcher.machine import python

            interpreter = python.find_interpreter(self.python, os.environ)
        return locate.Locator(
            checkout=self.open_instruct,
            allow_unpinned=self.allow_unpinned,
            interpreter=interpreter,
            say=console.say_aside,
        )

    def show_progress(self, text: str) -> None:
        """Print to stderr how far the command is, unless the answer is JSON."""
        if self.format == "text":
            console.say_aside(text)

    def print_findings(self, findings: Sequence[Finding], redactor: Redactor | None = None) -> None:
        """Print findings before a run starts; JSON has them in the answer."""
        if self.format == "text":
            console.print_findings(findings, redactor)

    def rehearse_first(self, stages: Mapping[str, Facts], *, by_itself: bool = True) -> None:
        """Rehearse stages that are about to start, and print the findings.

        Raises InvalidConfig if the trainer refuses one of them.
        """
        from launcher.workflows.rehearse import rehearsal

        self.print_findings(rehearsal.require(stages, self.show_progress, by_itself=by_itself))

    def parse_end_options(self) -> dict[str, Any]:
        """What happens at the end of a run, as arguments of `start.begin`. Raises UsageError."""
        from launcher.lifecycle import on_finish

        if self.on_finish_limit is not None and self.on_finish is None:
            message = "--on-finish-limit has no effect without --on-finish"
            raise usage("useless-option", message)
        return {
            "on_finish": on_finish.parse_command(self.on_finish),
            "on_finish_s": on_finish.parse_limit(self.on_finish_limit),
            "allow_unproven": self.allow_unproven,
        }

    def reject_ignored_options(self) -> None:
        """Raise UsageError with every option that --slurm would ignore."""
        if not self.slurm:
            return
        findings = []
        for name in ("detach", "devices", "node_rank", "main_address", "cpu"):
            value = getattr(self, name)
            # 0 is a rank, and equals False
            if value is None or value is False or value == "":
                continue
            option = name.replace("_", "-")
            message = f"--{option} has no effect with --slurm"
            findings.append(launch_finding("error", "useless-option", message))
        if findings:
            raise UsageError(findings)

    def hand_over(self, command: str, name: str, *, gpus: int, options: Options) -> Exit:
        """Start this command line again in a tmux session or a Slurm job."""
        from launcher.lifecycle import background

        words = sys.argv[1:]
        if self.slurm:
            started = background.queue(command, name, words, gpus=gpus, options=options)
        else:
            started = background.detach(command, name, words)
        data = started._asdict()
        return answer(command, self.format, data, started.lines())

    def request(self, **changes: Any) -> Request:
        """The request of these options; `changes` are other values of its fields."""
        from launcher.planning.request import Request

        fields: dict[str, Any] = {
            "stage": self.stage,
            "config": self.config,
            "overrides": self.overrides or (),
            "gpus": self.gpus,
            "nodes": self.nodes,
            "devices": self.devices,
            "python": self.python,
            "checkout": self.open_instruct,
            "allow_unpinned": self.allow_unpinned,
            "strict": self.strict,
            "rehearse": self.rehearse,
            "probe": not self.no_probe,
            "allowed": tuple(self.allow_changed_resume or ()),
            "node_rank": self.node_rank,
            "main_address": self.main_address,
        }
        return Request(**{**fields, **changes})


GROUPS = {
    # which source of the trainer is looked at
    "source": "python open_instruct allow_unpinned",
    # what every command has that plans a stage, that trains for long, that starts a whole run
    "request": "config overrides stage python open_instruct allow_unpinned format",
    "background": "detach on_finish on_finish_limit slurm",
    "start": "gpus devices dry_run python open_instruct allow_unpinned allow_unproven strict "
    "no_probe rehearse fresh allow_changed_resume format",
}
_TYPES = get_type_hints(Shared)
Command = Callable[..., Any]


def with_options(*names: str) -> Callable[[Command], Command]:
    """Give a command these options of `Shared`, or groups of them, as its first argument."""
    words = " ".join(GROUPS.get(name, name) for name in names).split()
    shared: list[inspect.Parameter] = []
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(Shared):
        if field.name in words:
            shared.append(_make_parameter(field.name, field.default, _TYPES[field.name]))
        else:
            defaults[field.name] = vars(field.default)["default"]

    def add(command: Command) -> Command:
        def run(**values: Any) -> Any:
            options = {name: values.pop(name) for name in words}
            return command(Shared(**defaults, **options), **values)

        parameters = _join_parameters(shared, command)
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return add


_BY_PLACE = ("config", "overrides")


def _join_parameters(shared: list[inspect.Parameter], command: Command) -> list[inspect.Parameter]:
    """Arguments by place come first, then the command's own options, then the shared ones."""
    by_place = []
    by_name = []
    for parameter in shared:
        if parameter.name in _BY_PLACE:
            by_place.append(parameter)
        else:
            by_name.append(parameter)
    signature = inspect.signature(command, eval_str=True)
    _, *parameters = signature.parameters.values()
    own = []
    for parameter in parameters:
        own.append(_make_parameter(parameter.name, parameter.default, parameter.annotation))
    return [*by_place, *own, *by_name]


def _make_parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def require_run(name: str, kind: str = "run") -> RunFolder:
    """The run of that name, or the last run of the pipeline, bench, ladder or tune of that name.

    Raises UsageError if there is none, or several.
    """
    from launcher.runs import rundir

    folder = rundir.find_run(name)
    if folder is None:
        members = rundir.list_campaign_runs(Path(name))
        if members:
            console.say_aside(f"the last run of {name}: {members[-1].path.name}")
            return members[-1]
        raise usage("no-such-run", f"there is no {kind} `{name}`", "launch runs")
    if name == "last" and not rundir.was_started_here(folder):
        console.say_aside(f"no run was begun in this folder; the last of all is {folder.path.name}")
    return folder


def confirm_deletion(
    lines: Sequence[str], is_confirmed: bool, flag: str, kept: Sequence[str] = ()
) -> bool:
    """Whether to delete: `flag` was given, or the user says yes at the terminal.

    `kept` are lines about what stays. Raises UsageError without a flag and a terminal.
    """
    if is_confirmed:
        return True
    if not sys.stdin.isatty():
        message = "; ".join([f"this would delete {', '.join(lines)}", *kept])
        raise usage("not-confirmed", message, f"add {flag}")
    for line in lines:
        console.say_aside(f"delete {line}")
    for line in kept:
        console.say_aside(line)
    return typer.confirm("Delete?", err=True)


def list_stage_files(path: Path) -> list[Path]:
    """The YAML files of a folder and of those in it, hidden ones left out; a file is itself."""
    # the help pages need no YAML
    from launcher.config.document import SUFFIXES

    if not is_dir(path):
        return [path]
    files = []
    for file in sorted(path.rglob("*.y*ml")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.suffix in SUFFIXES and not is_hidden and is_file(file):
            files.append(file)
    # an empty folder is judged itself, and refused
    return files or [path]


def refuse_unstarted(folder: RunFolder) -> UsageError:
    name = folder.path.name
    help = f"launch exec {name} starts it, where no Slurm job will"
    return usage("not-begun", f"{name} was never started", help)


def answer(
    command: str,
    format: Findings,
    data: object,
    show: Iterable[str] | Callable[[], object],
    findings: Sequence[Finding] = (),
    code: Exit = Exit.OK,
    *,
    before: Sequence[Finding] = (),
    redactor: Redactor | None = None,
) -> Exit:
    """Print the answer of a command, and return its exit code.

    As JSON it is one object of `data` and all findings; as text the findings, then `show`: its
    lines, or whatever it prints. `before` are findings that were printed already. A warning is
    added for each tool that did not answer. `redactor` is that of the stage file or the run.
    """
    findings = [*findings, *_report_silent_tools([*before, *findings])]
    everything = [*before, *findings]
    if format == "json":
        console.print_envelope(command, code is Exit.OK, everything, data, redactor)
        return code
    if format == "github":
        console.annotate(everything, redactor)
        return code
    console.print_findings(findings, redactor)
    if callable(show):
        show()
        return code
    lines = list(show)
    if lines:
        console.say("\n".join(lines), redactor)
    return code


def _report_silent_tools(findings: Sequence[Finding]) -> Iterator[Finding]:
    """A warning for each tool that did not answer this command, unless a finding says so."""
    # a command that ran no tool has not imported it
    if "launcher.machine.tools" not in sys.modules:
        return
    from launcher.machine import tools

    said = " ".join(finding.message for finding in findings)
    for sentence in tools.describe_silences():
        if sentence not in said:
            help = f"this command went on without it; {tools.VARIABLE}=30 waits longer"
            yield launch_finding("warning", "tool-hangs", sentence, help)


def start_several_runs(command: Callable[..., Exit]) -> Callable[..., Exit]:
    """Decorate a command that starts several runs: check its options, call --on-finish."""

    @functools.wraps(command)
    def run(shared: Shared, **options: Any) -> Exit:
        from launcher.lifecycle import background, on_finish

        shared.reject_ignored_options()
        ending = shared.parse_end_options()
        words = ending["on_finish"]
        if shared.hands_over or shared.dry_run or not words:
            return command(shared, **options)
        on_finish.require_program(words)
        try:
            code = command(shared, **options)
        except LaunchError as error:
            # in the background, nobody reads the error
            if background.FOLDER in os.environ:
                code = error.exit_code
                background.finish(words, ending["on_finish_s"], command.__name__, code, "fail")
            raise
        outcome = "fail"
        if code is Exit.OK:
            outcome = "pass"
        background.finish(words, ending["on_finish_s"], command.__name__, code, outcome)
        return code

    return run
