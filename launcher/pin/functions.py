"""Which functions on a script's path, and which known behaviours, differ at another commit."""

import difflib
from collections.abc import Iterator, Mapping
from typing import TypeVar

from launcher.lazy_dataclass import dataclass
from launcher.upstream import behaviour
from launcher.upstream.entry import Entry
from launcher.upstream.locate import Upstream
from launcher.upstream.schema import Schema
from launcher.upstream.source import reached, reads
from launcher.upstream.source.packages import Sources
from launcher.upstream.source.reached import Reached

_SHOWN_LINES = 12
_CONTEXT_LINES = 1
HEADINGS = {"changed": "changed", "reached": "newly reached", "left": "reached no more"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDifference:
    """One function, or constant, on the path of a script that is not the same at both commits.

    `what` is a key of `HEADINGS`; `old` and `new` are `file:line` where it stands, None where the
    script does not reach it. `before` and `after` are its texts without docstrings and log calls,
    `diff` their lines as `diff -u` would show them.
    """

    symbol: str
    what: str
    old: str | None
    new: str | None
    before: str | None
    after: str | None
    diff: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourDifference:
    """One behaviour that rules depend on and that differs; None: nothing tells."""

    name: str
    says: str
    old: bool | None
    new: bool | None


_Difference = TypeVar("_Difference", FunctionDifference, BehaviourDifference)


def find_reached_functions(source: Upstream, entry: Entry, schema: Schema) -> Mapping[str, Reached]:
    """The functions that an entry script reaches in a source; nothing if it cannot be followed."""
    sources = Sources(source.packages)
    try:
        classes = reads.find_entry_classes(sources, entry.script)
    except LookupError:
        classes = list(entry.classes)
    try:
        return reached.find_functions_on_path(
            sources, entry.script, classes, schema.fields, entry.recorders
        )
    except (LookupError, RecursionError, SyntaxError, ValueError):
        return {}


def compare(
    old: Mapping[str, Reached], new: Mapping[str, Reached]
) -> tuple[FunctionDifference, ...]:
    """What differs, by symbol: other bodies first, then what is reached at one commit alone."""
    changed = []
    reached = []
    for name, function in new.items():
        if name not in old:
            reached.append(_compare_function("reached", None, function))
        elif old[name].text != function.text:
            changed.append(_compare_function("changed", old[name], function))
    left = []
    for name, function in old.items():
        if name not in new:
            left.append(_compare_function("left", function, None))
    return (*changed, *reached, *left)


def _compare_function(what: str, old: Reached | None, new: Reached | None) -> FunctionDifference:
    function = new or old
    assert function is not None
    before = None if old is None else old.text
    after = None if new is None else new.text
    lines: tuple[str, ...] = ()
    if before is not None and after is not None:
        first = before.splitlines()
        second = after.splitlines()
        compared = difflib.unified_diff(first, second, n=_CONTEXT_LINES, lineterm="")
        # without the names of files
        lines = tuple(compared)[2:]
    return FunctionDifference(
        symbol=function.symbol,
        what=what,
        old=_render_place(old),
        new=_render_place(new),
        before=before,
        after=after,
        diff=lines,
    )


def _render_place(function: Reached | None) -> str | None:
    if function is None:
        return None
    file = function.symbol.partition("::")[0]
    return f"{file}:{function.line}"


def compare_behaviours(old: Schema, new: Schema) -> tuple[BehaviourDifference, ...]:
    """The behaviours of `behaviour.BEHAVIOURS` in which two commits differ for one entry script."""
    differences = []
    for described in behaviour.list_behaviours(new.key):
        name = described.name
        first = old.does(name)
        second = new.does(name)
        if first is not second:
            difference = BehaviourDifference(name=name, says=described.says, old=first, new=second)
            differences.append(difference)
    return tuple(differences)


def render_functions(
    by_stage: Mapping[str, tuple[FunctionDifference, ...]], *, everything: bool
) -> Iterator[str]:
    """The section for people: each function once, with the stages that reach it."""
    stages = _list_stages(by_stage)
    if not stages:
        yield "functions on the path that changed: none"
        return
    yield "functions on the path that changed, without docstrings and log calls:"
    for what, heading in HEADINGS.items():
        of_kind = [difference for difference in stages if difference.what == what]
        if not of_kind:
            continue
        yield f"  {heading}:"
        for difference in of_kind:
            line = str(difference.new or difference.old).rpartition(":")[2]
            yield f"    {difference.symbol}  ({', '.join(stages[difference])}; line {line})"
            if everything:
                yield from _render_diff(difference)
    if not everything:
        yield "  (--all shows what changed in each)"


def _list_stages(by_stage: Mapping[str, tuple[_Difference, ...]]) -> dict[_Difference, list[str]]:
    """Each difference once, with the stages that it is about."""
    stages: dict[_Difference, list[str]] = {}
    for stage, differences in by_stage.items():
        for difference in differences:
            stages.setdefault(difference, []).append(stage)
    return stages


def _render_diff(difference: FunctionDifference) -> Iterator[str]:
    for line in difference.diff[:_SHOWN_LINES]:
        yield f"      {line}".rstrip()
    more = len(difference.diff) - _SHOWN_LINES
    if more > 0:
        yield f"      ... {more} more lines (--format json has them all)"


def render_behaviours(by_stage: Mapping[str, tuple[BehaviourDifference, ...]]) -> Iterator[str]:
    """What launch knows of the change: each behaviour once, with the stages that it is about."""
    stages = _list_stages(by_stage)
    if not stages:
        return
    yield "what upstream does otherwise, as far as launch's rules know of it:"
    words = {True: "yes", False: "no", None: "not known"}
    for difference, names in stages.items():
        states = f"{words[difference.old]} -> {words[difference.new]}"
        yield f"  {difference.name}: {states}: {difference.says}  ({', '.join(names)})"
