"""Arguments that upstream takes and then never uses: for this script, and for these values.

Everything here comes from `reads`, so that it moves with the source.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from launcher.errors import Finding, Layer, Severity, brief
from launcher.upstream.citations import rendered
from launcher.upstream.schema import Read, Schema, Values
from launcher.upstream.source import conditions
from launcher.upstream.trainers import Entry

_UNKNOWN = object()
_WAYS = 3
"""Of the places that would read an argument, each under a condition of its own, so many are named."""
_FOLDER_AS_IT_IS = "do_not_randomize_output_dir"


def find(values: Values, entry: Entry) -> Iterator[Finding]:
    """A finding for every argument that was given and that nothing will read."""
    schema = values.schema
    known = effective(values, entry)
    for name in schema.fields:
        reads = schema.path.reads.get(name)
        if reads is None or not values.given(name):
            continue
        # whether the value says no more than the default: no, nothing
        is_off = not values[name] and values[name] == schema.fields[name].default
        if not reads:
            yield _unread(schema, entry, name, idle=is_off)
        elif not is_off and all(closed := [_false(read, known, entry) for read in reads]):
            yield _closed(entry, name, reads, closed, known)


def acts(values: Values, entry: Entry, name: str) -> bool:
    """Whether these values may lead to a place that reads an argument; also where nothing is known of it."""
    reads = values.schema.path.reads.get(name)
    if reads is None:
        return True
    known = effective(values, entry)
    return any(not _false(read, known, entry) for read in reads)


def refused(values: Values, entry: Entry, wrong: Container[str | None]) -> Iterator[Finding]:
    """What the script itself refuses for these values, at a `raise` that arguments alone lead to.

    Nothing where one of those arguments is among the `wrong`: keys that were found wrong already.
    """
    schema = values.schema
    known = effective(values, entry)
    for refusal in schema.path.refusals:
        # at the pin the rules say the same, and better
        if refusal.parsing and schema.tested:
            continue
        if not all(conditions.holds(c, known, _UNKNOWN) for c in refusal.when):
            continue
        names = sorted({name for c in refusal.when for name in conditions.names(c)})
        if any(f"args.{name}" in wrong for name in names):
            continue
        first = next(filter(values.given, names), names[0])
        message = f"{refusal.where} raises {refusal.error} where {shown(refusal.when)}"
        layer: Layer = "parser" if refusal.parsing else "run"
        yield _finding("error", "refused-by-source", first, message, _state(names, known), layer)


def effective(values: Values, entry: Entry) -> Mapping[str, Any]:
    """The values that the script will see as far as they are known; what launch derives included."""
    known: dict[str, Any] = {}
    # what the plan decides, once the number of GPUs and the run's folder are known
    later = {entry.names.output, entry.names.per_device, entry.names.accumulation, _FOLDER_AS_IT_IS}
    for name, one in values.schema.fields.items():
        if values.given(name):
            known[name] = values[name]
        elif name in later:
            known[name] = _UNKNOWN
        elif name in entry.derived:
            known[name] = entry.derived[name][0]
        else:
            known[name] = one.default if one.default_text is None else _UNKNOWN
    return known


def shown(when: tuple[str, ...]) -> str:
    return " and ".join(f"`{one}`" for one in when)


def condition_of(read: Read, entry: Entry) -> tuple[str, ...]:
    """The conditions of a read, less those that only ask whether the script ends early on purpose."""
    return tuple(c for c in read.when if not conditions.names(c) & entry.partial)


def _false(read: Read, known: Mapping[str, Any], entry: Entry) -> tuple[str, ...]:
    return tuple(c for c in condition_of(read, entry) if conditions.holds(c, known, _UNKNOWN) is False)


def _unread(schema: Schema, entry: Entry, name: str, *, idle: bool) -> Finding:
    code, reason = "unread-key", f"no read found on the path of {schema.script}"
    if (shadow := schema.path.shadows.get(name)) is not None:
        code = "shadowed-key"
        reason = f"{', '.join(f'`{by}`' for by in shadow.by)} comes before it ({shadow.where} is never reached)"
    message = f"`{name}` does nothing: {reason}"
    return _finding("note" if idle else "warning", code, name, message, instead(schema, entry, name))


def _finding(
    severity: Severity, code: str, name: str, message: str, help: str | None, layer: Layer = "run"
) -> Finding:
    return Finding(severity=severity, layer=layer, code=code, key=f"args.{name}", message=message, help=help)


def instead(schema: Schema, entry: Entry, name: str) -> str:
    """What to write for an argument that does nothing, or who else would read it."""
    readers = [script for script, reads in schema.beside.items() if reads.get(name)]
    help = f"delete the line: only {' and '.join(readers)} reads it" if readers else "delete the line"
    return rendered(entry.instead.get(name, help))


def _closed(
    entry: Entry, name: str, reads: tuple[Read, ...], closed: list[tuple[str, ...]], known: Mapping[str, Any]
) -> Finding:
    # what stands in the way everywhere, or else in each of the places that read it
    everywhere = set(closed[0]).intersection(*closed[1:])
    way = tuple(c for c in closed[0] if c in everywhere)
    first: dict[tuple[str, ...], Read] = {}
    for each, read in zip(closed, reads, strict=True):
        first.setdefault(each, read)
    ways, places = ([way], reads[:2]) if way else (list(first), list(first.values()))
    ways, places = ways[:_WAYS], places[:_WAYS]
    names = sorted({one for each in ways for c in each for one in conditions.names(c)})
    where = ", ".join(dict.fromkeys(read.where for read in places))
    message = f"`{name}` does nothing here: it is read only where {' or '.join(map(shown, ways))} ({where}), "
    help = rendered(entry.instead.get(name, "delete the line, or set what it needs"))
    return _finding("warning", "conditional-key", name, f"{message}and {_state(names, known)}", help)


def _state(names: Iterable[str], known: Mapping[str, Any]) -> str:
    values = {name: known[name] for name in names if known[name] is not _UNKNOWN}
    return ", ".join(f"`{name}` is {_plain(value)}" for name, value in values.items())


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "true", False: "false"}[value]
    return brief(value)
