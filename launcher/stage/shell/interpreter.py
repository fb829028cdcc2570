"""A script walked from top to bottom -> its commands.

Nothing is run and nothing is written. A branch whose condition the script does not tell is walked
as one that may be taken: its commands are marked, and its assignments count if nothing else sets
the variable.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace

from launcher.lazy_dataclass import dataclass
from launcher.stage.shell import conditions, lexer, syntax
from launcher.stage.shell.expansion import (
    Argument,
    ShellScope,
    Variable,
    expand_all,
    expand_document,
    expand_text,
)
from launcher.stage.shell.lexer import HereDocument, Word
from launcher.stage.shell.syntax import (
    DECLARATIONS,
    Assignment,
    Case,
    For,
    FunctionDefinition,
    If,
    Joined,
    Node,
    Simple,
    While,
)

_MOST_COMMANDS = 5_000
_MOST_STEPS = 50_000
_MOST_ROUNDS = 200
_MOST_CALLS = 12
"""Functions, scripts and `eval` inside each other."""
_COMMAND_SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh"})
_SHELLS = frozenset({"bash", "sh", "zsh", "source", ".", "sbatch"})
_SCRIPT = re.compile(r".+\.(sh|bash|zsh|slurm|sbatch)")
_FLAG = re.compile(r"\s*--?[A-Za-z]")
_FLAGS = re.compile(r"(?:^|\s)(--[A-Za-z][\w.-]*)")
_STARTS = re.compile(
    r"accelerate\s+launch|\btorchrun\b|\bdeepspeed\s|torch\.distributed\.(run|launch)|\btrl\s+(sft|dpo)\b|"
    r"llamafactory-cli\s+train|\bswift\s+(sft|rlhf)\b|\baxolotl\s+train|\btune\s+run\b"
)
_PRINTERS = frozenset({"echo", "printf", "cat", "log", "logger", "grep", "sed", "pkill", "pgrep"})
_REMOTE = frozenset({"ssh", "srun"})
_CLUSTER = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_GPUS_ON_NODE": "gpus",
    "SLURM_GPUS_PER_NODE": "gpus",
    "SLURM_JOB_NAME": "job-name",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
}

Find = Callable[[str], str | None]
"""The text of another script by its path; None if it must not be read."""


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """One command of a script with its arguments; `environment` are the variables before it.

    `unless` says on what it depends whether the command runs at all. `prefixes` are the words
    before the script, or the text, that holds the command: `srun --nodes=2` of
    `srun --nodes=2 ./train.sh`.
    """

    arguments: tuple[Argument, ...]
    environment: tuple[tuple[str, Argument], ...]
    line: int
    file: str
    unless: str = ""
    prefixes: tuple[tuple[Argument, ...], ...] = ()


@dataclass(slots=True)
class Script:
    """What a script would start and set.

    `exported` are the variables that it hands to its commands, `files` those that it writes, with
    their text, `mended` the lines (file, number) at which bash ends a command that was read on,
    `choices` what was taken of several, `absent` the scripts it starts that do not exist. `skipped`
    are the flags in branches that are not taken, with the reason.
    """

    commands: list[ScriptCommand] = field(default_factory=list)
    exported: dict[str, Argument] = field(default_factory=dict)
    files: dict[str, Argument] = field(default_factory=dict)
    mended: list[tuple[str, int]] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    skipped: list[tuple[Argument, str]] = field(default_factory=list)
    scope: ShellScope = field(default_factory=ShellScope)


class _Interpreter:
    def __init__(self, find: Find, scope: ShellScope) -> None:
        self.find = find
        self.script = Script(scope=scope)
        self.functions: dict[str, tuple[Node, ...]] = {}
        self.calls = 0
        self.steps = 0
        self.unless: list[str] = []
        self.prefixes: list[tuple[Argument, ...]] = []
        self.file = ""

    def read(self, text: str, file: str, line: int = 1) -> None:
        tokens = lexer.split(text, line)
        for number in tokens.mended:
            self.script.mended.append((file, number))
        nodes = syntax.parse(tokens.tokens)
        before = self.file
        self.file = file
        self.run(nodes)
        self.file = before

    def run(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            self._walk_node(node)

    def _walk_node(self, node: Node) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS or len(self.script.commands) > _MOST_COMMANDS:
            return
        match node:
            case Simple():
                self._walk_simple(node)
            case Joined():
                self._walk_joined(node)
            case If():
                self._walk_if(node)
            case For():
                self._walk_for(node)
            case While():
                self._walk_while(node)
            case Case():
                self._walk_case(node)
            case FunctionDefinition():
                self.functions[node.name] = node.body

    def _walk_uncertain(self, nodes: tuple[Node, ...], why: str) -> None:
        """Walk commands of which the script does not tell whether they run."""
        self.unless.append(why)
        self.run(nodes)
        self.unless.pop()

    def _walk_joined(self, node: Joined) -> None:
        value: bool | None = True
        for sign, item in node.items:
            if sign == "&&" and value is False:
                self._skip_branch((item,), getattr(item, "line", 0))
            elif sign == "||" and value is True:
                continue
            elif isinstance(item, Simple) and item.keyword in conditions.TESTS:
                value = conditions.holds((item,), self.script.scope)
            elif value is None:
                self._walk_uncertain((item,), "a condition")
            else:
                self._walk_node(item)
                value = True

    def _walk_if(self, node: If) -> None:
        # whether a branch before is taken
        taken: bool | None = False
        for branch in node.branches:
            value = conditions.negate(taken)
            if value is True:
                self._run_starts(branch.condition)
                value = conditions.holds(branch.condition, self.script.scope)
                taken = value
            self._walk_branch(value, branch.body, node.line)
        self._walk_branch(conditions.negate(taken), node.otherwise, node.line)

    def _walk_branch(self, value: bool | None, body: tuple[Node, ...], line: int) -> None:
        if value is True:
            self.run(body)
        elif value is False:
            self._skip_branch(body, line)
        else:
            self._walk_uncertain(body, f"the condition in line {line}")

    def _skip_branch(self, nodes: tuple[Node, ...], line: int) -> None:
        """Note the flags of a branch that is not taken."""
        reason = f"only if the condition in line {line} holds, which it does not"
        for word in syntax.walk_words(nodes):
            first = word.parts[0] if word.parts else None
            if first is not None and first.kind == "text" and _FLAG.match(first.text):
                for name in _FLAGS.findall(first.text):
                    self.script.skipped.append((Argument(name, word.line), reason))

    def _run_starts(self, condition: tuple[Node, ...]) -> None:
        """Commands of a condition that are no tests: `if ! accelerate launch ...; then`."""
        for node in condition:
            if isinstance(node, Simple) and node.words and node.keyword not in conditions.TESTS:
                self._walk_simple(node)

    def _walk_for(self, node: For) -> None:
        items = expand_all(node.items, self.script.scope)
        if node.variable and items:
            chosen = ""
            if len(items) > 1:
                chosen = f"the first of {len(items)} values of the loop in line {node.line}"
            self._set_variable(node.variable, Variable((items[0],), chosen=chosen))
        self.run(node.body)

    def _walk_while(self, node: While) -> None:
        scope = self.script.scope
        for _ in range(_MOST_ROUNDS):
            value = conditions.holds(node.condition, scope)
            if value is False:
                return
            before = scope.parameters
            if value is None:
                self._walk_uncertain(node.body, f"the loop in line {node.line}")
            else:
                self.run(node.body)
            # only a loop that takes the arguments one by one is walked again
            if scope.parameters == before:
                return

    def _walk_case(self, node: Case) -> None:
        scope = self.script.scope
        subject = expand_text(node.word, scope)
        if subject.missing:
            for choice in node.choices:
                self._walk_uncertain(choice.body, f"the case in line {node.line}")
            return
        for choice in node.choices:
            patterns = [expand_text(pattern, scope) for pattern in choice.patterns]
            if any(_matches(subject, pattern) for pattern in patterns):
                self.run(choice.body)
                for other in node.choices:
                    if other is not choice:
                        self._skip_branch(other.body, node.line)
                return

    def _walk_simple(self, node: Simple) -> None:
        scope = self.script.scope
        if not node.words:
            self._assign_all(node, exports=False)
            return
        if node.keyword in DECLARATIONS:
            self._declare(node)
            return
        arguments = expand_all(node.words, scope)
        match [argument.text for argument in arguments]:
            case []:
                return
            case ["read", *_]:
                self._read_builtin(node, arguments)
                return
            case ["shift", *counts]:
                count = int(counts[0]) if counts and counts[0].isdecimal() else 1
                scope.parameters = scope.parameters[count:]
                return
            case ["set", "--", *_]:
                scope.parameters = tuple(arguments[2:])
                return
        if node.document is not None:
            self._write_document(node, node.document, arguments)
        if self._try_script(node, arguments) or self._try_text(node, arguments):
            return
        environment = []
        for assignment in node.assignments:
            if assignment.values:
                value = expand_text(assignment.values[0], scope)
                environment.append((assignment.name, value))
        command = ScriptCommand(
            arguments=tuple(arguments),
            environment=tuple(environment),
            line=node.line,
            file=self.file,
            unless=self.unless[-1] if self.unless else "",
            prefixes=tuple(self.prefixes),
        )
        self.script.commands.append(command)

    def _declare(self, node: Simple) -> None:
        keywords = [word.keyword or "" for word in node.words]
        exports = keywords[0] == "export" or "-x" in keywords
        self._assign_all(node, exports=exports)
        for name in keywords[1:]:
            value = self.script.scope.variables.get(name)
            if exports and value is not None:
                self.script.exported[name] = value.first

    def _assign_all(self, node: Simple, *, exports: bool) -> None:
        for assignment in node.assignments:
            self._assign(assignment, exports=exports)

    def _assign(self, assignment: Assignment, *, exports: bool) -> None:
        scope = self.script.scope
        name = assignment.name
        self._run_substitutions(assignment.values)
        if assignment.is_array:
            value = Variable(tuple(expand_all(assignment.values, scope)), is_array=True)
        else:
            value = Variable((expand_text(assignment.values[0], scope),))
        before = scope.variables.get(name)
        if assignment.adds and before is not None:
            value = _append_value(before, value)
        self._set_variable(name, value)
        if exports:
            self.script.exported[name] = value.first

    def _run_substitutions(self, words: Iterable[Word]) -> None:
        """Walk `NAME=$(accelerate launch ...)`, whose output becomes the value."""
        for word in words:
            for part in word.parts:
                if part.kind == "command" and _STARTS.search(part.text):
                    self._walk_text(part.text, word.line)

    def _set_variable(self, name: str, value: Variable) -> None:
        scope = self.script.scope
        if self.unless:
            if name in scope.variables:
                return
            value = replace(value, chosen=f"it depends on {self.unless[-1]}")
        self.script.choices.pop(name, None)
        if value.chosen:
            self.script.choices[name] = value.chosen
        scope.variables[name] = value

    def _read_builtin(self, node: Simple, arguments: list[Argument]) -> None:
        """`read -r -d '' NAME <<EOF` and `read -ra NAME <<< "$TEXT"`."""
        scope = self.script.scope
        *flags, name = [argument.text for argument in arguments]
        if node.document is not None:
            text = expand_document(node.document, scope)
            self._set_variable(name, Variable((text,)))
            return
        if node.text is None:
            return
        value = expand_text(node.text, scope)
        is_array = any(flag.startswith("-") and "a" in flag for flag in flags)
        if not is_array:
            self._set_variable(name, Variable((value,)))
            return
        items = [replace(value, text=word) for word in value.text.split()]
        self._set_variable(name, Variable(tuple(items), is_array=True))

    def _write_document(
        self, node: Simple, document: HereDocument, arguments: list[Argument]
    ) -> None:
        """Note a here-document that the command writes into a file."""
        scope = self.script.scope
        program = arguments[0].text
        target = None
        if program == "cat" and node.target is not None:
            target = expand_text(node.target, scope).text
        if program == "tee" and len(arguments) > 1:
            target = arguments[-1].text
        if target is not None:
            self.script.files[target] = expand_document(document, scope)

    def _try_script(self, node: Simple, arguments: list[Argument]) -> bool:
        """Walk a function, the text of `eval` and `bash -c`, or another script, if it is one."""
        if self.calls >= _MOST_CALLS:
            return False
        texts = [argument.text for argument in arguments]
        if texts[0] in self.functions:
            with self._enter_call(arguments[1:]):
                self.run(self.functions[texts[0]])
            return True
        if texts[0] == "eval":
            self._walk_text(" ".join(texts[1:]), node.line)
            return True
        for index, text in enumerate(texts[:-2]):
            if text in _COMMAND_SHELLS and re.fullmatch(r"-\w*c", texts[index + 1]):
                self._assign_all(node, exports=True)
                with self._enter_call(arguments[index + 4 :], arguments[:index]):
                    self._walk_text(texts[index + 2], node.line)
                return True
        return self._try_file(node, arguments)

    def _try_text(self, node: Simple, arguments: list[Argument]) -> bool:
        """Walk the text of a training that a program gets as an argument or a here-document.

        As in `ssh HOST "torchrun ..."`, `tmux new -d "..."`, `sbatch --wrap "..."`, `sbatch <<EOF`.
        """
        program = posixpath.basename(arguments[0].text)
        if self.calls >= _MOST_CALLS or program in _PRINTERS:
            return False
        scope = self.script.scope
        texts = [argument.text for argument in arguments]
        if node.document is not None and program in _SHELLS | _REMOTE:
            texts.append(expand_document(node.document, scope).text)
        for place, text in enumerate(texts):
            if place and " " in text.strip() and _STARTS.search(text):
                command = text.partition("--wrap=")[2] or text
                with self._enter_call(scope.parameters, arguments[:place]):
                    self._walk_text(command, node.line)
                return True
        return False

    def _walk_text(self, text: str, line: int) -> None:
        if self.calls < _MOST_CALLS:
            self.calls += 1
            self.read(text, self.file, line)
            self.calls -= 1

    @contextmanager
    def _enter_call(
        self, parameters: Iterable[Argument], prefix: Iterable[Argument] | None = None
    ) -> Iterator[None]:
        """Walk with other parameters, and with further words before every command."""
        scope = self.script.scope
        before = scope.parameters
        prefixes = self.prefixes
        scope.parameters = tuple(parameters)
        if prefix is not None:
            self.prefixes = [*prefixes, tuple(prefix)]
        self.calls += 1
        yield
        self.calls -= 1
        self.prefixes = prefixes
        scope.parameters = before

    def _try_file(self, node: Simple, arguments: list[Argument]) -> bool:
        """Walk the script whose path a command names, if it names one that can be read."""
        texts = [argument.text for argument in arguments]
        place = _find_script(texts)
        if place is None or arguments[place].missing:
            return False
        path = texts[place]
        document = self.script.files.get(path)
        text = self.find(path) if document is None else document.text
        if text is None:
            self.script.absent.setdefault(path, node.line)
            return False
        self._assign_all(node, exports=True)
        parameters = self.script.scope.parameters
        if texts[0] not in ("source", ".") or len(texts) > place + 1:
            parameters = tuple(arguments[place + 1 :])
        with self._enter_call(parameters, arguments[:place]):
            self.read(text, path)
        return True


def _find_script(texts: Sequence[str]) -> int | None:
    """Which word of a command is the path of a script: the first, or an argument of a shell."""
    if posixpath.basename(texts[0]) not in _SHELLS and texts[0] not in ("srun", "nohup", "exec"):
        return 0 if _SCRIPT.fullmatch(texts[0]) else None
    for place, text in enumerate(texts):
        if place and _SCRIPT.fullmatch(text):
            return place
    return None


def _matches(subject: Argument, pattern: Argument) -> bool:
    return not pattern.missing and fnmatch.fnmatchcase(subject.text, pattern.text)


def _append_value(before: Variable, value: Variable) -> Variable:
    """The value of a variable after `+=`."""
    if before.is_array or value.is_array:
        return Variable((*before.items, *value.items), is_array=True)
    first = before.first
    second = value.first
    missing = tuple(dict.fromkeys((*first.missing, *second.missing)))
    return Variable((Argument(first.text + second.text, second.line, missing),))


def read_script(text: str, file: str, *, find: Find, scope: ShellScope) -> Script:
    """The commands of a script with all that the text tells of their arguments.

    Raises syntax.TooDeep.
    """
    interpreter = _Interpreter(find, scope)
    interpreter.read(text, file)
    return interpreter.script


def list_cluster_variables(directives: Mapping[str, str]) -> dict[str, str]:
    """What Slurm sets for a job of these directives (`nodes`, `gpus`, ... ) in its environment."""
    values: dict[str, str] = {}
    for variable, directive in _CLUSTER.items():
        if directives.get(directive):
            values[variable] = directives[directive]
    return values
