"""Words -> arguments: variables, arrays, arithmetic and the few commands whose output is known.

What the text of a script does not tell (`$1`, `$(date)`, a variable that nobody sets) stays in the argument as it was
written, and is named in `Argument.missing`.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launcher.stage.shell import lexer
from launcher.stage.shell.lexer import Operator, Word, WordPart

_EXPANSION = re.compile(
    r"(?P<length>#)?(?P<name>!?[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?P<index>\[[^\]]*\])?(?P<rest>.*)", re.S
)
_SPECIAL = frozenset("@*#?$!-")
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_JOINED = "\0"
_LARGEST = 10**18
_LONGEST = 200_000
"""Characters of a value: `A=$A$A` in a loop ends here."""
_MOST_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class Argument:
    """A word as a command would get it. `missing` are the expressions in it that have no value here."""

    text: str
    line: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Variable:
    """What a variable holds. `chosen` says why this value was taken of several."""

    items: tuple[Argument, ...]
    is_array: bool = False
    chosen: str = ""

    @property
    def first(self) -> Argument:
        return self.items[0] if self.items else Argument("", 0)


@dataclass(slots=True)
class ShellScope:
    """Variables and parameters. `folder` is the script's; `gpus` and `nodes` are what it would count.

    `counts` are the commands that counted them, `uses` the names of variables that were read.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    parameters: tuple[Argument, ...] = ()
    folder: str = "."
    depth: int = 0
    uses: set[str] = field(default_factory=set)
    gpus: int = 1
    nodes: int = 1
    counts: dict[str, int] = field(default_factory=dict)

    def set(self, name: str, value: Variable) -> None:
        self.variables[name] = value

    def get(self, name: str) -> Variable | None:
        self.uses.add(name)
        return self.variables.get(name)


def expand(word: Word, scope: ShellScope) -> list[Argument]:
    """The arguments that a word becomes: none, one, or several."""
    fields = _Fields(word.line)
    for part in _at_home(word.parts, scope):
        _expand_part(part, scope, fields)
    return fields.arguments()


def expand_text(word: Word, scope: ShellScope) -> Argument:
    """A word as one text, as an assignment or a test takes it."""
    texts: list[str] = []
    missing: list[str] = []
    for part in _at_home(word.parts, scope):
        value = _value(part, scope, word.line)
        texts.append(" ".join(item.text for item in value.items))
        for item in value.items:
            missing += item.missing
    text = "".join(texts)[:_LONGEST]
    return Argument(text, word.line, tuple(dict.fromkeys(missing)))


def _at_home(parts: tuple[WordPart, ...], scope: ShellScope) -> tuple[WordPart, ...]:
    """The parts of a word with the home folder in the place of `~/`."""
    first = parts[0] if parts else None
    if first is None or first.kind != "text" or first.quoted or not first.text.startswith("~/"):
        return parts
    home = scope.get("HOME")
    if home is None:
        return parts
    return (WordPart("text", home.first.text + first.text[1:], quoted=True), *parts[1:])


class _Fields:
    """The arguments that the parts of a word come to."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.done: list[Argument] = []
        self.texts: list[str] | None = None
        self.missing: list[str] = []
        self.line_of_field = line

    def add(self, text: str, missing: tuple[str, ...] = (), line: int | None = None) -> None:
        if self.texts is None:
            self.texts = []
            self.line_of_field = self.line if line is None else line
        self.texts.append(text)
        self.missing += missing

    def end(self) -> None:
        if self.texts is None:
            return
        text = "".join(self.texts)[:_LONGEST]
        if len(self.done) < _MOST_ITEMS:
            self.done.append(Argument(text, self.line_of_field, tuple(dict.fromkeys(self.missing))))
        self.texts = None
        self.missing = []

    def arguments(self) -> list[Argument]:
        self.end()
        return self.done


def _expand_part(part: WordPart, scope: ShellScope, fields: _Fields) -> None:
    if part.kind == "text":
        fields.add(part.text)
        return
    value = _value(part, scope, fields.line)
    if value.is_array:
        for index, item in enumerate(value.items):
            if index:
                fields.end()
            fields.add(item.text, item.missing, item.line)
        return
    for item in value.items:
        if part.quoted:
            fields.add(item.text, item.missing)
        else:
            _split(item, fields)


def _split(item: Argument, fields: _Fields) -> None:
    """Add a value that is not quoted: blanks in it separate arguments."""
    text = item.text
    for expression in item.missing:
        # what has no value is one word, whatever blanks its expression has
        text = text.replace(expression, _JOINED.join(expression.split()))
    words = text.split()
    if not words:
        if text:
            fields.end()
        return
    if text[0].isspace():
        fields.end()
    for index, word in enumerate(words):
        if index:
            fields.end()
        whole = word.replace(_JOINED, " ")
        fields.add(whole, tuple(name for name in item.missing if " ".join(name.split()) in whole))
    if text[-1].isspace():
        fields.end()


def _value(part: WordPart, scope: ShellScope, line: int) -> Variable:
    if part.kind == "text":
        return _one(part.text, line)
    if scope.depth >= lexer.MAX_DEPTH:
        return _unknown(part, line)
    scope.depth += 1
    try:
        if part.kind == "variable":
            value = _parameter(part, scope, line)
        elif part.kind == "arithmetic":
            value = _calculated(part.text, scope, line)
        else:
            value = _output(part.text, scope, line)
    finally:
        scope.depth -= 1
    return _unknown(part, line) if value is None else value


def _one(text: str, line: int) -> Variable:
    return Variable((Argument(text, line),))


def written(part: WordPart) -> str:
    """A part as it stands in the script."""
    match part.kind:
        case "text":
            return part.text
        case "arithmetic":
            return f"$(({part.text}))"
        case "command":
            return f"$({' '.join(part.text.split())})"
    plain = re.fullmatch(r"\w+|[@*#?$!-]", part.text)
    return f"${part.text}" if plain else f"${{{part.text}}}"


def _unknown(part: WordPart, line: int) -> Variable:
    text = written(part)
    return Variable((Argument(text, line, (text,)),))


def _parameter(part: WordPart, scope: ShellScope, line: int) -> Variable | None:
    """`$NAME` and `${NAME...}`; None where the script does not tell it."""
    match = _EXPANSION.fullmatch(part.text)
    if match is None:
        return None
    name = match["name"]
    if name == "#" and not match["rest"]:
        return _one(str(len(scope.parameters)), line)
    if name.startswith("!"):
        return None
    value = _named(name, match["index"], scope)
    if match["length"] and value is not None:
        length = len(value.items) if value.is_array else len(value.first.text)
        return _one(str(length), line)
    rest = match["rest"]
    if not rest:
        return value
    return _modified(value, rest, scope, line)


def _named(name: str, index: str | None, scope: ShellScope) -> Variable | None:
    if name in ("@", "*"):
        return Variable(scope.parameters, is_array=name == "@")
    if name == "0":
        return _one(f"{scope.folder}/script", 0)
    if name.isdecimal():
        at = int(name) - 1
        return Variable((scope.parameters[at],)) if at < len(scope.parameters) else None
    if name in _SPECIAL:
        return None
    if name == "BASH_SOURCE":
        return _one(f"{scope.folder}/script", 0)
    value = scope.get(name)
    if value is None or not value.is_array:
        return value
    if index in ("[@]", "[*]"):
        return value
    inner = (index or "[0]")[1:-1]
    if not re.fullmatch(r"-?\d{1,6}", inner):
        counted = _calculated(inner, scope, 0)
        inner = counted.first.text if counted is not None else ""
    if not re.fullmatch(r"-?\d{1,6}", inner) or not -len(value.items) <= int(inner) < len(value.items):
        return None
    return Variable((value.items[int(inner)],))


def _modified(value: Variable | None, rest: str, scope: ShellScope, line: int) -> Variable | None:
    """Apply what stands behind the name: a default, a pattern that is cut off, a part of the text."""
    for sign in (":-", ":=", "-", "="):
        if rest.startswith(sign):
            is_set = value is not None and (value.first.text or not sign.startswith(":"))
            return value if is_set else _text(rest[len(sign) :], scope, line)
    for sign in (":+", "+"):
        if rest.startswith(sign):
            is_set = value is not None and (value.first.text or sign == "+")
            return _text(rest[len(sign) :], scope, line) if is_set else Variable(())
    if rest.startswith((":?", "?")) or value is None:
        return value
    items = [_cut(item, rest, scope, line) for item in value.items]
    if any(item is None for item in items):
        return None
    return Variable(tuple(item for item in items if item is not None), value.is_array)


def _text(text: str, scope: ShellScope, line: int) -> Variable:
    return Variable((expand_text(lexer.bare_default(text, line), scope),))


def _cut(item: Argument, rest: str, scope: ShellScope, line: int) -> Argument | None:
    text = item.text
    if item.missing:
        return item
    for sign in ("##", "#", "%%", "%"):
        if rest.startswith(sign):
            pattern = expand_text(lexer.bare_default(rest[len(sign) :], line), scope)
            changed = _without(text, pattern.text, at_start=sign[0] == "#", longest=len(sign) == 2)
            return Argument(changed, item.line)
    if rest.startswith("/"):
        every = rest.startswith("//")
        searched, _, replacement = rest[2 if every else 1 :].partition("/")
        old = expand_text(lexer.bare_default(searched, line), scope).text
        new = expand_text(lexer.bare_default(replacement, line), scope).text
        if not old or any(sign in old for sign in "*?["):
            return None
        return Argument(text.replace(old, new, -1 if every else 1), item.line)
    if rest in (",,", "^^"):
        return Argument(text.lower() if rest == ",," else text.upper(), item.line)
    match = re.fullmatch(r":\s*(\d{1,6})(?::\s*(\d{1,6}))?", rest)
    if match is None:
        return None
    start = int(match[1])
    end = len(text) if match[2] is None else start + int(match[2])
    return Argument(text[start:end], item.line)


def _without(text: str, pattern: str, *, at_start: bool, longest: bool) -> str:
    """The text without the shortest or the longest begin or end that a pattern matches."""
    if len(text) > 4096 or len(pattern) > 256:
        return text
    lengths = range(len(text), -1, -1) if longest else range(len(text) + 1)
    matches = re.compile(fnmatch.translate(pattern)).match
    for length in lengths:
        piece = text[:length] if at_start else text[len(text) - length :]
        if matches(piece):
            return text[length:] if at_start else text[: len(text) - length]
    return text


def _calculated(text: str, scope: ShellScope, line: int) -> Variable | None:
    """The value of an arithmetic expression over whole numbers; None where a name in it has none."""
    number = calculate(text, scope)
    return None if number is None else _one(str(number), line)


def calculate(text: str, scope: ShellScope) -> int | None:
    """The whole number that `$((text))` is; None where it is unknown."""

    def replaced(match: re.Match[str]) -> str:
        value = scope.get(match[1] or match[2])
        inner = "" if value is None else value.first.text.strip()
        return inner if re.fullmatch(r"-?\d{1,15}", inner) else "?"

    whole = expand_text(lexer.quoted(text, 0), scope)
    plain = re.sub(r"\$\{(\w+)\}|\$?([A-Za-z_]\w*)", replaced, whole.text)
    # a number with a leading zero is octal, which nobody means
    plain = re.sub(r"\b0+(?=\d)", "", plain)
    if len(plain) > 500 or not re.fullmatch(r"[-+*/%()\d\s]+", plain):
        return None
    try:
        return _evaluate(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        value = _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        if abs(value) > _LARGEST:
            raise ValueError
        return value
    raise ValueError


def _output(text: str, scope: ShellScope, line: int) -> Variable | None:
    """What a command between `$(` and `)` would print, of the few that only rearrange their words."""
    tokens = lexer.split(text.strip(), line).tokens
    documents = [token for token in tokens if isinstance(token, lexer.HereDocument)]
    words = [token for token in tokens if isinstance(token, Word)]
    operators = [token.text for token in tokens if isinstance(token, Operator)]
    if documents and words and words[0].keyword == "cat":
        return _document(documents[0], scope)
    if "BASH_SOURCE" in text or "$0" in text:
        return _own_folder(text, scope, line)
    counted = _counted(text, scope, line)
    if counted is not None:
        return counted
    if set(operators) - {"\n"}:
        return None
    arguments = [argument for word in words for argument in expand(word, scope)]
    if not arguments or any(argument.missing for argument in arguments):
        return None
    command, *values = [argument.text for argument in arguments]
    printed = _printed(command, values, scope)
    return None if printed is None else _one(printed, line)


_COUNTS_GPUS = re.compile(r"nvidia-smi|rocm-smi|device_count\(\)|CUDA_VISIBLE_DEVICES")
_COUNTS_NODES = re.compile(r"scontrol\s+show\s+hostnames|SLURM_(JOB_)?NODELIST|hostfile")


def _counted(text: str, scope: ShellScope, line: int) -> Variable | None:
    """The number of GPUs or machines, where a command counts them; None of every other command."""
    whole = expand_text(lexer.quoted(text, line), scope).text
    listed = _LISTED.match(text)
    if listed is not None:
        return _length_of_list(text, listed[1], scope, line)
    if not re.search(r"\bwc\s+-[lw]|device_count\(\)|grep\s+-c", whole):
        return None
    number: int | None = None
    if _COUNTS_NODES.search(whole):
        number = scope.nodes
    elif _COUNTS_GPUS.search(whole):
        number = scope.gpus
    if number is None:
        return None
    scope.counts[f"$({' '.join(text.split())})"] = number
    return _one(str(number), line)


# how many GPUs a list such as `0,1,2,3` names
_LISTED = re.compile(r"\s*echo\s+(\S+)\s*\|\s*(?:awk\s+-F\s*['\"]?,.*\bNF\b|tr\s+.*\|\s*wc\s+-[lw])", re.DOTALL)


def _length_of_list(text: str, written_list: str, scope: ShellScope, line: int) -> Variable:
    """The number of entries in a list; of an empty or unknown one, of devices as often as not, that of the GPUs."""
    value = expand_text(lexer.bare_default(written_list, line), scope)
    entries = [entry for entry in value.text.split(",") if entry.strip()]
    if entries and not value.missing:
        return _one(str(len(entries)), line)
    scope.counts[f"$({' '.join(text.split())})"] = scope.gpus
    return _one(str(scope.gpus), line)


def _document(document: lexer.HereDocument, scope: ShellScope) -> Variable:
    if not document.expands:
        return _one(document.text, document.line)
    return Variable((expand_text(lexer.quoted(document.text, document.line), scope),))


def document_text(document: lexer.HereDocument, scope: ShellScope) -> Argument:
    """The lines of a here-document, with variables in them replaced."""
    return _document(document, scope).first


def _own_folder(text: str, scope: ShellScope, line: int) -> Variable | None:
    """`$(dirname "$0")` and `$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)`: the script's folder, or above it."""
    if "dirname" not in text:
        return None
    ups = re.findall(r"\.\.(?=[/\"'\s]|$)", text)
    return _one(posixpath.normpath(posixpath.join(scope.folder, *ups)), line)


def _printed(command: str, values: list[str], scope: ShellScope) -> str | None:
    match command, values:
        case "basename", [path]:
            return posixpath.basename(path.rstrip("/"))
        case "basename", [path, suffix]:
            return posixpath.basename(path.rstrip("/")).removesuffix(suffix)
        case "dirname", [path]:
            return posixpath.dirname(path) or "."
        case (("echo" | "printf"), _) if not any(value.startswith("-") or "%" in value for value in values):
            return " ".join(values)
        case (("realpath" | "readlink"), [*_, path]):
            return path
        case "pwd", []:
            return "."
        case "expr", _:
            number = calculate(" ".join(value.strip("\\") for value in values), scope)
            return None if number is None else str(number)
        case "seq", _:
            return _sequence(values)
    return None


def _sequence(values: list[str]) -> str | None:
    separator = "\n"
    numbers: list[int] = []
    words = iter(values)
    for word in words:
        if word.startswith("-s"):
            separator = word[2:] or next(words, ",")
        elif re.fullmatch(r"-?\d{1,6}", word):
            numbers.append(int(word))
        else:
            return None
    if not 1 <= len(numbers) <= 2:
        return None
    first = numbers[0] if len(numbers) == 2 else 1
    last = min(numbers[-1], first + _MOST_ITEMS)
    return separator.join(str(number) for number in range(first, last + 1))
