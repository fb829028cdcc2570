"""Write the pages that follow from launch itself.

docs/cli.md out of the command line, docs/findings.md out of the table of codes, docs/cited.md out of the committed
places of upstream's lines; and in README and docs the numbers of lines that a command printed, below a
comment that cites them. `--check` only says whether all of that is up to date.
"""

import re
import sys
from collections.abc import Iterator, Mapping
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
    # the site shows a bar in a table with its backslash, GitHub ends the cell without one
    if option.param_type_name == "argument":
        return f"`{option.make_metavar(context)}`".replace("|", " or ")
    value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    names = " / ".join([*option.opts, *option.secondary_opts])
    return f"`{names}{value}`".replace("|", " or ")


def _meaning(option: Any) -> str:
    text = _plain(option.help)
    default = option.default
    # typer says so of most defaults by itself; an off switch and an empty list go without saying
    if option.show_default and default not in (None, False, "", ()) and not callable(default):
        text += f" (default: `{getattr(default, 'value', default)}`)"
    return text.strip()


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


CITED_HEAD = """\
# Cited lines

What rules, comments and pages cite of the trainers' source, and the line where it is: of open-instruct at the pin,
of packages in the release that launch is tested with. Written by `make docs` out of
`launcher/upstream/snapshots/cited.json`; how citations are written is said in [the pin](pin.md).
"""


def cited_page() -> str:
    """The page of what is cited, by release and file."""
    known = citations.committed()
    citing: dict[str, set[str]] = {}
    for row in cited.find_citations(ROOT):
        citing.setdefault(row.citation, set()).add(row.file)
    lines = [CITED_HEAD]
    for release, table in _current_releases(known):
        package = release.partition(" ")[0]
        lines += [f"## {release}", "", "| cited | line | in |", "|---|---|---|"]
        for name in sorted(name for name in citing if name.startswith(f"{package}/")):
            where = ", ".join(f"`{file}`" for file in sorted(citing[name]))
            text = name.replace("|", "\\|")
            lines.append(f"| `{text}` | {_numbered(name, table.get(name), release)} | {where} |")
        lines.append("")
    return "\n".join(lines)


def _current_releases(known: citations.Committed) -> Iterator[tuple[str, Table]]:
    """The pin first, then the packages."""
    pin = f"{cited.PACKAGE} {known.pin}"
    yield pin, known.tables[pin]
    for release, table in known.tables.items():
        if not release.startswith(f"{cited.PACKAGE} "):
            yield release, table


def _numbered(name: str, place: CitedPlace | None, release: str) -> str:
    if place is None:
        return "not there"
    if not release.startswith(f"{cited.PACKAGE} "):
        return str(place.line)
    file = name.partition("::")[0]
    commit = release.rpartition(" ")[2]
    return f"[{place.line}](https://github.com/allenai/open-instruct/blob/{commit[:12]}/{file}#L{place.line})"


_SHOWN = re.compile(r"<!-- cited: (.*?) -->\n(.*?)(?=<!-- cited: |\Z)", re.DOTALL)


def with_numbers(text: str) -> str:
    """A page whose printed lines have the numbers of what the comment above them cites, in its order."""
    known = citations.committed()
    table = known.tables[f"{cited.PACKAGE} {known.pin}"]

    def renumbered(match: re.Match[str]) -> str:
        below = match[2]
        for name in citations.citations(match[1]):
            file = name.partition("::")[0]
            if name in table:
                below = re.sub(rf"{re.escape(file)}:(?:\d+)", f"{file}\0{table[name].line}", below, count=1)
        return f"<!-- cited: {match[1]} -->\n" + below.replace("\0", ":")

    return _SHOWN.sub(renumbered, text)


def pages() -> Mapping[Path, str]:
    """Every page that this writes, with its text."""
    texts = {DOCS / "cli.md": page(), DOCS / "findings.md": findings_page(), DOCS / "cited.md": cited_page()}
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        text = texts.get(path) or path.read_text(encoding="utf-8")
        if "<!-- cited: " in text and path.name != "pin.md":
            texts[path] = with_numbers(text)
    return texts


def main(arguments: list[str]) -> int:
    """Write the pages; with `--check`, exit 1 where one differs."""
    texts = pages()
    if arguments == ["--check"]:
        return int(any(not path.exists() or path.read_text(encoding="utf-8") != text for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
