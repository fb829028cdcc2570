"""A small package in a test's own folder, and what the analysis finds in it."""

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.upstream.schema import Path as ScriptPath
from launcher.upstream.source import reads
from launcher.upstream.source.packages import Folder, Sources

FIELDS = ("a", "b", "c", "d", "kind", "names")
OPTIONS = """
from dataclasses import dataclass, field
from enum import Enum

class Kind(str, Enum):
    one = "one"
    two = "two"

@dataclass
class Options:
    a: bool = False
    b: bool = False
    c: int = 0
    d: int = 0
    kind: Kind = Kind.one
    names: list[str] = field(default_factory=list)
"""
START = """
from pkg.options import Options, Kind

def start():
    args, = HfArgumentParser((Options,)).parse_args_into_dataclasses()
    main(args)

if __name__ == "__main__":
    start()
"""


def package(folder: Path, files: Mapping[str, str]) -> Sources:
    """Write modules of the package `pkg`; `options.py` and a start of `main.py` come with it."""
    root = folder / "pkg"
    root.mkdir(parents=True, exist_ok=True)
    known = {"__init__.py": "", "options.py": OPTIONS, **files}
    for name, text in known.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for above in path.relative_to(root).parents:
            (root / above / "__init__.py").touch()
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return Sources({"pkg": Folder(root)})


def path_of(
    folder: Path,
    main: str,
    files: Mapping[str, str] | None = None,
    *,
    start: str = START,
    fields: Iterable[str] = FIELDS,
    recorders: Iterable[str] = (),
) -> ScriptPath:
    """What `main.py` of a package reads; `main` stands above the usual start."""
    text = f"{textwrap.dedent(main)}\n{start}"
    sources = package(folder, {"main.py": text, **(files or {})})
    classes = reads.find_entry_classes(sources, "pkg/main.py")
    return reads.read_path(sources, "pkg/main.py", classes, fields, recorders)


def conditions_of(path: ScriptPath, name: str) -> set[tuple[str, ...]]:
    """The sets of conditions under which an argument is read."""
    return {read.when for read in path.reads[name]}
