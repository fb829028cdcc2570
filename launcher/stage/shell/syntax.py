"""Words and operators -> the structure of a script: commands, branches, loops, functions.

It is lenient: a word that fits nowhere is passed over, and what is never closed ends with the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.stage.shell.lexer import HereDocument, Operator, Token, Word, WordPart

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?(\+?=)")
_REDIRECTIONS = frozenset({">", ">>", "<", "<<<", "&>", "&>>", ">&", "<&"})
_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
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


@dataclass(frozen=True, slots=True)
class Simple:
    """One command. `target` is the file that its output goes to, `text` the word behind `<<<`."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int
    document: HereDocument | None = None
    target: Word | None = None
    text: Word | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Commands joined by `&&` and `||`: each with the operator before it."""

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
    line: int


Node = Simple | Joined | If | For | While | Case | FunctionDefinition | Arithmetic


class TooDeep(Exception):
    """Structures are nested deeper than `MAX_DEPTH`."""


@dataclass(slots=True)
class _Collected:
    """What the words of one simple command came to so far."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    document: HereDocument | None = None
    target: Word | None = None
    text: Word | None = None

    def node(self) -> Simple:
        return Simple(
            assignments=tuple(self.assignments),
            words=tuple(self.words),
            line=self.line,
            document=self.document,
            target=self.target,
            text=self.text,
        )


class _Parser:
    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    def _peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _keyword(self) -> str | None:
        token = self._peek()
        return token.keyword if isinstance(token, Word) else None

    def _operator(self) -> str | None:
        token = self._peek()
        return token.text if isinstance(token, Operator) else None

    def body(self, stops: frozenset[str]) -> tuple[Node, ...]:
        """Commands up to one of these words or operators, which is not read."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooDeep
        nodes: list[Node] = []
        while self.at < len(self.tokens):
            if self._keyword() in stops or self._operator() in stops:
                break
            if self._operator() is not None and self._operator() != "(":
                self.at += 1
                continue
            if self._keyword() in _CLOSING:
                # it closes nothing that is open
                self.at += 1
                continue
            before = self.at
            node = self._joined()
            if node is not None:
                nodes.append(node)
            if self.at == before:
                self.at += 1
        self.depth -= 1
        return tuple(nodes)

    def _joined(self) -> Node | None:
        items: list[tuple[str, Node]] = []
        operator = ""
        while True:
            nodes = self._command()
            items += [(operator if index == 0 else "|", node) for index, node in enumerate(nodes)]
            operator = self._operator() or ""
            if operator not in ("&&", "||", "|", "|&"):
                break
            self.at += 1
            self._skip_newlines()
        if not items:
            return None
        if len(items) == 1:
            return items[0][1]
        return Joined(tuple(items))

    def _skip_newlines(self) -> None:
        while self._operator() == "\n":
            self.at += 1

    def _command(self) -> tuple[Node, ...]:
        """One command; a group in brackets is those in it."""
        token = self._peek()
        if token is None:
            return ()
        if isinstance(token, Operator) and token.text == "(":
            return self._in_brackets(token)
        match self._keyword():
            case "if":
                return (self._if(),)
            case "for" | "select":
                return (self._for(),)
            case "while" | "until":
                return (self._while(),)
            case "case":
                return (self._case(),)
            case "function":
                return (self._function(),)
            case "{":
                self.at += 1
                nodes = self.body(frozenset({"}"}))
                self._close("}")
                self._skip_redirections()
                return nodes
            case "!" | "time":
                self.at += 1
                return self._command()
        if self._is_function():
            return (self._function(),)
        node = self._simple()
        return () if node is None else (node,)

    def _in_brackets(self, token: Operator) -> tuple[Node, ...]:
        following = self.tokens[self.at + 1 : self.at + 2]
        if following and isinstance(following[0], Operator) and following[0].text == "(" and following[0].glued:
            return (self._arithmetic(token.line),)
        self.at += 1
        nodes = self.body(frozenset({")"}))
        self._close(")")
        self._skip_redirections()
        return nodes

    def _arithmetic(self, line: int) -> Arithmetic:
        self.at += 2
        words: list[str] = []
        while self._peek() is not None and self._operator() != ")":
            token = self.tokens[self.at]
            words.append(token.text if isinstance(token, Operator) else _source(token))
            self.at += 1
        while self._operator() == ")":
            self.at += 1
        return Arithmetic(" ".join(words), line)

    def _is_function(self) -> bool:
        following = self.tokens[self.at + 1 : self.at + 3]
        return (
            self._keyword() is not None
            and len(following) == 2
            and all(isinstance(token, Operator) for token in following)
            and [token.text for token in following if isinstance(token, Operator)] == ["(", ")"]
        )

    def _close(self, word: str) -> None:
        if self._keyword() == word or self._operator() == word:
            self.at += 1

    def _skip_redirections(self) -> None:
        while self._operator() in _REDIRECTIONS:
            self.at += 1
            if isinstance(self._peek(), Word):
                self.at += 1

    def _if(self) -> If:
        line = self.tokens[self.at].line
        branches: list[Branch] = []
        otherwise: tuple[Node, ...] = ()
        while self._keyword() in ("if", "elif"):
            self.at += 1
            condition = self.body(frozenset({"then", "fi"}))
            self._close("then")
            body = self.body(frozenset({"elif", "else", "fi"}))
            branches.append(Branch(condition, body))
        if self._keyword() == "else":
            self.at += 1
            otherwise = self.body(frozenset({"fi"}))
        self._close("fi")
        self._skip_redirections()
        return If(tuple(branches), otherwise, line)

    def _for(self) -> Node:
        line = self.tokens[self.at].line
        self.at += 1
        variable = self._keyword() or ""
        items: list[Word] = []
        if self._operator() == "(":
            # for ((i=0; i<3; i++))
            depth = 0
            while self._peek() is not None:
                depth += {"(": 1, ")": -1}.get(self._operator() or "", 0)
                self.at += 1
                if depth == 0:
                    break
            variable = ""
        else:
            self.at += 1
            self._skip_newlines()
            if self._keyword() == "in":
                self.at += 1
                items = self._words()
        self._skip_separators()
        self._close("do")
        body = self.body(frozenset({"done"}))
        self._close("done")
        self._skip_redirections()
        return For(variable, tuple(items), body, line)

    def _words(self) -> list[Word]:
        words: list[Word] = []
        token = self._peek()
        while isinstance(token, Word):
            words.append(token)
            self.at += 1
            token = self._peek()
        return words

    def _skip_separators(self) -> None:
        while self._operator() in (";", "\n"):
            self.at += 1

    def _while(self) -> While:
        line = self.tokens[self.at].line
        self.at += 1
        condition = self.body(frozenset({"do", "done"}))
        self._close("do")
        body = self.body(frozenset({"done"}))
        self._close("done")
        self._skip_redirections()
        return While(condition, body, line)

    def _case(self) -> Node:
        line = self.tokens[self.at].line
        self.at += 1
        word = self._peek()
        self.at += 1
        self._skip_separators()
        self._close("in")
        choices: list[CasePattern] = []
        while self._peek() is not None and self._keyword() != "esac":
            self._skip_separators()
            if self._keyword() == "esac":
                break
            patterns: list[Word] = []
            while self._peek() is not None and self._operator() != ")":
                token = self.tokens[self.at]
                if isinstance(token, Word):
                    patterns.append(token)
                self.at += 1
            self._close(")")
            body = self.body(frozenset({";;", ";&", ";;&", "esac"}))
            choices.append(CasePattern(tuple(patterns), body))
            if self._operator() in (";;", ";&", ";;&"):
                self.at += 1
            self._skip_separators()
        self._close("esac")
        subject = word if isinstance(word, Word) else Word((), line)
        return Case(subject, tuple(choices), line)

    def _function(self) -> FunctionDefinition:
        if self._keyword() == "function":
            self.at += 1
        name = self._keyword() or ""
        self.at += 1
        while self._operator() in ("(", ")", "\n"):
            self.at += 1
        return FunctionDefinition(name, self._command())

    def _simple(self) -> Simple | None:
        token = self._peek()
        if token is None:
            return None
        collected = _Collected(token.line)
        in_test = False
        while token is not None:
            if isinstance(token, HereDocument):
                collected.document = token
                self.at += 1
            elif isinstance(token, Operator):
                if not self._operator_in_command(token, collected, in_test=in_test):
                    break
            else:
                self._word(token, collected)
                if token.keyword == "[[":
                    in_test = True
                if token.keyword == "]]":
                    in_test = False
            token = self._peek()
        return collected.node()

    def _operator_in_command(self, token: Operator, collected: _Collected, *, in_test: bool) -> bool:
        """Read an operator that belongs to a command; False where it ends the command."""
        if in_test and token.text != "\n":
            self._take_as_word(token, collected)
            return True
        if token.text in ("<<", "<<-"):
            self.at += 1
            return True
        if token.text not in _REDIRECTIONS:
            return False
        self._drop_descriptor(token, collected)
        self.at += 1
        target = self._peek()
        if isinstance(target, Word):
            self.at += 1
            if token.text == "<<<":
                collected.text = target
            elif token.text in (">", ">>", "&>"):
                collected.target = target
        return True

    def _take_as_word(self, token: Operator, collected: _Collected) -> None:
        collected.words.append(Word((WordPart("text", token.text, quoted=False),), token.line))
        self.at += 1

    def _drop_descriptor(self, token: Operator, collected: _Collected) -> None:
        """The 2 of `2>file` is no argument."""
        if token.glued and collected.words and (collected.words[-1].keyword or "") in ("0", "1", "2"):
            collected.words.pop()

    def _word(self, token: Word, collected: _Collected) -> None:
        self.at += 1
        declares = bool(collected.words) and collected.words[0].keyword in _DECLARATIONS
        if collected.words and not declares:
            collected.words.append(token)
            return
        assignment = self._assignment(token)
        if assignment is None:
            collected.words.append(token)
        else:
            collected.assignments.append(assignment)

    def _assignment(self, token: Word) -> Assignment | None:
        first = token.parts[0] if token.parts else None
        if first is None or first.kind != "text" or first.quoted:
            return None
        match = _ASSIGNMENT.match(first.text)
        if match is None:
            return None
        adds = match[3] == "+="
        rest = first.text[match.end() :]
        following = self._peek()
        is_open = isinstance(following, Operator) and following.text == "(" and following.glued
        if not rest and len(token.parts) == 1 and is_open:
            return Assignment(match[1], self._array(), is_array=True, adds=adds, line=token.line)
        parts = token.parts[1:]
        if rest:
            parts = (WordPart("text", rest, quoted=False), *parts)
        value = Word(parts, token.line)
        # an element of an array is not followed
        name = match[1] if match[2] is None else f"{match[1]}{match[2]}"
        return Assignment(name, (value,), is_array=False, adds=adds, line=token.line)

    def _array(self) -> tuple[Word, ...]:
        self.at += 1
        words: list[Word] = []
        while self._peek() is not None and self._operator() != ")":
            token = self.tokens[self.at]
            if isinstance(token, Word):
                words.append(token)
            self.at += 1
        self._close(")")
        return tuple(words)


_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})


def _source(token: Token) -> str:
    """Roughly the text that a token was read from."""
    if not isinstance(token, Word):
        return token.text
    texts = []
    for part in token.parts:
        texts.append(part.text if part.kind == "text" else f"${{{part.text}}}")
    return "".join(texts)


def words(nodes: tuple[Node, ...]) -> Iterator[Word]:
    """Every word of commands and assignments, those in structures too."""
    for node in nodes:
        match node:
            case Simple():
                for assignment in node.assignments:
                    yield from assignment.values
                yield from node.words
            case Joined():
                yield from words(tuple(item for _, item in node.items))
            case If():
                for branch in node.branches:
                    yield from words(branch.body)
                yield from words(node.otherwise)
            case For() | While() | FunctionDefinition():
                yield from words(node.body)
            case Case():
                for choice in node.choices:
                    yield from words(choice.body)
            case Arithmetic():
                pass


def parse(tokens: tuple[Token, ...]) -> tuple[Node, ...]:
    """The commands of a script. Raises TooDeep."""
    return _Parser(tokens).body(frozenset())
