"""Dataclasses read as text, in every way in which upstream and its like write them."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Write

from launcher.upstream.schema import Field
from launcher.upstream.source.fields import read_fields
from launcher.upstream.source.packages import Folder, Sources

HEAD = """
import enum
import os
from dataclasses import dataclass, field
from typing import *
"""


def package_of(write: Write, name: str, **modules: str) -> Folder:
    """A package with these modules."""
    root = write(f"{name}/__init__.py", "").parent
    for module, text in modules.items():
        write(f"{name}/{module}.py", HEAD + text)
    return Folder(root)


def fields_of(write: Write, body: str, *, takes_none: bool = False) -> dict[str, Field]:
    """The fields of class `A` of a module."""
    sources = Sources({"pkg": package_of(write, "pkg", mod=body)})
    return read_fields(sources, [("pkg.mod", "A")], {}, takes_none=takes_none)


def field_of(write: Write, field: str, *, takes_none: bool = False) -> Field:
    """The only field of a dataclass."""
    body = f"@dataclass\nclass A:\n    {field}\n"
    (only,) = fields_of(write, body, takes_none=takes_none).values()
    return only


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        ("int", "int"),
        ("Optional[float]", "float"),
        ("'str | None'", "str"),
        ("dict | None", "dict"),
        ("dict | str", "dict"),
        ("dict | str | None", "str"),
        ("Optional[Union[dict, str]]", "str"),
        ("int | str", "int"),
        ("os.PathLike", "str"),
        ("Any", "str"),
        ("Whatever", "opaque"),
    ],
)
def test_the_kind_of_an_annotation(annotation: str, kind: str, write: Write) -> None:
    known = field_of(write, f"x: {annotation} = None")
    assert known.kind == kind
    assert known.type == annotation.strip("'")
    assert not known.many


def test_a_list_takes_many_words(write: Write) -> None:
    known = field_of(write, "x: list[str] = None")
    assert known.kind == "str"
    assert known.many


CHOICES = """
class Mode(str, enum.Enum):
    ONE = 'one'
    TWO = 'two'
    def f(self): ...

@dataclass
class A:
    literal: Literal['x', 1, None] = 'x'
    optional_literal: Optional[Literal['x']] = None
    member: Mode = Mode.TWO
    optional: Mode | None = None
    several: list[Mode] = field(default_factory=list)
    named: str = field(default='p', metadata={'choices': ['p', 'q'], 'help': f'{os}'})
"""


@pytest.mark.parametrize(
    ("name", "kind", "choices", "default"),
    [
        ("literal", "choice", ("x", 1, None), "x"),
        ("optional_literal", "choice", ("x",), None),
        ("member", "choice", ("one", "two"), "two"),
        ("optional", "choice", ("one", "two"), None),
        ("several", "choice", ("one", "two"), []),
        ("named", "str", ("p", "q"), "p"),
    ],
)
def test_choices_of_literals_enums_and_metadata(
    name: str, kind: str, choices: tuple[Any, ...], default: Any, write: Write
) -> None:
    field = fields_of(write, CHOICES)[name]
    assert (field.kind, field.choices) == (kind, choices)
    assert field.default == default


def test_an_enum_of_another_package(write: Write) -> None:
    body = "from other.deep import Kind\n@dataclass\nclass A:\n    k: Kind = None\n"
    package = package_of(write, "pkg", mod=body)
    other = package_of(write, "other", deep="class Kind(enum.StrEnum):\n    a = 'x'\n")
    classes = [("pkg.mod", "A")]

    alone = Sources({"pkg": package})
    both = Sources({"pkg": package, "other": other})

    by_source = read_fields(both, classes, {})["k"]
    by_table = read_fields(alone, classes, {"other.deep.Kind": ["x"]})["k"]
    unknown = read_fields(alone, classes, {})["k"]

    assert (by_source.kind, by_source.choices) == ("choice", ("x",))
    assert by_table == by_source
    assert unknown.kind == "opaque"
    assert by_source.external == unknown.external == "other.deep.Kind"


CONSTANTS = "IN = 'in'\nKEYS = [IN, 'out']\nLOOP = LOOP\n"


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("x: str = 'a' 'b'", "ab"),
        ("x: float = field(default=2e-5, metadata={'help': 'x'})", 2e-5),
        ("x: list[str] = field(default_factory=lambda: ['a', '1.0'])", ["a", "1.0"]),
        ("x: list[str] = field(default_factory=lambda: KEYS)", ["in", "out"]),
        ("x: list[str] = field(default_factory=list)", []),
        ("x: str = os.path.basename(__file__)[: -len('.py')]", "mod"),
        # the parser drops the default of what is no list
        ("x: str | list[str] = 'all'", None),
    ],
)
def test_the_default_of_a_field(field: str, default: Any, write: Write) -> None:
    known = fields_of(write, f"{CONSTANTS}@dataclass\nclass A:\n    {field}\n")["x"]
    assert known.default == default
    assert known.default_text is None
    assert not known.required


@pytest.mark.parametrize(
    "default", ["f()", "LOOP", "-'a'", "{}['a']", "[][3]", "a.b.c", "x if y else z"]
)
def test_a_default_that_only_running_could_tell(default: str, write: Write) -> None:
    known = fields_of(write, f"{CONSTANTS}@dataclass\nclass A:\n    x: str = {default}\n")["x"]
    assert known.default is None
    assert known.default_text


@pytest.mark.parametrize(
    ("field", "required"),
    [
        ("x: int", True),
        ("x: int = field(metadata={'help': 'h'})", True),
        ("x: list[bool]", True),
        # hf_argparser hands argparse a default, or a flag that may be left out
        ("x: bool", False),
        ("x: bool | None", False),
    ],
)
def test_which_fields_need_a_value(field: str, required: bool, write: Write) -> None:
    assert field_of(write, field).required is required


@pytest.mark.parametrize(
    ("field", "bare"),
    [
        ("x: str | None = field(default=None, metadata={'nargs': '?', 'const': True})", True),
        ("x: str | None = None", False),
        ("x: bool = False", True),
        ("x: bool | None = None", False),
    ],
)
def test_which_flags_may_stand_without_a_value(field: str, bare: bool, write: Write) -> None:
    assert field_of(write, field).bare is bare


@pytest.mark.parametrize(
    ("annotation", "nullable"),
    [
        ("int | None", True),
        ("float | None", True),
        ("dict | None", True),
        ("int", False),
        ("str | None", False),
        ("bool | None", False),
        ("list[int] | None", False),
    ],
)
def test_where_the_parser_reads_the_word_none(
    annotation: str, nullable: bool, write: Write
) -> None:
    field = f"x: {annotation} = None"
    assert field_of(write, field, takes_none=True).nullable is nullable
    assert not field_of(write, field).nullable


NO_FIELDS = """
@dataclass
class A:
    _VALID = ['x']
    plain = 5
    _private: int = 1
    shared: ClassVar[int] = 1
    late: int = field(init=False, default=1)
    x: int = 1
    'its help'
    @property
    def p(self) -> int: ...
    def __post_init__(self): ...
"""


def test_what_is_no_field(write: Write) -> None:
    assert list(fields_of(write, NO_FIELDS)) == ["x"]


DERIVED = """
from .. import Exported
from ..base import Base as B
class Plain:
    not_a_field: int = 1
@dataclass
class Left(Exported):
    c: int = 3
    b: int = 20
@dataclass
class Right(B, Plain):
    d: int = 4
    a: str = 'right'
@dataclass(kw_only=True)
class A(Left, Right, Generic[T], Unknown):
    e: int = 5
    c: int = 30
"""


def test_inheritance_over_files_has_the_order_of_python(write: Write) -> None:
    root = write("pkg/__init__.py", "from pkg.base import Base as Exported\n").parent
    write("pkg/base.py", f"{HEAD}@dataclass\nclass Base:\n    a: int = 1\n    b: int = 2\n")
    write("pkg/sub/__init__.py", "")
    write("pkg/sub/mod.py", HEAD + DERIVED)

    fields = read_fields(Sources({"pkg": Folder(root)}), [("pkg.sub.mod", "A")], {})

    assert [(field.name, field.default, field.owner) for field in fields.values()] == [
        ("a", "right", "Right"),
        ("b", 20, "Left"),
        ("d", 4, "Right"),
        ("c", 30, "A"),
        ("e", 5, "A"),
    ]
    assert fields["b"].where == "pkg/sub/mod.py:14"


@pytest.mark.parametrize(
    ("module", "name"), [("pkg.mod", "Nope"), ("pkg.nope", "A"), ("nope.mod", "A")]
)
def test_a_class_that_is_not_there_is_an_error(module: str, name: str, write: Write) -> None:
    sources = Sources({"pkg": package_of(write, "pkg", mod="class A: ...\n")})
    with pytest.raises(LookupError, match=f"{module} has no class {name}"):
        read_fields(sources, [(module, name)], {})


def test_nothing_is_imported_or_run(write: Write, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    body = f"open({str(mark)!r}, 'w')\nraise SystemExit\n@dataclass\nclass A:\n    x: int = 1\n"
    assert list(fields_of(write, body)) == ["x"]
    assert not mark.exists()
