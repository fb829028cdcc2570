"""Which arguments an entry script reads, where, and under which conditions: by AST, from its start.

The walk follows the parsed dataclasses through calls, attributes and helper modules, over all files
of the packages given. It errs on the side of `read`; what it does not count as reading:

- tests whose only effect is to raise or to warn, and what is written to a log or the screen;
- the whole object handed to a tracker, a printer or a hash (`vars(args)`, `asdict(args)`, `getattr`
  with a computed name);
- values that `__post_init__` puts back into the same argument;
- branches that cannot be reached after an earlier `raise` or `return`.
"""

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from launcher.upstream.schema import Field, Path, Read, Refusal
from launcher.upstream.source import conditions
from launcher.upstream.source.packages import UNKNOWN as NO_VALUE
from launcher.upstream.source.packages import Module, Sources, mark
from launcher.upstream.source.statements import UNSURE, Passed, Walk

_PARSERS = {"ArgumentParserPlus", "HfArgumentParser", "TrlParser"}
_MAX_PASSES = 12
_MAX_RECURSION = 8_000


def entry_classes(sources: Sources, script: str) -> list[tuple[str, str]]:
    """The dataclasses that a script parses, as (module, class name): the parser's first argument.

    Raises LookupError where there is no such script, or it hands its parser something else.
    """
    module = _script(sources, script)
    inside = replace(module, imports=dict(module.imports), modules=dict(module.modules))
    assigned: dict[str, ast.expr] = {}
    calls: list[ast.Call] = []
    for node in ast.walk(module.tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                assigned |= {target.id: value for target in targets if isinstance(target, ast.Name)}
            case ast.Import() | ast.ImportFrom():
                # also inside the function that builds the parser
                inside.bind(node)
            case ast.Call(func=function, args=[_, *_]) if mark(function) in _PARSERS:
                calls.append(node)
    for call in calls:
        given = call.args[0]
        if isinstance(given, ast.Name):
            given = assigned.get(given.id, given)
        items = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
        found = [sources.resolve_class(inside, item) for item in items]
        if None not in found:
            return [(owner.name, known.name) for owner, known in filter(None, found)]
    raise LookupError(f"{script} hands its parser no dataclasses")


def with_own_defaults(sources: Sources, script: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields with those defaults that a script gives its parser itself, by `parser.set_defaults(...)`.

    Raises LookupError without the script.
    """
    module = _script(sources, script)
    changed = dict(fields)
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="set_defaults"), keywords=keywords):
                for keyword in keywords:
                    if keyword.arg in changed:
                        changed[keyword.arg] = _with_default(sources, module, changed[keyword.arg], keyword.value)
    return changed


def _with_default(sources: Sources, module: Module, known: Field, node: ast.expr) -> Field:
    value = sources.evaluate(module, node)
    if value is NO_VALUE:
        return replace(known, default=None, default_text=ast.unparse(node))
    return replace(known, default=value, default_text=None)


def _script(sources: Sources, script: str) -> Module:
    module = sources.module_at(script)
    if module is None:
        raise LookupError(f"there is no {script}")
    return module


def find(
    sources: Sources,
    script: str,
    classes: Sequence[tuple[str, str]],
    fields: Iterable[str],
    recorders: Iterable[str] = (),
) -> Path:
    """Every read of each argument on the path of `script`, and every refusal of their values.

    `classes` are the parsed dataclasses as (module, class name). `recorders` are functions that only
    write down what they read, such as the hash of a cache key. Raises LookupError without the script.
    """
    walk = walked(sources, script, classes, fields, recorders)
    return Path(
        reads={name: _reads(walk, name) for name in sorted(walk.fields)},
        refusals=_refusals(walk),
        shadows=walk.shadows,
    )


def walked(
    sources: Sources,
    script: str,
    classes: Sequence[tuple[str, str]],
    fields: Iterable[str],
    recorders: Iterable[str] = (),
) -> Walk:
    """The walk along `script`, repeated until nothing new is learnt; the parameters are those of `find`."""
    walk = Walk(
        sources, classes, script=_script(sources, script), fields=frozenset(fields), recorders=frozenset(recorders)
    )
    # a chain of calls upstream is several times as long a chain here
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _MAX_RECURSION))
    try:
        for _ in range(_MAX_PASSES):
            # what is kept somewhere may be learnt after the place that uses it was walked
            before = walk.learnt()
            walk.start()
            if walk.learnt() == before:
                break
    finally:
        sys.setrecursionlimit(limit)
    return walk


def _reads(walk: Walk, name: str) -> tuple[Read, ...]:
    found = []
    for where, alternatives in walk.reads.get(name, {}).items():
        # what the script itself changes on the way says nothing about the stage file
        kept = {
            conditions.simplified(
                str(c) for c in guards - walk.assumed - UNSURE if not isinstance(c, Passed) and walk.stands(c)
            )
            for guards in alternatives
        }
        weakest = [one for one in kept if not any(other < one for other in kept)]
        found += [Read(where, tuple(sorted(one))) for one in weakest if not conditions.impossible(one)]
    return tuple(sorted(found, key=_by_place))


def _refusals(walk: Walk) -> tuple[Refusal, ...]:
    """The `raise` statements that arguments alone lead to; what is needed to get there included."""
    found = []
    for where, alternatives in walk.refusals.items():
        for guards, name in alternatives:
            if guards and not conditions.impossible(guards):
                # what earlier refusals on the way exclude need not be repeated
                needed = frozenset(str(c) for c in guards if not isinstance(c, Passed)) or guards
                when = tuple(sorted(map(str, conditions.simplified(needed))))
                found.append(Refusal(where, when, error=name, parsing=where in walk.parsing))
    return tuple(sorted(found, key=_by_place))


def _by_place(read: Read | Refusal) -> tuple[str, int, tuple[str, ...]]:
    file, _, line = read.where.rpartition(":")
    return file, int(line), read.when
