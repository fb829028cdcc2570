"""What the commands share: the app, their options, and what names on the command line stand for."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from launcher import __version__
from launcher.errors import Exit, Finding, UsageError, usage

if TYPE_CHECKING:
    # only for annotations: validation must not pay for importing what starts a run
    from launcher.preparation import Request
    from launcher.rundir import RunFolder
    from launcher.upstream import Locator

LISTED = (
    "sft", "dpo", "validate-config", "rehearse", "plan", "prepare", "ladder", "pipeline", "bench", "tune",
    "runs",
    "attach", "logs", "stop", "check", "report", "doctor", "explain", "schema", "pin", "cache", "exec",
)  # fmt: skip
"""The commands in the order in which one meets them; whatever is not named here comes last."""


class Listed(TyperGroup):
    """The commands as `launch --help` lists them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names in the order of `LISTED`."""
        place = {name: nth for nth, name in enumerate(LISTED)}
        return sorted(super().list_commands(ctx), key=lambda name: place.get(name, len(place)))


app = typer.Typer(
    cls=Listed,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Start SFT and DPO stages from YAML, and prove afterwards that what was asked for is what ran.",
)


def _version(asked: bool) -> None:
    if asked:
        from launcher.backends import open_instruct, trl

        pins = f"open-instruct {open_instruct.PIN[:7]}, {trl.PIN}"
        typer.echo(f"launch {__version__} (pinned: {pins})")
        raise typer.Exit


@app.callback()
def _launch(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_version, help="which launch, which pins"
        ),
    ] = False,
) -> None:
    """What comes before a command."""


class Format(str, Enum):  # noqa: UP042 - StrEnum is not what typer looks for
    """How to answer."""

    text = "text"
    json = "json"


class Findings(str, Enum):  # noqa: UP042
    """How to answer where findings are all that there is to say."""

    text = "text"
    json = "json"
    github = "github"
    sarif = "sarif"


FindingsOption = Annotated[
    Findings, typer.Option("--format", help="text, json, github (annotations) or sarif")
]
FormatOption = Annotated[Format, typer.Option("--format", help="text, or json for machines")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)
]
StageFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="the stage file", show_default=False)
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", min=0, help="which of several machines this is, from 0")
]
MainAddress = Annotated[
    str | None,
    typer.Option("--main-address", metavar="HOST[:PORT]", help="the first of several machines"),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="a run, a unique prefix of its name, or `last`")
]
Unproven = Annotated[
    bool, typer.Option("--allow-unproven", help="treat an unproven verdict as success")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """Options that several commands have: `takes` adds those that a command names."""

    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="the stage file", show_default=False)
    ] = Path()
    overrides: Overrides = None
    stage: Annotated[
        str | None, typer.Option("--stage", help="sft or dpo, where the file does not say")
    ] = None
    backend: Annotated[
        str | None, typer.Option("--backend", help="open_instruct or trl, where no file says")
    ] = None
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, help="GPUs on this machine; 0 is the CPU")
    ] = None
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="machines")] = 1
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="2,3", help="these GPUs; default: free ones, as many as --gpus"
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the plan and the command, start nothing")
    ] = False
    price: Annotated[float | None, typer.Option("--price", help="price per GPU-hour")] = None
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="rows of the whole data set")
    ] = None
    row_tokens: Annotated[
        str | None, typer.Option("--row-tokens", metavar="MEAN:MAX", help="tokens a row")
    ] = None
    python: Annotated[Path | None, typer.Option("--python", help="the trainer's Python")] = None
    open_instruct: Annotated[
        Path | None, typer.Option("--open-instruct", help="the open-instruct checkout")
    ] = None
    allow_unpinned: Annotated[
        bool, typer.Option("--allow-unpinned", help="go on at another commit than the pin")
    ] = False
    allow_unproven: Unproven = False
    strict: Annotated[bool, typer.Option("--strict", help="warnings stop too")] = False
    no_probe: Annotated[
        bool,
        typer.Option("--no-probe", help="upstream's script alone: nothing is counted or enforced"),
    ] = False
    fresh: Annotated[
        bool, typer.Option("--fresh", help="start over, into a folder beside what is there")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="continue an earlier search; error if there is none")
    ] = False
    allow_changed_resume: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-changed-resume", metavar="NAME", help="go on although NAME is not as it was"
        ),
    ] = None
    format: FormatOption = Format.text

    @property
    def locator(self) -> Locator:
        """What finds the trainers' source."""
        from launcher import upstream

        return upstream.Locator(checkout=self.open_instruct, allow_unpinned=self.allow_unpinned)

    @property
    def show_progress(self) -> Callable[[str], None]:
        """What tells on stderr how far it is; nothing does for machines."""
        from launcher import report

        return report.aside if self.format is Format.text else lambda _: None

    def request(self, **more: Any) -> Request:
        """The request of these options; `more` are further fields, or others than these."""
        from launcher.preparation import Request

        fields: dict[str, Any] = {
            "stage": named_stage(self.stage), "config": self.config,
            "overrides": self.overrides or (), "gpus": self.gpus, "nodes": self.nodes,
            "devices": self.devices, "python": self.python, "checkout": self.open_instruct,
            "allow_unpinned": self.allow_unpinned, "strict": self.strict,
            "probe": not self.no_probe,
        }  # fmt: skip
        return Request(**{**fields, **more})

    def require_one_start(self) -> None:
        """Raise UsageError for `--resume` beside `--fresh`."""
        if self.fresh and self.resume:
            raise usage("useless-option", "--resume says nothing with --fresh")


SOURCE = ("open_instruct", "allow_unpinned")
"""Which source of the trainer is looked at."""
REQUEST = ("config", "overrides", "stage", "python", *SOURCE, "format")
"""What every command has that plans a stage."""

_TYPES = get_type_hints(Shared, include_extras=True)
Command = Callable[..., Any]


def takes(*names: str) -> Callable[[Command], Command]:
    """Give a command these options of `Shared`, which it gets as its first argument."""

    def add(command: Command) -> Command:
        shared = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, annotation=_TYPES[field.name],
                default=inspect.Parameter.empty if field.name == "config" else field.default,
            )
            for field in dataclasses.fields(Shared)
            if field.name in names
        ]  # fmt: skip
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        # arguments by place come first, and the form of the answer last
        ahead = [one for one in shared if one.name in {"config", "overrides"}]
        options = [one for one in shared if one not in ahead]

        def run(**given: Any) -> Any:
            return command(Shared(**{name: given.pop(name) for name in names}), **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        signature = inspect.Signature([*ahead, *own, *options])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return run

    return add


def found_run(name: str) -> RunFolder:
    """The run of that name. Raises UsageError where there is none, or several."""
    from launcher import rundir

    folder = rundir.find(name)
    if folder is None:
        raise usage("no-such-run", f"there is no run `{name}`", "launch runs")
    return folder


def files_of(path: Path) -> list[Path]:
    """The YAML files of a folder and of those in it, hidden ones left out; a file is itself."""
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in {".yaml", ".yml"}
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    # an empty one is judged itself, and refused
    return found or [path]


def not_begun(folder: RunFolder) -> UsageError:
    """What to raise where a run still waits to be started: it has nothing to show or to judge."""
    name = folder.path.name
    return usage(
        "not-begun", f"{name} has not begun: there is nothing of it yet",
        f"launch exec {name} starts it, where no Slurm job will",
    )  # fmt: skip


def answer(
    command: str,
    format: Format,
    data: object,
    show: Iterable[str] | Callable[[], object],
    findings: Sequence[Finding] = (),
    code: Exit = Exit.OK,
    *,
    before: Sequence[Finding] = (),
) -> Exit:
    """Print one envelope for machines, or the findings and what `show` prints or holds; the code.

    `before` are findings that people have been shown before.
    """
    from launcher import report

    if format is Format.json:
        report.envelope(command, code is Exit.OK, [*before, *findings], data)
        return code
    report.findings(findings)
    if callable(show):
        show()
    else:
        report.say("\n".join(show))
    return code


def named_stage(given: str | None) -> str | None:
    """`--stage` as given. Raises UsageError where it is none."""
    return _one_of("stage", given, ("sft", "dpo"))


def named_backend(given: str | None) -> str | None:
    """`--backend` as given. Raises UsageError where it is none."""
    from launcher.backends import BACKENDS

    return _one_of("backend", given, BACKENDS)


def _one_of(option: str, given: str | None, names: Iterable[str]) -> str | None:
    if given is not None and given not in names:
        help = " or ".join(f"--{option} {name}" for name in names)
        raise usage(f"bad-{option}", f"`{given}` is no {option}", help)
    return given
