"""The documents say what the program does."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from launcher.cli.commands import app
from launcher.cli.main import main
from launcher.config import keys, load
from launcher.errors import Exit
from launcher.stage import options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


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
    """Every text that stands in the source by itself."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "launcher").rglob("*.py")
    )
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


def test_what_the_docs_run_in_ci_passes_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line with its files, as a shell would hand them over in this repository's root."""
    monkeypatch.chdir(ROOT)
    told = (ROOT / "docs/editors.md").read_text(encoding="utf-8")
    lines = re.findall(r"run: launch (validate-config [^>\n]+)", told)
    assert lines
    for line in lines:
        words = [sorted(map(str, Path().glob(word))) or [word] for word in line.split()]
        assert main([word for found in words for word in found]) == Exit.OK, line
    capsys.readouterr()


def test_only_logs_has_no_json() -> None:
    without = {
        command.name or getattr(command.callback, "__name__", "")
        for group in (app, *(group.typer_instance for group in app.registered_groups))
        for command in group.registered_commands
        if command.callback and "format" not in inspect.signature(command.callback).parameters
    }
    assert without == {"logs"}
    assert "All but `logs` take `--format json`" in README


def test_the_exit_codes_of_the_readme_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \|$", README, re.M)
    assert rows == [str(int(code)) for code in Exit]


def test_every_command_has_help_an_example_and_a_place_in_the_readme() -> None:
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
        assert f"`launch {name} " in README or f"`launch {name}`" in README, name


def test_the_pin_is_the_submodule_and_the_snapshot() -> None:
    import json
    import subprocess

    from launcher.upstream import open_instruct

    facts = json.loads((ROOT / "launcher/upstream/snapshots/open_instruct.json").read_text())
    assert facts["version"] == open_instruct.PIN
    assert open_instruct.PIN in README
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-s", "external/open-instruct"],
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert not listed or f"160000 {open_instruct.PIN}" in listed
