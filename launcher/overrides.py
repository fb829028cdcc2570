"""`key=value` texts of the command line -> changes to the values of a file: `Tree`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from launcher.document import LOADER, UNUSABLE, Builder, Origin, bad, join, plain
from launcher.errors import Finding, InvalidConfig, brief
from launcher.keys import KEYS

# Ours: everything else that an override names without `args.` is an argument of upstream's.
OPTIONS = frozenset(KEYS) - {"args", "extends"}
_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]{1,200}|\[[0-9]{1,6}\])*\Z")
_STEPS = re.compile(r"\[([0-9]+)\]|([\w-]+)")


@dataclass(frozen=True, slots=True)
class Tree:
    """The values of a file, to which `key=value` texts are applied."""

    path: Path
    value: dict[str, Any]
    origins: dict[str, Origin]

    def override(self, text: str) -> Iterator[Finding]:
        """Apply one override in place; says what is wrong with it instead where it cannot be."""
        key, equals, raw = text.partition("=")
        if UNUSABLE.search(text):
            shown = text.encode("utf-8", "backslashreplace").decode()
            yield self._fault(text, None, f"`{brief(shown)}` is not UTF-8", None)
        elif not equals or not _OVERRIDE.match(key):
            help = "write for example learning_rate=1e-5"
            yield self._fault(text, None, f"`{brief(text)}` is not of the form key=value", help)
        elif key == "extends":
            yield self._fault(text, key, f"`{brief(text)}`: a parent is named in the file", None)
        elif not raw:
            # a variable of the shell that is not set, as often as not
            help = f"write {key}=null to leave it to upstream, or {key}='\"\"' for an empty text"
            yield self._fault(text, key, f"`{brief(text)}` has no value", help)
        elif raw == "None":
            yield self._fault(
                text, key, f"`{brief(text)}` would be the text 'None'", f"write {key}=null"
            )
        else:
            try:
                value = _override_value(raw)
            except (yaml.YAMLError, InvalidConfig) as error:
                help = f"for a text, quote it for YAML too: '{key}=\"...\"'"
                yield self._fault(text, key, f"`{brief(text)}`: {_reason(error)}", help)
            else:
                yield from self._set(_full_key(key), value, text)

    def _set(self, key: str, value: Any, text: str) -> Iterator[Finding]:
        steps = [int(index) if index else name for index, name in _STEPS.findall(key)]
        node: Any = self.value
        path = ""
        for number, written in enumerate(steps):
            step = _place(node, written)
            if step is None:
                yield self._no_place(key, text, node, path)
                return
            path = join(path, step)
            if number == len(steps) - 1:
                node[step] = value
            elif isinstance(node, dict) and node.get(step) is None:
                # what is empty, or not there, can become a mapping: its place is this override
                node[step] = {}
                # but for all the arguments: that is the place of those that are missing
                if path != "args":
                    self.origins[path] = Origin(str(self.path), None, text)
            node = node[step]
        forget(self.origins, path)
        self.origins[path] = Origin(str(self.path), None, text)

    def _no_place(self, key: str, text: str, node: Any, path: str) -> Finding:
        shown = path.removeprefix("args.")
        if isinstance(node, list):
            reason = f"is a list of {len(node)} entries, the first is [0]"
        elif isinstance(node, dict):
            reason = "is no list"
        else:
            reason = "holds nothing that has parts"
        return self._fault(text, key, f"`{brief(text)}`: `{shown}` {reason}", None)

    def _fault(self, text: str, key: str | None, message: str, help: str | None) -> Finding:
        # what is no UTF-8 cannot be printed
        shown = text.encode("utf-8", "backslashreplace").decode()
        found = bad(self.path, "bad-override", message, None, help)
        return replace(found, key=key, override=shown)


def _place(node: Any, step: str | int) -> str | int | None:
    """The key or index that a step means in this value; None where there is no such place."""
    if isinstance(node, dict):
        return step if isinstance(step, str) else None
    if not isinstance(node, list):
        return None
    # `.1`, as omegaconf writes it, is [1]
    index = int(step) if isinstance(step, str) and step.isdecimal() else step
    return index if isinstance(index, int) and index < len(node) else None


def _reason(error: yaml.YAMLError | InvalidConfig) -> str:
    if isinstance(error, InvalidConfig):
        return error.findings[0].message
    problem = getattr(error, "problem", None)
    return f"the value is not valid YAML{f': {problem}' if problem else ''}"


def _override_value(raw: str) -> Any:
    """What stands after `=`: a YAML list, mapping or quoted text, else one plain value.

    Text that only looks like YAML (`a: b`, `x # y`, `- z`, `{% if %}`) is kept whole.
    """
    stripped = raw.strip()
    if stripped[:1] in {"[", "{"} and stripped[:2] not in {"{%", "{{", "{#"}:
        return _yaml(stripped)
    if stripped[:1] in {"'", '"'}:
        try:
            return _yaml(stripped)
        except (yaml.YAMLError, InvalidConfig):
            return raw
    value = plain(stripped)
    return raw if isinstance(value, str) else value


def _yaml(raw: str) -> Any:
    builder = Builder("override")
    value = builder.build(yaml.parse(raw, Loader=LOADER))
    if builder.findings:
        raise InvalidConfig(builder.findings)
    return value


def _full_key(key: str) -> str:
    """`args.` may be left out: what is no option of ours is an argument of upstream's."""
    key = re.sub(r"^deepspeed_config(?![\w-])", "deepspeed", key.removeprefix("open_instruct."))
    first = re.split(r"[.\[]", key, maxsplit=1)[0]
    return key if first in OPTIONS or first in {"args", "num_gpus"} else f"args.{key}"


def forget(origins: dict[str, Origin], path: str) -> None:
    """Drop the places of everything below `path`: it was replaced."""
    for known in [known for known in origins if known.startswith((f"{path}.", f"{path}["))]:
        del origins[known]


def spelt(value: Any) -> str:
    """A value as an override on the command line spells it, so that it is read as the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    # a JSON text is YAML's too, and quotes keep `1e-5` or `no` a text; it is interpolated once more
    return json.dumps(value, ensure_ascii=False).replace("${", r"\\${")
