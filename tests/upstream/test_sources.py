"""Packages read as text: files, names over files, values, classes."""

from pathlib import Path
from typing import Any

import pytest
from source_package import package

from launcher.upstream.source.packages import Sources, find_package


def module_of(folder: Path, text: str, name: str = "main.py", **more: str) -> tuple[Sources, Any]:
    files = {f"{key}.py": value for key, value in more.items()}
    sources = package(folder, {name: text, **files})
    module = sources.module("pkg." + name.removesuffix(".py").replace("/", "."))
    assert module is not None
    return sources, module


def test_a_module_is_parsed_once_and_named(tmp_path: Path) -> None:
    sources, module = module_of(tmp_path, "x = 1\n")
    assert module.label == "pkg/main.py"
    assert sources.module("pkg.main") is module
    assert set(sources.digests) == {"pkg/main.py"}
    assert sources.module("pkg.none") is None
    assert sources.module("other.main") is None
    assert sources.module("pkg") is not None
    assert len(sources.digests) == 2


@pytest.mark.parametrize(
    "text",
    [
        "from pkg.far import f",
        "from .far import f",
        "from pkg.far import g as f",
        "from .way import f",
        "try:\n    from .none import f\nexcept ImportError:\n    from .far import f\nfrom .far import f",
        "if True:\n    from .far import f",
    ],
)
def test_a_name_is_followed(tmp_path: Path, text: str) -> None:
    more = {"far": "def f(): pass\ng = 1\n", "way": "from .far import f\n"}
    sources, module = module_of(tmp_path, text, **more)
    found = sources.resolve(module, "f")
    assert found is not None
    assert found[0].name == "pkg.far"


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    text = "from .main import f\nfrom elsewhere import g\nimport os\n"
    sources, module = module_of(tmp_path, text)
    assert sources.resolve(module, "f") is None
    assert sources.resolve(module, "g") is None
    assert sources.resolve(module, "os") is None
    assert sources.resolve(module, "none") is None
    assert sources.external(module, "g") == "elsewhere.g"
    assert sources.external(module, "none") is None


def test_the_last_binding_counts(tmp_path: Path) -> None:
    text = "from .far import f\ndef f(): pass\nclass f: pass\nf = 3\n"
    sources, module = module_of(tmp_path, text, far="def f(): pass\n")
    found = sources.resolve(module, "f")
    assert found is not None
    assert found[0] is module
    assert set(module.constants) == {"f"}
    assert not module.functions
    assert not module.classes


def test_packages_are_found_without_an_import(tmp_path: Path) -> None:
    package(tmp_path, {})
    assert find_package("pkg", (tmp_path / "none", tmp_path)) == tmp_path / "pkg"
    assert find_package("none", (tmp_path,)) is None
    assert find_package("launcher") is not None
    assert find_package("no_such_package") is None
