"""The truth of tests in a script: true, false, or None if the script does not tell."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Mapping

from launcher.stage.shell import expansion
from launcher.stage.shell.expansion import Argument, ShellScope
from launcher.stage.shell.lexer import Word, WordPart
from launcher.stage.shell.syntax import Arithmetic, Joined, Node, Simple

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_SIGNS: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
TESTS = frozenset({"[", "[[", "test"})


def holds(nodes: tuple[Node, ...], scope: ShellScope) -> bool | None:
    """Whether a condition holds: that of its last command."""
    last = nodes[-1] if nodes else None
    match last:
        case Joined():
            return _evaluate_joined(last, scope)
        case Simple():
            return _evaluate_command(last, scope)
        case Arithmetic():
            return _evaluate_comparison(last.text, scope)
    return None


def _evaluate_joined(node: Joined, scope: ShellScope) -> bool | None:
    value: bool | None = None
    for sign, item in node.items:
        current = holds((item,), scope)
        if sign == "|":
            return None
        if sign == "&&":
            value = _and(value, current)
        elif sign == "||":
            value = _or(value, current)
        else:
            value = current
    return value


def negate(value: bool | None) -> bool | None:
    return None if value is None else not value


def _and(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _or(left: bool | None, right: bool | None) -> bool | None:
    if left is True or right is True:
        return True
    return None if left is None or right is None else False


def _evaluate_command(command: Simple, scope: ShellScope) -> bool | None:
    if command.keyword in ("true", ":"):
        return True
    if command.keyword == "false":
        return False
    if command.keyword not in TESTS:
        return None
    terms = [_expand_term(word, scope) for word in command.words[1:]]
    if terms and terms[-1].text in ("]", "]]"):
        terms.pop()
    return _evaluate_test(terms)


def _expand_term(word: Word, scope: ShellScope) -> Argument:
    """A word of a test. A variable that nothing sets is empty there: tests are made for that."""
    argument = expansion.expand_text(word, scope)
    if not argument.missing:
        return argument
    match word.parts:
        case [WordPart(kind="variable", text=name)]:
            is_unset = not name.isdecimal() and name not in scope.variables
            if is_unset and argument.text == f"${name}":
                return Argument("", argument.line)
    return argument


def _evaluate_test(terms: list[Argument]) -> bool | None:
    for sign, join in (("||", _or), ("-o", _or), ("&&", _and), ("-a", _and)):
        for index, term in enumerate(terms):
            if term.text == sign and 0 < index < len(terms) - 1:
                return join(_evaluate_test(terms[:index]), _evaluate_test(terms[index + 1 :]))
    texts = [term.text for term in terms]
    if texts and texts[0] == "!":
        return negate(_evaluate_test(terms[1:]))
    if any(term.missing for term in terms):
        return None
    match texts:
        case [text] | ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, ("=" | "=="), right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, sign, right] if sign in _NUMBERS:
            try:
                return _NUMBERS[sign](int(left), int(right))
            except ValueError:
                return None
    return None


def _evaluate_comparison(text: str, scope: ShellScope) -> bool | None:
    """`(( a > b ))`."""
    for sign, compare in _SIGNS.items():
        left, has_sign, right = text.partition(sign)
        if has_sign:
            first = expansion.calculate(left, scope)
            second = expansion.calculate(right.lstrip("= "), scope)
            return None if first is None or second is None else compare(first, second)
    number = expansion.calculate(text, scope)
    return None if number is None else number != 0
