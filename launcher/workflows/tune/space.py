"""What can make a stage faster without changing what it learns, for each trainer and stage.

The keys that a lever is written as, the values that it can take on this machine, why another one
stays as it is; and the stage file of a setting. Nothing is measured or decided here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from launcher import files
from launcher.artifacts.architecture import Shape
from launcher.artifacts.lengths import Lengths
from launcher.config import load
from launcher.config.keys import DEEPSPEED
from launcher.config.load import Config, spell_override
from launcher.errors import InvalidConfig, not_ready, usage
from launcher.lifecycle.manifest import escape_interpolation
from launcher.machine.datasheets import Card
from launcher.plan import footprint, speed
from launcher.plan import plan as plans
from launcher.plan.footprint import Footprint
from launcher.plan.memory import peak
from launcher.plan.plan import Plan
from launcher.stage import options
from launcher.stage.options import SWITCHED, Batch
from launcher.stage.stage import Stage
from launcher.upstream.schema import Values

Setting = str | int | bool
Settings = Mapping[str, Setting]
"""One value for each lever, by the names in ORDER."""
Item = tuple[str, Setting]

ORDER = ("attention", "packing", "liger", "per_device", "checkpointing", "deepspeed")

_SPELT = {"flash_2": "flash_attention_2", "torch": "sdpa"}
_ROUNDING = 0.1
"""How far the tokens of a step may be from the file's if other rows hold them."""
_ON_OFF = (False, True)
# open-instruct's DPO asks for checkpointing by it; before #1444 by the flag that SFT has
_BUDGET = "activation_memory_budget"

MARK = "# Tuned by launch: "
_NESTED = ("batch", "expect", "probe", "gates", "slurm")
_LINE_ENDS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One lever: the value as the file is written, and all that may be tried, that one included.

    `key` is that of a stage file; the rows of a device have several.
    """

    name: str
    key: str = ""
    now: Setting
    values: tuple[Setting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setting with the plan's estimate; `purpose` is what a trial of it is for, `why` in words.

    `peak` in GiB is that of the whole run, which meets longer rows than a trial of a few steps;
    `short` is the trial's, with which the measured peak is compared; None if unknown. `seconds` and
    real `tokens` are a step's.
    """

    settings: Settings
    peak: float | None = None
    short: float | None = None
    seconds: float = 1.0
    tokens: float = 1.0
    purpose: str = "search"
    why: str = ""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def key(self) -> tuple[Item, ...]:
        return tuple((name, self.settings[name]) for name in ORDER if name in self.settings)

    @property
    def rows(self) -> int:
        return int(self.settings.get("per_device", 1))

    def differing(self, other: Candidate) -> list[str]:
        return [name for name in ORDER if self.settings.get(name) != other.settings.get(name)]

    def values_beside(self, other: Candidate) -> list[str]:
        """The levers that have a value here, and not the same as in another candidate."""
        return [name for name in self.differing(other) if name in self.settings]


@dataclass(slots=True, kw_only=True)
class Space:
    """The levers of a plan, why others stay as they are, and what estimates follow from.

    `packages` are those of the trainer's environment; `attention` is what the file's own comes to
    on this machine; `steps` are a trial's.
    """

    plan: Plan
    rows: Lengths
    packages: Mapping[str, str]
    shape: Shape
    card: Card
    steps: int
    attention: str | None = None
    levers: list[Lever] = field(init=False, default_factory=list)
    fixed: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        choosers = (
            _choose_attention,
            _choose_packing,
            _choose_liger,
            _choose_per_device,
            _choose_checkpointing,
            _choose_deepspeed,
        )
        for name, choose in zip(ORDER, choosers, strict=True):
            choice = choose(self)
            if isinstance(choice, str):
                self.fixed[name] = choice
            elif choice is not None:
                self.levers.append(choice)

    @property
    def base(self) -> dict[str, Setting]:
        """The file as it is written."""
        return {lever.name: lever.now for lever in self.levers}

    def settings(self) -> Iterator[dict[str, Setting]]:
        """Every combination that can be split over the devices, the file's own among them."""
        choices = {lever.name: lever.values for lever in self.levers}
        choices.pop("per_device", None)
        for values in itertools.product(*choices.values()):
            chosen = dict(zip(choices, values, strict=True))
            for settings in self._list_splits(chosen):
                if settings == self.base or not self._packs_nothing(settings):
                    yield settings

    def _list_splits(self, chosen: dict[str, Setting]) -> list[dict[str, Setting]]:
        """The settings with each split over the devices; as they are if no split is needed."""
        total = self.total_rows(chosen)
        is_split = any(lever.name == "per_device" for lever in self.levers)
        if total == self.plan.global_batch and not is_split:
            return [chosen]
        splits = plans.list_splits(total, self.plan.devices)
        return [{**chosen, "per_device": rows} for rows in splits]

    def _packs_nothing(self, settings: Settings) -> bool:
        """Whether it packs one row per micro-batch: that is the setting without packing."""
        entry = self.plan.stage.entry
        values = {"packing": settings.get("packing")}
        rows = int(settings.get("per_device", self.plan.per_device))
        return entry.packs(values, None) and not entry.packs(values, rows)

    def total_rows(self, settings: Settings) -> int:
        """Rows of a step that hold as many tokens as the file's, as the devices can share them.

        TRL's `bfd` makes few full rows of many.
        """
        plan = self.plan
        entry = plan.stage.entry
        limit = plan.values.get(entry.names.max_length)
        if entry.packing != "refilled" or not isinstance(limit, int):
            return plan.global_batch
        was_packed = bool(plan.values.get("packing"))
        packed = bool(settings.get("packing", was_packed))
        if packed == was_packed:
            return plan.global_batch
        # how much of a packed row an unpacked one fills
        share = min(self.rows.mean, limit) / limit
        factor = share if packed else 1 / share
        rows = round(plan.global_batch * factor / plan.devices)
        return max(1, rows) * plan.devices

    def changes(self, settings: Settings) -> dict[str, Any]:
        """The keys of a stage file that differ: `batch.…`, `deepspeed`, `args.…`, `expect.…`.

        What the file expects of a switch follows it: what is turned on must be `isolated` or
        `engaged`.
        """
        changed: dict[str, Any] = {}
        for lever in self.levers:
            value = settings.get(lever.name, lever.now)
            if lever.name == "per_device" or value == lever.now:
                continue
            changed[lever.key] = value
            if lever.key == f"args.{_BUDGET}":
                changed[lever.key] = 0.5 if value else 1.0
            state = self._expect_of_lever(lever.name, value)
            if state is not None:
                changed[f"expect.{lever.name}"] = state
        return changed | self._split_batch(settings)

    def _expect_of_lever(self, name: str, value: Setting) -> str | None:
        """What the file must expect of a lever with this value, if not what it expects."""
        expected = self.plan.stage.options.expect.get(name)
        if name == "attention":
            # a trainer that takes the best by itself has other names for it
            unnamed = expected is None and self.plan.stage.entry.best_attention
            if unnamed or expected == "any":
                return None
            return _SPELT.get(str(value), str(value))
        if name not in SWITCHED or expected is None:
            return None
        on, off = SWITCHED[name]
        # what is turned on is proved even if the file does not care
        if value and expected in ("off", "any"):
            return on
        if not value and expected not in ("off", "any"):
            return off
        return None

    def _split_batch(self, settings: Settings) -> dict[str, Any]:
        plan = self.plan
        per_device = int(settings.get("per_device", plan.per_device))
        total = self.total_rows(settings)
        if per_device == plan.per_device and total == plan.global_batch:
            return {}
        names = plan.stage.entry.names
        batch = plan.stage.options.batch or Batch()
        changed = {}
        rows_key = "batch.per_device"
        if batch.total is None:
            changed[f"args.{names.accumulation}"] = total // per_device // plan.devices
            if batch.per_device is None:
                rows_key = f"args.{names.per_device}"
        else:
            if total != batch.total:
                changed["batch.global"] = total
            if batch.per_device is None and plan.stage.values.given(names.per_device):
                rows_key = f"args.{names.per_device}"
        return {rows_key: per_device, **changed}

    def overrides(self, settings: Settings) -> tuple[str, ...]:
        return tuple(
            f"{key}={spell_override(value)}" for key, value in self.changes(settings).items()
        )

    def _apply_settings(self, settings: Settings) -> Stage:
        """The stage with these settings; the file is not read again for each of hundreds."""
        stage = self.plan.stage
        changed = self.changes(settings)
        args = dict(stage.args)
        for key, value in changed.items():
            if key.startswith("args."):
                args[key.removeprefix("args.")] = value
        args = {name: value for name, value in args.items() if value is not None}
        opts = stage.options
        if "batch.per_device" in changed or "batch.global" in changed:
            was = opts.batch or Batch()
            total = changed.get("batch.global", was.total)
            per_device = changed.get("batch.per_device", was.per_device)
            opts = replace(opts, batch=Batch(total=total, per_device=per_device))
        zero = changed.get("deepspeed")
        if zero is not None:
            opts = replace(opts, deepspeed=options.find_deepspeed_file(zero), deepspeed_name=zero)
        return replace(stage, args=args, options=opts, values=Values(stage.schema, args))

    def planned(self, settings: Settings) -> Plan:
        """The plan of these settings. Raises InvalidConfig if it cannot be split."""
        if settings == self.base:
            return self.plan
        stage = self._apply_settings(settings)
        return plans.make(stage, gpus=self.plan.gpus, nodes=self.plan.nodes, packages=self.packages)

    def grid(self) -> Iterator[Candidate]:
        """Every setting that can be planned, the file's own among them."""
        for settings in self.settings():
            candidate = self._estimate_candidate(settings)
            if candidate is not None:
                yield candidate

    def candidate(self, settings: Settings) -> Candidate:
        """One setting, whether it can be planned or not."""
        return self._estimate_candidate(settings) or Candidate(settings=settings)

    def _estimate_candidate(self, settings: Settings) -> Candidate | None:
        try:
            whole = self.footprint(settings)
        except InvalidConfig:
            return None
        trial = replace(whole, plan=replace(whole.plan, steps=self.steps))
        return Candidate(
            settings=settings,
            peak=_estimate_peak(whole),
            short=_estimate_peak(trial),
            seconds=speed.predict_step_seconds(whole, self.card),
            tokens=whole.tokens.real,
        )

    def footprint(self, settings: Settings) -> Footprint:
        """What speed and memory follow from. Raises InvalidConfig if it cannot be planned."""
        plan = self.planned(settings)
        named = None if "attention" in settings else self.attention
        attention = footprint.decide_attention(plan, named)
        rows = footprint.measure_trained_rows(plan, self.rows)
        return Footprint(plan=plan, shape=self.shape, rows=rows, attention=attention)

    def as_json(self) -> dict[str, object]:
        return {"levers": [asdict(lever) for lever in self.levers], "fixed": dict(self.fixed)}


def _estimate_peak(setting: Footprint) -> float | None:
    try:
        return peak.estimate(setting.setup()).peak
    except InvalidConfig:
        return None


Choice = Lever | str | None
"""A lever, why there is none, or None if the trainer does not know it at all."""


def _trains_adapters(plan: Plan) -> bool:
    return any(plan.values.get(name) for name in ("use_lora", "use_qlora", "use_peft"))


def _choose_attention(space: Space) -> Choice:
    plan = space.plan
    entry = plan.stage.entry
    has_flash = "flash-attn" in space.packages
    if "attn_implementation" not in plan.values:
        if not plan.gpus:
            return None
        state = "is installed" if has_flash else "is not installed"
        return f"upstream takes the best that is installed; flash-attn {state}"
    if not plan.gpus:
        return "the CPU has one"
    if plan.stage.options.attention:
        return "`attention:` names what is taken"
    if isinstance(plan.values.get("model_init_kwargs"), str | dict):
        return "`model_init_kwargs` may set it"
    plain, flash = entry.attentions
    now = plan.values["attn_implementation"]
    if not now:
        now = flash if has_flash and entry.best_attention else plain
    if now not in entry.attentions:
        return f"`attn_implementation: {now}` is the file's own choice"
    if not has_flash:
        return "flash-attn is not installed"
    return Lever(
        name="attention", key="args.attn_implementation", now=str(now), values=(plain, flash)
    )


def _choose_packing(space: Space) -> Choice:
    values = space.plan.values
    entry = space.plan.stage.entry
    names = entry.names
    if names.packing is None or names.packing not in values:
        return None
    if entry.packing == "padded":
        return "TRL's DPO pads whatever is asked for"
    if entry.packing == "one-row":
        return (
            "packed, a step of dpo.py holds the pairs that fit into a row a GPU: "
            "another global batch"
        )
    now = bool(values[names.packing])
    if entry.packing == "refilled":
        limit = values.get(names.max_length)
        if values.get("padding_free"):
            return "`padding_free` is the file's own choice"
        if now and values.get("packing_strategy") == "wrapped":
            return "`packing_strategy: wrapped` is the file's own choice"
        if values.get("dataset_kwargs"):
            return "`dataset_kwargs` prepares the rows in its own way"
        if not isinstance(limit, int):
            return f"without `{names.max_length}` there is no length to fill"
        if not _keeps_tokens(space, limit, packed=not now):
            return (
                f"a step of as many tokens in rows of {limit} cannot be made: "
                f"fewer `{names.max_length}`"
            )
    return Lever(name="packing", key=f"args.{names.packing}", now=now, values=_ON_OFF)


def _keeps_tokens(space: Space, limit: int, *, packed: bool) -> bool:
    """Whether rounding to whole rows leaves about as many tokens a step as there were."""
    row = min(space.rows.mean, limit)
    length_before = row if packed else limit
    length = limit if packed else row
    tokens_before = space.plan.global_batch * length_before
    tokens = space.total_rows({"packing": packed}) * length
    return abs(tokens / tokens_before - 1) <= _ROUNDING


def _choose_liger(space: Space) -> Choice:
    plan = space.plan
    name = plan.stage.entry.names.liger
    if name is None or name not in plan.values:
        return None
    if not plan.gpus:
        return "its kernels need a GPU"
    if "liger-kernel" not in space.packages:
        return "liger-kernel is not installed"
    now = bool(plan.values[name])
    if _trains_adapters(plan) and not now:
        return "on adapters it slows training down: only a full fine-tune gains by it"
    return Lever(name="liger", key=f"args.{name}", now=now, values=_ON_OFF)


def _choose_per_device(space: Space) -> Choice:
    plan = space.plan
    if plan.stage.entry.takes_one_row(plan.values):
        return "packed, dpo.py computes one row a GPU in a step, whatever it holds"
    values = tuple(plans.list_splits(plan.global_batch, plan.devices))
    if len(values) < 2:
        return f"{plan.global_batch} rows a step cannot be split in another way"
    return Lever(name="per_device", now=plan.per_device, values=values)


def _choose_checkpointing(space: Space) -> Choice:
    plan = space.plan
    values = plan.values
    entry = plan.stage.entry
    key = "gradient_checkpointing"
    now = bool(values.get(key))
    if _BUDGET in values:
        if _trains_adapters(plan):
            return "open-instruct's DPO reads it for the full model alone"
        if entry.selects_modules(values):
            return (
                "`activation_checkpointing_mode: selected_modules` decides it, "
                "and no budget is read"
            )
        needed = entry.names.recompute_needs
        if needed and not values.get(needed):
            return f"{entry.script} computes again only with `{needed}: true`"
        key = _BUDGET
        now = float(values[key]) < 1
    elif not plan.gpus and not entry.runs_on_cpu:
        return "on the CPU it shows nothing"
    return Lever(name="checkpointing", key=f"args.{key}", now=now, values=_ON_OFF)


def _choose_deepspeed(space: Space) -> Choice:
    """The DeepSpeed settings to try, or why none is."""
    plan = space.plan
    if not plan.gpus:
        return "DeepSpeed is left out on the CPU"
    for key in ("zero_stage", "fsdp", "deepspeed"):
        if plan.values.get(key):
            return f"`{key}` decides it"
    now = plan.stage.options.deepspeed_name
    if now == "none":
        return "the file trains without it, and with it weights would have another precision"
    if now not in DEEPSPEED:
        return f"`{now}` is a file of your own: `deepspeed: zero2` would be tuned"
    if plan.values.get("use_qlora") or plan.values.get("load_in_4bit"):
        return "quantised weights are not sharded"
    values = list(DEEPSPEED)
    if plan.processes == 1:
        # a single process sends nothing, and its gradients are whole under every stage
        values = ["zero2", "zero2_fp32_comm", "zero3_offload"]
    if now not in values:
        values.append(now)
    return Lever(name="deepspeed", key="deepspeed", now=now, values=tuple(values))


def describe_setting(name: str, value: Setting) -> str:
    if name == "per_device":
        return "1 row a device" if value == 1 else f"{value} rows a device"
    if name in ("deepspeed", "attention"):
        return str(value)
    word = "Liger" if name == "liger" else name
    if value:
        return word
    return f"no {word}"


def write(
    place: Path, space: Space, settings: Settings, *, head: Sequence[str], requested: Sequence[str]
) -> None:
    """Write the stage file of a setting, with `head` as its comment. Raises NotReady.

    `requested` are the overrides of the command line, which it includes.
    """
    redactor = space.plan.redactor
    # a path may hold what ends a comment
    lines = [_LINE_ENDS.sub(" ", line) for line in redactor.redact(head)]
    values = redactor.redact(_collect_keys(place, space, settings, requested))
    body = yaml.safe_dump(
        escape_interpolation(values), sort_keys=False, allow_unicode=True, width=100
    )
    comment = "\n# ".join(lines)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(place, f"{MARK}{comment}\n{body}")
    except OSError as error:
        message = f"the stage file cannot be written: {error.strerror}"
        raise not_ready(
            "unwritable-file", message, "another name with -o", file=str(place)
        ) from None


def _collect_keys(
    place: Path, space: Space, settings: Settings, requested: Sequence[str]
) -> dict[str, Any]:
    """The keys of a stage file that extends the tuned one, by what differs.

    A file of another shape cannot be extended: of that the whole stage is written.
    """
    stage = space.plan.stage
    source = stage.config.path
    values: dict[str, Any] = {"name": f"{stage.name}-tuned"}
    changed = space.overrides(settings)
    tuned = load.load(source, (*requested, *changed)) if changed else stage.config
    if stage.config.shape == "stage":
        values["extends"] = _make_relative(source, place)
        written = load.load(source) if requested else stage.config
        values |= _find_differences(written, tuned)
    else:
        values |= {"stage": stage.options.stage, "backend": stage.options.backend, **tuned.options}
        # the wrapped shape's own key; elsewhere `--gpus` says it
        values.pop("num_gpus", None)
        values["args"] = dict(tuned.args)
    zero = stage.options.deepspeed
    ships_with_launch = stage.options.deepspeed_name in DEEPSPEED
    if zero is not None and not ships_with_launch and "deepspeed" not in settings:
        # a file beside the old stage file is not beside this one
        values["deepspeed"] = _make_relative(zero, place)
    return values


def require_own(place: Path, source: Path) -> None:
    """Raise UsageError if a file would be overwritten that `write` has not written."""
    if not place.exists():
        return
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = place.read_text(encoding="utf-8")
    if not text.startswith(MARK) or place.resolve() == source.resolve():
        message = f"{place} exists and was not written by `launch tune`"
        raise usage("would-overwrite", message, "another name with -o")


def _make_relative(target: Path, place: Path) -> str:
    return os.path.relpath(target.resolve(), place.absolute().parent.resolve())


def _find_differences(written: Config, tuned: Config) -> dict[str, Any]:
    """The keys by which a file that extends `written` comes to `tuned`."""
    changed = _select_changed(written.options, tuned.options)
    for key in _NESTED:
        before = written.options.get(key)
        if isinstance(changed.get(key), dict) and isinstance(before, dict):
            changed[key] = _select_changed(before, changed[key])
    args = _select_changed(written.args, tuned.args)
    if args:
        changed["args"] = args
    return changed


def _select_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    missing = object()
    return {key: value for key, value in after.items() if before.get(key, missing) != value}
