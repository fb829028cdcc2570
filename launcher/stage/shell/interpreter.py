"""A script walked from top to bottom as if it were started without arguments -> its commands.

Nothing is run and nothing is written. A branch whose condition the script does not tell is walked as one that may be
taken: its commands are marked, and its assignments count where nothing else sets the variable.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launcher.stage.shell import conditions, lexer, syntax
from launcher.stage.shell.expansion import Argument, ShellScope, Variable, document_text, expand, expand_text
from launcher.stage.shell.syntax import (
    Arithmetic,
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
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
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
"""The text of another script by its path; None where it is not to be read."""


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """One command of a script with its arguments; `environment` are the variables that stand before it.

    `unless` says on what it depends whether the command runs at all. `prefixes` are the words before the script, or
    the text, that holds the command: `srun --nodes=2` of `srun --nodes=2 ./train.sh`.
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

    `exported` are the variables that it hands to its commands, `files` those that it writes, with their text,
    `mended` the lines (file, number) at which bash would have ended a command that was read on, `choices` what was
    taken of several, `absent` the scripts it starts that were not there. `skipped` are the flags in
    branches that are not taken, with the reason.
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
        self.script.mended += [(file, number) for number in tokens.mended]
        nodes = syntax.parse(tokens.tokens)
        before = self.file
        self.file = file
        self.run(nodes)
        self.file = before

    def run(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            self._node(node)

    def _node(self, node: Node) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS or len(self.script.commands) > _MOST_COMMANDS:
            return
        match node:
            case Simple():
                self._simple(node)
            case Joined():
                self._joined(node)
            case If():
                self._if(node)
            case For():
                self._for(node)
            case While():
                self._while(node)
            case Case():
                self._case(node)
            case FunctionDefinition():
                self.functions[node.name] = node.body
            case Arithmetic():
                pass

    def _maybe(self, nodes: tuple[Node, ...], why: str) -> None:
        self.unless.append(why)
        self.run(nodes)
        self.unless.pop()

    def _joined(self, node: Joined) -> None:
        value: bool | None = True
        for sign, item in node.items:
            if sign == "&&" and value is False:
                self._skip((item,), getattr(item, "line", 0))
                continue
            if sign == "||" and value is True:
                continue
            is_test = isinstance(item, Simple) and bool(item.words) and item.words[0].keyword in ("[", "[[", "test")
            if is_test:
                value = conditions.holds((item,), self.script.scope)
            elif value is None:
                self._maybe((item,), "a condition")
            else:
                self._node(item)
                value = True

    def _if(self, node: If) -> None:
        for branch in node.branches:
            self._test_assignments(branch.condition)
            value = conditions.holds(branch.condition, self.script.scope)
            if value is True:
                self.run(branch.body)
                for other in node.branches[node.branches.index(branch) + 1 :]:
                    self._skip(other.body, node.line)
                self._skip(node.otherwise, node.line)
                return
            if value is False:
                self._skip(branch.body, node.line)
            if value is None:
                self._maybe(branch.body, f"the condition in line {node.line}")
                for other in node.branches[node.branches.index(branch) + 1 :]:
                    self._maybe(other.body, f"the condition in line {node.line}")
                self._maybe(node.otherwise, f"the condition in line {node.line}")
                return
        self.run(node.otherwise)

    def _skip(self, nodes: tuple[Node, ...], line: int) -> None:
        """Note the flags of a branch that is not taken."""
        reason = f"only if the condition in line {line} holds, which it does not"
        for word in syntax.words(nodes):
            flag = word.parts[0] if word.parts else None
            if flag is not None and flag.kind == "text" and _FLAG.match(flag.text):
                for name in _FLAGS.findall(flag.text):
                    self.script.skipped.append((Argument(name, word.line), reason))

    def _test_assignments(self, nodes: tuple[Node, ...]) -> None:
        """Commands of a condition that are no tests, such as `if ! accelerate launch ...; then`."""
        for node in nodes:
            if isinstance(node, Simple) and node.words and node.words[0].keyword not in ("[", "[[", "test"):
                self._simple(node)

    def _for(self, node: For) -> None:
        items = [argument for word in node.items for argument in expand(word, self.script.scope)]
        if node.variable and items:
            chosen = ""
            if len(items) > 1:
                chosen = f"the first of {len(items)} values of the loop in line {node.line}"
            self._set(node.variable, Variable((items[0],), chosen=chosen))
        self.run(node.body)

    def _while(self, node: While) -> None:
        scope = self.script.scope
        for _ in range(_MOST_ROUNDS):
            value = conditions.holds(node.condition, scope)
            if value is False:
                return
            before = scope.parameters
            if value is None:
                self._maybe(node.body, f"the loop in line {node.line}")
            else:
                self.run(node.body)
            # only what takes the arguments of a script one by one is walked again
            if scope.parameters == before:
                return

    def _case(self, node: Case) -> None:
        subject = expand_text(node.word, self.script.scope)
        for choice in node.choices:
            for pattern in choice.patterns:
                if subject.missing:
                    continue
                test = Simple((), (_WORDS["["], node.word, _WORDS["="], pattern), node.line)
                if conditions.holds((test,), self.script.scope):
                    self.run(choice.body)
                    for other in node.choices:
                        if other is not choice:
                            self._skip(other.body, node.line)
                    return
        if subject.missing:
            for choice in node.choices:
                self._maybe(choice.body, f"the case in line {node.line}")

    def _simple(self, node: Simple) -> None:
        scope = self.script.scope
        if not node.words:
            for assignment in node.assignments:
                self._assign(assignment, exports=False)
            return
        first = node.words[0].keyword
        if first in _DECLARATIONS:
            self._declare(node, exports=first == "export" or any(word.keyword == "-x" for word in node.words))
            return
        arguments = [argument for word in node.words for argument in expand(word, scope)]
        if not arguments:
            return
        name = arguments[0].text
        if name == "read":
            self._read_builtin(node, arguments)
            return
        if name == "shift":
            count = int(arguments[1].text) if len(arguments) > 1 and arguments[1].text.isdecimal() else 1
            scope.parameters = scope.parameters[count:]
            return
        if name == "set" and len(arguments) > 1 and arguments[1].text == "--":
            scope.parameters = tuple(arguments[2:])
            return
        if node.document is not None:
            self._document(node, arguments)
        if self._starts_script(node, arguments) or self._starts_text(node, arguments):
            return
        environment = tuple(
            (item.name, expand_text(item.values[0], scope)) for item in node.assignments if item.values
        )
        unless = self.unless[-1] if self.unless else ""
        command = ScriptCommand(
            arguments=tuple(arguments),
            environment=environment,
            line=node.line,
            file=self.file,
            unless=unless,
            prefixes=tuple(self.prefixes),
        )
        self.script.commands.append(command)

    def _declare(self, node: Simple, *, exports: bool) -> None:
        for assignment in node.assignments:
            self._assign(assignment, exports=exports)
        for word in node.words[1:]:
            name = word.keyword or ""
            value = self.script.scope.variables.get(name)
            if exports and value is not None:
                self.script.exported[name] = value.first

    def _assign(self, assignment: Assignment, *, exports: bool) -> None:
        scope = self.script.scope
        name = assignment.name
        self._started_inside(assignment)
        if assignment.is_array:
            items = [argument for word in assignment.values for argument in expand(word, scope)]
            value = Variable(tuple(items), is_array=True)
        else:
            value = Variable((expand_text(assignment.values[0], scope),))
        before = scope.variables.get(name)
        if assignment.adds and before is not None:
            value = _added(before, value)
        self._set(name, value)
        if exports:
            self.script.exported[name] = value.first

    def _started_inside(self, assignment: Assignment) -> None:
        """Walk `NAME=$(accelerate launch ...)`, whose output becomes the value."""
        for word in assignment.values:
            for part in word.parts:
                if part.kind == "command" and _STARTS.search(part.text) and self.calls < _MOST_CALLS:
                    self._nested(part.text, word.line)

    def _set(self, name: str, value: Variable) -> None:
        scope = self.script.scope
        if self.unless:
            if name in scope.variables:
                return
            value = Variable(value.items, value.is_array, f"it depends on {self.unless[-1]}")
        if value.chosen:
            self.script.choices[name] = value.chosen
        else:
            self.script.choices.pop(name, None)
        scope.set(name, value)

    def _read_builtin(self, node: Simple, arguments: list[Argument]) -> None:
        """`read -r -d '' NAME <<EOF` and `read -ra NAME <<< "$TEXT"`."""
        scope = self.script.scope
        name = arguments[-1].text
        if node.document is not None:
            self._set(name, Variable((document_text(node.document, scope),)))
        elif node.text is not None:
            value = expand_text(node.text, scope)
            is_array = any("a" in argument.text for argument in arguments[1:-1] if argument.text.startswith("-"))
            words = tuple(Argument(word, value.line, value.missing) for word in value.text.split())
            self._set(name, Variable(words, is_array=True) if is_array else Variable((value,)))

    def _document(self, node: Simple, arguments: list[Argument]) -> None:
        """A here-document that is written into a file."""
        target = None
        if arguments[0].text == "cat" and node.target is not None:
            target = expand_text(node.target, self.script.scope).text
        if arguments[0].text == "tee" and len(arguments) > 1:
            target = arguments[-1].text
        if target is not None and node.document is not None:
            self.script.files[target] = document_text(node.document, self.script.scope)

    def _starts_script(self, node: Simple, arguments: list[Argument]) -> bool:
        """Walk a function, the text of `eval` and `bash -c`, or another script; False where it is none of these."""
        texts = [argument.text for argument in arguments]
        if self.calls >= _MOST_CALLS:
            return False
        if texts[0] in self.functions:
            self._call(self.functions[texts[0]], tuple(arguments[1:]))
            return True
        if texts[0] == "eval":
            self._nested(" ".join(texts[1:]), node.line)
            return True
        for index, text in enumerate(texts):
            if text in ("bash", "sh", "/bin/bash", "/bin/sh") and len(texts) > index + 2:
                flags = texts[index + 1]
                if re.fullmatch(r"-\w*c", flags):
                    self._exported_before(node)
                    scope = self.script.scope
                    before = scope.parameters
                    scope.parameters = tuple(arguments[index + 4 :])
                    self.prefixes.append(tuple(arguments[:index]))
                    self._nested(texts[index + 2], node.line)
                    self.prefixes.pop()
                    scope.parameters = before
                    return True
        return self._other_script(node, arguments)

    def _starts_text(self, node: Simple, arguments: list[Argument]) -> bool:
        """Walk the text of a training that a program gets as one argument or as a here-document.

        Such as `ssh HOST "torchrun ..."`, `tmux new -d "..."`, `sbatch --wrap "..."` and `sbatch <<EOF`.
        """
        program = posixpath.basename(arguments[0].text)
        if self.calls >= _MOST_CALLS or program in _PRINTERS:
            return False
        texts = [(place, argument.text) for place, argument in enumerate(arguments[1:], start=1)]
        if node.document is not None and (program in _SHELLS or program in _REMOTE):
            texts.append((len(arguments), document_text(node.document, self.script.scope).text))
        for place, text in texts:
            if " " in text.strip() and _STARTS.search(text):
                self.prefixes.append(tuple(arguments[:place]))
                self._nested(text.partition("--wrap=")[2] or text, node.line)
                self.prefixes.pop()
                return True
        return False

    def _exported_before(self, node: Simple) -> None:
        for assignment in node.assignments:
            self._assign(assignment, exports=True)

    def _nested(self, text: str, line: int) -> None:
        self.calls += 1
        self.read(text, self.file, line)
        self.calls -= 1

    def _call(self, body: tuple[Node, ...], parameters: tuple[Argument, ...]) -> None:
        scope = self.script.scope
        before = scope.parameters
        scope.parameters = parameters
        self.calls += 1
        self.run(body)
        self.calls -= 1
        scope.parameters = before

    def _other_script(self, node: Simple, arguments: list[Argument]) -> bool:
        texts = [argument.text for argument in arguments]
        place = 0
        if posixpath.basename(texts[0]) in _SHELLS or texts[0] in ("srun", "nohup", "exec"):
            place = 1
            while place < len(texts) and not _SCRIPT.fullmatch(texts[place]):
                place += 1
        if place >= len(texts) or not _SCRIPT.fullmatch(texts[place]) or arguments[place].missing:
            return False
        path = texts[place]
        document = self.script.files.get(path)
        text = self.find(path) if document is None else document.text
        if text is None:
            self.script.absent.setdefault(path, node.line)
            return False
        self._exported_before(node)
        scope = self.script.scope
        before = scope.parameters
        if texts[0] not in ("source", ".") or len(texts) > place + 1:
            scope.parameters = tuple(arguments[place + 1 :])
        self.calls += 1
        self.prefixes.append(tuple(arguments[:place]))
        self.read(text, path)
        self.prefixes.pop()
        self.calls -= 1
        scope.parameters = before
        return True


_WORDS = {sign: lexer.bare_default(sign, 0) for sign in ("[", "=")}


def _added(before: Variable, value: Variable) -> Variable:
    """The value of a variable after `+=`."""
    if before.is_array or value.is_array:
        return Variable((*before.items, *value.items), is_array=True)
    first, second = before.first, value.first
    missing = tuple(dict.fromkeys((*first.missing, *second.missing)))
    return Variable((Argument(first.text + second.text, second.line, missing),))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSetup:
    """What a script is walked with: variables that are set, its arguments, and the devices that it would count."""

    folder: str
    known: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    gpus: int = 1
    nodes: int = 1


def read_script(text: str, file: str, *, find: Find, setup: ScriptSetup) -> Script:
    """The commands of a script with all that the text tells of their arguments. Raises syntax.TooDeep."""
    parameters = tuple(Argument(argument, 0) for argument in setup.arguments)
    scope = ShellScope(folder=setup.folder, parameters=parameters, gpus=setup.gpus, nodes=setup.nodes)
    for name, value in setup.known.items():
        scope.set(name, Variable((Argument(value, 0),)))
    interpreter = _Interpreter(find, scope)
    interpreter.read(text, file)
    return interpreter.script


def cluster_variables(directives: Mapping[str, str]) -> dict[str, str]:
    """What Slurm sets for a job of these directives (`nodes`, `gpus`, ... ) in its environment."""
    values: dict[str, str] = {}
    for variable, directive in _CLUSTER.items():
        if directives.get(directive):
            values[variable] = directives[directive]
    return values
