"""The text of a shell script -> words and operators with their lines.

Quotes, escapes, continued lines, comments, here-documents and substitutions are read as bash reads
them (bash(1), "QUOTING" and "EXPANSION"). Where bash ends a command by mistake of its author, at a
comment between continued lines or a blank behind a backslash, the command goes on and the line is
noted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from launcher.lazy_dataclass import dataclass

Kind = Literal["text", "variable", "command", "arithmetic"]
# `<(` and `>(` are process substitutions, parts of words
_OPERATOR = re.compile(r"(?![<>]\()(&&|\|\||;;&|;;|;&|\|&|&>>|&>|>>|<<<|<<-|<<|>&|<&|[|&;()<>\n])")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_BLANK_AFTER_BACKSLASH = re.compile(r"\\[ \t]+(#[^\n]*)?\n")
MAX_DEPTH = 20
"""Substitutions inside each other; deeper ones are unknown."""


@dataclass(frozen=True, slots=True)
class WordPart:
    """A piece of a word. `quoted`: a value in its place is not split at blanks."""

    kind: Kind
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Word:
    """`glued`: nothing stands between it and the token before."""

    parts: tuple[WordPart, ...]
    line: int
    glued: bool = False

    @property
    def literal(self) -> str | None:
        """The text of a word without substitutions."""
        if any(part.kind != "text" for part in self.parts):
            return None
        return "".join(part.text for part in self.parts)

    @property
    def keyword(self) -> str | None:
        """The text of a word that has neither quotes nor substitutions."""
        if any(part.quoted for part in self.parts):
            return None
        return self.literal


@dataclass(frozen=True, slots=True)
class Operator:
    text: str
    line: int
    glued: bool = False


@dataclass(frozen=True, slots=True)
class HereDocument:
    """The lines of a here-document. `expands`: variables in it are replaced."""

    text: str
    line: int
    expands: bool


Token = Word | Operator | HereDocument


@dataclass(frozen=True, slots=True)
class TokenList:
    """`mended` are the lines at which bash ends a command that goes on here."""

    tokens: tuple[Token, ...]
    mended: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A here-document whose lines begin at the next line; `index` is the place of its token."""

    delimiter: str
    strips_tabs: bool
    index: int


class _Lexer:
    def __init__(self, text: str, line: int) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.line = line
        self.tokens: list[Token] = []
        self.mended: list[int] = []
        self.pending: list[_Pending] = []
        self.continued = False

    def run(self) -> TokenList:
        while self.at < len(self.text):
            self._read_token()
        self._read_documents()
        return TokenList(tuple(self.tokens), tuple(self.mended))

    def _read_token(self) -> None:
        start = self.at
        self._skip_blanks()
        if self.at >= len(self.text):
            return
        glued = self.at == start and start > 0
        after_operator = bool(self.tokens) and isinstance(self.tokens[-1], Operator)
        if self.text[self.at] == "#" and (after_operator or not glued):
            self._skip_comment()
            return
        operator = _OPERATOR.match(self.text, self.at)
        if operator is None:
            self.tokens.append(self._read_word(glued=glued))
            return
        self.at = operator.end()
        self.tokens.append(Operator(operator[0], self.line, glued))
        if operator[0] == "\n":
            self.line += 1
            self.continued = False
            self._read_documents()
        elif operator[0] in ("<<", "<<-"):
            self._expect_document(strips_tabs=operator[0] == "<<-")

    def _skip_blanks(self) -> None:
        while True:
            if self.text.startswith((" ", "\t"), self.at):
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self._continue_line(2)
            else:
                match = _BLANK_AFTER_BACKSLASH.match(self.text, self.at)
                if match is None:
                    return
                self.mended.append(self.line)
                self._continue_line(len(match[0]))

    def _continue_line(self, length: int) -> None:
        self.at += length
        self.line += 1
        self.continued = True

    def _skip_comment(self) -> None:
        self.at = _find(self.text, "\n", self.at)
        if self.continued and self._option_follows():
            self.mended.append(self.line)
            # skip the end of the line, which would end the command
            self.at += 1
            self.line += 1

    def _option_follows(self) -> bool:
        """Whether the next line that is no comment goes on with an option."""
        for text in self.text[self.at + 1 :].split("\n", 200)[:200]:
            stripped = text.strip()
            if not stripped.startswith("#"):
                return stripped.startswith("-")
        return False

    def _expect_document(self, *, strips_tabs: bool) -> None:
        self._skip_blanks()
        if self.text[self.at : self.at + 1] in ("", "\n"):
            return
        word = self._read_word()
        delimiter = "".join(part.text for part in word.parts)
        expands = not any(part.quoted for part in word.parts)
        document = HereDocument("", word.line, expands)
        pending = _Pending(delimiter, strips_tabs, len(self.tokens))
        self.pending.append(pending)
        self.tokens.append(document)

    def _read_documents(self) -> None:
        for pending in self.pending:
            first = self.line
            lines: list[str] = []
            while self.at < len(self.text):
                end = _find(self.text, "\n", self.at)
                line = self.text[self.at : end]
                self.at = end + 1
                self.line += 1
                if pending.strips_tabs:
                    line = line.lstrip("\t")
                if line.rstrip() == pending.delimiter:
                    break
                lines.append(line)
            document = self.tokens[pending.index]
            if isinstance(document, HereDocument):
                text = "\n".join(lines)
                self.tokens[pending.index] = replace(document, text=text, line=first)
        self.pending = []

    def _read_word(self, *, glued: bool = False) -> Word:
        reader = _WordReader(self.text, self.at, self.line)
        word = Word(tuple(reader.bare_or_character()), self.line, glued)
        self.at = reader.at
        self.line = reader.line
        return word


class _WordReader:
    """Reads one word, or the inside of double quotes."""

    def __init__(self, text: str, at: int, line: int) -> None:
        self.text = text
        self.at = at
        self.line = line
        self.parts: list[WordPart] = []
        self.buffer: list[str] = []

    def bare_or_character(self) -> list[WordPart]:
        """The parts of a word, or a character that begins none."""
        start = self.at
        parts = self.bare()
        if self.at == start:
            self.at += 1
            return [WordPart("text", self.text[start], quoted=False)]
        return parts

    def bare(self) -> list[WordPart]:
        """The parts of a word up to a blank or an operator."""
        while self.at < len(self.text):
            character = self.text[self.at]
            if self.text.startswith(("<(", ">("), self.at):
                self._flush(quoted=False)
                inner = self._read_balanced(2, "(", ")")
                self.parts.append(WordPart("command", inner, quoted=True))
            elif character in " \t\n;&|()<>":
                break
            elif character == "\\":
                if not self._read_escape():
                    break
            elif character == "'":
                self._read_single_quotes()
            elif character == '"':
                self._read_double_quotes()
            elif character in "$`":
                self._read_dollar(quoted=False)
            else:
                self.buffer.append(character)
                self.at += 1
        self._flush(quoted=False)
        return self.parts

    def inside_quotes(self, end: str) -> list[WordPart]:
        """The parts of a text in which blanks and operators mean nothing, up to `end`."""
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == end:
                break
            if character == "\\" and self.at + 1 < len(self.text):
                self._read_escape_in_quotes()
            elif character in "$`":
                self._read_dollar(quoted=True)
            else:
                self.buffer.append(character)
                self.at += 1
                if character == "\n":
                    self.line += 1
        self._flush(quoted=True)
        return self.parts

    def _flush(self, *, quoted: bool) -> None:
        if self.buffer:
            self.parts.append(WordPart("text", "".join(self.buffer), quoted))
            self.buffer = []

    def _read_escape(self) -> bool:
        """Read a backslash outside quotes; False if the word ends at it."""
        following = self.text[self.at + 1 : self.at + 2]
        if following == "\n":
            self.at += 2
            self.line += 1
            # a blank at the start of the next line ends the word
            return self.text[self.at : self.at + 1] not in ("", " ", "\t", "\n")
        if _BLANK_AFTER_BACKSLASH.match(self.text, self.at):
            return False
        self._flush(quoted=False)
        self.buffer.append(following)
        self._flush(quoted=True)
        self.at += 2
        return True

    def _read_escape_in_quotes(self) -> None:
        following = self.text[self.at + 1]
        if following == "\n":
            self.at += 2
            self.line += 1
        elif following in '$`"\\':
            self.buffer.append(following)
            self.at += 2
        else:
            self.buffer.append("\\")
            self.at += 1

    def _read_single_quotes(self) -> None:
        self._flush(quoted=False)
        self.parts.append(WordPart("text", self._read_up_to("'"), quoted=True))

    def _read_up_to(self, end: str) -> str:
        """The text between this character and the next `end`; moves behind that."""
        start = self.at + 1
        stop = _find(self.text, end, start)
        self.line += self.text.count("\n", start, stop)
        self.at = stop + 1
        return self.text[start:stop]

    def _read_double_quotes(self) -> None:
        self._flush(quoted=False)
        inner = _WordReader(self.text, self.at + 1, self.line)
        parts = inner.inside_quotes('"')
        self.parts += parts or [WordPart("text", "", quoted=True)]
        self.at = inner.at + 1
        self.line = inner.line

    def _read_dollar(self, *, quoted: bool) -> None:
        self._flush(quoted=quoted)
        name = _NAME.match(self.text, self.at + 1)
        if self.text[self.at] == "`":
            part = WordPart("command", self._read_up_to("`"), quoted)
        elif self.text.startswith("$((", self.at):
            inner = self._read_balanced(2, "(", ")")
            part = WordPart("arithmetic", inner.removeprefix("(").removesuffix(")"), quoted)
        elif self.text.startswith("$(", self.at):
            part = WordPart("command", self._read_balanced(2, "(", ")"), quoted)
        elif self.text.startswith("${", self.at):
            part = WordPart("variable", self._read_balanced(2, "{", "}"), quoted)
        elif self.text.startswith("$'", self.at) and not quoted:
            self.at += 1
            part = WordPart("text", self._read_up_to("'"), quoted=True)
        elif name is not None:
            self.at = name.end()
            part = WordPart("variable", name[0], quoted)
        else:
            self.buffer.append("$")
            self.at += 1
            return
        self.parts.append(part)

    def _read_balanced(self, offset: int, opening: str, closing: str) -> str:
        """The text from `offset` to the bracket that closes it; moves behind that."""
        start = self.at + offset
        depth = 1
        quote = ""
        at = start
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            elif quote:
                if character == quote:
                    quote = ""
            elif character in "\"'":
                quote = character
            elif character == opening:
                depth += 1
            elif character == closing:
                depth -= 1
                if depth == 0:
                    break
            at += 1
        self.line += self.text.count("\n", start, at)
        self.at = at + 1
        return self.text[start:at]


def _find(text: str, wanted: str, start: int) -> int:
    """Where `wanted` begins, or the end of the text."""
    at = text.find(wanted, start)
    return len(text) if at < 0 else at


def split(text: str, line: int = 1) -> TokenList:
    """The words and operators of a script whose first line has the number `line`."""
    return _Lexer(text, line).run()


def read_quoted(text: str, line: int) -> Word:
    """A text as if it stood in double quotes, such as the lines of a here-document."""
    reader = _WordReader(text, 0, line)
    return Word(tuple(reader.inside_quotes("")), line)


def read_bare_default(text: str, line: int) -> Word:
    """What stands behind the sign in `${NAME:-text}`: blanks are kept, quotes are taken off."""
    parts: list[WordPart] = []
    at = 0
    while at < len(text):
        reader = _WordReader(text, at, line)
        parts += reader.bare_or_character()
        at = reader.at
    return Word(tuple(parts), line)
