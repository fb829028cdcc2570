"""Arguments that upstream takes and then never uses: for this script, and for these values.

Everything here comes from `reads`, so that it moves with the source.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from launcher.errors import Finding, brief
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
        if not reads:
            yield _unread(schema, entry, name, idle=_is_off(values, name))
        elif not _is_off(values, name):
            closed: list[tuple[str, ...]] = []
            for read in reads:
                closed.append(_false(read, known, entry))
                if not closed[-1]:
                    break
            else:
                yield _closed(entry, name, reads, closed, known)


def acts(values: Values, entry: Entry, name: str) -> bool:
    """Whether these values may lead to a place that reads an argument; also where nothing is known of it."""
    reads = values.schema.path.reads.get(name)
    if reads is None:
        return True
    known = effective(values, entry)
    return any(not _false(read, known, entry) for read in reads)


def refused(values: Values, entry: Entry, told: Container[str | None]) -> Iterator[Finding]:
    """What the script itself refuses for these values, at a `raise` that arguments alone lead to.

    Nothing where one of those arguments is among `told`: keys that were found wrong already.
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
        if any(f"args.{name}" in told for name in names):
            continue
        given = [name for name in names if values.given(name)] or names
        yield Finding(
            severity="error",
            layer="parser" if refusal.parsing else "run",
            code="refused-by-source",
            key=f"args.{given[0]}",
            message=f"{refusal.where} raises {refusal.error} where {shown(refusal.when)}",
            help=_state(names, known),
        )


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
    """Several conditions, for people."""
    return " and ".join(f"`{one}`" for one in when)


def condition_of(read: Read, entry: Entry) -> tuple[str, ...]:
    """The conditions of a read, less those that only ask whether the script ends early on purpose."""
    return tuple(c for c in read.when if not conditions.names(c) & entry.partial)


def _false(read: Read, known: Mapping[str, Any], entry: Entry) -> tuple[str, ...]:
    """The conditions of a read that these values do not meet."""
    return tuple(c for c in condition_of(read, entry) if conditions.holds(c, known, _UNKNOWN) is False)


def _is_off(values: Values, name: str) -> bool:
    """Whether the value says no more than the default: no, nothing."""
    return not values[name] and values[name] == values.schema.fields[name].default


def _unread(schema: Schema, entry: Entry, name: str, *, idle: bool) -> Finding:
    shadow = schema.path.shadows.get(name)
    code, message = ("unread-key", f"`{name}` does nothing: no read found on the path of {schema.script}")
    if shadow is not None:
        code = "shadowed-key"
        message = (
            f"`{name}` does nothing: {', '.join(f'`{by}`' for by in shadow.by)} comes before it "
            f"({shadow.where} is never reached)"
        )
    return Finding(
        severity="note" if idle else "warning",
        layer="run",
        code=code,
        key=f"args.{name}",
        message=message,
        help=instead(schema, entry, name),
    )


def instead(schema: Schema, entry: Entry, name: str) -> str:
    """What to write for an argument that does nothing, or who else would read it."""
    readers = [script for script, reads in schema.beside.items() if reads.get(name)]
    told = f"delete the line: only {' and '.join(readers)} reads it" if readers else "delete the line"
    return entry.instead.get(name, told)


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
    state = _state(names, known)
    return Finding(
        severity="warning",
        layer="run",
        code="conditional-key",
        key=f"args.{name}",
        message=f"`{name}` does nothing here: it is read only where {' or '.join(map(shown, ways))} "
        f"({where}), and {state}",
        help=entry.instead.get(name, "delete the line, or set what it needs"),
    )


def _state(names: Iterable[str], known: Mapping[str, Any]) -> str:
    """The values of these arguments, for people, as far as they are known."""
    told = [(name, known[name]) for name in names if known[name] is not _UNKNOWN]
    return ", ".join(f"`{name}` is {_plain(value)}" for name, value in told)


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "true", False: "false"}[value]
    return brief(value)
