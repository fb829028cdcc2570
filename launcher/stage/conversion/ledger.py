"""What becomes of every setting of a source: it is carried into the stage file, or left out with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import brief
from launcher.redaction import redact
from launcher.stage.conversion.settings import Recipe, SourceSetting, is_off
from launcher.stage.draft import Draft, Row
from launcher.upstream import history
from launcher.upstream.entry import Entry
from launcher.upstream.history import ArgumentChange
from launcher.upstream.schema import Schema

PLACEHOLDER = "SET_ME"
"""What stands for a value that the source does not tell and no stage file can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncarriedSetting:
    """A setting that is left out. `matters`: without it the stage trains, or is run, differently."""

    setting: SourceSetting
    reason: str
    matters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that a person has to look at, and the setting that it is about.

    `target` is the argument whose value it is about; it falls with that value.
    """

    setting: SourceSetting
    advice: str
    target: str = ""


@dataclass(slots=True, kw_only=True)
class ConversionLedger:
    """`carried` holds the keys of the stage file that a setting went to, by the setting as it was written.

    `kinds` are those of the rows that lie here, as `rows.Rows` has them.
    """

    recipe: Recipe
    draft: Draft
    schema: Schema
    entry: Entry
    past: Callable[[str], tuple[ArgumentChange, ...]]
    carried: dict[str, list[str]] = field(default_factory=dict)
    omissions: dict[str, UncarriedSetting] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    def is_settled(self, setting: SourceSetting) -> bool:
        return setting.written in self.carried or setting.written in self.omissions

    def carry(self, setting: SourceSetting, target: str, value: Any, *, note: str = "") -> None:
        """Write an argument of the trainer's that a setting says."""
        comment = note
        if not comment and setting.key != target:
            comment = setting.written.lstrip("-")
        self.draft.rows[target] = Row(value, comment)
        self.point(setting, target)

    def point(self, setting: SourceSetting, target: str) -> None:
        """Note that a setting is expressed by a key of the stage file."""
        self.omissions.pop(setting.written, None)
        targets = self.carried.setdefault(setting.written, [])
        if target not in targets:
            targets.append(target)

    def leave(self, setting: SourceSetting, reason: str, *, matters: bool = True) -> None:
        """Leave a setting out, unless it is carried already."""
        if setting.written not in self.carried:
            self.omissions[setting.written] = UncarriedSetting(setting=setting, reason=reason, matters=matters)

    def drop(self, target: str, reason: str, *, matters: bool = True) -> None:
        """Take an argument out again: the settings that it came from are left out for this reason."""
        self.draft.rows.pop(target, None)
        for written, targets in [*self.carried.items()]:
            if target not in targets:
                continue
            targets.remove(target)
            if not targets:
                del self.carried[written]
                self.leave(self._setting(written), reason, matters=matters)

    def _setting(self, written: str) -> SourceSetting:
        recipe = self.recipe
        for setting in (*recipe.settings, *recipe.launchers, *recipe.directives, *recipe.environment):
            if setting.written == written:
                return setting
        return SourceSetting(key=written, value=None, written=written, file=str(recipe.path))

    def check(self, setting: SourceSetting, advice: str, *, target: str = "") -> None:
        self.checks.append(Check(setting=setting, advice=advice, target=target))

    def take(self, *keys: str) -> SourceSetting | None:
        """The setting of one of these names that is not settled yet, if its value is known."""
        for key in keys:
            setting = self.recipe.get(key)
            if setting is not None and not self.is_settled(setting) and not setting.missing:
                return setting
        return None

    def by_name(
        self, setting: SourceSetting, names: Mapping[str, str], reasons: Mapping[str, str], unneeded: Mapping[str, str]
    ) -> None:
        """Carry a setting whose name, or the name that `names` has for it, is an argument of the trainer's.

        `reasons` are why names have no counterpart, `unneeded` why others need none.
        """
        if self.is_settled(setting):
            return
        if is_secret(setting):
            self.leave(setting, "a secret: set it where launch runs; no file holds it")
            return
        if setting.key in unneeded:
            self.leave(setting, unneeded[setting.key], matters=False)
            return
        if setting.missing:
            self.leave(setting, unknown_value(setting), matters=True)
            return
        if setting.key in reasons:
            self.leave(setting, reasons[setting.key], matters=not is_off(setting.value))
            return
        target = names.get(setting.key, setting.key)
        if target not in self.schema.fields:
            renamed = self._renamed(target)
            if renamed is None:
                self._leave_unknown(setting, target)
                return
            target = renamed
        self._carry_value(setting, target, setting.value)

    def _carry_value(self, setting: SourceSetting, target: str, value: Any) -> None:
        known = self.schema.fields[target]
        if value is None:
            self.leave(setting, "empty: the default counts", matters=False)
            return
        if value is False and known.default is False:
            self.leave(setting, f"`{target}` is off by default", matters=False)
            return
        if target in self.draft.rows:
            self.leave(setting, f"`{target}` is written already", matters=False)
            return
        if "${" in str(value):
            self.leave(setting, "it holds `${`, which launch would read as a reference: write the value")
            return
        reason = self.refusal(target, value)
        if reason is not None:
            self.leave(setting, f"`{target}`: {reason}")
            return
        self.carry(setting, target, value)

    def refusal(self, target: str, value: Any) -> str | None:
        """Why the trainer's parser refuses a value of an argument; None where it takes it."""
        if self.schema.in_file(target, value):
            return None
        if isinstance(value, dict) and "dict" not in self.schema.fields[target].type:
            return "takes no mapping"
        return self.schema.refusal(target, self.schema.words(target, value))

    def _renamed(self, name: str) -> str | None:
        """What an argument of this name is called now."""
        moved = self.entry.moved.get(name)
        if moved is not None and moved.to in self.schema.fields:
            return moved.to
        flag = self.schema.taken_as(name) if len(name) > 4 else None
        if flag is not None and not flag.negated:
            return flag.name
        events = self.past(name)
        if events and events[0].gone:
            return history.called_now(events[0], self.past, self.schema.fields)
        return None

    def _leave_unknown(self, setting: SourceSetting, target: str) -> None:
        matters = not is_off(setting.value)
        flag = self.schema.taken_as(target)
        if flag is not None and flag.negated:
            self.carry(setting, flag.name, value=False)
            return
        lost = self.entry.lost.get(target)
        if lost is not None:
            self.leave(setting, f"{lost.did}; now {lost.now}: {lost.instead}", matters=lost.mattered(setting.value))
            return
        moved = self.entry.moved.get(target)
        if moved is not None and moved.to is None:
            self.leave(setting, moved.why, matters=False)
            return
        events = self.past(target)
        if events and events[0].gone:
            self.leave(setting, history.sentence(events[0]), matters=matters)
            return
        reason = f"{self.schema.script} has no such argument"
        self.leave(setting, reason if matters else f"off there; {reason}", matters=matters)

    def placeholder(self, setting: SourceSetting, target: str) -> None:
        """Write a value that has to be filled in for one that the source does not tell."""
        name = "".join(character for character in setting.missing[0] if character.isalnum() or character == "_")
        self.carry(setting, target, f"{PLACEHOLDER}_{name}"[:60] if name else PLACEHOLDER)
        self.check(setting, f"write `{target}`: {unknown_value(setting)}", target=target)


def is_secret(setting: SourceSetting) -> bool:
    """Whether a setting holds a token or a password, by its name or by its shape."""
    value = setting.value
    if not isinstance(value, str):
        return False
    return holds_secret_by_name(setting.key, value) or redact(value) != value


def holds_secret_by_name(name: str, value: str) -> bool:
    return redact({name: value})[name] != value


def unknown_value(setting: SourceSetting) -> str:
    """Why a setting has no value here."""
    expressions = ", ".join(f"`{brief(redact(name), 60)}`" for name in dict.fromkeys(setting.missing))
    return f"its value is {expressions}, which the script does not tell"
