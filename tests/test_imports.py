"""Which module may import which, and what the light commands never load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Write

PACKAGE = REPOSITORY / "launcher"
HEAVY = (
    "torch",
    "transformers",
    "accelerate",
    "trl",
    "datasets",
    "deepspeed",
    "peft",
    "matplotlib",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imported(path: Path, *, lazily: bool = True) -> set[str]:
    """The modules of launcher that a file imports, also inside functions unless told otherwise."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if lazily else iter(tree.body)
    found = set()
    for node in nodes:
        whole = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and node.level:
            inside = ("launcher", *path.parent.relative_to(PACKAGE).parts, node.module)
            whole = ".".join(part for part in inside if part)
        if isinstance(node, ast.ImportFrom) and whole.partition(".")[0] == "launcher":
            base = whole.partition(".")[2]
            for alias in node.names:
                below = f"{base}.{alias.name}" if base else alias.name
                found.add(below if below in MODULES else base)
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.startswith("launcher.")
            }
    return found


# What each layer of the README's drawing may import. A module not named here may be imported by
# anything later, and is checked for circles only.
ARROWS = {
    "errors": {"redaction"},
    "redaction": set[str](),
    "files": set[str](),
    "printable": set[str](),
    "paths": {"files"},
    "document": {"errors", "files", "paths"},
    "interpolation": {"document", "errors", "redaction"},
    "keys": {"backends", "errors"},
    "config": {"document", "errors", "interpolation", "keys", "paths"},
    "schema": {"errors"},
    "sources": set[str](),
    "declarations": {"schema", "sources"},
    "backends.entry": {"schema"},
    "cited": {"errors", "sources"},
    "backends.rule": {"cited", "errors", "schema"},
    "backends.context": {"errors", "schema"},
    "backends.model_config": {"files", "paths", "schema"},
    "backends.rows": {"files", "paths"},
    "backends.open_instruct_rules": {
        "backends.model_config",
        "backends.open_instruct",
        "backends.rows",
        "backends.rule",
        "errors",
        "paths",
        "schema",
    },
    "backends.trl_resolved": {"schema"},
    "backends.trl_parser_rules": {"backends.rule", "errors", "schema"},
    "backends.trl_rules": {
        "backends.rule",
        "backends.trl_parser_rules",
        "backends.trl_resolved",
        "errors",
        "schema",
    },
    "backends.open_instruct": {"backends.entry", "schema"},
    "backends.trl": {"backends.entry", "schema"},
    "backends": {"backends.entry", "backends.open_instruct", "backends.trl", "schema"},
    "rules": {
        "backends.context",
        "backends.data_rules",
        "backends.deepspeed_rules",
        "backends.loading_rules",
        "backends.model_rules",
        "backends.olmo_core_rules",
        "backends.open_instruct",
        "backends.open_instruct_rules",
        "backends.output_rules",
        "backends.rule",
        "backends.service_rules",
        "backends.trl_attention",
        "backends.trl_data_rules",
        "backends.trl_machine_rules",
        "backends.trl_rules",
        "errors",
        "schema",
    },
    "conditions": set[str](),
    "git": set[str](),
    "flow": {"conditions", "schema", "sources"},
    "walk": {"conditions", "flow", "schema", "sources"},
    "reads": {"conditions", "flow", "schema", "sources", "walk"},
    "facts": {"backends", "declarations", "reads", "schema", "sources"},
    "history": {"git"},
    "upstream": {
        "cited",
        "backends",
        "errors",
        "facts",
        "git",
        "history",
        "machine",
        "paths",
        "schema",
        "sources",
    },
    "fix": {
        "files",
        "document",
        "config",
        "errors",
        "stage",
        "upstream",
    },
    "json_schema": {
        "backends",
        "document",
        "gates",
        "keys",
        "sbatch",
        "schema",
        "skypilot",
    },
    "noops": {"backends", "conditions", "errors", "schema"},
    "gates": {"errors"},
    "options": {"backends", "config", "errors", "gates", "keys", "paths", "sbatch", "skypilot"},
    "arguments": {
        "backends",
        "config",
        "errors",
        "history",
        "keys",
        "options",
        "schema",
        "upstream",
    },
    "stage": {
        "arguments",
        "backends",
        "backends.context",
        "backends.trl_attention",
        "config",
        "errors",
        "noops",
        "options",
        "rules",
        "schema",
        "upstream",
    },
    "probe": set[str](),
}

# From left to right, as the drawing has them: a module imports only what stands before it.
ORDER = (
    "errors", "config", "schema", "backends", "rules", "stage", "plan", "command", "rundir", "runner",
    "evidence", "check", "preparation", "start", "cli",
)  # fmt: skip


@pytest.mark.parametrize("name", ARROWS)
def test_a_module_imports_only_what_its_layer_may(name: str) -> None:
    assert imported(MODULES[name]) <= ARROWS[name]


@pytest.mark.parametrize("name", MODULES)
def test_arrows_go_right_only(name: str) -> None:
    if name not in ORDER:
        return
    later = set(ORDER[ORDER.index(name) :]) - {name}
    assert not imported(MODULES[name]) & later


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join((*path, name))}"
        if name not in done:
            for following in sorted(imported(MODULES[name], lazily=False) & MODULES.keys()):
                if following != name:
                    visit(following, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_nothing_imports_scripts_or_tests() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {
                "scripts",
                "tests",
                "benchmarks",
            }


def loaded(code: str) -> set[str]:
    """The modules that a process has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules, file=sys.stderr)"],
        capture_output=True, text=True, check=True, cwd=REPOSITORY,
    )  # fmt: skip
    return set(done.stderr.split())


@pytest.mark.parametrize("backend", ["open_instruct", "trl"])
def test_validate_config_never_loads_the_trainers_packages(write: Write, backend: str) -> None:
    name = "dataset_mixer_list: [a, 1.0]" if backend == "open_instruct" else "dataset_name: a"
    path = write(
        "a.yaml", f"stage: sft\nbackend: {backend}\nargs:\n  model_name_or_path: m\n  {name}\n"
    )
    modules = loaded(
        f"from launcher.cli import main\nassert main(['validate-config', {str(path)!r}]) in (0, 3)"
    )
    assert not modules & set(HEAVY)
    # nor what only files with ${...} need
    assert "omegaconf" not in modules


def test_help_loads_no_more() -> None:
    modules = loaded("from launcher.cli import main\nmain(['--help'])")
    assert not modules & {*HEAVY, "omegaconf", "yaml"}


def test_an_interrupt_while_commands_are_imported_ends_quietly() -> None:
    code = (
        "import sys\nclass Ctrl_C:\n  def find_spec(self, name, *_):\n"
        "    if name == 'launcher.commands': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Ctrl_C())\nfrom launcher.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
