"""The documents say what the program does."""

import ast
import contextlib
import inspect
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from launcher.cli.commands import app
from launcher.cli.main import main
from launcher.config import keys, load
from launcher.errors import Exit
from launcher.stage import options
from launcher.upstream import open_instruct

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
DATA_PAGE = ROOT / "docs" / "data.md"
"""tests/test_data_page.py runs all of its commands."""

CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
MAKERS = """
say bad _stop _add _missing _usage usage _said _say _fault complain Finding said _error not_ready
refuse_file report_misplaced launch_finding
""".split()
"""Functions that take a finding's code as a plain argument."""


@cache
def source_trees() -> list[ast.Module]:
    """The modules of launch without the table of the codes."""
    paths = set((ROOT / "launcher").rglob("*.py")) - {ROOT / "launcher/findings.py"}
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)]


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The values of a module's constants, by name: a code may be written as one."""
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    return values


def places_of_codes(node: ast.AST) -> list[ast.expr]:
    """The expressions of a node that may be a finding's code."""
    if isinstance(node, ast.Call):
        maker = ast.unparse(node.func).rpartition(".")[2]
        if maker not in MAKERS:
            return []
        named = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        return [*node.args, *named]
    if isinstance(node, ast.Tuple) and node.elts and "-key" in ast.unparse(node.elts[0]):
        # "unknown-key", message, help
        return node.elts[:1]
    if isinstance(node, ast.Assign) and "-key" in ast.unparse(node.value):
        return [node.value]
    return []


def codes_in(tree: ast.Module) -> Iterator[str]:
    named = constants(tree)
    for node in ast.walk(tree):
        for value in places_of_codes(node):
            if isinstance(value, ast.Name):
                value = named.get(value.id, value)
            if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                continue
            if CODE.fullmatch(value.value):
                yield value.value


def finding_codes() -> set[str]:
    """Every code that the source gives to a finding."""
    codes = {f"bad-{key.replace('_', '-')}" for key in (*keys.KEYS, *options.WRAPPED_KEYS)}
    # these keys cannot be wrong in themselves, or have codes of their own
    codes -= {"bad-args", "bad-extends"}
    for tree in source_trees():
        codes.update(codes_in(tree))
    return codes - {"open-instruct"}


def texts_of_the_source() -> set[str]:
    """Every text that stands in the source by itself."""
    texts = set()
    for tree in source_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return texts


def documented_codes() -> set[str]:
    """The codes in the first column of docs/findings.md."""
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    codes: set[str] = set()
    for row in re.findall(r"^\| (`.+?) \|", page, re.M):
        codes.update(re.findall(r"`([a-z0-9-]+)`", row))
    return codes


def test_every_finding_code_is_documented_and_none_is_invented() -> None:
    codes = finding_codes()
    assert codes - documented_codes() == set()
    assert documented_codes() - texts_of_the_source() - codes == set()
    assert load.PIPELINE in codes


def all_commands() -> list[tuple[str, typer.models.CommandInfo]]:
    """Every command with its whole name."""
    commands = []
    groups = [("", app)]
    for group in app.registered_groups:
        groups.append((f"{group.name} ", group.typer_instance))
    for prefix, group in groups:
        for command in group.registered_commands:
            name = command.name or getattr(command.callback, "__name__", "")
            commands.append((prefix + name, command))
    return commands


def test_only_logs_has_no_json() -> None:
    without = []
    for name, command in all_commands():
        assert command.callback is not None
        if "format" not in inspect.signature(command.callback).parameters:
            without.append(name)
    assert without == ["logs"]
    assert "All commands but `logs` take `--format json`" in CLI


@pytest.mark.parametrize(("name", "command"), all_commands())
def test_every_command_has_help_and_an_example(
    name: str, command: typer.models.CommandInfo
) -> None:
    assert inspect.getdoc(command.callback)
    assert str(command.epilog).startswith(f"Example: launch {name}")


def test_the_exit_codes_of_the_reference_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \|$", CLI, re.M)
    assert rows == [str(int(code)) for code in Exit]


def test_the_reference_of_commands_is_up_to_date() -> None:
    """`make docs` writes it."""
    reference = [sys.executable, str(ROOT / "scripts/reference.py"), "--check"]
    assert subprocess.run(reference, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}).returncode == 0


def commands_of(pages: Iterable[Path]) -> list[str]:
    """Every `launch ...` line in the code blocks of the pages, without its comment."""
    commands = set()
    for page in pages:
        # every block is matched, so that the end of one is not taken for the beginning of another
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(.*?)\n(.*?)^```$", text, re.M | re.S):
            if language not in {"", "bash", "sh", "console"}:
                continue
            for line in block.splitlines():
                match = re.fullmatch(r"(?:\$ )?launch ([a-z].*?)(?: +# .*)?", line)
                if match and "[OPTIONS]" not in line:
                    commands.add(match[1])
    return sorted(commands)


def words_of(line: str) -> list[str]:
    """The words of a command up to what its output goes to."""
    return shlex.split(re.split(r" (?:>|&&|\|) ", line)[0])


@pytest.mark.parametrize("line", commands_of(PAGES))
def test_a_command_of_the_docs_has_options_that_exist(line: str) -> None:
    words = words_of(line)
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    with contextlib.suppress(typer.Exit):
        command.make_context("launch", words)


def is_cheap(line: str) -> bool:
    if "CONFIG" in line or "7b.yaml --gpus 1,2,8" in line:
        return False
    is_quick = re.match("validate-config|plan|explain|schema|check tests/", line)
    return bool(is_quick) or "--dry-run" in line


CHEAP = [line for line in commands_of(set(PAGES) - {DATA_PAGE}) if is_cheap(line)]


OF_THE_TUTORIAL = [line for line in CHEAP if "my_sft.yaml" in line]


def write_stage_file(page: str, folder: Path) -> None:
    """The first stage file that the page shows, and chats for it."""
    (folder / "data").mkdir()
    rows = []
    for number in range(200):
        question = {"role": "user", "content": f"a {number}"}
        answer = {"role": "assistant", "content": f"b {number}"}
        rows.append(json.dumps({"messages": [question, answer]}) + "\n")
    (folder / "data" / "chats.jsonl").write_text("".join(rows), encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8")
    stage_file = re.search(r"^```yaml.*?\n(.*?stage: sft.*?)^```", text, re.M | re.S)
    assert stage_file
    (folder / "my_sft.yaml").write_text(stage_file[1], encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_stage_file_of_a_page_has_no_warning(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stage_file(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["validate-config", "my_sft.yaml", "--strict"]) == Exit.OK, capsys.readouterr()


@pytest.mark.parametrize(
    ("page", "line"),
    [
        *itertools.product(["README.md"], CHEAP),
        *itertools.product(["docs/tutorial.md"], OF_THE_TUTORIAL),
    ],
)
def test_a_cheap_command_of_the_docs_runs(
    line: str,
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a folder with the shipped files, and the stage file that the page shows."""
    for name in ("configs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_stage_file(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    code = main(words_of(line))
    # a log alone leaves points open
    expected = Exit.VERDICT if line.startswith("check") else Exit.OK
    assert code == expected, capsys.readouterr()


def test_the_pin_is_the_submodule_and_the_snapshot() -> None:
    snapshot = ROOT / "launcher/upstream/snapshots" / open_instruct.KNOWN[0].snapshot
    assert json.loads(snapshot.read_text())["version"] == open_instruct.PIN
    assert open_instruct.PIN in README
    command = ["git", "-C", str(ROOT), "ls-files", "-s", "external/open-instruct"]
    submodule = subprocess.run(command, capture_output=True, text=True).stdout
    assert not submodule or f"160000 {open_instruct.PIN}" in submodule


def test_the_site_can_be_searched_from_a_disk() -> None:
    """Browsers start no worker there: a script of this site takes its place."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^plugins: \[search, offline\]$", settings, re.M)
    script = re.search(r"^  polyfills: \[(\S+)\]$", settings, re.M)
    assert script
    # by this name the plugin knows that it need not load it
    assert "iframe-worker" in script[1]
    assert (ROOT / "docs" / script[1]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_has_an_escaped_bar(page: Path) -> None:
    """The site would print the backslash."""
    assert "\\|" not in page.read_text(encoding="utf-8")


def test_the_examples_of_contributing_are_code_of_the_house() -> None:
    """One rule, one command, one test and one extension, each short enough to read at once."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    examples = re.findall(r"<!-- from: (\S+) -->\n```python\n(.*?)\n```", text, re.S)
    assert [path.split("/")[1] for path, _ in examples] == ["rules", "cli", "cli", "data"]
    for path, code in examples:
        assert code in (ROOT / path).read_text(encoding="utf-8"), path
        assert len(code.splitlines()) < 30
