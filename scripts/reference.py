"""Write the pages that are generated: docs/cli.md from the command line, docs/findings.md from the
table of codes, docs/cited.md from the committed lines of upstream.

In README and docs it also renews the line numbers in printed output that stands below a comment
with citations. `--check` only says by its exit code whether all of that is up to date.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import typer

from launcher.cli.commands import app
from launcher.findings import SECTIONS
from launcher.pin import cited
from launcher.upstream import citations
from launcher.upstream.citations import CitedPlace, Table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
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
| 1 | the verdict is `fail` or `unproven` (`--allow-unproven` makes the latter 0); `pin move`: moved, and rules wait |
| 2 | the command line is wrong |
| 3 | the stage file is invalid |
| 4 | training failed, or an evaluation in a pipeline |
| 5 | the machine is not ready |
| 70 | a bug in launch; the traceback is in a file that the message names (`launch rehearse`: the finding says where) |
| 130 | interrupted |
"""


FINDINGS_HEAD = """\
# Findings

Every finding has a severity, a layer and a stable code. Errors stop; warnings stop with `--strict`;
notes only inform. A finding about an override names the override (`override` in the JSON) instead of a line.

| layer | meaning |
|---|---|
| `parser` | upstream's own parser or `__post_init__` refuses it at the pin |
| `run` | it parses, and would then crash, have no effect, or do something else than it says |
| `launch` | it is about launch's own file format and rules |
| `trainer` | the training script itself reported or showed it in a [rehearsal](planning.md#rehearsing) |
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Every visible command and its full name; the commands of a group in place of the group."""
    top: Any = typer.main.get_command(app)
    for name, command in top.commands.items():
        yield from _visible(name, command)


def _visible(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    members = getattr(command, "commands", {})
    if not members and not command.hidden:
        yield name, command
    for member_name, member in members.items():
        yield from _visible(f"{name} {member_name}", member)


def cli_page() -> str:
    parts = [HEAD]
    for name, command in commands():
        parts.append("\n" + command_section(name, command))
    return "".join(parts)


def command_section(name: str, command: Any) -> str:
    """One command: usage, what it does, its options with their defaults, an example."""
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([f"launch {name}", *command.collect_usage_pieces(context)])
    lines = [f"## launch {name}", "", "```", usage, "```", "", _plain(command.help), ""]
    rows = []
    for option in command.params:
        if not option.hidden and option.name != "help":
            rows.append(f"| {_names(option, context)} | {_meaning(option)} |")
    if rows:
        lines += ["| option | meaning |", "|---|---|", *rows, ""]
    if command.epilog:
        example = _plain(command.epilog).removeprefix("Example: ")
        lines += [f"Example: `{example}`", ""]
    return "\n".join(lines)


def _names(option: Any, context: Any) -> str:
    if option.param_type_name == "argument":
        words = [option.make_metavar(context)]
    else:
        words = [" / ".join([*option.opts, *option.secondary_opts])]
        if not option.is_flag and not option.count:
            words.append(option.make_metavar(context))
    # in a table, the site shows `\\|` as it is written; GitHub ends the cell at a bare bar
    return f"`{' '.join(words)}`".replace("|", " or ")


def _meaning(option: Any) -> str:
    text = _plain(option.help)
    default = option.default
    # typer sets show_default for most options; an off switch or an empty list is no news
    if option.show_default and default not in (None, False, "", ()) and not callable(default):
        text += f" (default: `{getattr(default, 'value', default)}`)"
    return text.strip()


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def findings_page() -> str:
    lines = [FINDINGS_HEAD]
    for section in SECTIONS:
        lines += [f"## {section.title}", ""]
        if section.intro:
            lines += [fill(section.intro, 116), ""]
        lines += ["| code | layer | meaning |", "|---|---|---|"]
        for row in section.rows:
            codes = ", ".join(f"`{code}`" for code in row.codes)
            lines.append(f"| {codes} | {row.layer} | {_cell(row.text)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


CITED_HEAD = """\
# Cited lines

What rules, comments and pages cite of the trainers' source, and the line where it is: of open-instruct at the pin,
of packages in the release that launch is tested with. Written by `make docs` out of
`launcher/upstream/snapshots/cited.json`; how citations are written is said in [the pin](pin.md).
"""


def cited_page() -> str:
    """The page of cited lines, by release and file."""
    committed = citations.load_committed()
    citing_files: dict[str, set[str]] = {}
    for row in cited.find_citations(ROOT):
        citing_files.setdefault(row.citation, set()).add(row.file)
    lines = [CITED_HEAD]
    for release, table in _current_releases(committed):
        package = release.partition(" ")[0]
        lines += [f"## {release}", "", "| cited | line | in |", "|---|---|---|"]
        for name in sorted(citing_files):
            if name.startswith(f"{package}/"):
                files = ", ".join(f"`{file}`" for file in sorted(citing_files[name]))
                line = _linked_line(name, table.get(name), release)
                lines.append(f"| `{_cell(name)}` | {line} | {files} |")
        lines.append("")
    return "\n".join(lines)


def _current_releases(committed: citations.Committed) -> Iterator[tuple[str, Table]]:
    """The pin first, then the packages."""
    pin = f"{cited.PACKAGE} {committed.pin}"
    yield pin, committed.tables[pin]
    for release, table in committed.tables.items():
        if not release.startswith(f"{cited.PACKAGE} "):
            yield release, table


def _linked_line(name: str, place: CitedPlace | None, release: str) -> str:
    if place is None:
        return "not there"
    package, _, version = release.partition(" ")
    if package != cited.PACKAGE:
        return str(place.line)
    file = name.partition("::")[0]
    tree = f"https://github.com/allenai/open-instruct/blob/{version[:12]}"
    return f"[{place.line}]({tree}/{file}#L{place.line})"


_SHOWN = re.compile(r"<!-- cited: (.*?) -->\n(.*?)(?=<!-- cited: |\Z)", re.DOTALL)


def renumber_lines(text: str) -> str:
    """Give the printed lines below a comment the numbers of what it cites, in its order."""
    committed = citations.load_committed()
    table = committed.tables[f"{cited.PACKAGE} {committed.pin}"]

    def renumber(match: re.Match[str]) -> str:
        printed = match[2]
        for name in citations.find_citations(match[1]):
            if name in table:
                file = name.partition("::")[0]
                # NUL for the colon: the next citation of this file means its next line
                number = f"{file}\0{table[name].line}"
                printed = re.sub(rf"{re.escape(file)}:\d+", number, printed, count=1)
        return f"<!-- cited: {match[1]} -->\n" + printed.replace("\0", ":")

    return _SHOWN.sub(renumber, text)


def pages() -> dict[Path, str]:
    """The text of every page that this script writes."""
    texts = {
        DOCS / "cli.md": cli_page(),
        DOCS / "findings.md": findings_page(),
        DOCS / "cited.md": cited_page(),
    }
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        text = texts.get(path) or path.read_text(encoding="utf-8")
        if "<!-- cited: " in text and path.name != "pin.md":
            texts[path] = renumber_lines(text)
    return texts


def main(arguments: list[str]) -> int:
    """Write the pages; with `--check`, exit 1 if one differs."""
    check = arguments == ["--check"]
    for path, text in pages().items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
