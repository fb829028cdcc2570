"""Arguments that upstream takes and then never uses: for this script, and for these values.

Everything here comes from the reads in a `Schema`, so that it moves with the source.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from launcher.errors import Finding, Severity, shorten
from launcher.lazy_dataclass import dataclass
from launcher.upstream.citations import render_citations
from launcher.upstream.schema import Read, Schema, Values
from launcher.upstream.source import conditions
from launcher.upstream.trainers import Entry

_UNKNOWN = object()
_MOST_PLACES = 3
_FIXED_OUTPUT = "do_not_randomize_output_dir"


def find_unread(values: Values, entry: Entry) -> Iterator[Finding]:
    """A finding for every argument that was given and that nothing will read."""
    schema = values.schema
    script = _build_script(values, entry)
    for name, field in schema.fields.items():
        reads = schema.path.reads.get(name)
        if reads is None or not values.given(name):
            continue
        asks_nothing = not values[name] and values[name] == field.default
        if not reads:
            yield _report_unread(schema, entry, name, asks_nothing=asks_nothing)
        elif not asks_nothing:
            closed = []
            for read in reads:
                closed.append(_ClosedRead(read.where, script.find_false_conditions(read)))
            if all(read.conditions for read in closed):
                yield _report_unreachable(script, name, closed)


def may_be_read(values: Values, entry: Entry, name: str) -> bool:
    """Whether these values may lead to a read of an argument; True if its reads are unknown."""
    reads = values.schema.path.reads.get(name)
    if reads is None:
        return True
    script = _build_script(values, entry)
    return any(not script.find_false_conditions(read) for read in reads)


def find_refusals(values: Values, entry: Entry, wrong: Container[str | None]) -> Iterator[Finding]:
    """What the script itself refuses for these values, at a `raise` that arguments alone lead to.

    Nothing if one of those arguments is among `wrong`: keys that are reported already.
    """
    schema = values.schema
    script = _build_script(values, entry)
    for refusal in schema.path.refusals:
        # at the pin the rules say the same, and better
        if refusal.parsing and schema.tested:
            continue
        names = _collect_names(refusal.when)
        if any(f"args.{name}" in wrong for name in names):
            continue
        if not all(conditions.holds(text, script.values, _UNKNOWN) for text in refusal.when):
            continue
        first = next(filter(values.given, names), names[0])
        message = f"{refusal.where} raises {refusal.error} where {join_conditions(refusal.when)}"
        state = script.describe_values(names)
        finding = _build_finding("error", "refused-by-source", first, message, state)
        if refusal.parsing:
            finding = replace(finding, layer="parser")
        yield finding


@dataclass(frozen=True, slots=True)
class _Script:
    """An entry script and the values that it will see, `_UNKNOWN` where only a plan decides."""

    entry: Entry
    values: Mapping[str, Any]

    def find_false_conditions(self, read: Read) -> tuple[str, ...]:
        false = []
        for text in find_conditions(read, self.entry):
            if conditions.holds(text, self.values, _UNKNOWN) is False:
                false.append(text)
        return tuple(false)

    def describe_values(self, names: Iterable[str]) -> str:
        states = []
        for name in names:
            value = self.values[name]
            if value is not _UNKNOWN:
                states.append(f"`{name}` is {_render_value(value)}")
        return ", ".join(states)


def _build_script(values: Values, entry: Entry) -> _Script:
    planned = {entry.names.output, entry.names.per_device, entry.names.accumulation, _FIXED_OUTPUT}
    effective_values: dict[str, Any] = {}
    for name, field in values.schema.fields.items():
        if values.given(name):
            value = values[name]
        elif name in planned or (name not in entry.derived and field.default_text is not None):
            value = _UNKNOWN
        elif name in entry.derived:
            value = entry.derived[name][0]
        else:
            value = field.default
        effective_values[name] = value
    return _Script(entry, effective_values)


def join_conditions(when: Iterable[str]) -> str:
    return " and ".join(f"`{text}`" for text in when)


def find_conditions(read: Read, entry: Entry) -> tuple[str, ...]:
    """The conditions of a read, except those that only ask whether the script ends early."""
    return tuple(text for text in read.when if not conditions.list_arguments(text) & entry.partial)


@dataclass(frozen=True, slots=True)
class _ClosedRead:
    """The place of a read, and those of its conditions that are false."""

    where: str
    conditions: tuple[str, ...]


def _collect_names(when: Iterable[str]) -> list[str]:
    return sorted({name for text in when for name in conditions.list_arguments(text)})


def _report_unread(schema: Schema, entry: Entry, name: str, *, asks_nothing: bool) -> Finding:
    """The finding about an argument that no line of the script reads.

    `asks_nothing`: its value is the default, and off (false, 0 or empty), so nothing is lost.
    """
    code = "unread-key"
    reason = f"no read found on the path of {schema.script}"
    shadow = schema.path.shadows.get(name)
    if shadow is not None:
        code = "shadowed-key"
        first = ", ".join(f"`{other}`" for other in shadow.by)
        reason = f"{first} comes before it ({shadow.where} is never reached)"
    severity: Severity = "note" if asks_nothing else "warning"
    message = f"`{name}` does nothing: {reason}"
    return _build_finding(severity, code, name, message, suggest_instead(schema, entry, name))


def _build_finding(severity: Severity, code: str, name: str, message: str, help: str) -> Finding:
    key = f"args.{name}"
    return Finding(severity=severity, layer="run", code=code, key=key, message=message, help=help)


def suggest_instead(schema: Schema, entry: Entry, name: str) -> str:
    """What to write for an argument that does nothing, or who else would read it."""
    readers = [script for script, reads in schema.beside.items() if reads.get(name)]
    help = "delete the line"
    if readers:
        help = f"delete the line: only {' and '.join(readers)} reads it"
    return render_citations(entry.instead.get(name, help))


def _report_unreachable(script: _Script, name: str, closed: list[_ClosedRead]) -> Finding:
    alternatives = _pick_alternatives(closed)
    ways = " or ".join(join_conditions(read.conditions) for read in alternatives)
    where = ", ".join(dict.fromkeys(read.where for read in alternatives))
    names = _collect_names(text for read in alternatives for text in read.conditions)
    state = script.describe_values(names)
    message = f"`{name}` does nothing here: it is read only where {ways} ({where}), and {state}"
    help = render_citations(script.entry.instead.get(name, "delete the line, or set what it needs"))
    return _build_finding("warning", "conditional-key", name, message, help)


def _pick_alternatives(closed: list[_ClosedRead]) -> list[_ClosedRead]:
    """The first read under the conditions that all share, else under each combination of them."""
    shared = list(closed[0].conditions)
    for read in closed:
        shared = [text for text in shared if text in read.conditions]
    if shared:
        return [_ClosedRead(closed[0].where, tuple(shared))]
    first: dict[tuple[str, ...], _ClosedRead] = {}
    for read in closed:
        first.setdefault(read.conditions, read)
    return list(first.values())[:_MOST_PLACES]


def _render_value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return shorten(value)
