"""Words and operators -> the structure of a script: commands, branches, loops, functions.

It is lenient: a word that fits nowhere is skipped, and what is never closed ends with the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.stage.shell.lexer import HereDocument, Operator, Token, Word, WordPart

DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?(\+?=)")
_REDIRECTIONS = frozenset({">", ">>", "<", "<<<", "&>", "&>>", ">&", "<&"})
_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
_CASE_ENDS = (";;", ";&", ";;&")
MAX_DEPTH = 60
"""Structures inside each other."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """`NAME=value`, or `NAME=(values)`. `adds`: it is `+=`."""

    name: str
    values: tuple[Word, ...]
    is_array: bool
    adds: bool
    line: int


@dataclass(slots=True)
class Simple:
    """One command. `target` is the file that its output goes to, `text` the word behind `<<<`."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    document: HereDocument | None = None
    target: Word | None = None
    text: Word | None = None

    @property
    def keyword(self) -> str | None:
        return self.words[0].keyword if self.words else None


@dataclass(frozen=True, slots=True)
class Joined:
    """Commands joined by `&&`, `||` and `|`: each with the operator before it."""

    items: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class Branch:
    condition: tuple[Node, ...]
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class If:
    branches: tuple[Branch, ...]
    otherwise: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """`variable` is empty for `for ((...))`."""

    variable: str
    items: tuple[Word, ...]
    body: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class While:
    condition: tuple[Node, ...]
    body: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class CasePattern:
    patterns: tuple[Word, ...]
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Case:
    word: Word
    choices: tuple[CasePattern, ...]
    line: int


@dataclass(frozen=True, slots=True)
class FunctionDefinition:
    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`(( ... ))`."""

    text: str


Node = Simple | Joined | If | For | While | Case | FunctionDefinition | Arithmetic


class TooDeep(Exception):
    """Structures are nested deeper than `MAX_DEPTH`."""


class _Parser:
    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    def _peek(self, offset: int = 0) -> Token | None:
        at = self.at + offset
        return self.tokens[at] if at < len(self.tokens) else None

    def _peek_symbol(self, offset: int = 0) -> str | None:
        """The next operator or word without quotes and substitutions."""
        token = self._peek(offset)
        if isinstance(token, Operator):
            return token.text
        return token.keyword if isinstance(token, Word) else None

    def _skip(self, *symbols: str) -> None:
        while self._peek_symbol() in symbols:
            self.at += 1

    def _take(self, symbol: str) -> None:
        """Read this symbol if it is the next one."""
        if self._peek_symbol() == symbol:
            self.at += 1

    def _close(self, symbol: str) -> None:
        """Read the end of a structure and the redirections behind it."""
        self._take(symbol)
        while self._peek_symbol() in _REDIRECTIONS:
            self.at += 1
            if isinstance(self._peek(), Word):
                self.at += 1

    def body(self, *stops: str) -> tuple[Node, ...]:
        """Commands up to one of these symbols, which is not read."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooDeep
        nodes: list[Node] = []
        while self.at < len(self.tokens):
            symbol = self._peek_symbol()
            if symbol in stops:
                break
            is_separator = isinstance(self._peek(), Operator) and symbol != "("
            if is_separator or symbol in _CLOSING:
                self.at += 1
                continue
            before = self.at
            node = self._parse_joined()
            if node is not None:
                nodes.append(node)
            if self.at == before:
                self.at += 1
        self.depth -= 1
        return tuple(nodes)

    def _parse_joined(self) -> Node | None:
        items: list[tuple[str, Node]] = []
        operator = ""
        while True:
            for node in self._parse_command():
                items.append((operator, node))
                operator = "|"
            operator = self._peek_symbol() or ""
            if operator not in ("&&", "||", "|", "|&"):
                break
            self.at += 1
            self._skip("\n")
        if len(items) == 1:
            return items[0][1]
        return Joined(tuple(items)) if items else None

    def _parse_command(self) -> tuple[Node, ...]:
        """One command; a group in brackets is those in it."""
        match self._peek_symbol():
            case "(":
                if self._is_glued_bracket(1):
                    return (self._parse_arithmetic(),)
                return self._parse_group(")")
            case "{":
                return self._parse_group("}")
            case "if":
                return (self._parse_if(),)
            case "for" | "select":
                return (self._parse_for(),)
            case "while" | "until":
                return (self._parse_while(),)
            case "case":
                return (self._parse_case(),)
            case "!" | "time":
                self.at += 1
                return self._parse_command()
            case "function":
                self.at += 1
                return (self._parse_function(),)
            case str() if self._peek_symbol(1) == "(" and self._peek_symbol(2) == ")":
                return (self._parse_function(),)
        return () if self._peek() is None else (self._parse_simple(),)

    def _is_glued_bracket(self, offset: int) -> bool:
        token = self._peek(offset)
        return isinstance(token, Operator) and token.text == "(" and token.glued

    def _parse_group(self, closing: str) -> tuple[Node, ...]:
        self.at += 1
        nodes = self.body(closing)
        self._close(closing)
        return nodes

    def _parse_arithmetic(self) -> Arithmetic:
        self.at += 2
        texts: list[str] = []
        while self._peek() is not None and self._peek_symbol() != ")":
            texts.append(_restore_source(self.tokens[self.at]))
            self.at += 1
        self._skip(")")
        return Arithmetic(" ".join(texts))

    def _parse_if(self) -> If:
        line = self.tokens[self.at].line
        branches: list[Branch] = []
        while self._peek_symbol() in ("if", "elif"):
            self.at += 1
            condition = self.body("then", "fi")
            self._take("then")
            branches.append(Branch(condition, self.body("elif", "else", "fi")))
        otherwise: tuple[Node, ...] = ()
        if self._peek_symbol() == "else":
            self.at += 1
            otherwise = self.body("fi")
        self._close("fi")
        return If(tuple(branches), otherwise, line)

    def _parse_for(self) -> For:
        line = self.tokens[self.at].line
        self.at += 1
        variable = ""
        items: tuple[Word, ...] = ()
        if self._peek_symbol() == "(":
            self._skip_brackets()
        else:
            variable = self._peek_symbol() or ""
            self.at += 1
            self._skip("\n")
            if self._peek_symbol() == "in":
                self.at += 1
                items = self._parse_words()
        return For(variable, items, self._parse_loop_body(), line)

    def _skip_brackets(self) -> None:
        """Skip the `((i=0; i<3; i++))` of a loop."""
        depth = 0
        while self._peek() is not None:
            if self._peek_symbol() == "(":
                depth += 1
            elif self._peek_symbol() == ")":
                depth -= 1
            self.at += 1
            if depth == 0:
                return

    def _parse_words(self) -> tuple[Word, ...]:
        words: list[Word] = []
        token = self._peek()
        while isinstance(token, Word):
            words.append(token)
            self.at += 1
            token = self._peek()
        return tuple(words)

    def _parse_loop_body(self) -> tuple[Node, ...]:
        self._skip(";", "\n")
        self._take("do")
        body = self.body("done")
        self._close("done")
        return body

    def _parse_while(self) -> While:
        line = self.tokens[self.at].line
        self.at += 1
        condition = self.body("do", "done")
        return While(condition, self._parse_loop_body(), line)

    def _parse_case(self) -> Case:
        line = self.tokens[self.at].line
        self.at += 1
        word = self._peek()
        self.at += 1
        self._skip(";", "\n")
        self._take("in")
        self._skip(";", "\n")
        choices: list[CasePattern] = []
        while self._peek() is not None and self._peek_symbol() != "esac":
            patterns = self._parse_words_before_bracket()
            body = self.body(*_CASE_ENDS, "esac")
            choices.append(CasePattern(patterns, body))
            self._skip(*_CASE_ENDS, ";", "\n")
        self._close("esac")
        subject = word if isinstance(word, Word) else Word((), line)
        return Case(subject, tuple(choices), line)

    def _parse_words_before_bracket(self) -> tuple[Word, ...]:
        """The words up to `)`, which is read too; operators between them are skipped."""
        words: list[Word] = []
        while self._peek() is not None and self._peek_symbol() != ")":
            token = self.tokens[self.at]
            if isinstance(token, Word):
                words.append(token)
            self.at += 1
        self._take(")")
        return tuple(words)

    def _parse_function(self) -> FunctionDefinition:
        name = self._peek_symbol() or ""
        self.at += 1
        self._skip("(", ")", "\n")
        return FunctionDefinition(name, self._parse_command())

    def _parse_simple(self) -> Simple:
        command = Simple(self.tokens[self.at].line)
        in_test = False
        token = self._peek()
        while token is not None:
            if isinstance(token, HereDocument):
                command.document = token
                self.at += 1
            elif isinstance(token, Word):
                self.at += 1
                self._add_word(token, command)
                if token.keyword in ("[[", "]]"):
                    in_test = token.keyword == "[["
            elif in_test and token.text != "\n":
                part = WordPart("text", token.text, quoted=False)
                command.words.append(Word((part,), token.line))
                self.at += 1
            elif not self._parse_redirection(token, command):
                break
            token = self._peek()
        return command

    def _parse_redirection(self, operator: Operator, command: Simple) -> bool:
        """Read a redirection; False if the operator is none, and ends the command."""
        if operator.text in ("<<", "<<-"):
            self.at += 1
            return True
        if operator.text not in _REDIRECTIONS:
            return False
        # the 2 of `2>file` is no argument
        if operator.glued and command.words and command.words[-1].keyword in ("0", "1", "2"):
            command.words.pop()
        self.at += 1
        target = self._peek()
        if isinstance(target, Word):
            self.at += 1
            if operator.text == "<<<":
                command.text = target
            elif operator.text in (">", ">>", "&>"):
                command.target = target
        return True

    def _add_word(self, word: Word, command: Simple) -> None:
        assignment = None
        if not command.words or command.keyword in DECLARATIONS:
            assignment = self._parse_assignment(word)
        if assignment is None:
            command.words.append(word)
        else:
            command.assignments.append(assignment)

    def _parse_assignment(self, word: Word) -> Assignment | None:
        first = word.parts[0] if word.parts else None
        if first is None or first.kind != "text" or first.quoted:
            return None
        match = _ASSIGNMENT.match(first.text)
        if match is None:
            return None
        adds = match[3] == "+="
        rest = first.text[match.end() :]
        if not rest and len(word.parts) == 1 and self._is_glued_bracket(0):
            self.at += 1
            values = self._parse_words_before_bracket()
            return Assignment(match[1], values, is_array=True, adds=adds, line=word.line)
        parts = word.parts[1:]
        if rest:
            parts = (WordPart("text", rest, quoted=False), *parts)
        # an element of an array is a variable of its own
        name = match[1] + (match[2] or "")
        value = Word(parts, word.line)
        return Assignment(name, (value,), is_array=False, adds=adds, line=word.line)


def _restore_source(token: Token) -> str:
    """Roughly the text that a token was read from."""
    if not isinstance(token, Word):
        return token.text
    texts = []
    for part in token.parts:
        texts.append(part.text if part.kind == "text" else f"${{{part.text}}}")
    return "".join(texts)


def walk_words(nodes: tuple[Node, ...]) -> Iterator[Word]:
    """Every word of commands and assignments, those in structures too."""
    for node in nodes:
        match node:
            case Simple():
                for assignment in node.assignments:
                    yield from assignment.values
                yield from node.words
            case Joined():
                yield from walk_words(tuple(item for _, item in node.items))
            case If():
                for branch in node.branches:
                    yield from walk_words(branch.body)
                yield from walk_words(node.otherwise)
            case For() | While() | FunctionDefinition():
                yield from walk_words(node.body)
            case Case():
                for choice in node.choices:
                    yield from walk_words(choice.body)


def parse(tokens: tuple[Token, ...]) -> tuple[Node, ...]:
    """The commands of a script. Raises TooDeep."""
    return _Parser(tokens).body()
