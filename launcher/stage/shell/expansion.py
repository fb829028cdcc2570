"""Words -> arguments: variables, arrays, arithmetic and the few commands whose output is known.

What the text of a script does not tell (`$1`, `$(date)`, a variable that nobody sets) stays in the
argument as it was written, and is named in `Argument.missing`.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace

from launcher.lazy_dataclass import dataclass
from launcher.stage.shell import lexer
from launcher.stage.shell.lexer import HereDocument, Operator, Word, WordPart

_EXPANSION = re.compile(
    r"(?P<length>#)?(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?P<index>\[[^\]]*\])?(?P<rest>.*)", re.S
)
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
    """A word as a command would get it. `missing` are the expressions in it without a value."""

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
    """Variables and parameters.

    `folder` is the script's; `gpus` and `nodes` are what it would count, and `counts` the commands
    that counted them; `uses` are the names of variables that were read.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    parameters: tuple[Argument, ...] = ()
    folder: str = "."
    depth: int = 0
    uses: set[str] = field(default_factory=set)
    gpus: int = 1
    nodes: int = 1
    counts: dict[str, int] = field(default_factory=dict)

    def get(self, name: str) -> Variable | None:
        self.uses.add(name)
        return self.variables.get(name)


def expand(word: Word, scope: ShellScope) -> list[Argument]:
    """The arguments that a word becomes: none, one, or several."""
    fields = _SplitWords(word.line)
    for part in _expand_home(word.parts, scope):
        _expand_part(part, scope, fields)
    fields.end()
    return fields.done


def expand_all(words: Iterable[Word], scope: ShellScope) -> list[Argument]:
    arguments: list[Argument] = []
    for word in words:
        arguments += expand(word, scope)
    return arguments


def expand_text(word: Word, scope: ShellScope) -> Argument:
    """A word as one text, as an assignment or a test takes it."""
    texts: list[str] = []
    missing: list[str] = []
    for part in _expand_home(word.parts, scope):
        items = _expand_value(part, scope, word.line).items
        texts.append(" ".join(item.text for item in items))
        for item in items:
            missing += item.missing
    return _join_texts(texts, missing, word.line)


def _join_texts(texts: Iterable[str], missing: Iterable[str], line: int) -> Argument:
    return Argument("".join(texts)[:_LONGEST], line, tuple(dict.fromkeys(missing)))


def _expand_home(parts: tuple[WordPart, ...], scope: ShellScope) -> tuple[WordPart, ...]:
    """The parts of a word with the home folder in place of `~/`."""
    if not parts:
        return parts
    first = parts[0]
    is_plain = first.kind == "text" and not first.quoted
    if not is_plain or not first.text.startswith("~/"):
        return parts
    home = scope.get("HOME")
    if home is None:
        return parts
    path = home.first.text + first.text[1:]
    return (WordPart("text", path, quoted=True), *parts[1:])


class _SplitWords:
    """The arguments that the parts of a word become; `texts` are those of the one not yet ended."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.done: list[Argument] = []
        self.texts: list[str] = []
        self.missing: list[str] = []
        self.line_of_field: int | None = None

    def add(self, text: str, missing: tuple[str, ...] = (), line: int | None = None) -> None:
        if self.line_of_field is None:
            self.line_of_field = self.line if line is None else line
        self.texts.append(text)
        self.missing += missing

    def end(self) -> None:
        if self.line_of_field is None:
            return
        if len(self.done) < _MOST_ITEMS:
            self.done.append(_join_texts(self.texts, self.missing, self.line_of_field))
        self.texts = []
        self.missing = []
        self.line_of_field = None


def _expand_part(part: WordPart, scope: ShellScope, fields: _SplitWords) -> None:
    if part.kind == "text":
        fields.add(part.text)
        return
    value = _expand_value(part, scope, fields.line)
    for index, item in enumerate(value.items):
        if value.is_array:
            if index:
                fields.end()
            fields.add(item.text, item.missing, item.line)
        elif part.quoted:
            fields.add(item.text, item.missing)
        else:
            _split_value(item, fields)


def _split_value(item: Argument, fields: _SplitWords) -> None:
    """Add a value that is not quoted: blanks in it separate arguments."""
    text = item.text
    for expression in item.missing:
        # an expression without a value is one word, whatever blanks it has
        text = text.replace(expression, _JOINED.join(expression.split()))
    if text[:1].isspace():
        fields.end()
    for index, word in enumerate(text.split()):
        if index:
            fields.end()
        whole = word.replace(_JOINED, " ")
        missing = [name for name in item.missing if " ".join(name.split()) in whole]
        fields.add(whole, tuple(missing))
    if text[-1:].isspace():
        fields.end()


def _expand_value(part: WordPart, scope: ShellScope, line: int) -> Variable:
    if part.kind == "text":
        return make_text_variable(part.text, line)
    value = None
    if scope.depth < lexer.MAX_DEPTH:
        scope.depth += 1
        if part.kind == "variable":
            value = _expand_parameter(part.text, scope, line)
        elif part.kind == "arithmetic":
            value = _calculate_variable(part.text, scope, line)
        else:
            value = _simulate_substitution(part.text, scope, line)
        scope.depth -= 1
    if value is None:
        text = render_part(part)
        return Variable((Argument(text, line, (text,)),))
    return value


def make_text_variable(text: str, line: int = 0) -> Variable:
    return Variable((Argument(text, line),))


def render_part(part: WordPart) -> str:
    """A part as it stands in the script."""
    match part.kind:
        case "text":
            return part.text
        case "arithmetic":
            return f"$(({part.text}))"
        case "command":
            return _write_command(part.text)
    plain = re.fullmatch(r"\w+|[@*#?$!-]", part.text)
    return f"${part.text}" if plain else f"${{{part.text}}}"


def _write_command(text: str) -> str:
    return f"$({' '.join(text.split())})"


def _expand_parameter(text: str, scope: ShellScope, line: int) -> Variable | None:
    """`$NAME` and `${NAME...}`; None if the script does not tell it."""
    match = _EXPANSION.fullmatch(text)
    if match is None:
        return None
    name = match["name"]
    rest = match["rest"]
    if name == "#" and not rest:
        return make_text_variable(str(len(scope.parameters)), line)
    value = _find_variable(name, match["index"], scope)
    if match["length"] and value is not None:
        measured = value.items if value.is_array else value.first.text
        return make_text_variable(str(len(measured)), line)
    return _modify_value(value, rest, scope, line)


def _find_variable(name: str, index: str | None, scope: ShellScope) -> Variable | None:
    if name in ("@", "*"):
        return Variable(scope.parameters, is_array=name == "@")
    if name in ("0", "BASH_SOURCE"):
        return make_text_variable(f"{scope.folder}/script")
    if name.isdecimal():
        return _take_element(scope.parameters, int(name) - 1)
    value = scope.get(name)
    if value is None or not value.is_array or index in ("[@]", "[*]"):
        return value
    if index is None:
        return _take_element(value.items, 0)
    return _take_element(value.items, calculate(index[1:-1], scope))


def _take_element(items: tuple[Argument, ...], index: int | None) -> Variable | None:
    if index is None or not -len(items) <= index < len(items):
        return None
    return Variable((items[index],))


def _modify_value(
    value: Variable | None, rest: str, scope: ShellScope, line: int
) -> Variable | None:
    """Apply what stands behind the name: a default, a pattern to cut off, a part of the text."""
    operation = _OPERATION.match(rest)
    if operation is None:
        return None if value is None else _cut_all(value, rest, scope, line)
    sign = operation[1]
    if sign == "?":
        return value
    is_set = value is not None
    if value is not None and rest.startswith(":"):
        is_set = bool(value.first.text)
    if sign == "+" and not is_set:
        return Variable(())
    if sign != "+" and is_set:
        return value
    alternative = rest[operation.end() :]
    return Variable((_expand_operand(alternative, scope, line),))


_OPERATION = re.compile(r":?([-=+?])")


def _expand_operand(text: str, scope: ShellScope, line: int) -> Argument:
    return expand_text(lexer.read_bare_default(text, line), scope)


def _cut_all(value: Variable, rest: str, scope: ShellScope, line: int) -> Variable | None:
    if not rest:
        return value
    items: list[Argument] = []
    for item in value.items:
        text = item.text if item.missing else _cut(item.text, rest, scope, line)
        if text is None:
            return None
        items.append(replace(item, text=text))
    return Variable(tuple(items), value.is_array)


def _cut(text: str, rest: str, scope: ShellScope, line: int) -> str | None:
    match = re.match("##?|%%?", rest)
    if match is not None:
        sign = match[0]
        pattern = _expand_operand(rest[match.end() :], scope, line).text
        return _strip_pattern(text, pattern, at_start="#" in sign, longest=len(sign) == 2)
    if rest.startswith("//"):
        return _replace_text(text, rest[2:], -1, scope, line)
    if rest.startswith("/"):
        return _replace_text(text, rest[1:], 1, scope, line)
    if rest == ",,":
        return text.lower()
    if rest == "^^":
        return text.upper()
    match = re.fullmatch(r":\s*(\d{1,6})(?::\s*(\d{1,6}))?", rest)
    if match is None:
        return None
    text = text[int(match[1]) :]
    return text if match[2] is None else text[: int(match[2])]


def _replace_text(text: str, rest: str, count: int, scope: ShellScope, line: int) -> str | None:
    """`${NAME/OLD/NEW}` with `rest` as `OLD/NEW`; None for a pattern. A count of -1 is all."""
    pattern, _, replacement = rest.partition("/")
    old = _expand_operand(pattern, scope, line).text
    if not old or any(sign in old for sign in "*?["):
        return None
    new = _expand_operand(replacement, scope, line).text
    return text.replace(old, new, count)


def _strip_pattern(text: str, pattern: str, *, at_start: bool, longest: bool) -> str:
    """The text without the shortest or the longest start or end that a pattern matches."""
    if len(text) > 4096 or len(pattern) > 256:
        return text
    matches = re.compile(fnmatch.translate(pattern)).match
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if longest else lengths:
        split = length if at_start else len(text) - length
        start = text[:split]
        end = text[split:]
        if matches(start if at_start else end):
            return end if at_start else start
    return text


def _calculate_variable(text: str, scope: ShellScope, line: int) -> Variable | None:
    number = calculate(text, scope)
    return None if number is None else make_text_variable(str(number), line)


_REFERENCE = re.compile(r"\$\{(\w+)\}|\$?([A-Za-z_]\w*)")
_LEADING_ZEROS = re.compile(r"\b0+(?=\d)")
_CALCULATION = re.compile(r"[-+*/%()\d\s]+")


def calculate(text: str, scope: ShellScope) -> int | None:
    """The whole number that `$((text))` is; None if a name in it has no value."""

    def number_of(match: re.Match[str]) -> str:
        value = scope.get(match[1] or match[2])
        number = "" if value is None else value.first.text.strip()
        return number if re.fullmatch(r"-?\d{1,15}", number) else "?"

    expression = expand_text(lexer.read_quoted(text, 0), scope).text
    expression = _REFERENCE.sub(number_of, expression)
    # a number with a leading zero is octal, which nobody means
    expression = _LEADING_ZEROS.sub("", expression)
    if len(expression) > 500 or not _CALCULATION.fullmatch(expression):
        return None
    try:
        return _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            value = _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
            if abs(value) <= _LARGEST:
                return value
    raise ValueError


def _simulate_substitution(text: str, scope: ShellScope, line: int) -> Variable | None:
    """What `$(text)` would print, of the few commands that only rearrange their words."""
    words: list[Word] = []
    documents: list[HereDocument] = []
    is_single = True
    for token in lexer.split(text.strip(), line).tokens:
        match token:
            case Word():
                words.append(token)
            case HereDocument():
                documents.append(token)
            case Operator(text=sign) if sign != "\n":
                is_single = False
    if documents and words and words[0].keyword == "cat":
        return Variable((expand_document(documents[0], scope),))
    if "BASH_SOURCE" in text or "$0" in text:
        return _find_script_folder(text, scope, line)
    number = _count_devices(text, scope, line)
    if number is not None:
        return make_text_variable(str(number), line)
    if not is_single:
        return None
    arguments = expand_all(words, scope)
    if not arguments or any(argument.missing for argument in arguments):
        return None
    command, *values = [argument.text for argument in arguments]
    if command == "expr":
        return _calculate_variable(" ".join(values).replace("\\", ""), scope, line)
    printed = _simulate_command(command, values)
    return None if printed is None else make_text_variable(printed, line)


_COUNTS = re.compile(r"\bwc\s+-[lw]|device_count\(\)|grep\s+-c")
_COUNTS_GPUS = re.compile(r"nvidia-smi|rocm-smi|device_count\(\)|CUDA_VISIBLE_DEVICES")
_COUNTS_NODES = re.compile(r"scontrol\s+show\s+hostnames|SLURM_(JOB_)?NODELIST|hostfile")
# the number of GPUs in a list such as `0,1,2,3`
_COUNTS_LIST = re.compile(
    r"\s*echo\s+(\S+)\s*\|\s*(?:awk\s+-F\s*['\"]?,.*\bNF\b|tr\s+.*\|\s*wc\s+-[lw])", re.DOTALL
)


def _count_devices(text: str, scope: ShellScope, line: int) -> int | None:
    """The number of GPUs or machines, if a command counts them."""
    whole = expand_text(lexer.read_quoted(text, line), scope).text
    listed = _COUNTS_LIST.match(text)
    number = None
    if listed is not None:
        devices = _expand_operand(listed[1], scope, line)
        entries = [entry for entry in devices.text.split(",") if entry.strip()]
        if entries and not devices.missing:
            return len(entries)
        # an empty or unknown list is mostly one of devices
        number = scope.gpus
    elif _COUNTS.search(whole) and _COUNTS_NODES.search(whole):
        number = scope.nodes
    elif _COUNTS.search(whole) and _COUNTS_GPUS.search(whole):
        number = scope.gpus
    if number is not None:
        scope.counts[_write_command(text)] = number
    return number


def expand_document(document: HereDocument, scope: ShellScope) -> Argument:
    """The lines of a here-document, with variables in them replaced."""
    if not document.expands:
        return Argument(document.text, document.line)
    return expand_text(lexer.read_quoted(document.text, document.line), scope)


def _find_script_folder(text: str, scope: ShellScope, line: int) -> Variable | None:
    """The script's folder, or one above it.

    `$(dirname "$0")` and `$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)`.
    """
    if "dirname" not in text:
        return None
    ups = re.findall(r"\.\.(?=[/\"'\s]|$)", text)
    return make_text_variable(posixpath.normpath(posixpath.join(scope.folder, *ups)), line)


def _simulate_command(command: str, values: list[str]) -> str | None:
    match command, values:
        case "basename", [path]:
            return posixpath.basename(path.rstrip("/"))
        case "basename", [path, suffix]:
            return posixpath.basename(path.rstrip("/")).removesuffix(suffix)
        case "dirname", [path]:
            return posixpath.dirname(path) or "."
        case (("echo" | "printf"), _):
            is_plain = not any(value.startswith("-") or "%" in value for value in values)
            return " ".join(values) if is_plain else None
        case (("realpath" | "readlink"), [*_, path]):
            return path
        case "pwd", []:
            return "."
    return None
