"""The command that starts one stage: its words, its environment, what of it is secret."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.printable import printable
from launcher.redaction import redact


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The whole intention to start one stage. `env` holds only what is added to the environment.

    `variables` are those of `env` that hold secrets, and the shell's variables that hold the same.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """The command as it can be pasted into a POSIX shell; redacted, that fills in the secrets."""
        words = [
            f'{name}="{value}"' if value == f"${self.variables.get(name)}" else f"{name}={_quoted(value)}"
            for name, value in self.env.items()
        ]
        return " ".join([*words, *map(_quoted, self.argv)])

    def redacted(self) -> Command:
        """The same without secrets, for whatever is shown or kept."""
        named = {name: f"${variable}" for name, variable in self.variables.items()}
        shown = redact(replace(self, env={**self.env, **named}))
        return replace(shown, variables=self.variables)


def _quoted(word: str) -> str:
    """A word for a shell; where it is not fit for a terminal as it is, in the `$'...'` of bash and zsh."""
    if printable(word) == word:
        return shlex.quote(word)
    shown = "".join(
        one if one.isprintable() and one not in "\\'#" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(one))
        for one in word
    )
    return f"$'{shown}'"
