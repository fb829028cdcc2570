"""Write docs/cli.md out of the command line itself, and docs/findings.md out of the table of codes.

`--check` only says whether they are up to date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import typer

from launcher.cli.commands import app
from launcher.findings import SECTIONS

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = """\
# CLI reference

Written by `make docs` from the command line itself. All commands but `logs` take `--format json`;
`validate-config` also takes `github`. `--dry-run` prints the plan as comments and the command on one line,
quoted so that it can be pasted. Only commands that start a stage need GPUs, the trainer's packages and a
checkout (`prepare` no GPU); `--gpus 0` is the CPU.

## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | the verdict is `fail` or `unproven` (`--allow-unproven` makes the latter 0) |
| 2 | the command line is wrong |
| 3 | the stage file is invalid |
| 4 | training failed, or an evaluation in a pipeline |
| 5 | the machine is not ready |
| 70 | a bug in launch; the traceback is in a file that the message names (`launch rehearse`: the finding says where) |
| 130 | interrupted |
"""


FINDINGS_HEAD = """\
# Findings

Every finding has a severity, a layer and a stable code. Layer `parser`: upstream's own parser or
`__post_init__` refuses it at the pin. Layer `run`: it parses, and would then crash, do nothing, or
do something else than it says. Layer `launch`: this tool's own file format and rules. Layer
`trainer`: the training script itself said it, or showed it, in a
[rehearsal](planning.md#rehearsing). Errors stop; warnings stop under `--strict`; notes only tell.
What an override set is named by it (`override` in the JSON) where else a line is.
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Every visible command with its full name, those of groups too."""
    top: Any = typer.main.get_command(app)
    for name, command in top.commands.items():
        for full, one in [(name, command), *_below(name, command)]:
            if not one.hidden and not getattr(one, "commands", None):
                yield full, one


def _below(name: str, group: Any) -> list[tuple[str, Any]]:
    return [(f"{name} {below}", one) for below, one in getattr(group, "commands", {}).items()]


def page() -> str:
    """The whole page."""
    return HEAD + "".join("\n" + section(name, command) for name, command in commands())


def section(name: str, command: Any) -> str:
    """One command: usage, what it does, its options with their defaults, an example."""
    context = command.make_context(name, [], resilient_parsing=True)
    words = [f"launch {name}", *command.collect_usage_pieces(context)]
    lines = [f"## launch {name}", "", "```", " ".join(words), "```", "", _plain(command.help), ""]
    options = [o for o in command.params if not o.hidden and o.name != "help"]
    if options:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| {_names(o, context)} | {_meaning(o)} |" for o in options]
        lines.append("")
    if command.epilog:
        lines += [_example(command.epilog), ""]
    return "\n".join(lines)


def _names(option: Any, context: Any) -> str:
    if option.param_type_name == "argument":
        return f"`{option.make_metavar(context)}`"
    value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    names = " / ".join([*option.opts, *option.secondary_opts])
    return f"`{names}{value}`".replace("|", "\\|")


def _meaning(option: Any) -> str:
    text = _plain(option.help)
    default = option.default
    # typer says so of most defaults by itself; an off switch and an empty list go without saying
    if option.show_default and default not in (None, False, "", ()) and not callable(default):
        text += f" (default: `{getattr(default, 'value', default)}`)"
    return text.replace("|", "\\|").strip()


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def _example(epilog: str) -> str:
    return f"Example: `{_plain(epilog).removeprefix('Example: ')}`"


def findings_page() -> str:
    """The page of finding codes."""
    lines = [FINDINGS_HEAD]
    for section in SECTIONS:
        lines += [f"## {section.title}", ""]
        if section.intro:
            lines += [fill(section.intro, 116), ""]
        lines += ["| code | layer | meaning |", "|---|---|---|"]
        for row in section.rows:
            codes = ", ".join(f"`{code}`" for code in row.codes)
            text = row.text.replace("|", "\\|")
            lines.append(f"| {codes} | {row.layer} | {text} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write the pages; with `--check`, exit 1 where one differs."""
    pages = {DOCS / "cli.md": page(), DOCS / "findings.md": findings_page()}
    if arguments == ["--check"]:
        return int(any(path.read_text(encoding="utf-8") != text for path, text in pages.items()))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
