"""What an entry script imports, read from its source, and whether the trainer's Python really can.

Reading finds every name, and those that an installed module never binds; importing, in a process of its
own, tells a package that is missing from one that is broken. Only the second costs seconds (15 to 60 for
open-instruct), so that only `launch doctor` does it: training imports the same within its first seconds.
"""

from __future__ import annotations

import ast
import importlib.machinery
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
class Tried:
    """How importing went; `cuda` is what torch says of the GPUs, `fault` why nothing could be tried.

    `failed` are all top-level modules that did not import, also those that others explain.
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


# --- looked for, without importing ----------------------------------------------------------------


def lacking(modules: Sequence[str], trainer: Trainer) -> tuple[str, ...]:
    """Those top-level modules that the trainer's Python holds neither as a distribution nor as a file."""
    path = [str(folder) for folder in trainer.path]
    return tuple(
        name
        for name in modules
        if distribution(name) not in trainer.packages and not _findable(name, path)
    )


def _findable(name: str, path: list[str]) -> bool:
    spec = _spec(name, path)
    # any folder of that name (`wandb` makes one) would do for a namespace
    return spec is not None and spec.origin is not None


# what may bind names that its source does not show
_DYNAMIC = re.compile(
    r"\b(?:__getattr__|__dict__|__path__|globals|locals|vars|exec|eval|setattr|meta_path)\b"
    r"|\bsys\s*\.\s*modules\b|\bimport\s*\(?\s*\*"
)


def unbound(wanted: Sequence[Import], trainer: Trainer) -> tuple[Failure, ...]:
    """Statements that cannot but fail, by the source of what is installed: names that it never binds.

    Nothing is imported. What a module may bind by other means than statements of its own (a star, its
    `__getattr__`, lazy modules, a compiled one) counts as there, and so does a package that is missing.
    """
    path = [str(folder) for folder in trainer.path]
    failures = []
    for one in _merged(wanted):
        lacks = _never_bound(one, path)
        if lacks is not None:
            failures.append(lacks)
    return tuple(failures)


def _never_bound(wanted: Import, path: list[str]) -> Failure | None:
    parts, places = wanted.module.split("."), path
    origin, text = "", ""
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        spec = _spec(name, places)
        if spec is None:
            # of the top-level one `lacking` tells
            if count == 1 or _DYNAMIC.search(text):
                return None
            return Failure(
                wanted=wanted, error="ModuleNotFoundError", message=f"there is no module `{name}`",
                file=origin,
            )  # fmt: skip
        places = list(spec.submodule_search_locations or ())
        origin, text = _source(spec)
        if not origin:
            return None
    # most are seen without parsing, and every module has some that begin with two underscores
    hidden = [n for n in wanted.names if not n.startswith("__") and not _defined(n, text)]
    if not hidden or _DYNAMIC.search(text) or (bound := _bound(text)) is None:
        return None
    for name in hidden:
        if name not in bound and _spec(f"{wanted.module}.{name}", places) is None:
            return Failure(
                wanted=wanted, error="ImportError", message=f"it has no `{name}`", file=origin
            )
    return None


def _defined(name: str, text: str) -> bool:
    return re.search(rf"^(?:(?:async +)?def +|class +)?{name}\b *[(:=]", text, re.M) is not None


def _spec(name: str, places: list[str]) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.machinery.PathFinder.find_spec(name, places)
    except (ImportError, OSError, ValueError):
        return None


def _source(spec: importlib.machinery.ModuleSpec) -> tuple[str, str]:
    """The file of a module in Python and its text; empty where it is none, or cannot be read."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return "", ""
    try:
        return spec.origin, Path(spec.origin).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "", ""


def _bound(text: str) -> set[str] | None:
    """Every name that a statement binds, wherever it stands; None where the source does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name is not None:
            found.add(node.name)
    return found


# --- really imported ------------------------------------------------------------------------------


def attempted(
    wanted: Sequence[Import], trainer: Trainer, *, paths: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S, cuda: bool = False,
) -> Tried:  # fmt: skip
    """Import everything in the trainer's Python; the first failure of each package is kept.

    `paths` come first on its path. An interpreter that dies in an import is started again for the
    rest; one that does not come back within `timeout_s` (for all together) is killed.
    """
    remaining = _merged(wanted)
    failures: dict[str, Failure] = {}
    told: Mapping[str, Any] | None = None
    fault: str | None = None
    for _ in range(5):
        answers, ended, words = _child(remaining, trainer, paths, environ, timeout_s, cuda)
        begun: int | None = None
        for answer in answers:
            if "begun" in answer:
                begun = answer["begun"]
            elif "ended" in answer:
                one, begun = remaining[answer["ended"]], None
                if answer.get("fault"):
                    failure = _failure(one, answer["fault"])
                    failures.setdefault(failure.missing or one.top, failure)
            else:
                told = answer.get("cuda")
        if begun is None:
            fault = f"{ended}: {words}" if ended and not answers else None
            break
        one = remaining[begun]
        failures.setdefault(one.top, Failure(wanted=one, error=ended, message=words))
        remaining = [other for other in remaining[begun + 1 :] if other.top != one.top]
        if ended.startswith("TimeoutError") or not remaining:
            break
    return Tried(
        failures=tuple(_once(failures.values())), cuda=told,
        modules=tuple(dict.fromkeys(one.top for one in wanted)),
        failed=tuple(sorted({one.wanted.top for one in failures.values()})), fault=fault,
    )  # fmt: skip


def _once(failures: Iterable[Failure]) -> Iterator[Failure]:
    """Without those that others explain: a script's own modules fail where what they import does."""
    said = set[tuple[str | None, int | None]]()
    for one in failures:
        if one.missing is None and one.file is not None:
            if (one.file, one.line) in said:
                continue
            said.add((one.file, one.line))
        yield one


def _merged(wanted: Sequence[Import]) -> list[Import]:
    """Each module once, with all names that are taken from it."""
    found: dict[str, Import] = {}
    for one in wanted:
        before = found.get(one.module)
        names = one.names if before is None else (*before.names, *one.names)
        found[one.module] = replace(before or one, names=tuple(dict.fromkeys(names)))
    return list(found.values())


def _child(
    wanted: Sequence[Import], trainer: Trainer, paths: Sequence[Path],
    environ: Mapping[str, str] | None, timeout_s: float, cuda: bool,
) -> tuple[list[dict[str, Any]], str, str]:  # fmt: skip
    """The answers, how it ended (empty: well) and its last words."""
    asked = {
        "paths": [str(path) for path in paths],
        "imports": [[one.module, one.names] for one in wanted],
        "cuda": cuda,
    }
    environ = os.environ if environ is None else environ
    try:
        child = subprocess.Popen(
            [str(trainer.python), str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=dict(environ), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return [], "OSError", str(error)
    try:
        out, err = child.communicate(json.dumps(asked).encode(), timeout=timeout_s)
        ended = _ending(child.returncode)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        ended = f"TimeoutError after {timeout_s:.0f} s"
    answers = []
    for line in out.splitlines():
        try:
            answers.append(json.loads(line))
        except ValueError:
            continue
    last = err.decode(errors="replace").strip().splitlines()[-1:]
    return [one for one in answers if isinstance(one, dict)], ended, last[0] if last else ""


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _failure(wanted: Import, told: Mapping[str, Any]) -> Failure:
    """The root of a failure: where something is not installed, that, however deep it was found."""
    chain = [told]
    while isinstance(cause := chain[-1].get("cause"), Mapping) and len(chain) < 10:
        chain.append(cause)
    for one in chain:
        if one.get("absent"):
            return _as_failure(wanted, one, str(one["absent"]))
    root = told
    while root.get("raised_from"):
        root = root["cause"]
    return _as_failure(wanted, root, None)


def _as_failure(wanted: Import, told: Mapping[str, Any], missing: str | None) -> Failure:
    message = " ".join(str(told["message"]).split())
    return Failure(
        wanted=wanted, error=str(told["type"]), message=message, file=told.get("file"),
        line=told.get("line"), missing=missing,
    )  # fmt: skip
