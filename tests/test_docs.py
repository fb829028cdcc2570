"""The documents say what the program does."""

import ast
import contextlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import typer

from launcher.cli.commands import app
from launcher.cli.main import main
from launcher.config import keys, load
from launcher.errors import Exit
from launcher.stage import options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
# tests/test_data_page.py runs all of its commands
RUN_ELSEWHERE = {"data.md"}


CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
# functions that take a finding's code as a plain argument
MAKERS = {
    "say", "bad", "_stop", "_add", "_missing", "_usage", "usage", "_said", "_say", "_fault", "complain",
    "Finding", "said", "_error", "not_ready", "refused",
}  # fmt: skip


@cache
def finding_codes() -> set[str]:
    """Every code that the source gives to a finding."""
    codes = {f"bad-{key.replace('_', '-')}" for key in (*keys.KEYS, *options.WRAPPED_KEYS)}
    # these keys cannot be wrong in themselves, or have codes of their own
    codes -= {"bad-args", "bad-extends"}
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in MAKERS:
                given = [*node.args, *(k.value for k in node.keywords if k.arg == "code")]
            elif isinstance(node, ast.Tuple | ast.Assign):
                # "unknown-key", message, help
                given = node.elts[:1] if isinstance(node, ast.Tuple) else [node.value]
                given = [g for g in given if "-key" in ast.unparse(g)]
            else:
                continue
            given = [named.get(g.id, g) if isinstance(g, ast.Name) else g for g in given]
            texts = (g.value for g in given if isinstance(g, ast.Constant))
            codes |= {text for text in texts if isinstance(text, str) and CODE.fullmatch(text)}
    return codes - {"open-instruct"}


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The values of a module's constants, by name: a code may be given by one."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }


def words() -> set[str]:
    """Every text that stands in the source by itself, the table of the codes left out."""
    paths = set((ROOT / "launcher").rglob("*.py")) - {ROOT / "launcher/findings.py"}
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def documented_codes() -> set[str]:
    """The codes in the first column of docs/findings.md."""
    rows = re.findall(
        r"^\| (`.+?) \|", (ROOT / "docs/findings.md").read_text(encoding="utf-8"), re.M
    )
    return {code for row in rows for code in re.findall(r"`([a-z0-9-]+)`", row)}


def test_every_finding_code_is_documented_and_none_is_invented() -> None:
    codes = finding_codes()
    assert codes - documented_codes() == set()
    assert documented_codes() - words() - codes == set()
    assert load.PIPELINE in finding_codes()


def test_only_logs_has_no_json() -> None:
    without = {
        command.name or getattr(command.callback, "__name__", "")
        for group in (app, *(group.typer_instance for group in app.registered_groups))
        for command in group.registered_commands
        if command.callback and "format" not in inspect.signature(command.callback).parameters
    }
    assert without == {"logs"}
    assert "All commands but `logs` take `--format json`" in CLI


def test_the_exit_codes_of_the_reference_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \|$", CLI, re.M)
    assert rows == [str(int(code)) for code in Exit]


def test_every_command_has_help_and_an_example() -> None:
    groups = [
        ("", app),
        *((f"{group.name} ", group.typer_instance) for group in app.registered_groups),
    ]
    for prefix, command in ((p, c) for p, group in groups for c in group.registered_commands):
        function = command.callback
        assert function is not None
        name = prefix + (command.name or function.__name__)
        assert function.__doc__, name
        assert (command.epilog or "").startswith(f"Example: launch {name}"), name


def test_the_reference_of_commands_is_up_to_date() -> None:
    """`make docs` writes it."""
    reference = [sys.executable, str(ROOT / "scripts/reference.py"), "--check"]
    assert subprocess.run(reference, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}).returncode == 0


def commands(pages: Iterable[Path] = PAGES) -> list[str]:
    """Every `launch ...` line in the code blocks of the pages, without its comment."""
    lines = []
    for page in pages:
        # every block is matched, so that the end of one is not taken for the beginning of another
        blocks = re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
        for language, block in blocks:
            if language in {"", "bash", "sh", "console"}:
                lines += block.splitlines()
    found = (re.fullmatch(r"(?:\$ )?launch ([a-z].*?)(?: +# .*)?", line) for line in lines)
    return sorted({match[1] for match in found if match and "[OPTIONS]" not in match[1]})


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_docs_has_options_that_exist(line: str) -> None:
    words = shlex.split(re.split(r" (?:>|&&|\|) ", line)[0])
    command = typer.main.get_command(app)
    while below := getattr(command, "commands", None):
        if not words or words[0] not in below:
            break
        command = below[words.pop(0)]
    with contextlib.suppress(typer.Exit):
        command.make_context("launch", words)


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in commands(page for page in PAGES if page.name not in RUN_ELSEWHERE)
        if (
            re.match("validate-config|plan|explain|schema|check tests/", line)
            or "--dry-run" in line
        )
        and "CONFIG" not in line
        and "7b.yaml --gpus 1,2,8" not in line
    ],
)
def test_a_cheap_command_of_the_docs_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with the shipped files, and the stage files that README and the tutorial show."""
    for name in ("configs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    row = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    (tmp_path / "data/chats.jsonl").write_text(f"{row}\n" * 200, encoding="utf-8")
    for page in ("README.md", "docs/tutorial.md"):
        shown = re.search(
            r"^```yaml.*?\n(.*?stage: sft.*?)^```", (ROOT / page).read_text(), re.M | re.S
        )
        assert shown
        (tmp_path / "my_sft.yaml").write_text(shown[1], encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        code = main(shlex.split(re.split(r" (?:>|&&|\|) ", line)[0]))
        out = capsys.readouterr()
        # a log alone leaves points open
        assert code == (Exit.VERDICT if line.startswith("check") else Exit.OK), out.err + out.out


def test_the_pin_is_the_submodule_and_the_snapshot() -> None:
    import json
    import subprocess

    from launcher.upstream import open_instruct

    facts = json.loads(
        (ROOT / "launcher/upstream/snapshots" / open_instruct.KNOWN[0].snapshot).read_text()
    )
    assert facts["version"] == open_instruct.PIN
    assert open_instruct.PIN in README
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-s", "external/open-instruct"],
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert not listed or f"160000 {open_instruct.PIN}" in listed


def test_the_site_can_be_searched_from_a_disk() -> None:
    """Browsers start no worker there: a script takes its place, and must not come from elsewhere."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^plugins: \[search, offline\]$", settings, re.M)
    scripts = re.search(r"^  polyfills: \[(\S+)\]$", settings, re.M)
    # by this name the plugin knows that it need not load it
    assert scripts and "iframe-worker" in scripts[1]
    assert (ROOT / "docs" / scripts[1]).is_file()


def test_no_table_has_an_escaped_bar() -> None:
    """The site would print the backslash."""
    assert [page.name for page in PAGES if "\\|" in page.read_text(encoding="utf-8")] == []


def test_the_examples_of_contributing_are_code_of_the_house() -> None:
    """One rule, one command, one test and one extension, each short enough to read at once."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    examples = re.findall(r"<!-- from: (\S+) -->\n```python\n(.*?)\n```", text, re.S)
    assert [path.split("/")[1] for path, _ in examples] == ["rules", "cli", "cli", "data"]
    for path, code in examples:
        assert code in (ROOT / path).read_text(encoding="utf-8"), path
        assert len(code.splitlines()) < 30
