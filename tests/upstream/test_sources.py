"""Packages read as text: files, names over files, values, classes."""

import ast
from pathlib import Path
from typing import Any

import pytest
from source_package import package

from launcher.upstream.source.packages import UNKNOWN, Sources, enum_members, find_package


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


def test_a_file_that_python_cannot_parse(tmp_path: Path) -> None:
    sources = package(tmp_path, {"main.py": "def f(:\n"})
    with pytest.raises(SyntaxError):
        sources.module("pkg.main")


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


@pytest.mark.parametrize(
    ("text", "annotation"),
    [
        ("from .far import C", "C"),
        ("from . import far", "far.C"),
        ("import pkg.far", "pkg.far.C"),
        ("import pkg.far as p", "p.C"),
    ],
)
def test_a_class_by_any_name(tmp_path: Path, text: str, annotation: str) -> None:
    sources, module = module_of(tmp_path, text, far="class C: pass\nx = 1\n")
    found = sources.resolve_class(module, ast.parse(annotation, mode="eval").body)
    assert found is not None
    assert found[1].name == "C"


def test_bases_in_pythons_own_order(tmp_path: Path) -> None:
    text = """
from .far import Base
class A(Base): pass
class B(Base): pass
class C(A, B, External): pass
"""
    sources, module = module_of(tmp_path, text, far="class Base: pass\n")
    line = sources.linearised(module, module.classes["C"])
    assert [node.name for _, node in line] == ["Base", "B", "A", "C"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3", 3), ("-3", -3), ("'x'", "x"), ("None", None), ("[1, 'a']", [1, "a"]), ("(1,)", [1]),
        ("{'a': 1}", {"a": 1}), ("OTHER", 7), ("FAR", 9), ("Kind.one", "one"), ("len([1, 2])", 2),
        ("[1, 2, 3][1:]", [2, 3]), ("list", []), ("lambda: 3", 3),
    ],
)  # fmt: skip
def test_values(tmp_path: Path, expression: str, value: object) -> None:
    text = f"from .far import FAR\nfrom pkg.options import Kind\nOTHER = 7\nX = {expression}\n"
    sources, module = module_of(tmp_path, text, far="FAR = 9\n")
    assert sources.evaluate(module, module.constants["X"]) == value


@pytest.mark.parametrize("expression", ["f()", "x.y", "1 + 2", "NONE", "X", "[1][5:9:2]", "-'a'"])
def test_values_that_only_running_it_could_tell(tmp_path: Path, expression: str) -> None:
    sources, module = module_of(tmp_path, f"X = {expression}\n")
    assert sources.evaluate(module, module.constants["X"]) is UNKNOWN


def test_members_of_an_enum(tmp_path: Path) -> None:
    sources, module = module_of(tmp_path, "from .options import Kind, Options\n")
    for name, members in (("Kind", {"one": "one", "two": "two"}), ("Options", None)):
        found = sources.resolve(module, name)
        assert found is not None
        assert enum_members(sources, found[0], found[0].classes[found[1]]) == members


def test_packages_are_found_without_an_import(tmp_path: Path) -> None:
    package(tmp_path, {})
    assert find_package("pkg", (tmp_path / "none", tmp_path)) == tmp_path / "pkg"
    assert find_package("none", (tmp_path,)) is None
    assert find_package("launcher") is not None
    assert find_package("no_such_package") is None
