"""Every argument that a rule reads exists where the rule applies: others would silence it."""

import ast
import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import checkouts
import pytest

from launcher.errors import InvalidConfig
from launcher.rules import premises, registry
from launcher.rules.context import Context
from launcher.upstream import locate
from launcher.upstream.schema import NoSuchField, Schema, Values
from launcher.upstream.trainers import BACKENDS

CASES = [(backend, key) for backend, module in BACKENDS.items() for key in module.STAGES]
RULES_FOLDER = Path(registry.__file__).parent
Function = Callable[..., Any]


@cache
def syntax(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def nodes_of(code: CodeType) -> Iterator[ast.AST]:
    """The function, or the lambdas, that start at a line of a file."""
    for node in ast.walk(syntax(code.co_filename)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if node.name == code.co_name and first == code.co_firstlineno:
                yield node
        elif (
            isinstance(node, ast.Lambda)
            and code.co_name == "<lambda>"
            and node.lineno == code.co_firstlineno
        ):
            yield node


def fields_in(node: ast.AST) -> Iterator[str]:
    """The literal names in `values["name"]`, `v["name"]` and `context.values["name"]`."""
    for inner in ast.walk(node):
        match inner:
            case ast.Subscript(
                value=ast.Name(id="values" | "v"), slice=ast.Constant(value=str() as name)
            ):
                yield name
            case ast.Subscript(
                value=ast.Attribute(attr="values"), slice=ast.Constant(value=str() as name)
            ):
                yield name


def functions_of(rule: Function) -> Iterator[Function]:
    """A rule, what it closes over, and the functions of our rules that it calls."""
    seen: set[int] = set()
    waiting: list[Any] = [rule]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not callable(value):
            continue
        seen.add(id(value))
        yield value
        if not inspect.isfunction(value):
            continue
        waiting += [cell.cell_contents for cell in value.__closure__ or ()]
        for name in value.__code__.co_names:
            called = value.__globals__.get(name)
            if inspect.isfunction(called) and Path(called.__code__.co_filename).is_relative_to(
                RULES_FOLDER
            ):
                waiting.append(called)


def fields_of(rule: Function) -> set[str]:
    names: set[str] = set()
    for function in functions_of(rule):
        if isinstance(function, operator.itemgetter):
            names |= set(function.__reduce__()[1])
        elif inspect.isfunction(function):
            for node in nodes_of(function.__code__):
                names |= set(fields_in(node))
    return names


def rules_of(backend: str, key: str) -> list[Function]:
    return [*registry.of_script(backend, key), *registry.of_stage(backend, key)]


def schemas(backend: str, key: str) -> Iterator[Schema]:
    """Of every commit whose checkout is here; of the pin always."""
    if backend != "open_instruct":
        yield locate.Locator(search=()).schema(backend, key)
        return
    for commit in checkouts.COMMITS:
        root = checkouts.find(commit)
        if root is not None:
            source = locate.locate(backend, checkout=root)
            # a checkout from before the script was written has no schema of it
            with contextlib.suppress(InvalidConfig):
                yield locate.load_schema(source, key, allow_unpinned=True)


@pytest.mark.parametrize(("backend", "key"), CASES)
def test_every_field_that_a_rule_names_exists_where_it_applies(backend: str, key: str) -> None:
    absent = []
    for schema in schemas(backend, key):
        for rule in rules_of(backend, key):
            if premises.applies(rule, schema):
                gone = sorted(fields_of(rule) - schema.fields.keys())
                absent += [(schema.version[:12], rule.__qualname__, name) for name in gone]
    assert not absent


@pytest.mark.parametrize(("backend", "key"), CASES)
def test_no_rule_asks_for_an_absent_field_of_a_plain_stage(backend: str, key: str) -> None:
    """Also by names that are computed, which reading the rule does not show."""
    for schema in schemas(backend, key):
        values = Values(
            schema, {"model_name_or_path": "m", "max_seq_length": 16, "push_to_hub": False}
        )
        for rule in rules_of(backend, key):
            if not premises.applies(rule, schema):
                continue
            subject = values
            if rule not in registry.of_script(backend, key):
                subject = Context(values=values)
            try:
                list(rule(subject))
            except NoSuchField as error:
                pytest.fail(f"{rule.__qualname__} asks for {error} at {schema.version[:12]}")


def test_names_are_read_from_rules_of_every_kind() -> None:
    """In a function, in what it calls, in a condition alone, and by `itemgetter`."""
    named: set[str] = set()
    for backend, key in CASES:
        for rule in rules_of(backend, key):
            named |= fields_of(rule)
    assert {"try_launch_beaker_eval_jobs", "max_grad_norm", "use_qlora", "compile_model"} <= named
    rules = {rule.__qualname__: rule for rule in rules_of("open_instruct", "dpo_olmo_core")}
    assert "packing" in fields_of(rules["packed_without_documents"])
