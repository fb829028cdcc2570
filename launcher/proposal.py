"""What a search found -> a stage file that `launch sft` takes as it is, with what each change gained.

It extends the file that was tuned and holds what differs, overrides of the command line included: the
author's comments stay where they are, and the changes can be read at a glance. Upstream's flat files
cannot be extended by launch's own keys: of those the whole stage is written.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher import config, rundir
from launcher.comparison import Spread
from launcher.config import Config
from launcher.errors import Finding, NotReady, not_ready, usage
from launcher.keys import DEEPSPEED
from launcher.levers import Setting, Settings, Space, by_lever, described
from launcher.manifest import escaped
from launcher.redaction import redact

MARK = "# Tuned by launch: "
_NESTED = ("batch", "expect", "probe", "gates", "slurm", "skypilot")
_ENDS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one lever of the proposed setting gains, as a `share`; None where not measured alone.

    It is by medians; its least and most are by any run with the lever and any without. `beside` is the
    micro-batch that came with it, where leaving it out made room for a smaller one only.
    """

    lever: str
    before: Setting | None
    after: Setting
    share: Spread | None
    beside: str | None = None

    def text(self) -> str:
        """In one line, for a comment."""
        was = "" if self.before is None else f"was {_word(self.before)}; "
        if self.share is None:
            return f"{was}measured only together with the other changes"
        told = f"{was}gains {self.share.median:+.1%}"
        if self.share.min != self.share.max:
            told += f" ({self.share.min:+.1%} – {self.share.max:+.1%})"
        return told + (f" (with {self.beside})" if self.beside else "")

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {
            "lever": self.lever, "before": self.before, "after": self.after,
            "gain": None if self.share is None else round(self.share.median, 4),
            "spread": None if self.share is None else self.share.as_json(), "with": self.beside,
            "said": described(self.lever, self.after),
        }  # fmt: skip


def _word(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A stage file in the making: the space and the setting, and the lines that its head says."""

    space: Space
    settings: Settings
    gains: Sequence[Gain]
    head: Sequence[str]
    overrides: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def text(self, place: Path) -> str:
        """The file as it would stand at `place`."""
        told = self.space.plan.stage
        source = told.config.path
        # a path may hold what ends a comment
        told_first, *more = (_ENDS.sub(" ", line) for line in redact(self.head))
        lines = [MARK + told_first, *(f"# {line}" for line in more)]
        written = config.load(source)
        wanted = config.load(source, (*self.overrides, *_texts(self.space, self.settings)))
        comments = self._comments(told.config.shape)
        if told.config.shape == "flat":
            values = {"stage": told.options.stage, "backend": told.options.backend,
                      **wanted.options, "args": dict(wanted.args)}  # fmt: skip
        else:
            lines.append(f"extends: {_scalar(_relative(source, place))}")
            values = _differences(written, wanted)
        values = {"name": f"{told.name}-tuned", **values}
        if (zero := self._own_deepspeed(place)) is not None:
            values["deepspeed"] = zero
        if told.config.shape == "wrapped":
            values = _wrapped(values)
        lines += _lines(redact(values), comments)
        return "\n".join(lines) + "\n"

    def _own_deepspeed(self, place: Path) -> str | None:
        """A DeepSpeed file that lies beside the stage file is not beside this one."""
        opts = self.space.plan.stage.options
        if (
            opts.deepspeed is None
            or opts.deepspeed_name in DEEPSPEED
            or "deepspeed" in self.settings
        ):
            return None
        return _relative(opts.deepspeed, place)

    def _comments(self, shape: str) -> dict[str, str]:
        """A comment for the first key of each lever."""
        gains = {gain.lever: gain.text() for gain in self.gains}
        found: dict[str, str] = {}
        for lever, keys in by_lever(self.space, self.settings).items():
            # the split is another where `packing` makes other rows of the same tokens
            if lever in gains:
                for nth, key in enumerate(keys):
                    said = (
                        gains[lever] if not nth else f"goes with {next(iter(keys)).split('.')[-1]}"
                    )
                    found[_placed(key, shape)] = said
            else:
                found |= {_placed(key, shape): "as many tokens a step" for key in keys}
        return found


def write(proposal: Proposal, place: Path) -> None:
    """Write the file. Raises NotReady where that cannot be done."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        rundir.write_text(place, proposal.text(place))
    except OSError as error:
        raise _unwritable(place, error.strerror) from None


def require_free(place: Path, source: Path) -> None:
    """Raise UsageError where a file of somebody's own would be overwritten, NotReady where none can be."""
    # unlike `Path.exists` it takes a folder that may not be looked into for one without the file
    if os.path.exists(place):
        try:
            ours = place.is_file() and place.read_text(encoding="utf-8").startswith(MARK)
        except (OSError, ValueError):
            ours = False
        if not ours or place.resolve() == source.resolve():
            raise usage("would-overwrite", f"{place} is there, and no file that `tune` wrote",
                        "another name with -o")  # fmt: skip
    _require_writable(place)


def _require_writable(place: Path) -> None:
    """Said before hours of trials, not after them; what it makes to find out it takes away again."""
    folders = place.absolute().parents
    missing = list(itertools.takewhile(lambda one: not os.path.exists(one), folders))
    folder = folders[len(missing)]
    if not folder.is_dir():
        raise _unwritable(place, f"{folder} is a file")
    try:
        # permissions do not tell: root has them all, also in /proc and on what is mounted read-only
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_name(f".{place.name}.{secrets.token_hex(6)}")
        half.touch(exist_ok=False)
        half.unlink()
    except OSError as error:
        raise _unwritable(place, f"{folder}: {error.strerror}") from None
    finally:
        for one in missing:
            with contextlib.suppress(OSError):
                one.rmdir()


def _unwritable(place: Path, reason: str | None) -> NotReady:
    return not_ready(
        "unwritable-file", f"the stage file cannot be written: {reason}", "another name with -o",
        file=str(place),
    )  # fmt: skip


def _texts(space: Space, settings: Settings) -> tuple[str, ...]:
    from launcher.levers import overrides

    return overrides(space, settings)


def _relative(target: Path, place: Path) -> str:
    """A path as seen from the folder of `place`; whole where there is no common way."""
    try:
        return os.path.relpath(target.resolve(), place.absolute().parent.resolve())
    except ValueError:
        return str(target.absolute())


def _differences(written: Config, wanted: Config) -> dict[str, Any]:
    """What has to stand in a file that extends `written` so that it comes to `wanted`."""
    told: dict[str, Any] = {}
    for key, value in wanted.options.items():
        before = written.options.get(key)
        if value == before:
            continue
        if key in _NESTED and isinstance(value, dict) and isinstance(before, dict):
            value = {k: v for k, v in value.items() if k not in before or before[k] != v}
        told[key] = value
    args = {
        key: value for key, value in wanted.args.items()
        if key not in written.args or written.args[key] != value
    }  # fmt: skip
    return {**told, "args": args} if args else told


def _wrapped(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same in the shape `open_instruct: {…, args}`."""
    outside = {"name", "batch", "expect", "probe", "num_gpus", "gates", "slurm", "skypilot",
               "mixed_precision", "on_violation", "on_hang"}  # fmt: skip
    above = {key: value for key, value in values.items() if key in outside}
    inside = {key: value for key, value in values.items() if key not in outside}
    if "deepspeed" in inside:
        inside["deepspeed_config"] = inside.pop("deepspeed")
    return {**above, "open_instruct": inside} if inside else above


def _placed(key: str, shape: str) -> str:
    """Where a key of a stage file stands in this shape."""
    inside = key.startswith("args.") or key in ("deepspeed", "deepspeed_config")
    if shape != "wrapped" or not inside:
        return key
    return f"open_instruct.{'deepspeed_config' if key == 'deepspeed' else key}"


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], path: str = "") -> Iterator[str]:
    """Block style, one key a line, each with its comment."""
    depth = "  " * (path.count(".") + 1 if path else 0)
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        nested = isinstance(value, Mapping) and (not path or where == "open_instruct.args")
        if nested and value and (key in ("args", "open_instruct") or key in _NESTED):
            yield f"{depth}{key}:"
            yield from _lines(value, comments, where)
            continue
        line = f"{depth}{key}: {_scalar(value)}"
        said = comments.get(where)
        yield line if said is None else f"{line:<40} # {said}"


def _scalar(value: Any) -> str:
    """A value in one line of YAML, safe against being interpolated once more."""
    text = yaml.safe_dump(
        escaped(value), default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False,
        # plain and single-quoted texts would go on in the next line
        default_style='"' if "\n" in str(value) else None,
    )  # fmt: skip
    return text.removesuffix("...\n").strip()


def faults(place: Path, stage: str, checkout: Path | None, *, allowed: bool) -> tuple[Finding, ...]:
    """What is wrong with a written file, judged as `launch validate-config` does; errors alone."""
    from launcher import stage as stages
    from launcher.errors import InvalidConfig, errors
    from launcher.upstream import Locator

    try:
        judged = stages.judge(
            config.load(place),
            stage=stage,
            locator=Locator(checkout=checkout, allow_unpinned=allowed),
        )
    except InvalidConfig as error:
        return error.findings
    return errors(judged.findings)
