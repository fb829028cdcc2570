"""Dataclasses read as text, in every way in which upstream and its like write them."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Write

from launcher.upstream.schema import Field
from launcher.upstream.source.fields import read_fields
from launcher.upstream.source.packages import Folder, Sources

HEAD = "import enum\nimport os\nfrom dataclasses import dataclass, field\nfrom typing import *\n"


def fields_of(write: Write, body: str, name: str = "A", **more: Any) -> dict[str, Field]:
    root = write("pkg/__init__.py", "").parent
    write("pkg/mod.py", f"{HEAD}{body}")
    return read_fields(Sources({"pkg": Folder(root)}), [("pkg.mod", name)], {}, **more)


def only(write: Write, annotation: str, default: str = "None", **more: Any) -> Field:
    body = f"@dataclass\nclass A:\n    x: {annotation} = {default}\n"
    return fields_of(write, body, **more)["x"]


@pytest.mark.parametrize(
    ("annotation", "kind", "many"),
    [
        ("int", "int", False),
        ("Optional[float]", "float", False),
        ("'str | None'", "str", False),
        ("list[str]", "str", True),
        ("dict | None", "dict", False),
        ("dict | str", "dict", False),
        ("dict | str | None", "str", False),
        ("Optional[Union[dict, str]]", "str", False),
        ("int | str", "int", False),
        ("os.PathLike", "str", False),
        ("Any", "str", False),
        ("Whatever", "opaque", False),
    ],
)
def test_annotations(write: Write, annotation: str, kind: str, many: bool) -> None:
    known = only(write, annotation)
    assert (known.kind, known.many) == (kind, many)
    assert known.type == annotation.strip("'")


def test_literals_and_enums(write: Write) -> None:
    body = (
        "class Mode(str, enum.Enum):\n    ONE = 'one'\n    TWO = 'two'\n    def f(self): ...\n"
        "@dataclass\nclass A:\n    a: Literal['x', 1, None] = 'x'\n    b: Mode = Mode.TWO\n"
        "    c: Mode | None = None\n    d: list[Mode] = field(default_factory=list)\n"
        "    e: str = field(default='p', metadata={'choices': ['p', 'q'], 'help': f'{os}'})\n"
        "    f: Optional[Literal['x']] = None\n"
    )
    known = fields_of(write, body)
    assert [(k.name, k.kind, k.choices, k.default) for k in known.values()] == [
        ("a", "choice", ("x", 1, None), "x"),
        ("b", "choice", ("one", "two"), "two"),
        ("c", "choice", ("one", "two"), None),
        ("d", "choice", ("one", "two"), []),
        ("e", "str", ("p", "q"), "p"),
        ("f", "choice", ("x",), None),
    ]
    assert known["d"].many


def test_an_enum_of_another_package(write: Write) -> None:
    root = write("pkg/__init__.py", "").parent
    write(
        "pkg/mod.py",
        f"{HEAD}from other.deep import Kind\n@dataclass\nclass A:\n    k: Kind = None\n",
    )
    write("other/__init__.py", "")
    other = write("other/deep.py", "import enum\nclass Kind(enum.StrEnum):\n    a = 'x'\n").parent
    classes = [("pkg.mod", "A")]
    here = read_fields(Sources({"pkg": Folder(root), "other": Folder(other)}), classes, {})["k"]
    told = read_fields(Sources({"pkg": Folder(root)}), classes, {"other.deep.Kind": ["x"]})["k"]
    blind = read_fields(Sources({"pkg": Folder(root)}), classes, {})["k"]
    assert (here.kind, here.choices, here.external) == ("choice", ("x",), "other.deep.Kind")
    assert told == here
    assert (blind.kind, blind.external) == ("opaque", "other.deep.Kind")


@pytest.mark.parametrize(
    ("annotation", "default", "value"),
    [
        ("str", "'a' 'b'", "ab"),
        ("float", "field(default=2e-5, metadata={'help': 'x'})", 2e-5),
        ("list[str]", "field(default_factory=lambda: ['a', '1.0'])", ["a", "1.0"]),
        ("list[str]", "field(default_factory=lambda: KEYS)", ["in", "out"]),
        ("list[str]", "field(default_factory=list)", []),
        ("str", "os.path.basename(__file__)[: -len('.py')]", "mod"),
        ("str | list[str]", "'all'", None),  # the parser drops the default of what is no list
    ],
)
def test_defaults(write: Write, annotation: str, default: str, value: Any) -> None:
    constants = "IN = 'in'\nKEYS = [IN, 'out']\nDEEP: str = OTHER\nOTHER = 'deep'\n"
    body = f"{constants}@dataclass\nclass A:\n    x: {annotation} = {default}\n"
    known = fields_of(write, body)["x"]
    assert (known.default, known.default_text, known.required) == (value, None, False)


@pytest.mark.parametrize(
    "default", ["f()", "LOOP", "-'a'", "{}['a']", "[][3]", "a.b.c", "x if y else z"]
)
def test_defaults_that_only_running_could_tell(write: Write, default: str) -> None:
    body = f"LOOP = LOOP\n@dataclass\nclass A:\n    x: str = {default}\n"
    known = fields_of(write, body)["x"]
    assert known.default is None
    assert known.default_text


def test_which_fields_need_a_value(write: Write) -> None:
    body = "@dataclass\nclass A:\n    x: int\n    y: int = field(metadata={'help': 'h'})\n"
    assert all(known.required for known in fields_of(write, body).values())
    # a bool needs no default
    # hf_argparser hands argparse a default, or a flag that may be left out
    body = "@dataclass\nclass A:\n    x: bool\n    y: bool | None\n    z: list[bool]\n"
    known = fields_of(write, body)
    assert [known[name].required for name in "xyz"] == [False, False, True]
    # a word may be optional
    known = only(write, "str | None", "field(default=None, metadata={'nargs': '?', 'const': True})")
    assert known.bare
    assert not only(write, "str | None").bare
    assert only(write, "bool", "False").bare
    assert not only(write, "bool | None").bare


@pytest.mark.parametrize(
    ("annotation", "nullable"),
    [("int | None", True), ("float | None", True), ("int", False), ("str | None", False),
     ("bool | None", False), ("list[int] | None", False), ("dict | None", True)],
)  # fmt: skip
def test_the_word_none_where_the_parser_reads_it(
    write: Write, annotation: str, nullable: bool
) -> None:
    assert only(write, annotation, takes_none=True).nullable is nullable
    assert not only(write, annotation).nullable


def test_what_is_no_field(write: Write) -> None:
    body = (
        "@dataclass\nclass A:\n    _VALID = ['x']\n    plain = 5\n    _private: int = 1\n"
        "    shared: ClassVar[int] = 1\n    late: int = field(init=False, default=1)\n"
        "    x: int = 1\n    'its help'\n    @property\n    def p(self) -> int: ...\n"
        "    def __post_init__(self): ...\n"
    )
    assert list(fields_of(write, body)) == ["x"]


def test_inheritance_over_files_keeps_pythons_order(write: Write) -> None:
    root = write("pkg/__init__.py", "from pkg.base import Base as Exported\n").parent
    write("pkg/base.py", f"{HEAD}@dataclass\nclass Base:\n    a: int = 1\n    b: int = 2\n")
    write("pkg/sub/__init__.py", "")
    write(
        "pkg/sub/mod.py",
        f"{HEAD}from .. import Exported\nfrom ..base import Base as B\n"
        "class Plain:\n    not_a_field: int = 1\n"
        "@dataclass\nclass Left(Exported):\n    c: int = 3\n    b: int = 20\n"
        "@dataclass\nclass Right(B, Plain):\n    d: int = 4\n    a: str = 'right'\n"
        "@dataclass(kw_only=True)\nclass A(Left, Right, Generic[T], Unknown):\n"
        "    e: int = 5\n    c: int = 30\n",
    )
    known = read_fields(Sources({"pkg": Folder(root)}), [("pkg.sub.mod", "A")], {})
    assert [(k.name, k.default, k.owner) for k in known.values()] == [
        ("a", "right", "Right"),
        ("b", 20, "Left"),
        ("d", 4, "Right"),
        ("c", 30, "A"),
        ("e", 5, "A"),
    ]
    assert known["b"].where == "pkg/sub/mod.py:12"


@pytest.mark.parametrize("name", ["pkg.mod.Nope", "pkg.nope.A", "nope.mod.A"])
def test_an_absent_class_is_an_error_and_no_empty_schema(write: Write, name: str) -> None:
    root = write("pkg/__init__.py", "").parent
    write("pkg/mod.py", "class A: ...\n")
    module, _, class_name = name.rpartition(".")
    with pytest.raises(LookupError, match=f"{module} has no class {class_name}"):
        read_fields(Sources({"pkg": Folder(root)}), [(module, class_name)], {})


def test_nothing_is_imported_or_run(write: Write, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    body = f"open({str(mark)!r}, 'w')\nraise SystemExit\n@dataclass\nclass A:\n    x: int = 1\n"
    assert list(fields_of(write, body)) == ["x"]
    assert not mark.exists()
