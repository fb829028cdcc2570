"""What an entry script imports, read from its source, and whether the trainer's Python really can.

Reading costs nothing, so every start does it. Importing, in a process of its own, tells a package that is
missing from one that is broken. It costs 15 to 60 seconds for open-instruct, so only `launch doctor` does it.
"""

from __future__ import annotations

import ast
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.files import parse_line
from launcher.machine import Trainer
from launcher.sources import Tree

CHILD = Path(__file__).resolve().parent / "importing.py"
TIMEOUT_S = 300.0

# names under which a distribution is installed, where they are not the module's own
DISTRIBUTIONS: Mapping[str, str] = {
    "absl": "absl-py",
    "beaker": "beaker-py",
    "bs4": "beautifulsoup4",
    "cpuinfo": "py-cpuinfo",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "git": "gitpython",
    "hydra": "hydra-core",
    "olmo_core": "ai2-olmo-core",
    "openenv": "openenv-core",
    "PIL": "pillow",
    "pkg_resources": "setuptools",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}


@dataclass(frozen=True, slots=True)
class Import:
    """One statement: `from module import names`, or `import module`; `file` is a label, `line` 1-based."""

    module: str
    names: tuple[str, ...]
    file: str
    line: int

    @property
    def top(self) -> str:
        """The package that has to be installed."""
        return self.module.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An import that fails: the exception, and `file:line` of where it was raised.

    `missing` is the top-level module that is not installed; None where something that is there fails.
    """

    wanted: Import
    error: str
    message: str
    file: str | None = None
    line: int | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How importing went; `cuda` is what torch says of the GPUs, `fault` why nothing could be tried.

    `failed` are all top-level modules that did not import.
    """

    failures: tuple[Failure, ...] = ()
    cuda: Mapping[str, Any] | None = None
    modules: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    fault: str | None = None


def distribution(module: str) -> str:
    """The name to install a top-level module by."""
    return DISTRIBUTIONS.get(module, module.replace("_", "-").lower())


# --- read from the source -------------------------------------------------------------------------


def of_script(script: str, packages: Mapping[str, Tree]) -> tuple[Import, ...]:
    """The imports of other packages that a script certainly makes, over all files of its own package.

    Left out is what a condition or a `try` guards. In the script itself the bodies of its functions
    count too: TRL's import there. Empty where the source is not here or cannot be parsed.
    """
    top = script.partition("/")[0]
    own = packages.get(top)
    if own is None:
        return ()
    first = script.removesuffix(".py").replace("/", ".")
    waiting, seen, found = [first], {first}, list[Import]()
    while waiting:
        name = waiting.pop(0)
        for statement in _statements(name, own, inside=name == first):
            if statement.top != top:
                found.append(statement)
                continue
            for module in _own_modules(statement):
                if module not in seen:
                    seen.add(module)
                    waiting.append(module)
    return tuple(one for one in found if one.top not in sys.stdlib_module_names)


def lazy(script: str, packages: Mapping[str, Tree]) -> tuple[Import, ...]:
    """What a script takes from its own package: what a package that loads lazily must then import."""
    top = script.partition("/")[0]
    own = packages.get(top)
    name = script.removesuffix(".py").replace("/", ".")
    told = () if own is None else tuple(_statements(name, own, inside=True))
    return tuple(one for one in told if one.top == top)


def _own_modules(statement: Import) -> Iterator[str]:
    """The modules of its own package that a statement loads: parents, the module, what may be one."""
    parts = statement.module.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))
    yield from (f"{statement.module}.{name}" for name in statement.names)


def _statements(name: str, own: Tree, *, inside: bool) -> Iterator[Import]:
    below = name.partition(".")[2].replace(".", "/")
    for path in (f"{below}/__init__.py".lstrip("/"), f"{below}.py"):
        raw = own.read(path)
        if raw is None:
            continue
        try:
            tree = ast.parse(raw)
        except (SyntaxError, ValueError):
            return
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        for node in _certain(tree.body, inside=inside):
            yield from _imported(node, package, f"{own.name}/{path}")
        return


def _certain(body: Sequence[ast.stmt], *, inside: bool) -> Iterator[ast.stmt]:
    """Statements that run whenever the body does; `with suppress(...)` and the like guard theirs."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if inside or isinstance(node, ast.ClassDef):
                yield from _certain(node.body, inside=False)
        elif isinstance(node, ast.Try):
            yield from _certain(
                [*([] if node.handlers else node.body), *node.finalbody], inside=False
            )


def _imported(node: ast.stmt, package: str, label: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, (), label, node.lineno)
    elif isinstance(node, ast.ImportFrom):
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        names = tuple(alias.name for alias in node.names if alias.name != "*")
        yield Import(module, names, label, node.lineno)


# --- checked --------------------------------------------------------------------------------------


def missing(modules: Sequence[str], trainer: Trainer) -> tuple[str, ...]:
    """Those top-level modules that the trainer's Python holds neither as a distribution nor as a file."""
    path = [str(folder) for folder in trainer.path]
    return tuple(
        name
        for name in modules
        if distribution(name) not in trainer.packages and not _has_file(name, path)
    )


def _has_file(name: str, path: list[str]) -> bool:
    try:
        spec = importlib.machinery.PathFinder.find_spec(name, path)
    except (ImportError, OSError, ValueError):
        return False
    # any folder of that name (`wandb` makes one) would do for a namespace
    return spec is not None and spec.origin is not None


def attempt(
    wanted: Sequence[Import], trainer: Trainer, *, paths: Sequence[Path] = (),
    environ: Mapping[str, str], timeout_s: float = TIMEOUT_S, cuda: bool = False,
) -> Result:  # fmt: skip
    """Import everything in turn, in one process of the trainer's Python.

    `paths` come first on its path. An import in which the process dies or does not come back (within
    `timeout_s` for all together) is the last one.
    """
    names: dict[str, tuple[Import, set[str]]] = {}
    for one in wanted:
        names.setdefault(one.module, (one, set()))[1].update(one.names)
    question = {
        "paths": [str(path) for path in paths],
        "imports": [[module, sorted(taken)] for module, (_, taken) in names.items()],
        "cuda": cuda,
    }
    answers, ended, words = _child(question, trainer, environ, timeout_s)
    begun: Import | None = None
    failed = set[str]()
    # of several imports that fail for the same reason only the first
    failures: dict[object, Failure] = {}
    for answer in answers:
        if "begun" in answer:
            begun = names[answer["begun"]][0]
        elif "imported" in answer:
            begun = None
        elif (told := answer.get("fault")) and begun is not None:
            failed.add(begun.top)
            failure = Failure(
                wanted=begun, error=told["type"], message=" ".join(told["message"].split()),
                file=told["file"], line=told["line"], missing=told["missing"],
            )  # fmt: skip
            place = failure.file and (failure.file, failure.line)
            failures.setdefault(failure.missing or place or begun, failure)
    if ended and begun is not None:
        failed.add(begun.top)
        failures[begun] = Failure(wanted=begun, error=ended, message=words)
    return Result(
        failures=tuple(failures.values()),
        cuda=next((answer["cuda"] for answer in answers if "cuda" in answer), None),
        modules=tuple(dict.fromkeys(one.top for one in wanted)), failed=tuple(sorted(failed)),
        fault=f"{ended}: {words}" if ended and begun is None else None,
    )  # fmt: skip


def _child(
    question: Mapping[str, Any], trainer: Trainer, environ: Mapping[str, str], timeout_s: float
) -> tuple[list[dict[str, Any]], str, str]:
    """The answers, how it ended (empty: well) and its last words."""
    try:
        child = subprocess.Popen(
            [str(trainer.python), str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=dict(environ), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return [], "OSError", str(error)
    try:
        out, err = child.communicate(json.dumps(question).encode(), timeout=timeout_s)
        code = child.returncode
        ended = "" if not code else f"exit code {code}" if code > 0 else f"signal {-code}"
        if -code in list(signal.Signals):
            ended = signal.Signals(-code).name
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        ended = f"TimeoutError after {timeout_s:.0f} s"
    answers = [answer for line in out.splitlines() if (answer := parse_line(line))]
    last = err.decode(errors="replace").strip().splitlines()[-1:]
    return answers, ended, last[0] if last else ""
