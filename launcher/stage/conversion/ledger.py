"""What becomes of every setting: carried into the stage file, or left out with the reason."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from launcher.errors import shorten
from launcher.lazy_dataclass import dataclass
from launcher.redaction import redact
from launcher.stage.conversion.settings import Recipe, SourceSetting, is_off, is_on
from launcher.stage.conversion.sharding import ShardingName
from launcher.stage.draft import Draft, Row
from launcher.upstream import history
from launcher.upstream.entry import Entry
from launcher.upstream.history import ArgumentChange
from launcher.upstream.schema import Schema

PLACEHOLDER = "SET_ME"
"""Stands for a value that every stage file needs and the source does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncarriedSetting:
    """A setting that is left out. `matters`: the stage trains, or runs, differently without it."""

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
    """`carried` are the keys of the stage file that a setting went to, by the setting as written.

    `kinds` are those of local rows, as `rows.Rows` has them.
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

    def rename(self, target: str, key: str) -> None:
        """Note that what went to `target` went to `key`."""
        for targets in self.carried.values():
            if target in targets:
                targets[targets.index(target)] = key

    def leave(self, setting: SourceSetting, reason: str, *, matters: bool = True) -> None:
        """Leave a setting out, unless it is carried already."""
        if setting.written not in self.carried:
            omission = UncarriedSetting(setting=setting, reason=reason, matters=matters)
            self.omissions[setting.written] = omission

    def drop(self, target: str, reason: str, *, matters: bool = True) -> None:
        """Take an argument out again, and leave out the settings that it came from."""
        self.draft.rows.pop(target, None)
        for written, targets in [*self.carried.items()]:
            if target not in targets:
                continue
            targets.remove(target)
            if not targets:
                del self.carried[written]
                self.leave(self._find_setting(written), reason, matters=matters)

    def _find_setting(self, written: str) -> SourceSetting:
        recipe = self.recipe
        places = (recipe.settings, recipe.launchers, recipe.directives, recipe.environment)
        for setting in itertools.chain(*places):
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

    def take_on(self, *keys: str) -> SourceSetting | None:
        """The same, if it is a switch that is on."""
        setting = self.take(*keys)
        if setting is None or not is_on(setting.value):
            return None
        return setting

    def shard(self, sharding: ShardingName, *settings: SourceSetting) -> None:
        """Write `deepspeed:`, which these settings say."""
        self.draft.deepspeed = sharding.name
        for setting in settings:
            self.point(setting, "deepspeed")
        if sharding.advice:
            self.check(settings[0], sharding.advice)

    def switch_on_lora(self, rank: SourceSetting | None) -> bool:
        """Carry the rank of LoRA, if a source names one above 0."""
        if rank is None or not isinstance(rank.value, int) or rank.value <= 0:
            return False
        self.carry(rank, "use_peft", value=True)
        self.carry(rank, "lora_r", rank.value)
        return True

    def carry_by_name(
        self,
        setting: SourceSetting,
        names: Mapping[str, str],
        reasons: Mapping[str, str],
        unneeded: Mapping[str, str],
    ) -> None:
        """Carry a setting whose name, or that which `names` has for it, is an argument.

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
            self.leave(setting, explain_missing(setting))
            return
        if setting.key in reasons:
            self.leave(setting, reasons[setting.key], matters=not is_off(setting.value))
            return
        name = names.get(setting.key, setting.key)
        target = self._find_argument(name)
        if target is None:
            self._leave_unknown(setting, name)
        else:
            self._carry_value(setting, target)

    def _carry_value(self, setting: SourceSetting, target: str) -> None:
        value = setting.value
        refusal = self.refusal(target, value)
        if value is None:
            self.leave(setting, "empty: the default counts", matters=False)
        elif value is False and self.schema.fields[target].default is False:
            self.leave(setting, f"`{target}` is off by default", matters=False)
        elif target in self.draft.rows:
            self.leave(setting, f"`{target}` is written already", matters=False)
        elif "${" in str(value):
            reason = "it holds `${`, which launch would read as a reference: write the value"
            self.leave(setting, reason)
        elif refusal is not None:
            self.leave(setting, f"`{target}`: {refusal}")
        else:
            self.carry(setting, target, value)

    def refusal(self, target: str, value: Any) -> str | None:
        """Why the trainer's parser refuses a value of an argument; None if it takes it."""
        if self.schema.in_file(target, value):
            return None
        if isinstance(value, dict) and "dict" not in self.schema.fields[target].type:
            return "takes no mapping"
        return self.schema.refusal(target, self.schema.words(target, value))

    def _find_argument(self, name: str) -> str | None:
        """The argument of this name, else the one that the name was changed or is short for."""
        if name in self.schema.fields:
            return name
        moved = self.entry.moved.get(name)
        if moved is not None and moved.to in self.schema.fields:
            return moved.to
        flag = self.schema.taken_as(name)
        # few letters may be meant for anything
        if len(name) > 4 and flag is not None and not flag.negated:
            return flag.name
        events = self.past(name)
        if events and events[0].gone:
            return history.find_present_name(events[0], self.past, self.schema.fields)
        return None

    def _leave_unknown(self, setting: SourceSetting, target: str) -> None:
        matters = not is_off(setting.value)
        flag = self.schema.taken_as(target)
        lost = self.entry.lost.get(target)
        moved = self.entry.moved.get(target)
        changes = self.past(target)
        if flag is not None and flag.negated:
            self.carry(setting, flag.name, value=False)
        elif lost is not None:
            reason = f"{lost.did}; now {lost.now}: {lost.instead}"
            self.leave(setting, reason, matters=lost.mattered(setting.value))
        elif moved is not None and moved.to is None:
            self.leave(setting, moved.why, matters=False)
        elif changes and changes[0].gone:
            self.leave(setting, history.describe_event(changes[0]), matters=matters)
        else:
            reason = f"{self.schema.script} has no such argument"
            if not matters:
                reason = f"off there; {reason}"
            self.leave(setting, reason, matters=matters)

    def write_placeholder(self, setting: SourceSetting, target: str) -> None:
        """Write a value that has to be filled in for one that the source does not tell."""
        name = re.sub(r"\W", "", setting.missing[0])
        self.carry(setting, target, f"{PLACEHOLDER}_{name}"[:60].rstrip("_"))
        self.check(setting, f"write `{target}`: {explain_missing(setting)}", target=target)


def is_secret(setting: SourceSetting) -> bool:
    """Whether a setting holds a token or a password, by its name or by its shape."""
    value = setting.value
    if not isinstance(value, str):
        return False
    return holds_secret_by_name(setting.key, value) or redact(value) != value


def holds_secret_by_name(name: str, value: str) -> bool:
    return redact({name: value})[name] != value


def explain_missing(setting: SourceSetting) -> str:
    """Why a setting has no value here."""
    expressions = []
    for name in dict.fromkeys(setting.missing):
        shown = shorten(redact(name), 60)
        expressions.append(f"`{shown}`")
    return f"its value is {', '.join(expressions)}, which the script does not tell"
