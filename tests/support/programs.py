"""Random small programs over a handful of arguments, and what really happens when they run."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import FrameType
from typing import Any

BOOLS = ("a", "b", "e")
INTS = ("c", "d")
FIELDS = (*BOOLS, *INTS, "kind")
OPTIONS = """
from dataclasses import dataclass
from enum import Enum

class Kind(str, Enum):
    one = "one"
    two = "two"

@dataclass
class Options:
    a: bool = False
    b: bool = False
    e: bool = False
    c: int = 0
    d: int = 0
    kind: Kind = Kind.one
"""
HEAD = """\
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pkg.options import Kind, Options

LIMIT = 2

class Keeper:
    def __init__(self, kept):
        self.kept = kept
"""
TAIL = """
def start():
    args, = HfArgumentParser((Options,)).parse_args_into_dataclasses()
    main(args)

if __name__ == "__main__":
    start()
"""
_INDENT = "    "


class Kind(StrEnum):
    """As in the programs."""

    one = "one"
    two = "two"


@dataclass
class Program:
    """The text of `main.py`, and the lines whose tests only refuse: these are no reads."""

    text: str
    quiet: set[int]


@dataclass
class _Writer:
    chance: random.Random
    lines: list[str] = field(default_factory=list)
    quiet: set[int] = field(default_factory=set)
    functions: int = 5
    names: int = 0
    writes: bool = True

    def add(self, depth: int, text: str) -> None:
        self.lines.append(_INDENT * depth + text)

    def pick(self, *choices: str) -> str:
        return self.chance.choice(choices)

    # --- expressions --------------------------------------------------------------------------------

    def atom(self, o: str, known: list[str]) -> str:
        c, d = self.chance.choice(INTS), self.chance.choice(INTS)
        b = self.chance.choice(BOOLS)
        choices = [
            f"{o}.{b}", f"{o}.{b}", f"not {o}.{b}", f"{o}.{c} > 1", f"{o}.{c} == {o}.{d}",
            f"{o}.{c} in (1, 3)", f"{o}.{c} is None", f"0 < {o}.{c} < 3", f"{o}.{c} >= LIMIT",
            f"{o}.kind == Kind.two", f"{o}.kind in (Kind.one,)", f"({o}.{c} or 2) == 2",
            f"getattr({o}, '{b}')", "unknown()", f"({o}.{b} and {o}.{c}) == 2",
            f"(lambda: {o}.{b})()", f"any(x.{b} for x in [{o}])",
        ]  # fmt: skip
        choices += known * 3
        return self.chance.choice(choices)

    def test(self, o: str, known: list[str]) -> str:
        one = self.atom(o, known)
        match self.chance.randrange(8):
            case 0:
                return f"({one} and {self.atom(o, known)})"
            case 1:
                return f"({one} or {self.atom(o, known)})"
            case 2:
                return f"(not ({one} and {self.atom(o, known)}))"
            case 3:
                return f"(({one}) if {self.atom(o, known)} else ({self.atom(o, known)}))"
            case 4:
                self.names += 1
                return f"(w{self.names} := {one})"
        return f"({one})"

    # --- statements ---------------------------------------------------------------------------------

    def block(self, depth: int, o: str, known: list[str], number: int, *, loop: bool) -> None:
        known = list(known)
        for _ in range(self.chance.randint(1, 3 if depth < 3 else 1)):
            self.statement(depth, o, known, number, loop=loop)
        self.add(depth, f"use({o}.{self.chance.choice(FIELDS)})")

    def statement(self, depth: int, o: str, known: list[str], number: int, *, loop: bool) -> None:
        kinds = ["read", "refuse", "local", "call", "call"]
        if depth < 4:
            kinds += ["if", "if", "if", "else", "leave", "loop", "try", "nested", "match", "with"]
        if self.writes:
            kinds += ["write", "rebind"]
        getattr(self, f"_{self.chance.choice(kinds)}")(depth, o, known, number, loop)

    def _read(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        name = self.chance.choice(FIELDS)
        self.add(depth, self.pick(
            f"use({o}.{name})", f"use({o}.{name} and {o}.{self.chance.choice(FIELDS)})",
            f"use({o}.{name} if {self.test(o, known)} else {o}.{self.chance.choice(FIELDS)})",
            f"use([x.{name} for x in ({o}, {o})])", f"use(vars({o})['{name}'])",
            f"use(f'{{{o}.{name}}}')", f"use(max({o}.c, 3))",
            f"use(Keeper({o}).kept.{name})", f"use({{'x': {o}}}['x'].{name})",
        ))  # fmt: skip

    def _refuse(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        test = self.test(o, known)
        if self.chance.randrange(4) == 0:
            self.add(depth, f"assert {test}")
            self.quiet.add(len(self.lines))
            return
        self.add(depth, f"if {test}:")
        self.quiet.add(len(self.lines))
        self.add(depth + 1, "raise ValueError('refused')")

    def _local(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        if known and self.chance.randrange(3) == 0:
            name = self.chance.choice(known)
        else:
            self.names += 1
            name = f"x{self.names}"
        value = self.pick(self.test(o, known), self.test(o, known), f"{o}.c", "None", "unknown()")
        self.add(depth, f"{name} = {value}")
        if name not in known:
            known.append(name)

    def _call(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        following = [n for n in range(number + 1, self.functions)]
        if not following:
            return self._read(depth, o, known, number, loop)
        f = f"f{self.chance.choice(following)}"
        flag = self.pick(self.test(o, known), "False", "unknown()")
        self.add(depth, self.pick(
            f"{f}({o}, {flag})", f"{f}({o}, flag={flag})", f"{f}(flag={flag}, o={o})", f"{f}({o})",
            f"{f}(*({o}, {flag}))", f"{f}(**{{'o': {o}, 'flag': {flag}}})",
            f"partial({f}, {o})({flag})", f"partial({f}, flag={flag})({o})",
            f"use({self.atom(o, known)} and {f}({o}, {flag}))",
            f"use([{f}({o}, {flag}) for x in range(2)])",
            f"table['{f}']({o}, {flag})", f"y{self.names} = {f}({o}, {flag})",
            f"use({f}({o}, {flag}) if {self.atom(o, known)} else None)",
            f"for each in ({o},): {f}(each, {flag})", f"K(lambda: {f}({o}, {flag})).run()",
            f"list(map({f}, [{o}]))",
        ))  # fmt: skip
        return None

    def _if(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self.add(depth, f"if {self.test(o, known)}:")
        self.block(depth + 1, o, known, number, loop=loop)

    def _else(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self._if(depth, o, known, number, loop)
        if self.chance.randrange(2):
            self.add(depth, f"elif {self.test(o, known)}:")
            self.block(depth + 1, o, known, number, loop=loop)
        self.add(depth, "else:")
        if self.chance.randrange(5) == 0:
            self.add(depth + 1, "raise ValueError('refused')")
        else:
            self.block(depth + 1, o, known, number, loop=loop)

    def _leave(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self.add(depth, f"if {self.test(o, known)}:")
        ways = ["return", f"return {o}.c", "return 5", "sys.exit(0)"]
        self.add(depth + 1, self.pick(*ways, *(["continue", "break"] * 2 if loop else [])))

    def _loop(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self.names += 1
        test = self.test(o, known)
        self.add(depth, self.pick(
            "for each in range(2):", f"for each in [{o}]:", f"for each in range(1 if {test} else 0):",
        ))  # fmt: skip
        self.block(depth + 1, o, known, number, loop=True)

    def _try(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self.add(depth, "try:")
        self.block(depth + 1, o, known, number, loop=loop)
        if self.chance.randrange(4):
            self.add(depth, "except ValueError:")
            self.block(depth + 1, o, known, number, loop=loop)
        else:
            self.add(depth, "finally:")
            self.add(depth + 1, f"use({o}.{self.chance.choice(FIELDS)})")

    def _with(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self.add(depth, self.pick("with suppress(ValueError):", "with ctx():"))
        self.block(depth + 1, o, known, number, loop=loop)

    def _match(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self.add(depth, f"match {o}.{self.chance.choice(INTS)}:")
        self.add(depth + 1, f"case 1 if {self.test(o, known)}:")
        self.block(depth + 2, o, known, number, loop=loop)
        self.add(depth + 1, self.pick("case 2:", "case _:"))
        self.block(depth + 2, o, known, number, loop=loop)

    def _nested(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self.names += 1
        name = f"g{self.names}"
        inner = self.pick("p", o)
        self.add(depth, f"def {name}({'p, q=False' if inner == 'p' else ''}):")
        self.block(depth + 1, inner, ["q"] if inner == "p" else [], number, loop=False)
        given = f"{o}, {self.test(o, known)}" if inner == "p" else ""
        self.add(depth, f"if {self.test(o, known)}:")
        self.add(depth + 1, self.pick(f"{name}({given})", f"use({name}({given}))"))

    def _write(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        bool_, int_ = self.chance.choice(BOOLS), self.chance.choice(INTS)
        self.add(depth, self.pick(
            f"{o}.{bool_} = unknown()", f"{o}.{bool_} = not {o}.{bool_}", f"{o}.{int_} = 3",
            f"{o}.{int_} += 1", f"setattr({o}, '{bool_}', True)", f"vars({o})['{bool_}'] = False",
        ))  # fmt: skip

    def _rebind(self, depth: int, o: str, known: list[str], number: int, loop: bool) -> None:
        self.add(depth, self.pick(f"use(other({o}).a)", f"o2 = {o} if unknown() else Options()"))


def program(seed: int, *, writes: bool = True) -> Program:
    """One program, the same for the same seed."""
    writer = _Writer(random.Random(seed), writes=writes)
    writer.lines = HEAD.splitlines()
    for line in (
        "class K:", "    def __init__(self, f): self.f = f", "    def run(self): return self.f()",
        "@contextmanager", "def ctx(): yield",
    ):  # fmt: skip
        writer.add(0, line)
    for number in range(writer.functions):
        first = "main" if number == 0 else f"f{number}"
        writer.add(0, f"def {first}(o, flag=False):")
        writer.block(1, "o", ["flag"], number, loop=False)
    writer.add(0, f"table = {{{', '.join(f'{k!r}: {k}' for k in _tables(writer.functions))}}}")
    return Program("\n".join(writer.lines) + "\n" + TAIL, writer.quiet)


def _tables(functions: int) -> list[str]:
    return [f"f{number}" for number in range(1, functions)]


@dataclass
class Ran:
    """What happened: every argument read, with its line, and whether the program was refused."""

    reads: set[tuple[str, int]]
    refused: bool
    # tests whose branch was not taken
    idle: set[int]


def values(chance: random.Random) -> dict[str, Any]:
    """Values for all arguments."""
    known: dict[str, Any] = {name: chance.random() < 0.5 for name in BOOLS}
    known |= {name: chance.choice([0, 1, 2, 3]) for name in INTS}
    return {**known, "kind": chance.choice(list(Kind))}


def run(source: Program, given: Mapping[str, Any], chance: random.Random) -> Ran:
    """Run a program with these values; what is not known from them is drawn by chance."""
    told: set[tuple[str, int]] = set()

    class Options:
        def __init__(self) -> None:
            self.__dict__.update(a=False, b=False, e=False, c=0, d=0, kind=Kind.one)

    class Recorded(Options):
        def __getattribute__(self, name: str) -> Any:
            if name in FIELDS or name == "__dict__":
                frame = sys._getframe(1)
                if frame.f_code.co_filename == "main.py" and name in FIELDS:
                    told.add((name, frame.f_lineno))
            return object.__getattribute__(self, name)

    args = Recorded()
    args.__dict__.update(given)
    # only `main` is run: the start is for the analysis, which sees no import of these names
    text = source.text.replace("from pkg.options import Kind, Options\n", "\n")
    names = {
        "Kind": Kind, "Options": Options, "use": lambda *_: None, "partial": partial,
        "unknown": lambda: chance.random() < 0.5, "other": lambda o: o, "__name__": "pkg.main",
    }  # fmt: skip
    exec(compile(text, "main.py", "exec"), names)
    refused = False
    lines: set[int] = set()

    def trace(frame: FrameType, event: str, value: object) -> Any:
        if frame.f_code.co_filename != "main.py":
            return None
        lines.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    with suppress(SystemExit, TypeError):
        try:
            names["main"](args)
        except (ValueError, AssertionError):
            refused = True
        except TypeError:
            # comparing with None: not what is looked at here
            refused = True
            raise
    sys.settrace(before)
    seen = {(name, line) for name, line in told if line not in source.quiet}
    text_lines = source.text.splitlines()
    # nothing depends on a test whose branch is never taken
    idle = {n for n in lines if _tests(text_lines[n - 1]) and n + 1 not in lines}
    return Ran(seen, refused, idle)


def _tests(line: str) -> bool:
    return line.lstrip().startswith(("if ", "elif "))
