"""What can be turned to make a stage faster without changing what it learns, for each backend and stage.

Data with reasons: which keys a lever is written as, which values it can take here, why another one stays as
it is; and the stage file of a setting. Nothing is measured or decided here.
"""

from __future__ import annotations

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
from launcher.config.load import Config, spelt
from launcher.errors import InvalidConfig, not_ready, usage
from launcher.lifecycle.manifest import escaped
from launcher.machine.datasheets import Card
from launcher.plan import footprint, plan, speed
from launcher.plan.footprint import Footprint
from launcher.plan.memory import peak
from launcher.plan.plan import Plan
from launcher.redaction import redact
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
"""How far the tokens of a step may be from the file's where other rows hold them."""
_ON, _OFF = True, False
# open-instruct's DPO asks for checkpointing by it; its commits before #1444 have the flag that SFT has
_BUDGET = "activation_memory_budget"

Packages = Mapping[str, str]

MARK = "# Tuned by launch: "
_NESTED = ("batch", "expect", "probe", "gates", "slurm")
_LINE_ENDS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One lever: the value as the file is written, and all that may be tried, that one included."""

    name: str
    now: Setting
    values: tuple[Setting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setting with the plan's estimate; `purpose` says what a trial of it is for, `why` in words.

    `peak` in GiB is that of the whole run, which meets longer rows than a trial of a few steps; `short` is the
    trial's, with which the measured peak is compared; both None where unknown. `seconds` and real `tokens` are
    a step's.
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


@dataclass(slots=True, kw_only=True)
class Space:
    """The levers of a plan, those that stay as they are, each with the reason, and what estimates follow from.

    `packages` are those of the trainer's environment; `attention` is what the file's own comes to on this machine;
    `steps` are a trial's.
    """

    plan: Plan
    rows: Lengths
    packages: Packages
    shape: Shape
    card: Card
    steps: int
    attention: str | None = None
    levers: list[Lever] = field(init=False, default_factory=list)
    fixed: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        makers = (_attention, _packing, _liger, _per_device, _checkpointing, _deepspeed)
        for name, maker in zip(ORDER, makers, strict=True):
            choice = maker(self.plan, self.packages, self.rows)
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
        around = [lever for lever in self.levers if lever.name != "per_device"]
        for values in itertools.product(*(lever.values for lever in around)):
            chosen = {lever.name: value for lever, value in zip(around, values, strict=True)}
            total = total_rows(self.plan, self.rows, chosen)
            split = [{**chosen, "per_device": rows} for rows in plan.splits(total, devices(self.plan))]
            if total == self.plan.global_batch and len(around) == len(self.levers):
                split = [chosen]
            yield from (one for one in split if one == self.base or not self._packs_nothing(one))

    def _packs_nothing(self, chosen: Settings) -> bool:
        """One row a micro-batch has none to be packed with: that is the setting without packing."""
        entry, values = self.plan.stage.entry, {"packing": chosen.get("packing")}
        rows = int(chosen.get("per_device", self.plan.per_device))
        return entry.packs(values, None) and not entry.packs(values, rows)

    def changes(self, settings: Settings) -> dict[str, Any]:
        """The keys of a stage file that differ with these settings: `batch.…`, `deepspeed`, `args.…`.

        Where the file expects a state of what is turned (`expect: {packing: off}`), that follows: what is
        on must be `isolated` or `engaged`.
        """
        changed: dict[str, Any] = {}
        for name in ORDER:
            if name in settings and name != "per_device" and settings[name] != self.base[name]:
                key, value = _written(self.plan, name, settings[name])
                changed |= {key: value, **_contract(self.plan, name, settings[name])}
        return changed | _batch(self, settings)

    def overrides(self, settings: Settings) -> tuple[str, ...]:
        return tuple(f"{key}={spelt(value)}" for key, value in self.changes(settings).items())

    def turned(self, settings: Settings) -> Stage:
        stage, opts = self.plan.stage, self.plan.stage.options
        changed = self.changes(settings)
        args = {**stage.args, **{k[5:]: v for k, v in changed.items() if k.startswith("args.")}}
        args = {name: value for name, value in args.items() if value is not None}
        if "batch.per_device" in changed or "batch.global" in changed:
            was = opts.batch or Batch()
            total, rows = changed.get("batch.global", was.total), changed.get("batch.per_device", was.per_device)
            opts = replace(opts, batch=Batch(total=total, per_device=rows))
        if (zero := changed.get("deepspeed")) is not None:
            opts = replace(opts, deepspeed=options.deepspeed_file(zero), deepspeed_name=zero)
        return replace(stage, args=args, options=opts, values=Values(stage.schema, args))

    def planned(self, settings: Settings) -> Plan:
        """The plan of these settings. Raises InvalidConfig where it cannot be split."""
        if settings == self.base:
            return self.plan
        gpus, nodes = self.plan.gpus, self.plan.nodes
        return plan.make(self.turned(settings), gpus=gpus, nodes=nodes, packages=self.packages)

    def grid(self) -> Iterator[Candidate]:
        """Every setting that can be planned, the file's own among them."""
        return (one for one in map(self._estimated, self.settings()) if one is not None)

    def candidate(self, settings: Settings) -> Candidate:
        """One setting, whether it can be planned or not."""
        return self._estimated(settings) or Candidate(settings=settings)

    def _estimated(self, settings: Settings) -> Candidate | None:
        try:
            whole = self.footprint(settings)
        except InvalidConfig:
            return None
        short = self._peak(replace(whole, plan=replace(whole.plan, steps=self.steps)))
        seconds, tokens = speed.step_seconds(whole, self.card), whole.tokens.real
        return Candidate(settings=settings, peak=self._peak(whole), short=short, seconds=seconds, tokens=tokens)

    def footprint(self, settings: Settings) -> Footprint:
        """What speed and memory follow from. Raises InvalidConfig where it cannot be planned."""
        plan, named = self.planned(settings), None if "attention" in settings else self.attention
        rows, attention = footprint.rows_of(plan, self.rows), footprint.attention_of(plan, named)
        return Footprint(plan=plan, shape=self.shape, rows=rows, attention=attention)

    def _peak(self, setting: Footprint) -> float | None:
        try:
            return peak.estimate(setting.setup()).peak
        except InvalidConfig:
            return None

    def as_json(self) -> dict[str, Any]:
        return {"levers": [asdict(one) for one in self.levers], "fixed": dict(self.fixed)}


Choice = Lever | str | None
"""A lever, why there is none, or None where the backend does not know it at all."""


def _adapters(made: Plan) -> bool:
    return bool(made.values.get("use_lora") or made.values.get("use_qlora") or made.values.get("use_peft"))


def _attention(made: Plan, packages: Packages, _rows: Lengths) -> Choice:
    flash_attn = "flash-attn" in packages
    if "attn_implementation" not in made.values:
        word = "is" if flash_attn else "is not"
        chosen = f"upstream takes the best that is installed; flash-attn {word} installed"
        return chosen if made.gpus else None
    if not made.gpus:
        return "the CPU has one"
    if made.stage.options.attention:
        return "`attention:` names what is taken"
    if isinstance(made.values.get("model_init_kwargs"), str | dict):
        return "`model_init_kwargs` may set it"
    entry = made.stage.entry
    plain, flash = entry.attentions
    best = flash if flash_attn and entry.best_attention else plain
    now = made.values["attn_implementation"] or best
    if now not in (flash, plain):
        return f"`attn_implementation: {now}` is the file's own choice"
    if not flash_attn:
        return "flash-attn is not installed"
    return Lever(name="attention", now=str(now), values=(plain, flash))


def _packing(made: Plan, _packages: Packages, rows: Lengths) -> Choice:
    names = made.stage.entry.names
    if names.packing is None or names.packing not in made.values:
        return None
    entry = made.stage.entry
    if entry.packing == "padded":
        return "TRL's DPO pads whatever is asked for"
    if entry.packing == "one-row":
        return "packed, a step of dpo.py holds the pairs that fit into a row a GPU: another global batch"
    now = bool(made.values[names.packing])
    if entry.packing == "refilled":
        limit = made.values.get(names.max_length)
        if made.values.get("padding_free"):
            return "`padding_free` is the file's own choice"
        if now and made.values.get("packing_strategy") == "wrapped":
            return "`packing_strategy: wrapped` is the file's own choice"
        if made.values.get("dataset_kwargs"):
            return "`dataset_kwargs` prepares the rows in its own way"
        if not isinstance(limit, int):
            return f"without `{names.max_length}` there is no length to fill"
        if not _tokens_kept(made, rows, not now):
            return f"a step of as many tokens in rows of {limit} cannot be made: fewer `{names.max_length}`"
    return Lever(name="packing", now=now, values=(_OFF, _ON))


def _liger(made: Plan, packages: Packages, _rows: Lengths) -> Choice:
    name = made.stage.entry.names.liger
    if name is None or name not in made.values:
        return None
    now = bool(made.values[name])
    if not made.gpus:
        return "its kernels need a GPU"
    if "liger-kernel" not in packages:
        return "liger-kernel is not installed"
    if _adapters(made) and not now:
        return "on adapters it slows training down: only a full fine-tune gains by it"
    return Lever(name="liger", now=now, values=(_OFF, _ON))


def _per_device(made: Plan, _packages: Packages, _rows: Lengths) -> Choice:
    if made.stage.entry.takes_one_row(made.values):
        return "packed, dpo.py computes one row a GPU in a step, whatever it holds"
    values = tuple(plan.splits(made.global_batch, devices(made)))
    if len(values) < 2:
        return f"{made.global_batch} rows a step cannot be split in another way"
    return Lever(name="per_device", now=made.per_device, values=values)


def _checkpointing(made: Plan, _packages: Packages, _rows: Lengths) -> Choice:
    if _BUDGET in made.values:
        if _adapters(made):
            return "open-instruct's DPO reads it for the full model alone"
        if made.stage.entry.selects_modules(made.values):
            return "`activation_checkpointing_mode: selected_modules` decides it, and no budget is read"
        if (needed := made.stage.entry.names.recompute_needs) and not made.values.get(needed):
            return f"{made.stage.entry.script} computes again only with `{needed}: true`"
        return Lever(name="checkpointing", now=float(made.values[_BUDGET]) < 1, values=(_OFF, _ON))
    if not made.gpus and not made.stage.entry.runs_on_cpu:
        return "on the CPU it shows nothing"
    now = bool(made.values.get("gradient_checkpointing"))
    return Lever(name="checkpointing", now=now, values=(_OFF, _ON))


def _deepspeed(made: Plan, _packages: Packages, _rows: Lengths) -> Choice:
    if not made.gpus:
        return "DeepSpeed is left out on the CPU"
    for key in ("zero_stage", "fsdp", "deepspeed"):
        if made.values.get(key):
            return f"`{key}` decides it"
    now = made.stage.options.deepspeed_name
    if now == "none":
        return "the file trains without it, and with it weights would have another precision"
    if now not in DEEPSPEED:
        return f"`{now}` is a file of your own: `deepspeed: zero2` would be tuned"
    if made.values.get("use_qlora") or made.values.get("load_in_4bit"):
        return "quantised weights are not sharded"
    # one process sends nothing, and its gradients are whole under every stage
    alone = ("zero2", "zero2_fp32_comm", "zero3_offload")
    values = DEEPSPEED if made.processes > 1 else alone
    return Lever(name="deepspeed", now=now, values=tuple(dict.fromkeys((*values, now))))


def total_rows(made: Plan, rows: Lengths, settings: Settings) -> int:
    """Rows of one step that hold as many tokens as the file's, as the devices can share them.

    TRL's `bfd` makes few full rows of many.
    """
    entry, now = made.stage.entry, bool(made.values.get("packing"))
    packs, limit = bool(settings.get("packing", now)), made.values.get(entry.names.max_length)
    if entry.packing != "refilled" or packs == now or not isinstance(limit, int):
        return made.global_batch
    share = min(rows.mean, limit) / limit
    exact = made.global_batch * (share if packs else 1 / share)
    return max(1, round(exact / devices(made))) * devices(made)


def devices(made: Plan) -> int:
    """How many devices read rows of their own: those that share a sequence count as one."""
    return made.global_batch // made.per_device // made.accumulation


def _tokens_kept(made: Plan, rows: Lengths, packed: bool) -> bool:
    """Whether rounding to whole rows leaves as many tokens a step as there were."""
    limit = float(made.values[made.stage.entry.names.max_length])
    row = min(rows.mean, limit)
    one = made.global_batch * (row if packed else limit)
    other = total_rows(made, rows, {"packing": packed}) * (limit if packed else row)
    return abs(other / one - 1) <= _ROUNDING


def _contract(made: Plan, name: str, value: Setting) -> dict[str, Any]:
    """What the file must expect instead of what it expects: what is turned on is to be proved."""
    expected = made.stage.options.expect.get(name)
    if name == "attention":
        # what a trainer that takes the best by itself came to has other names
        names_it = not made.stage.entry.best_attention if expected is None else expected != "any"
        return {"expect.attention": _SPELT.get(str(value), str(value))} if names_it else {}
    if name not in SWITCHED or expected is None or (expected == "any" and not value):
        return {}
    if expected != "any" and (expected != "off") == value:
        return {}
    return {f"expect.{name}": SWITCHED[name][0 if value else 1]}


def _batch(space: Space, settings: Settings) -> dict[str, Any]:
    """The split of the global batch, in whichever words the file has it."""
    made = space.plan
    per_device = int(settings.get("per_device", made.per_device))
    total = total_rows(made, space.rows, settings)
    if (per_device, total) == (made.per_device, made.global_batch):
        return {}
    names, batch = made.stage.entry.names, made.stage.options.batch
    changed: dict[str, Any] = {}
    if batch is not None and batch.total is not None:
        if total != batch.total:
            changed["batch.global"] = total
        in_args = batch.per_device is None and made.stage.values.given(names.per_device)
        changed[f"args.{names.per_device}" if in_args else "batch.per_device"] = per_device
        return changed
    shared = batch is not None and batch.per_device is not None
    changed["batch.per_device" if shared else f"args.{names.per_device}"] = per_device
    changed[f"args.{names.accumulation}"] = total // per_device // devices(made)
    return changed


def _written(made: Plan, name: str, value: Setting) -> tuple[str, Setting | float]:
    names = made.stage.entry.names
    if name == "deepspeed":
        return "deepspeed", value
    if name == "checkpointing" and _BUDGET in made.values:
        return f"args.{_BUDGET}", 0.5 if value else 1.0
    keys = {
        "attention": "attn_implementation",
        "packing": names.packing or "packing",
        "liger": names.liger,
        "checkpointing": "gradient_checkpointing",
    }
    return f"args.{keys[name]}", value


def described(name: str, value: Setting) -> str:
    if name == "per_device":
        return f"{value} row{'s' if value != 1 else ''} a device"
    if name in ("deepspeed", "attention"):
        return str(value)
    word = "Liger" if name == "liger" else name
    return word if value else f"no {word}"


def write(place: Path, space: Space, settings: Settings, *, head: Sequence[str], given: Sequence[str]) -> None:
    """Write the stage file of a setting, with `head` as its comment. Raises NotReady where that cannot be done.

    It extends the file that was tuned and holds what differs, `given` overrides of the command line included:
    the author's comments stay where they are, and the changes can be read at a glance. Files of other shapes
    cannot be extended: of those the whole stage is written.
    """
    stage = space.plan.stage
    source, opts = stage.config.path, stage.options
    values: dict[str, Any] = {"name": f"{stage.name}-tuned"}
    changed = space.overrides(settings)
    tuned = load.load(source, (*given, *changed)) if changed else stage.config
    if stage.config.shape == "stage":
        values["extends"] = _relative(source, place)
        values |= _differences(load.load(source) if given else stage.config, tuned)
    else:
        values |= {"stage": opts.stage, "backend": opts.backend, **tuned.options}
        # the wrapped shape's own words; how many GPUs says `--gpus` elsewhere
        values.pop("num_gpus", None)
        values["args"] = dict(tuned.args)
    if opts.deepspeed is not None and opts.deepspeed_name not in DEEPSPEED and "deepspeed" not in settings:
        # a file that lies beside the stage file does not lie beside this one
        values["deepspeed"] = _relative(opts.deepspeed, place)
    # a path may hold what ends a comment
    lines = [_LINE_ENDS.sub(" ", line) for line in redact(head)]
    body = yaml.safe_dump(escaped(redact(values)), sort_keys=False, allow_unicode=True, width=100)
    text = MARK + "\n# ".join(lines) + "\n" + body
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(place, text)
    except OSError as error:
        message = f"the stage file cannot be written: {error.strerror}"
        raise not_ready("unwritable-file", message, "another name with -o", file=str(place)) from None


def require_ours(place: Path, source: Path) -> None:
    """Raise UsageError where a file of somebody's own would be overwritten."""
    if not place.exists():
        return
    try:
        ours = place.read_text(encoding="utf-8").startswith(MARK)
    except (OSError, ValueError):
        ours = False
    if not ours or place.resolve() == source.resolve():
        message = f"{place} exists and was not written by `launch tune`"
        raise usage("would-overwrite", message, "another name with -o")


def _relative(target: Path, place: Path) -> str:
    return os.path.relpath(target.resolve(), place.absolute().parent.resolve())


def _differences(written: Config, tuned: Config) -> dict[str, Any]:
    """What has to stand in a file that extends `written` so that it comes to `tuned`."""
    changed: dict[str, Any] = {}
    for key, value in tuned.options.items():
        before = written.options.get(key)
        if value == before:
            continue
        if key in _NESTED and isinstance(value, dict) and isinstance(before, dict):
            value = {k: v for k, v in value.items() if k not in before or before[k] != v}
        changed[key] = value
    args = {key: value for key, value in tuned.args.items() if key not in written.args or written.args[key] != value}
    return {**changed, "args": args} if args else changed
