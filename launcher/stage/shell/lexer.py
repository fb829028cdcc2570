"""The text of a shell script -> words and operators with their lines.

Quotes, escapes, continued lines, comments, here-documents and substitutions are read as bash reads them
(bash(1), "QUOTING" and "EXPANSION"). Where bash would end a command by mistake of its author, at a comment
between continued lines or a blank behind a backslash, the command goes on and the line is noted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "variable", "command", "arithmetic"]
_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "&>>", "&>", ">>", "<<<", "<<-", "<<", ">&", "<&", "<(", ">(")
_SINGLE = "|&;()<>\n"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_BLANK_AFTER_BACKSLASH = re.compile(r"\\[ \t]+(#[^\n]*)?\n")
_REST_OF_LINE = re.compile(r"[^\n]*")
MAX_DEPTH = 20
"""Substitutions inside each other; deeper ones are kept as text."""


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
    """`mended` are the lines at which bash would have ended a command that goes on here."""

    tokens: tuple[Token, ...]
    mended: tuple[int, ...]


@dataclass(slots=True)
class _Pending:
    """A here-document whose lines begin at the next line."""

    delimiter: str
    strips_tabs: bool
    expands: bool
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
            self._step()
        self._read_documents()
        return TokenList(tuple(self.tokens), tuple(self.mended))

    def _step(self) -> None:
        start = self.at
        self._skip_blanks()
        if self.at >= len(self.text):
            return
        glued = self.at == start and start > 0
        character = self.text[self.at]
        if character == "#" and not glued:
            self._comment()
            return
        if character == "#" and self.tokens and isinstance(self.tokens[-1], Operator):
            self._comment()
            return
        operator = self._operator()
        if operator is None:
            self._word(glued)
            return
        self.at += len(operator)
        self.tokens.append(Operator(operator, self.line, glued))
        if operator == "\n":
            self.line += 1
            self.continued = False
            self._read_documents()
        elif operator in ("<<", "<<-"):
            self._expect_document(strips_tabs=operator == "<<-")

    def _skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self._continue(2)
            else:
                match = _BLANK_AFTER_BACKSLASH.match(self.text, self.at)
                if match is None:
                    return
                self.mended.append(self.line)
                self._continue(len(match[0]))

    def _continue(self, length: int) -> None:
        self.at += length
        self.line += 1
        self.continued = True

    def _comment(self) -> None:
        rest = _REST_OF_LINE.match(self.text, self.at)
        if rest is not None:
            self.at = rest.end()
        if self.continued and self._option_follows():
            self.mended.append(self.line)
            # the line's end, which would end the command
            self.at += 1
            self.line += 1

    def _option_follows(self) -> bool:
        """Whether the next line that is no comment goes on with an option."""
        for text in self.text[self.at + 1 :].split("\n", 200)[:200]:
            stripped = text.strip()
            if stripped.startswith("#"):
                continue
            return stripped.startswith("-")
        return False

    def _operator(self) -> str | None:
        for operator in _OPERATORS:
            if self.text.startswith(operator, self.at):
                # a process substitution is a word
                return None if operator in ("<(", ">(") else operator
        if self.text[self.at] in _SINGLE:
            return self.text[self.at]
        return None

    def _expect_document(self, *, strips_tabs: bool) -> None:
        self._skip_blanks()
        if self.at >= len(self.text) or self.text[self.at] == "\n":
            return
        self._word(glued=False)
        word = self.tokens.pop()
        if not isinstance(word, Word):
            return
        delimiter = "".join(part.text for part in word.parts)
        expands = not any(part.quoted for part in word.parts)
        self.tokens.append(HereDocument("", word.line, expands))
        self.pending.append(_Pending(delimiter, strips_tabs, expands, len(self.tokens) - 1))

    def _read_documents(self) -> None:
        for pending in self.pending:
            first = self.line
            lines: list[str] = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                self.line += 1
                if pending.strips_tabs:
                    line = line.lstrip("\t")
                if line.rstrip() == pending.delimiter:
                    break
                lines.append(line)
            text = "\n".join(lines)
            self.tokens[pending.index] = HereDocument(text, first, pending.expands)
        self.pending = []

    def _word(self, glued: bool) -> None:
        line = self.line
        reader = _WordReader(self.text, self.at, self.line)
        parts = reader.bare()
        if reader.at == self.at:
            # a character that begins nothing
            parts = [WordPart("text", self.text[self.at], quoted=False)]
            reader.at += 1
        self.at = reader.at
        self.line = reader.line
        self.tokens.append(Word(tuple(parts), line, glued))


class _WordReader:
    """Reads one word, or the inside of double quotes."""

    def __init__(self, text: str, at: int, line: int) -> None:
        self.text = text
        self.at = at
        self.line = line
        self.parts: list[WordPart] = []
        self.buffer: list[str] = []

    def bare(self) -> list[WordPart]:
        """The parts of a word up to a blank or an operator."""
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\n;&|()<>":
                if not self._process_substitution():
                    break
                continue
            if character == "\\":
                if not self._escape():
                    break
            elif character == "'":
                self._single_quotes()
            elif character == '"':
                self._double_quotes()
            elif character in "$`":
                self._dollar(quoted=False)
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
                self._escape_in_quotes()
            elif character in "$`":
                self._flush(quoted=True)
                self._dollar(quoted=True)
            else:
                self._take(character)
        self._flush(quoted=True)
        return self.parts

    def _take(self, character: str) -> None:
        self.buffer.append(character)
        self.at += 1
        if character == "\n":
            self.line += 1

    def _flush(self, *, quoted: bool) -> None:
        if self.buffer:
            self.parts.append(WordPart("text", "".join(self.buffer), quoted))
            self.buffer = []

    def _process_substitution(self) -> bool:
        if not self.text.startswith(("<(", ">("), self.at):
            return False
        self._flush(quoted=False)
        inner = self._balanced(self.at + 2, "(", ")")
        self.parts.append(WordPart("command", inner, quoted=True))
        return True

    def _escape(self) -> bool:
        """Read a backslash outside quotes; False where the word ends at it."""
        following = self.text[self.at + 1 : self.at + 2]
        if following == "\n":
            self.at += 2
            self.line += 1
            # a blank at the begin of the next line ends the word
            return self.text[self.at : self.at + 1] not in ("", " ", "\t", "\n")
        if _BLANK_AFTER_BACKSLASH.match(self.text, self.at):
            return False
        self._flush(quoted=False)
        self.buffer.append(following)
        self._flush(quoted=True)
        self.at += 2
        return True

    def _escape_in_quotes(self) -> None:
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

    def _single_quotes(self) -> None:
        self._flush(quoted=False)
        end = self.text.find("'", self.at + 1)
        end = len(self.text) if end < 0 else end
        inner = self.text[self.at + 1 : end]
        self.line += inner.count("\n")
        self.parts.append(WordPart("text", inner, quoted=True))
        self.at = end + 1

    def _double_quotes(self) -> None:
        self._flush(quoted=False)
        inner = _WordReader(self.text, self.at + 1, self.line)
        parts = inner.inside_quotes('"')
        self.parts += parts or [WordPart("text", "", quoted=True)]
        self.at = inner.at + 1
        self.line = inner.line

    def _dollar(self, *, quoted: bool) -> None:
        self._flush(quoted=quoted)
        text = self.text
        if text[self.at] == "`":
            end = text.find("`", self.at + 1)
            end = len(text) if end < 0 else end
            self.parts.append(WordPart("command", text[self.at + 1 : end], quoted))
            self.line += text.count("\n", self.at, end)
            self.at = end + 1
        elif text.startswith("$((", self.at):
            inner = self._balanced(self.at + 2, "(", ")")
            self.parts.append(WordPart("arithmetic", inner.removeprefix("(").removesuffix(")"), quoted))
        elif text.startswith("$(", self.at):
            inner = self._balanced(self.at + 2, "(", ")")
            self.parts.append(WordPart("command", inner, quoted))
        elif text.startswith("${", self.at):
            inner = self._balanced(self.at + 2, "{", "}")
            self.parts.append(WordPart("variable", inner, quoted))
        elif text.startswith("$'", self.at) and not quoted:
            self.at += 1
            self._single_quotes()
        else:
            name = _NAME.match(text, self.at + 1)
            if name is None:
                self.buffer.append("$")
                self.at += 1
                return
            self.parts.append(WordPart("variable", name[0], quoted))
            self.at = name.end()

    def _balanced(self, start: int, opening: str, closing: str) -> str:
        """The text from `start` to the bracket that closes it; moves behind that."""
        depth = 1
        at = start
        quote = ""
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 2
                continue
            if quote:
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


def split(text: str, line: int = 1) -> TokenList:
    """The words and operators of a script whose first line has the number `line`."""
    return _Lexer(text, line).run()


def quoted(text: str, line: int) -> Word:
    """A text as if it stood in double quotes, such as the lines of a here-document."""
    reader = _WordReader(text, 0, line)
    parts = reader.inside_quotes("")
    return Word(tuple(parts), line)


def bare_default(text: str, line: int) -> Word:
    """What stands behind the sign in `${NAME:-text}`: blanks are kept, quotes are taken off."""
    parts: list[WordPart] = []
    at = 0
    while at < len(text):
        reader = _WordReader(text, at, line)
        parts += reader.bare()
        if reader.at == at:
            parts.append(WordPart("text", text[at], quoted=False))
            reader.at += 1
        at = reader.at
    return Word(tuple(parts), line)
