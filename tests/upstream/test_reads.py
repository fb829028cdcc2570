"""What an entry script reads: arguments followed through a package, and conditions on the way."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from source_package import conditions_of, package, path_of

from launcher.upstream.source import reads
from launcher.upstream.source.fields import read_fields

# Each body reads `a`, and nothing else. `main(args)` is called with the parsed arguments; a body
# without one is that of `main`.
FOLLOWED = {
    "an attribute": "use(args.a)",
    "*args": "def g(*rest): use(rest[0].a)\ndef main(args): g(args)",
    "**kwargs": "def g(**rest): use(rest['o'].a)\ndef main(args): g(o=args)",
    "handed on by **": "def h(o): use(o.a)\ndef g(**rest): h(**rest)\ndef main(args): g(o=args)",
    "a list": "for one in [args]:\n    use(one.a)",
    "enumerate": "for i, one in enumerate([args]):\n    use(one.a)",
    "a comprehension": "use([one.a for one in [args]])",
    "a closure": "def g():\n    use(args.a)\ng()",
    "global": """
        CFG = None
        def g(): use(CFG.a)
        def main(args):
            global CFG
            CFG = args
            g()
    """,
    "partial": """
        from functools import partial
        def g(o, x): use(o.a)
        def main(args): partial(g, args)(1)
    """,
    "partial of others": """
        from functools import partial
        def g(x, o): use(o.a)
        def main(args): partial(g, 1)(args)
    """,
    "map": "def g(o): use(o.a)\ndef main(args): list(map(g, [args]))",
    "a table of functions": """
        def g(o): use(o.a)
        TABLE = {"x": g, "y": None}
        def main(args): TABLE["x"](args)
    """,
    "a table of many keys": """
        def g(o): use(o.a)
        TABLE = {"z": max, **dict.fromkeys(["x", "y"], g)}
        def main(args): TABLE["x"](args)
    """,
    "a wrapped function": """
        def g(o): use(o.a)
        def main(args):
            f = torch.compile(g)
            f(args)
    """,
    "a returned object": "def same(o): return o\ndef main(args): use(same(args).a)",
    "await": """
        async def g(o): return o
        async def inner(o):
            one = await g(o)
            use(one.a)
        def main(args): asyncio.run(inner(args))
    """,
    "try": "try:\n    use(args.a)\nexcept ValueError:\n    pass",
    "suppressed": """
        from contextlib import suppress
        def main(args):
            with suppress(ValueError):
                raise ValueError
            use(args.a)
    """,
    "match": "match args.a:\n    case True: work()",
    "a case": "match x:\n    case 1: use(args.a)",
    "walrus": "if (x := args.a):\n    use(x)",
    "while": "while args.a: work()",
    "a loop's second round": """
        def main(args):
            cfg = None
            for x in y:
                if cfg is not None:
                    use(cfg.a)
                cfg = args
    """,
    "recursion": """
        def g(o, n):
            if n: g(o, n - 1)
            use(o.a)
        def main(args): g(args, 3)
    """,
    "getattr": "use(getattr(args, 'a'))",
    "getattr with a standard value": "use(getattr(args, 'a', None))",
    "getattr over names": "for n in ('a',): use(getattr(args, n))",
    "vars": "use(vars(args)['a'])",
    "replace": "from dataclasses import replace\ndef main(args): use(replace(args, b=True).a)",
    "a base of the dataclass": "def g(o: Options): use(o.a)\ndef main(args): g(unknown(args))",
    "a method": "class T:\n    def go(self, o): use(o.a)\ndef main(args): T().go(args)",
    "kept": """
        class T:
            def __init__(self, o): self.o = o
            def go(self): use(self.o.a)
        def main(args): T(args).go()
    """,
    "a base that is not here": """
        class T(External):
            def go(self): use(self.args.a)
        def main(args): T(args=args).go()
    """,
    "a property": """
        class T:
            def __init__(self, o): self.o = o
            @property
            def half(self): return self.o.a
        def main(args): use(T(args).half)
    """,
    "a class method": """
        class T:
            @classmethod
            def make(cls, o): return cls(o)
            def __init__(self, o): use(o.a)
        def main(args): T.make(args)
    """,
    "a dataclass": """
        from dataclasses import dataclass
        @dataclass
        class T:
            o: object
        def main(args): use(T(args).o.a)
    """,
    "a callback": """
        class Base:
            def on_step(self, args: Options): pass
        class Own(Base):
            def on_step(self, args): use(args.a)
        def main(args): Trainer(callbacks=[Own])
    """,
    "a callback named by a function": """
        class Base:
            def on_step(self, args: Options): pass
        class Own(Base):
            def on_step(self, args): use(args.a)
        def pick(): return [Own()]
        def callbacks(): return pick()
        def main(args): Trainer(callbacks=callbacks())
    """,
}


def whole(body: str) -> str:
    """The module of a body."""
    return body if "def main(" in body else f"def main(args):\n{textwrap.indent(body, '    ')}"


@pytest.mark.parametrize("body", FOLLOWED.values(), ids=FOLLOWED)
def test_an_argument_is_followed(tmp_path: Path, body: str) -> None:
    reads = path_of(tmp_path, whole(body)).reads
    assert reads["a"]
    assert not reads["d"]
    assert not reads["kind"]


IMPORTS = {
    "from": "from pkg.steps import go\ndef main(args): go(args)",
    "a module": "import pkg.steps\ndef main(args): pkg.steps.go(args)",
    "a module from a package": "from pkg import steps\ndef main(args): steps.go(args)",
    "relative": "from .steps import go\ndef main(args): go(args)",
    "inside a function": "from pkg.steps import go\ngo(args)",
    "a package's own names": "from pkg.deep import go\ndef main(args): go(args)",
    "in a try": """
        try:
            from pkg.steps import go
        except ImportError:
            go = None
        def main(args): go(args)
    """,
}
STEPS = """
def go(o): use(o.a)
class T:
    def __init__(self, o): use(o.a)
TABLE = {"x": go}
"""


@pytest.mark.parametrize("body", IMPORTS.values(), ids=IMPORTS)
def test_an_argument_is_followed_over_files(tmp_path: Path, body: str) -> None:
    files = {
        "steps.py": STEPS,
        "deep/__init__.py": "from .down import go\n",
        "deep/down.py": "from ..steps import go\n",
    }
    path = path_of(tmp_path, whole(body), files)
    assert {read.where.partition(":")[0] for read in path.reads["a"]} == {"pkg/steps.py"}


STARTS = {
    "two at once": (
        "args, other = HfArgumentParser((Options, More)).parse_args_into_dataclasses()\nmain(args)"
    ),
    "the rest of the words": """
args, other, rest = HfArgumentParser((Options, More)).parse_args_into_dataclasses(
    return_remaining_strings=True)
main(args)
""",
    "one object": "args = ArgumentParserPlus((Options,)).parse()\nmain(args)",
    "a named parser": """
parser = HfArgumentParser((Options,))
args, = parser.parse_args_into_dataclasses()
main(args)
""",
    "TRL's": "args, = TrlParser((Options,)).parse_args_and_config()\nmain(args)",
}
HEAD = """
from dataclasses import dataclass
from pkg.options import Options
@dataclass
class More:
    e: int = 0
"""


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_arguments_come_from_any_parser(tmp_path: Path, start: str) -> None:
    body = "def main(args): use(args.a)"
    body_of_start = textwrap.indent(start.strip(), "    ")
    inside = f"def start():\n{body_of_start}\nif __name__ == '__main__': start()"
    for text in (start, inside):
        path = path_of(tmp_path, f"{HEAD}\n{body}", start=f"\n{text}\n", fields=["a", "b", "e"])
        assert path.reads["a"]
        assert not path.reads["b"]


def test_arguments_are_read_where_they_are_parsed(tmp_path: Path) -> None:
    start = "args = HfArgumentParser((Options,)).parse()\nif args.a:\n    use(args.b)\n"
    path = path_of(tmp_path, HEAD, start=start)
    assert conditions_of(path, "b") == {("a",)}


def test_global_arguments_are_followed(tmp_path: Path) -> None:
    start = """
if __name__ == "__main__":
    args = HfArgumentParser((Options,)).parse()
    main()
"""
    path = path_of(tmp_path, f"{HEAD}\ndef g(): use(args.a)\ndef main(): g()", start=start)
    assert path.reads["a"]


def test_a_class_that_the_parser_gets_from_another_module(tmp_path: Path) -> None:
    sources = package(
        tmp_path, {"main.py": "import pkg.options\nP = HfArgumentParser((pkg.options.Options,))\n"}
    )
    assert reads.find_entry_classes(sources, "pkg/main.py") == [("pkg.options", "Options")]


def test_a_missing_script_or_parser_is_an_error(tmp_path: Path) -> None:
    sources = package(tmp_path, {"main.py": "x = 1\n"})
    with pytest.raises(LookupError, match="no pkg/other"):
        reads.find_entry_classes(sources, "pkg/other.py")
    with pytest.raises(LookupError, match="no dataclasses"):
        reads.find_entry_classes(sources, "pkg/main.py")
    with pytest.raises(LookupError):
        reads.read_path(sources, "pkg/other.py", [], [])


NOT_READ = {
    "never": "pass",
    "a function that nobody calls": "def g(o): use(o.a)\ndef main(args): pass",
    "a log": "logger.info('%s', args.a)",
    "a log of an object's own": (
        "class T:\n    def go(self, o): self.log.info(o.a)\ndef main(args): T().go(args)"
    ),
    "a refusal": "if args.a: raise ValueError(f'{args.a}')",
    "a complaint": "if args.a: logger.warning('a')",
    "an assertion": "assert args.a, 'x'",
    "vars": "tracker.init(vars(args))",
    "the whole object": "tracker.init(config=args)",
    "an assignment": "args.a = 3",
    "another object's": "use(model.a)",
    "after return": "return\nuse(args.a)",
    "after raise": "raise ValueError\nuse(args.a)",
    "excluded before": """
        def main(args):
            if args.b: raise ValueError
            if args.b: use(args.a)
    """,
    "a parameter of that name": "def g(args): use(args.a)\ndef main(args): g(3)",
    "a recorder": "def key(o): return o.a\ndef main(args): use(key(args))",
}


@pytest.mark.parametrize("body", NOT_READ.values(), ids=NOT_READ)
def test_what_does_not_count_as_reading(tmp_path: Path, body: str) -> None:
    path = path_of(tmp_path, whole(body), recorders=["key"])
    assert not path.reads["a"]


POST_INIT = """
from dataclasses import dataclass
@dataclass
class Options:
    a: bool = False
    b: bool = False
    c: int = 0
    def __post_init__(self):
{body}
def main(args): use(args.b)
"""
OWN_START = "args, = HfArgumentParser((Options,)).parse_args_into_dataclasses()\nmain(args)\n"


@pytest.mark.parametrize(
    ("lines", "read"),
    [
        ("self.a = bool(self.a)", False),
        ("if self.a is None: self.a = False", False),
        ("if isinstance(self.a, str): self.a = [self.a]", False),
        ("for n in ('a',): setattr(self, n, str(getattr(self, n)))", False),
        ("self.c = self.a + 1", True),
        ("if self.a: self.c = 3", True),
        ("use(self.a)", True),
        ("if self.a: raise ValueError", False),
    ],
)
def test_what_post_init_only_puts_back_is_not_read(tmp_path: Path, lines: str, read: bool) -> None:
    body = POST_INIT.format(body=f"        {lines}")
    path = path_of(tmp_path, body, start=OWN_START, fields=["a", "b", "c"])
    assert bool(path.reads["a"]) == read


# Each body reads `b`; the conditions under which it does, each set as one text.
CONDITIONS = {
    "none": ("use(args.b)", {()}),
    "if": ("if args.a: use(args.b)", {("a",)}),
    "else": ("if args.a: work()\nelse: use(args.b)", {("not a",)}),
    "and": ("if args.a and args.c: use(args.b)", {("a", "c")}),
    "or": ("if args.a or args.c: use(args.b)", {("a or c",)}),
    "or with something else": ("if args.a or x(): use(args.b)", {()}),
    "early return": ("if not args.a: return\nuse(args.b)", {("a",)}),
    "raised before": ("if args.a: raise E\nuse(args.b)", {()}),
    "while": ("while args.a: use(args.b)", {("a",)}),
    "a comprehension": ("use([args.b for x in y if args.a])", {("a",)}),
    "a local expression": ("x = args.a and args.c > 2\nif x: use(args.b)", {("a and c > 2",)}),
    "a parameter": ("def g(o, x):\n    if x: use(o.b)\ndef main(args): g(args, args.a)", {("a",)}),
    "a returned value": (
        "def on(o): return o.a and o.c\ndef main(args):\n    if on(args): use(args.b)",
        {()},
    ),
    "a property": (
        """
            class T:
                def __init__(self, o): self.o = o
                @property
                def on(self): return self.o.a
            def main(args):
                t = T(args)
                if t.on: use(args.b)
        """,
        {()},
    ),
    "a function of two returns": (
        """
            def on(o):
                if y(): return o.a
                return 5
            def main(args):
                x = on(args)
                if x: use(args.b)
        """,
        {()},
    ),
    "equality": ("if args.c == 3: use(args.b)", {("c == 3",)}),
    "an enum": ("if args.kind == Kind.two: use(args.b)", {("kind == 'two'",)}),
    "a constant": ("LIMIT = 4\ndef main(args):\n    if args.c > LIMIT: use(args.b)", {("c > 4",)}),
    "a constant that a function changes": (
        """
            LIMIT = 4
            def f():
                global LIMIT
                LIMIT = 9
            def main(args):
                if args.c > LIMIT: use(args.b)
        """,
        {()},
    ),
    "overwritten": ("args.a = y()\nif args.a: use(args.b)", {()}),
    "overwritten later": ("if args.a: use(args.b)\nargs.a = True\n", {()}),
    "overwritten in a loop": (
        "if not args.a: return\nfor x in y:\n    if not args.a: use(args.b)\n    args.a = False",
        {()},
    ),
    "changed in place": ("args.names.append('x')\nif args.names: use(args.b)", {()}),
    "a replaced copy": (
        """
            from dataclasses import replace
            def main(args):
                new = replace(args, a=True)
                if new.a: use(new.b)
        """,
        {()},
    ),
    "an attribute that is also something else": (
        "class T:\n    def __init__(self, o): self.o = o\n    def go(self, p):\n"
        "        if self.o.a: use(p.b)\n"
        "def main(args):\n    T(args).go(args)\n    T(other()).go(args)",
        {()},
    ),
    "an object's attribute": (
        "class T:\n    def __init__(self, o): self.o = o\n    def go(self):\n"
        "        if self.o.a: use(self.o.b)\ndef main(args): T(args).go()",
        {("a",)},
    ),
    "try": ("try:\n    if args.a: return\n    work()\nexcept E:\n    pass\nuse(args.b)", {()}),
    "with": ("with x():\n    if not args.a: return\nuse(args.b)", {("a",)}),
    "match": ("if args.a:\n    match x:\n        case 1: use(args.b)", {("a",)}),
    "the object before the condition": (
        "cfg = args if args.a else None\nif cfg: use(args.b)",
        {()},
    ),
    "decided alternatives": ("if args.a or args.c:\n    if args.a: use(args.b)", {("a",)}),
    "a parameter's standard value": (
        "def g(o, x=False):\n    if x: use(o.b)\ndef main(args): g(args)",
        {()},
    ),
}


@pytest.mark.parametrize(("body", "expected"), CONDITIONS.values(), ids=CONDITIONS)
def test_conditions_of_a_read(tmp_path: Path, body: str, expected: set[tuple[str, ...]]) -> None:
    assert conditions_of(path_of(tmp_path, whole(body)), "b") == expected


def test_an_argument_that_a_refusal_before_it_rules_out_is_shadowed(tmp_path: Path) -> None:
    body = """
        def main(args):
            if args.c is None:
                raise ValueError
            if args.names and args.c is None:
                use(args.names)
    """
    path = path_of(tmp_path, body)
    assert not path.reads["names"]
    assert path.shadows["names"].by == ("c",)
    assert path.shadows["names"].where == "pkg/main.py:5"


REFUSALS = {
    "a raise": ("if args.a: raise ValueError('x')", [(("a",), "ValueError")]),
    "an assertion": ("assert args.a", [(("not a",), "AssertionError")]),
    "two conditions": ("if args.a and args.c > 2: raise E", [(("a", "c > 2"), "E")]),
    "one way": (
        "if args.d:\n        if args.a: raise E\n    elif not args.a and args.c: raise F",
        [(("a", "d"), "E"), (("c", "not a", "not d"), "F")],
    ),
    "a loop": ("for x in y:\n        if args.a: raise E", []),
    "the loop that trains": (
        """
            for epoch in y:
                    for x in z:
                        if args.a: raise E
                        loss.backward()
        """,
        [(("a",), "E")],
    ),
    "after a loop that breaks off": (
        "for x in y:\n        if x: break\n        if z: continue\n    if args.c: raise E",
        [(("c",), "E")],
    ),
    "after a way out": ("if y():\n        return\n    if args.c: raise E", []),
    "caught": ("try:\n        if args.a: raise E\n    except E:\n        pass", []),
    "suppressed": ("with suppress(E):\n        if args.a: raise E", []),
    "a generator": ("def g():\n        if args.a: raise E\n        yield\n    g()", []),
    "a function handed over": ("register(check, args)", []),
    "a function called": ("check(args)", [(("c < 0",), "Bad")]),
    "a value that changed": ("args.a = y()\n    if args.a: raise E", []),
    "a return inside": (
        "if args.a:\n        if args.c: return\n        raise E\n    if args.d: raise F",
        [(("a", "not c"), "E"), (("d", "not a"), "F")],
    ),
}


@pytest.mark.parametrize(("lines", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(tmp_path: Path, lines: str, expected: list[tuple[tuple[str, ...], str]]) -> None:
    body = f"""
def check(o):
    if o.c < 0: raise Bad
def main(args):
    {lines}
"""
    refusals = path_of(tmp_path, body).refusals
    conditions = [(refusal.when, refusal.error) for refusal in refusals]
    assert sorted(conditions) == sorted(expected)
    assert not any(refusal.parsing for refusal in refusals)


def test_a_refusal_of_post_init_is_the_parsers(tmp_path: Path) -> None:
    body = "        if self.a and self.c > 1: raise ValueError\n        self.c = 3"
    path = path_of(tmp_path, POST_INIT.format(body=body), start=OWN_START, fields=["a", "b", "c"])
    (refusal,) = path.refusals
    assert refusal.when == ("a", "c > 1")
    assert refusal.error == "ValueError"
    assert refusal.parsing


def test_a_long_chain_of_calls_is_followed(tmp_path: Path) -> None:
    lines = [f"def f{i}(o): f{i + 1}(o)" for i in range(50)]
    body = "\n".join([*lines, "def f50(o): use(o.a)", "def main(args): f0(args)"])
    assert path_of(tmp_path, body).reads["a"]


def test_recursions_over_expressions_come_to_an_end(tmp_path: Path) -> None:
    body = """
        def g(o, x):
            if x: use(o.b)
            g(o, not x)
            g(o, x or o.c)
        def main(args): g(args, args.a)
    """
    assert path_of(tmp_path, body).reads["b"]


def test_a_function_called_in_very_many_ways(tmp_path: Path) -> None:
    """More sets of conditions than are kept apart: nothing is claimed that does not hold."""
    calls = "\n".join(f"    if args.c == {i}: g(args)" for i in range(40))
    path = path_of(tmp_path, f"def g(o): use(o.b)\ndef main(args):\n{calls}")
    assert path.reads["b"]
    for value in range(40):
        assert any(set(when) <= {f"c == {value}"} for when in conditions_of(path, "b"))


def test_functions_that_make_functions_come_to_an_end(tmp_path: Path) -> None:
    body = """
        def wrap(f, o):
            def inner(*rest):
                return f(*rest)
            return inner
        def main(args):
            f = use
            for x in y:
                f = wrap(f, args)
                f = partial(f, f)
                g = (f, g)
            f(args.a)
    """
    assert path_of(tmp_path, body).reads["a"]


REFUSED_IN_A_MODULE = {
    "a value": (
        "def check(kind):\n    if kind == 'one': raise Bad",
        "check(args.kind)",
        ("kind == 'one'",),
        "Bad",
    ),
    "a named value": (
        "def check(n, limit=3):\n    if limit < 0: raise Bad",
        "check(1, limit=args.c)",
        ("c < 0",),
        "Bad",
    ),
    "what is left over": (
        """
            def check(k):
                if k == 'one':
                    return 1
                if k == 'two':
                    return 2
                raise Bad
        """,
        "check(args.kind)",
        ("kind != 'one'", "kind != 'two'"),
        "Bad",
    ),
    "an assertion": (
        "def check(a, c):\n    assert not a or c > 1, 'no'",
        "check(args.a, args.c)",
        None,
        "AssertionError",
    ),
    "a set of names": (
        "KNOWN = frozenset({'one'})\ndef check(kind):\n    assert kind in KNOWN",
        "check(args.kind)",
        ("kind not in ('one',)",),
        "AssertionError",
    ),
}


@pytest.mark.parametrize(
    ("checks", "call", "when", "error"), REFUSED_IN_A_MODULE.values(), ids=REFUSED_IN_A_MODULE
)
def test_a_refusal_in_a_function_that_gets_the_values_alone(
    tmp_path: Path, checks: str, call: str, when: tuple[str, ...] | None, error: str
) -> None:
    body = f"from pkg.checks import check\ndef main(args):\n    {call}"
    (refusal,) = path_of(tmp_path, body, {"checks.py": checks}).refusals
    assert refusal.where.startswith("pkg/checks.py:")
    assert refusal.error == error
    if when is not None:
        assert refusal.when == when


def test_a_function_that_gets_something_else_refuses_nothing(tmp_path: Path) -> None:
    body = """
        from pkg.checks import check
        def main(args):
            check(use(args.c))
            check(args.c + x)
    """
    checks = "def check(limit):\n    if limit < 0: raise Bad"
    assert path_of(tmp_path, body, {"checks.py": checks}).refusals == ()


def test_the_defaults_that_a_script_gives_its_parser(tmp_path: Path) -> None:
    start = """
from pkg.options import Options
FIVE = 5
if __name__ == "__main__":
    parser = HfArgumentParser((Options,))
    parser.set_defaults(a=True, c=FIVE, d=compute(), names=["x"], other=1)
    args, = parser.parse_args_into_dataclasses()
"""
    sources = package(tmp_path, {"main.py": start})
    classes = reads.find_entry_classes(sources, "pkg/main.py")
    declared = read_fields(sources, classes, {})
    fields = reads.apply_own_defaults(sources, "pkg/main.py", declared)

    changed = {}
    for name, field in fields.items():
        if field != declared[name]:
            changed[name] = field.default
    assert changed == {"a": True, "c": 5, "d": None, "names": ["x"]}
    assert fields["d"].default_text == "compute()"
