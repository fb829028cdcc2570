"""Mappings of a module in which a script looks up what its arguments name."""

import ast
from collections.abc import Sequence
from typing import Any

from launcher.upstream.source.packages import Module, Sources
from launcher.upstream.source.syntax import list_parameters


def list_keys(sources: Sources, where: str, name: str) -> set[str]:
    """The texts under which a mapping of a module has something; none without the module."""
    module = sources.module(where)
    if module is None:
        return set()
    keys = _read_keys(sources, module, name)
    return {key for key in keys if isinstance(key, str)}


def map_parameters(
    sources: Sources, where: str, names: Sequence[str]
) -> dict[str, dict[str, list[str]]]:
    """The texts of these mappings of a module, each with the parameters of the function behind it.

    A mapping that is not there, or that the module changes later, is left out.
    """
    module = sources.module(where)
    if module is None:
        return {}
    changed = _find_changed_names(module)
    tables = {}
    for name in names:
        table = module.constants.get(name)
        if not isinstance(table, ast.Dict) or name in changed:
            continue
        keys = _read_keys(sources, module, name)
        if all(isinstance(key, str) for key in keys):
            functions = [_list_parameters(sources, module, value) for value in table.values]
            tables[name] = dict(zip(keys, functions, strict=True))
    return tables


def list_sized_configs(sources: Sources, where: str, name: str) -> set[str]:
    """The class methods that make a config of a given size: they take no size but the vocabulary's.

    None of a library that is not among the sources.
    """
    module = sources.module(where)
    if module is None or name not in module.classes:
        return set()
    configs = set()
    for node in module.classes[name].body:
        if isinstance(node, ast.FunctionDef):
            names = [parameter.arg for parameter in list_parameters(node.args)]
            if names == ["cls", "vocab_size"]:
                configs.add(node.name)
    return configs


def _read_keys(sources: Sources, module: Module, name: str) -> list[Any]:
    """The keys of a mapping; none if the module has no mapping of that name."""
    table = module.constants.get(name)
    if not isinstance(table, ast.Dict):
        return []
    return [sources.evaluate(module, key) for key in table.keys]


def _find_changed_names(module: Module) -> set[str]:
    names = set()
    for node in ast.walk(module.tree):
        match node:
            case (
                ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                | ast.Attribute(value=ast.Name(id=name), attr="update" | "setdefault")
                | ast.AugAssign(target=ast.Name(id=name))
            ):
                names.add(name)
    return names


def _list_parameters(sources: Sources, module: Module, node: ast.expr) -> list[str]:
    """The parameters of a function that stands alone or first in a tuple; `**` for any others."""
    match node:
        case ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), *_]):
            origin = sources.resolve(module, name)
        case _:
            return []
    if origin is None:
        return []
    owner, name = origin
    if name not in owner.functions:
        return []
    signature = owner.functions[name].args
    names = [parameter.arg for parameter in list_parameters(signature)]
    if signature.kwarg is not None:
        names.append("**")
    return names
