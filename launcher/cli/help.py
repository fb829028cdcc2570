"""The help pages: commands and options in groups, and overrides for mistyped options."""

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_name
from typer.models import CommandInfo

COMMANDS = {
    "Run": "sft dpo pipeline",
    "Before": "init configs data validate-config preview rehearse plan prepare doctor",
    "Watch": "runs attach logs stop",
    "After": "check report chat merge card rm cache",
    "Tune": "ladder bench tune",
    "Know": "explain schema pin",
}
"""The commands of `launch --help`, in the order in which a user needs them."""

OPTIONS = {
    "Machines": "gpus nodes devices node_rank main_address slurm gpu gpu_memory cpu",
    "Start": "dry_run detach fresh rehearse on_finish on_finish_limit first until",
    "Checks": "strict no_probe allow_unproven allow_unpinned allow_changed_resume "
    "allow_corrupting_overlap",
    "Trainer": "stage backend python open_instruct",
    "Output": "format output help",
}
"""The groups of the options of a command with more than `_FEW`."""
_FEW = 9
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _simplify(text: str) -> str:
    # without the brackets that typer sets around a default in words, and limits as a formula
    text = re.sub(r"default: \(([^()]+)\)", r"default: \1", text)
    return re.sub(r"  \[x>=\d+\]|; x>=\d+(?=\])", "", text)


def _write_section(formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def _group_names(
    names: Iterable[str], groups: Mapping[str, str], rest: str
) -> Iterator[tuple[str, list[str]]]:
    """The given names by group; last, as `rest`, those that are in no group."""
    left = list(names)
    for title, members in groups.items():
        group = [name for name in members.split() if name in left]
        left = [name for name in left if name not in group]
        yield title, group
    yield rest, left


class SummarizedCommand(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        options: dict[str, tuple[str, str]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            row = (record[0].replace("<int range>", "N"), _simplify(record[1]))
            if parameter.param_type_name == "argument":
                arguments.append(row)
            else:
                options[str(parameter.name)] = row
        _write_section(formatter, "Arguments", arguments)
        groups = OPTIONS if len(options) > _FEW else {}
        *titled, others = _group_names(options, groups, "Options")
        for title, names in (others, *titled):
            rows = [options[name] for name in names]
            _write_section(formatter, title, rows)


class Group(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        names: list[str] = []
        for _, group in _group_names(super().list_commands(ctx), COMMANDS, "Further"):
            names += group
        return names

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        longest = max(map(len, names))
        limit = formatter.width - longest - 4
        for title, group in _group_names(names, COMMANDS, "Further"):
            rows = []
            for name in group:
                summary = self.commands[name].get_short_help_str(limit)
                rows.append((name.ljust(longest), summary))
            _write_section(formatter, title, rows)


class App(typer.Typer):
    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, **{"cls": SummarizedCommand, **settings})

    def narrowed(self, name: str) -> Self:
        """This app with the command or group of that name alone; all of it if there is none.

        typer builds the parser of every command that an app has, which takes 20 ms for all.
        """
        commands = [info for info in self.registered_commands if _find_command_name(info) == name]
        groups = [info for info in self.registered_groups if info.name == name]
        if not commands and not groups:
            return self
        app = copy.copy(self)
        app.registered_commands = commands
        app.registered_groups = groups
        return app


def _find_command_name(info: CommandInfo) -> str:
    if info.name is not None:
        return info.name
    assert info.callback is not None
    return get_command_name(info.callback.__name__)


def suggest_overrides(arguments: list[str], command: Any) -> list[str]:
    """The `key=value` to write for options of a command line that are keys of a stage file.

    `command` is the parsed command; without overrides it has none.
    """
    if "overrides" not in {parameter.name for parameter in command.params}:
        return []
    options = set()
    for parameter in command.params:
        options.update(parameter.opts)
    keys = _list_keys(command.name)
    prefix = ""
    if command.name == "pipeline":
        # its overrides name the stage too
        prefix = "STAGE."
    written = []
    for word, following in itertools.pairwise([*arguments, "--"]):
        option, _, value = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and option not in options and key in keys:
            value = value or _infer_value(following)
            written.append(f"{prefix}{key}={value}")
    return written


def _list_keys(command: str) -> set[str]:
    """The keys of the stage files that a command takes: launch's own and every trainer's."""
    from launcher.config import keys
    from launcher.upstream import locate
    from launcher.upstream.trainers import BACKENDS

    stages = [command] if command in keys.STAGES else keys.STAGES
    names = set(keys.KEYS)
    for backend in BACKENDS:
        for stage in stages:
            for field in locate.load_snapshot(backend)["stages"][stage]:
                names.add(field.partition(".")[2])
    return names


def _infer_value(following: str) -> str:
    """The value of an option by the next word: it may be a switch, which has none."""
    is_option = following.startswith("--")
    is_override = "=" in following
    is_file = following.endswith((".yaml", ".yml"))
    if is_option or is_override or is_file:
        return "true"
    return following
