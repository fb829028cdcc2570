"""Packages read as text: files, names over files, values, classes."""

from pathlib import Path

import pytest
from source_package import package

from launcher.upstream.source.packages import Sources, find_package


def sources_with(folder: Path, main: str, far: str = "", way: str = "") -> Sources:
    return package(folder, {"main.py": main, "far.py": far, "way.py": way})


def place_of(sources: Sources, name: str) -> str | None:
    """The module that defines what a name of pkg.main means."""
    module = sources.module("pkg.main")
    assert module is not None
    place = sources.resolve(module, name)
    return None if place is None else place[0].name


def test_a_module_is_parsed_once(tmp_path: Path) -> None:
    sources = sources_with(tmp_path, "x = 1\n")
    module = sources.module("pkg.main")
    assert module is not None
    assert module.label == "pkg/main.py"
    assert sources.module("pkg.main") is module
    assert sources.module("pkg.none") is None
    assert sources.module("other.main") is None
    assert set(sources.digests) == {"pkg/main.py"}


TRIED = """
try:
    from .none import f
except ImportError:
    from .far import f
from .far import f
"""


@pytest.mark.parametrize(
    "text",
    [
        "from pkg.far import f",
        "from .far import f",
        "from pkg.far import g as f",
        "from .way import f",
        "if True:\n    from .far import f",
        TRIED,
    ],
)
def test_a_name_is_followed_over_files(text: str, tmp_path: Path) -> None:
    far = "def f(): pass\ng = 1\n"
    assert place_of(sources_with(tmp_path, text, far, "from .far import f\n"), "f") == "pkg.far"


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    sources = sources_with(tmp_path, "from .main import f\nfrom elsewhere import g\nimport os\n")
    for name in ("f", "g", "os", "none"):
        assert place_of(sources, name) is None
    module = sources.module("pkg.main")
    assert module is not None
    assert sources.external(module, "g") == "elsewhere.g"
    assert sources.external(module, "none") is None


def test_the_last_binding_counts(tmp_path: Path) -> None:
    text = "from .far import f\ndef f(): pass\nclass f: pass\nf = 3\n"
    sources = sources_with(tmp_path, text, far="def f(): pass\n")
    assert place_of(sources, "f") == "pkg.main"
    module = sources.module("pkg.main")
    assert module is not None
    assert set(module.constants) == {"f"}
    assert not module.functions
    assert not module.classes


def test_packages_are_found_without_an_import(tmp_path: Path) -> None:
    package(tmp_path, {})
    assert find_package("pkg", (tmp_path / "none", tmp_path)) == tmp_path / "pkg"
    assert find_package("none", (tmp_path,)) is None
    assert find_package("launcher") is not None
