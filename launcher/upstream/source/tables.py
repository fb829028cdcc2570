"""Mappings of a module in which a script looks up what its arguments name."""

import ast
from collections.abc import Sequence

from launcher.upstream.source.packages import Module, Sources
from launcher.upstream.source.syntax import parameters_of


def keys_of(sources: Sources, where: str, name: str) -> set[str]:
    """The texts under which a mapping of a module has something; none without the module."""
    module = sources.module(where)
    table = None if module is None else module.constants.get(name)
    if module is None or not isinstance(table, ast.Dict):
        return set()
    keys = [sources.evaluate(module, key) for key in table.keys]
    return {key for key in keys if isinstance(key, str)}


def parameters_by_key(
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
        keys = [sources.evaluate(module, key) for key in table.keys]
        if all(isinstance(key, str) for key in keys):
            functions = [_list_parameters(sources, module, value) for value in table.values]
            tables[name] = dict(zip(keys, functions, strict=True))
    return tables


def sized_configs(sources: Sources, where: str, name: str) -> set[str]:
    """The class methods that make a config of a given size: they take no size but the vocabulary's.

    None of a library that is not among the sources.
    """
    module = sources.module(where)
    owner = None if module is None else module.classes.get(name)
    configs = set()
    for node in [] if owner is None else owner.body:
        if isinstance(node, ast.FunctionDef):
            names = [parameter.arg for parameter in parameters_of(node.args)]
            if names == ["cls", "vocab_size"]:
                configs.add(node.name)
    return configs


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
    if isinstance(node, ast.Tuple) and node.elts:
        node = node.elts[0]
    origin = sources.resolve(module, node.id) if isinstance(node, ast.Name) else None
    function = None if origin is None else origin[0].functions.get(origin[1])
    if function is None:
        return []
    names = [parameter.arg for parameter in parameters_of(function.args)]
    if function.args.kwarg is not None:
        names.append("**")
    return names
