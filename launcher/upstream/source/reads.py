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
from launcher.upstream.source.record import UNSURE, Guards, Passed, WalkRecord
from launcher.upstream.source.statements import Walk
from launcher.upstream.source.values import ClassKey

_PARSERS = {"ArgumentParserPlus", "HfArgumentParser", "TrlParser"}
_MAX_PASSES = 12
_MAX_RECURSION = 8_000


def find_entry_classes(sources: Sources, script: str) -> list[tuple[str, str]]:
    """The dataclasses that a script parses, as (module, class name): the parser's first argument.

    Raises LookupError if there is no such script, or it hands its parser something else.
    """
    module = _find_script(sources, script)
    inside = replace(module, imports=dict(module.imports), modules=dict(module.modules))
    assigned: dict[str, ast.expr] = {}
    handed: list[ast.expr] = []
    for node in ast.walk(module.tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        assigned[target.id] = value
            case ast.Import() | ast.ImportFrom():
                # also inside the function that builds the parser
                inside.bind(node)
            case ast.Call(func=function, args=[first, *_]) if mark(function) in _PARSERS:
                handed.append(first)
    for value in handed:
        if isinstance(value, ast.Name):
            value = assigned.get(value.id, value)
        items = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
        classes = []
        for item in items:
            key = sources.resolve_class(inside, item)
            if key is not None:
                owner, node = key
                classes.append((owner.name, node.name))
        if len(classes) == len(items):
            return classes
    raise LookupError(f"{script} hands its parser no dataclasses")


def apply_own_defaults(
    sources: Sources, script: str, fields: Mapping[str, Field]
) -> dict[str, Field]:
    """The fields with the defaults that a script itself sets, by `parser.set_defaults(...)`.

    Raises LookupError without the script.
    """
    module = _find_script(sources, script)
    changed = dict(fields)
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="set_defaults"), keywords=keywords):
                for keyword in keywords:
                    if keyword.arg in changed:
                        value = sources.evaluate(module, keyword.value)
                        text = None
                        if value is NO_VALUE:
                            value = None
                            text = ast.unparse(keyword.value)
                        field = changed[keyword.arg]
                        changed[keyword.arg] = replace(field, default=value, default_text=text)
    return changed


def _find_script(sources: Sources, script: str) -> Module:
    module = sources.module_at(script)
    if module is None:
        raise LookupError(f"there is no {script}")
    return module


def read_path(
    sources: Sources,
    script: str,
    classes: Sequence[tuple[str, str]],
    fields: Iterable[str],
    recorders: Iterable[str] = (),
) -> Path:
    """Every read of each argument on the path of `script`, and every refusal of their values.

    `classes` are the parsed dataclasses as (module, class name). `recorders` are functions that
    only write down what they read, such as the hash of a cache key. Raises LookupError without the
    script or one of the classes.
    """
    record = walk_script(sources, script, classes, fields, recorders).record
    reads = {}
    for name in sorted(record.fields):
        reads[name] = _list_reads(record, name)
    return Path(reads=reads, refusals=_list_refusals(record), shadows=record.shadows)


def walk_script(
    sources: Sources,
    script: str,
    classes: Sequence[tuple[str, str]],
    fields: Iterable[str],
    recorders: Iterable[str] = (),
) -> Walk:
    """The walk along `script`, repeated until nothing new is learnt; parameters as for `find`."""
    walk = Walk(
        sources,
        [_find_class(sources, *names) for names in classes],
        record=WalkRecord(frozenset(fields)),
        script=_find_script(sources, script),
        recorders=frozenset(recorders),
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


def _find_class(sources: Sources, module_name: str, name: str) -> ClassKey:
    module = sources.module(module_name)
    if module is None or name not in module.classes:
        raise LookupError(f"{module_name} has no class {name}")
    return module, module.classes[name]


def _list_reads(record: WalkRecord, name: str) -> tuple[Read, ...]:
    reads: list[Read] = []
    for where, alternatives in record.reads.get(name, {}).items():
        ways = {_keep_file_conditions(record, guards) for guards in alternatives}
        for when in ways:
            is_weakest = not any(other < when for other in ways)
            if is_weakest and not conditions.is_impossible(when):
                reads.append(Read(where, tuple(sorted(when))))
    reads.sort(key=_order_by_place)
    return tuple(reads)


def _keep_file_conditions(record: WalkRecord, guards: Guards) -> frozenset[str]:
    """The conditions that a stage file decides: not those on what the script itself changes."""
    kept = _without_passed(guards - UNSURE)
    return conditions.simplify(filter(record.stands, kept))


def _without_passed(guards: Guards) -> Guards:
    return frozenset(text for text in guards if not isinstance(text, Passed))


def _list_refusals(record: WalkRecord) -> tuple[Refusal, ...]:
    """The `raise` statements that arguments alone lead to, with all that it takes to get there."""
    refusals: list[Refusal] = []
    for where, alternatives in record.refusals.items():
        parsing = where in record.parsing
        for guards, error in alternatives:
            if not guards or conditions.is_impossible(guards):
                continue
            # what earlier refusals on the way exclude need not be repeated
            new = _without_passed(guards)
            shortest = conditions.simplify(new or guards)
            when = tuple(sorted(map(str, shortest)))
            refusals.append(Refusal(where, when, error=error, parsing=parsing))
    refusals.sort(key=_order_by_place)
    return tuple(refusals)


def _order_by_place(read: Read | Refusal) -> tuple[str, int, tuple[str, ...]]:
    file, _, line = read.where.rpartition(":")
    return file, int(line), read.when
