"""Which module may import which, and what the light commands never load."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Write

PACKAGE = REPOSITORY / "launcher"
HEAVY = (
    "torch", "transformers", "accelerate", "trl", "datasets", "deepspeed", "peft", "matplotlib",
)  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """The modules of launcher that a file imports, inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, module = alias.name.partition(".")
                if package == "launcher":
                    modules.add(module)
        if isinstance(node, ast.ImportFrom):
            package, _, base = absolute_name(node, path).partition(".")
            if package != "launcher":
                continue
            for alias in node.names:
                module = f"{base}.{alias.name}".lstrip(".")
                modules.add(module if module in MODULES else base)
    return modules


def absolute_name(node: ast.ImportFrom, path: Path) -> str:
    module = node.module or ""
    if node.level == 0:
        return module
    return ".".join(("launcher", *path.parent.relative_to(PACKAGE).parts, module)).rstrip(".")


# From the ground up: a package imports only what stands before it. `launcher/` itself is the first.
PACKAGES = """
config machine upstream artifacts dataset runs rules stage plan verdict cache pin report planning
trained lifecycle workflows cli
"""
FLOORS = ["", *PACKAGES.split()]
GROUND = {
    "errors",
    "findings",
    "files",
    "lazy_dataclass",
    "paths",
    "printable",
    "redaction",
    "__main__",
    "",
}
# A dozen files and a few: what grows beyond it has two subjects.
MOST_FILES = 16


def floor(name: str) -> int:
    first, _, below = name.partition(".")
    return FLOORS.index(first if below or first in FLOORS else "")


IN_THE_TRAINER = ("probe", "workflows.rehearse.inside")
"""What runs under the trainer's Python."""


def test_imports_only_go_down() -> None:
    for name, path in MODULES.items():
        if name.startswith((*IN_THE_TRAINER, "__main__")):
            continue
        for module in imported(path):
            assert not module.startswith("probe"), name
            assert floor(module) <= floor(name), name


def test_the_probe_imports_nothing_of_launch() -> None:
    for name, path in MODULES.items():
        if not name.startswith(IN_THE_TRAINER):
            continue
        package = name.split(".")[0]
        for module in imported(path):
            assert module.split(".")[0] in (package, ""), name


def test_what_the_probe_loads_by_its_path_imports_nothing_of_launch() -> None:
    assert imported(PACKAGE / "artifacts" / "digest.py") == set()


FOLDERS = {path.parent for path in MODULES.values()}


def test_every_module_has_a_room() -> None:
    assert {name for name in MODULES if "." not in name} <= GROUND | {*FLOORS, "probe"}


@pytest.mark.parametrize("folder", sorted(FOLDERS), ids=lambda folder: folder.name)
def test_a_package_is_small_and_says_what_it_is_for(folder: Path) -> None:
    init = folder / "__init__.py"
    others = set(folder.glob("*.py")) - {init}
    assert len(others) <= MOST_FILES
    if others and folder != PACKAGE:
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join((*path, name))}"
        if name not in done:
            for following in sorted(imported(MODULES[name]) & MODULES.keys()):
                if following != name:
                    visit(following, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_nothing_imports_scripts_or_tests() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^ *(import|from) (scripts|tests|benchmarks)\b", text, re.M), path


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
    command = ["validate-config", str(path)]
    modules = loaded(f"from launcher.cli.main import main\nassert main({command!r}) in (0, 3)")
    assert not modules & set(HEAVY)
    # nor what only files with ${...} need
    assert "omegaconf" not in modules


def test_help_loads_no_more() -> None:
    modules = loaded("from launcher.cli.main import main\nmain(['--help'])")
    assert not modules & {*HEAVY, "omegaconf", "yaml"}


def test_an_interrupt_while_commands_are_imported_ends_quietly() -> None:
    code = (
        "import sys\nclass Ctrl_C:\n  def find_spec(self, name, *_):\n"
        "    if name == 'launcher.cli.commands': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Ctrl_C())\nfrom launcher.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
