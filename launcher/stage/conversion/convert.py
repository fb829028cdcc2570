"""A file or script that somebody trains with -> a draft of a stage file, and what became of every setting."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from launcher.config.keys import PAIRED, STAGES
from launcher.config.load import TOOLS
from launcher.errors import Finding, InvalidConfig, Severity, brief, launch_finding
from launcher.redaction import is_secret_variable, redact
from launcher.stage.conversion import launchers, replacement, sbatch, sources
from launcher.stage.conversion.ledger import PLACEHOLDER, ConversionLedger, is_secret, unknown_value
from launcher.stage.conversion.replacement import Replacements
from launcher.stage.conversion.settings import Recipe, SourceSetting, last_of_each, name_of
from launcher.stage.conversion.tools import axolotl, llama_factory, open_instruct, other_tools, torchtune, trl
from launcher.stage.draft import Draft
from launcher.upstream.locate import Locator, past
from launcher.upstream.trainers import BACKENDS


@dataclass(frozen=True, slots=True)
class _Tool:
    """How the settings of a tool are settled, the trainer they are for, and which key names its stage."""

    convert: Callable[[ConversionLedger], None]
    backend: str = "trl"
    stage_key: str = ""
    prepare: Callable[[Recipe], None] | None = None
    name: str = ""


_TOOLS: Mapping[str, _Tool] = {
    "trl": _Tool(trl.convert, prepare=launchers.split_off),
    "handbook": _Tool(trl.convert_handbook, prepare=launchers.split_off),
    "own": _Tool(trl.convert_own, prepare=trl.flatten, name="a script of its own"),
    "axolotl": _Tool(axolotl.convert, stage_key="rl"),
    "llama_factory": _Tool(llama_factory.convert, stage_key="stage"),
    "torchtune": _Tool(torchtune.convert, prepare=torchtune.flatten),
    "open_instruct": _Tool(open_instruct.convert, backend="open_instruct", name="open-instruct"),
    "openrlhf": _Tool(other_tools.convert_openrlhf, prepare=other_tools.flatten_openrlhf, name="OpenRLHF"),
    "verl": _Tool(other_tools.convert_verl, name="verl"),
    "swift": _Tool(other_tools.convert_swift, name="ms-swift"),
}
_FIRST = (
    "model_name_or_path",
    "model_revision",
    "datasets",
    "test_split_size",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_mixer_list",
    "mixer_list",
    "output_dir",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A draft with what became of the settings of its source."""

    draft: Draft
    ledger: ConversionLedger

    @property
    def left_out(self) -> dict[str, str]:
        """Every setting that the stage file does not say, with the reason."""
        return {written: omission.reason for written, omission in self.ledger.omissions.items()}

    @property
    def lost(self) -> list[str]:
        """Those without which the stage trains, or is run, differently."""
        return [written for written, omission in self.ledger.omissions.items() if omission.matters]

    def findings(self) -> list[Finding]:
        return [*_findings(self.ledger)]


def convert(
    path: Path,
    *,
    stage: str | None,
    gpus: int | None,
    locator: Locator,
    arguments: tuple[str, ...] = (),
    environ: Mapping[str, str] = os.environ,
    replacements: Replacements = replacement.NONE,
) -> Conversion:
    """The stage that a file or script describes; `arguments` are those that a script would be started with.

    `replacements` take the place of the model and the data of the source.

    Raises InvalidConfig where the file cannot be read or its stage is neither SFT nor DPO, and UsageError where it
    describes no training that is known.
    """
    circumstances = sources.Circumstances(environ=environ, arguments=arguments, gpus=gpus)
    source = sources.read(path, circumstances)
    recipe = _choose(source.recipes, stage, locator)
    tool = _TOOLS[recipe.tool]
    if tool.prepare is not None:
        tool.prepare(recipe)
    name = _stage(recipe, tool, stage, locator)
    launchers.read_configs(recipe)
    script = _script(recipe, tool, name)
    schema = locator.schema(tool.backend, script)
    entry = BACKENDS[tool.backend].STAGES[script]
    described = tool.name or TOOLS.get(recipe.tool, recipe.tool)
    name_of_file = "".join(character if character.isprintable() else "?" for character in path.name)
    origin = f"from {name_of_file} ({described})"
    draft = Draft(stage=name, backend=tool.backend, origin=origin, gpus=gpus)
    if script != name:
        draft.script = script
    upstream = locator.find(tool.backend)

    def changes(key: str) -> Any:
        return past(upstream, entry.script, key)

    ledger = ConversionLedger(recipe=recipe, draft=draft, schema=schema, entry=entry, past=changes)
    _settle(ledger, tool, gpus)
    replacement.apply(ledger, replacements)
    _sort(draft)
    _others(source.recipes, recipe, ledger)
    return Conversion(draft=draft, ledger=ledger)


def _choose(recipes: tuple[Recipe, ...], stage: str | None, locator: Locator) -> Recipe:
    """The first training of a script, or the first of the requested stage."""
    if stage is not None:
        for recipe in recipes:
            if _named_stage(recipe, _TOOLS[recipe.tool], locator) in (stage, None):
                return recipe
    return recipes[0]


def _script(recipe: Recipe, tool: _Tool, stage: str) -> str:
    """The key of the script among those of its trainer: a further one where the source starts that."""
    module = recipe.program.removesuffix(".py").replace("/", ".")
    name = f"{module.rpartition('.')[2]}.py"
    for key, entry in BACKENDS[tool.backend].STAGES.items():
        is_same = name in (PurePath(entry.script).name, PurePath(entry.renamed).name)
        if is_same and entry.stage == stage:
            return key
    return stage


def _stage(recipe: Recipe, tool: _Tool, stage: str | None, locator: Locator) -> str:
    named = _named_stage(recipe, tool, locator)
    if named not in (None, *STAGES):
        setting = recipe.get(tool.stage_key) if tool.stage_key else None
        line = None if setting is None else setting.line
        message = f"`{named}` is not a stage of launch, which trains {' and '.join(STAGES)}"
        place = {"key": tool.stage_key or "stage", "file": str(recipe.path), "line": line}
        raise InvalidConfig(launch_finding("error", "bad-stage", message, None, **place))
    return stage or named or "sft"


def _named_stage(recipe: Recipe, tool: _Tool, locator: Locator) -> str | None:
    if recipe.stage is not None:
        return recipe.stage
    value = recipe.value(tool.stage_key) if tool.stage_key else None
    if value is not None:
        return str(value)
    if tool.stage_key and recipe.get("train_dataset") is None:
        # what the tool trains without the key is SFT
        return None
    words = f"{recipe.program} {recipe.path.name} {recipe.path.parent.name}".lower()
    keys = {setting.key for setting in recipe.settings}
    for paired in PAIRED:
        own = set(locator.schema(tool.backend, paired).fields)
        first = next(name for name in STAGES if name not in PAIRED)
        further = own - set(locator.schema(tool.backend, first).fields)
        further |= {"max_prompt_length", "dataset_mixer_pref"}
        if keys & further - {"loss_type", "run_name", "attn_implementation", "max_grad_norm", "label_smoothing"}:
            return paired
        if re.search(rf"(?<![a-z]){paired}(?![a-z])", words) and "sft" not in recipe.path.name.lower():
            return paired
        loss = recipe.value("loss", "loss_name", "method", "rl_type")
        if loss is not None and paired in str(loss).lower():
            return paired
    return None


def _settle(ledger: ConversionLedger, tool: _Tool, gpus: int | None) -> None:
    recipe = ledger.recipe
    recipe.settings, earlier = last_of_each(recipe.settings)
    recipe.launchers, doubled = last_of_each(recipe.launchers)
    launchers.settle(recipe, ledger)
    launchers.arguments_of(recipe, ledger)
    _placeholders(ledger)
    tool.convert(ledger)
    _directives(ledger)
    _environment(ledger)
    for setting in (*earlier, *doubled):
        if not ledger.is_settled(setting):
            ledger.leave(setting, "a later one takes its place", matters=False)
    for setting, reason in recipe.skipped:
        if not ledger.is_settled(setting):
            ledger.leave(setting, reason, matters=False)
    _rest_of_script(ledger)
    for setting in recipe.others:
        ledger.leave(setting, "an argument without a name: launch does not know what it says")
    _batch(ledger, gpus)
    _complete(ledger)


_FLAG = re.compile(r"(?<![\w./=-])(--[A-Za-z][\w.-]*)")


def _rest_of_script(ledger: ConversionLedger) -> None:
    """Name the flags in a script that belong to other commands than the training."""
    recipe = ledger.recipe
    settled = {written.rpartition(" ")[2] for written in (*ledger.carried, *ledger.omissions)}
    for number, line in enumerate(recipe.text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        for flag in _FLAG.findall(line):
            if flag in settled:
                continue
            settled.add(flag)
            setting = SourceSetting(key=name_of(flag), value=None, written=flag, file=str(recipe.path), line=number)
            ledger.leave(setting, f"line {number} is no part of this training", matters=False)


def _placeholders(ledger: ConversionLedger) -> None:
    """Names of model, data and output that the script does not tell: a person writes them."""
    for keys, target in ((_MODEL, "model_name_or_path"), (_OUTPUT, "output_dir")):
        for setting in ledger.recipe.settings:
            if setting.key in keys and setting.missing and target in ledger.schema.fields:
                if target == "output_dir":
                    _output(ledger, setting)
                else:
                    ledger.placeholder(setting, target)
    for setting in ledger.recipe.settings:
        target = _NAMED.get(setting.key, "")
        if setting.missing and target in ledger.schema.fields:
            _name(ledger, setting, target)
    data = ledger.entry.names.data
    for setting in ledger.recipe.settings:
        if setting.key in _DATA and setting.missing and data not in ledger.draft.rows:
            ledger.placeholder(setting, data)
            row = ledger.draft.rows[data]
            if ledger.schema.fields[data].many:
                ledger.draft.rows[data] = row._replace(value=[row.value, 1.0])


_MODEL = frozenset(
    "model_name_or_path model_name model base_model model_path pretrain pretrained_model_name_or_path model_id "
    "base_model_name_or_path model_dir checkpointer.checkpoint_dir checkpoint_dir model_id_or_path "
    "model.partial_pretrain model.path".split()
)
_OUTPUT = frozenset(
    "output_dir save_path save_dir output_path output checkpoint_dir out_dir trainer.default_local_dir".split()
)
_DATA = frozenset(
    "dataset_name dataset dataset_path data_path train_file train_files train_data dataset_mixer_list mixer_list "
    "train_data_path train_file_path preference_dataset dataset_name_or_path data_file data data.train_files".split()
)


_NAMED: Mapping[str, str] = {
    "exp_name": "exp_name",
    "run_name": "run_name",
    "wandb_run_name": "run_name",
    "wandb_name": "run_name",
    "experiment_name": "run_name",
    "hub_model_id": "hub_model_id",
}


def _name(ledger: ConversionLedger, setting: SourceSetting, target: str) -> None:
    """The name of a run without the date and the like in it."""
    text = _without_unknown(setting).strip("-_./ ")
    if text:
        ledger.carry(setting, target, text)
        ledger.check(setting, f"`{target}`: {unknown_value(setting)}")


def _without_unknown(setting: SourceSetting) -> str:
    """A text without what only the shell knows, and without the signs that joined it."""
    text = str(setting.value)
    for expression in setting.missing:
        text = text.replace(expression, "")
    text = re.sub(r"[-_.]+(?=/|$)|(?<=/)[-_.]+(?!/|\.)", "", text)
    return re.sub(r"([-_])[-_]+", r"\1", text)


def _output(ledger: ConversionLedger, setting: SourceSetting) -> None:
    """A folder whose name holds what only the shell knows, such as the date: the rest of the name."""
    text = re.sub(r"/{2,}", "/", _without_unknown(setting)).strip()
    text = text.rstrip("/") or text
    if not re.search(r"\w", text):
        text = f"output/{ledger.draft.stage}"
    ledger.carry(setting, "output_dir", text)
    ledger.check(setting, f"`output_dir`: {unknown_value(setting)}")


def _directives(ledger: ConversionLedger) -> None:
    recipe = ledger.recipe
    job = sbatch.Job(settings=recipe.directives, gpus=recipe.gpus, nodes=recipe.nodes)
    carried = sbatch.carry(job)
    ledger.draft.slurm = carried.options
    ledger.draft.name = carried.name
    for setting in recipe.directives:
        if setting.written in carried.targets:
            ledger.point(setting, carried.targets[setting.written])
        else:
            ledger.leave(setting, carried.reasons.get(setting.written, "launch sets it"), matters=False)


_HARMLESS = re.compile(
    r"CUDA_|NCCL_|OMP_|MKL_|PYTHON|PATH$|LD_|TOKENIZERS_|TORCH_|GLOO_|MASTER_|RANK$|NODE_RANK|WORLD_SIZE|"
    r"NPROC_PER_NODE|FORCE_TORCHRUN|ACCELERATE_|TRANSFORMERS_VERBOSITY|TF_|BITSANDBYTES|DS_|ASCEND_|HYDRA_|CMD$|LAUNCHER$"
)


def _environment(ledger: ConversionLedger) -> None:
    """Variables that a script hands to its training; secrets by name alone."""
    for setting in ledger.recipe.environment:
        if ledger.is_settled(setting):
            continue
        if is_secret_variable(setting.key):
            ledger.leave(setting, "a secret: set it where launch runs; no file holds it")
        elif _HARMLESS.match(setting.key):
            ledger.leave(setting, "launch hands on the environment that it runs in", matters=False)
        else:
            ledger.leave(setting, "set it where launch runs", matters=setting.key.startswith(("WANDB_", "HF_")))


_PER_DEVICE = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"


def _batch(ledger: ConversionLedger, gpus: int | None) -> None:
    """`batch:` in the place of the two arguments, where the source tells its GPUs, or the command does."""
    draft, recipe = ledger.draft, ledger.recipe
    source_gpus = recipe.gpus
    if draft.gpus is None:
        draft.gpus = source_gpus
    draft.nodes = recipe.nodes or 1
    devices = gpus if source_gpus is None else source_gpus * (recipe.nodes or 1)
    devices = devices or recipe.counted
    if draft.batch is not None or devices is None:
        return
    each = draft.rows.get(_PER_DEVICE)
    steps = draft.rows.get(_ACCUMULATION)
    each_value = _default(ledger, _PER_DEVICE) if each is None else each.value
    steps_value = _default(ledger, _ACCUMULATION) if steps is None else steps.value
    unknown = _unknown_batch(ledger)
    if unknown or not isinstance(each_value, int) or not isinstance(steps_value, int):
        return
    if each_value < 1 or steps_value < 1:
        return
    draft.batch = each_value * steps_value * max(1, devices), each_value
    for target, key in ((_PER_DEVICE, "batch.per_device"), (_ACCUMULATION, "batch.global")):
        draft.rows.pop(target, None)
        for targets in ledger.carried.values():
            if target in targets:
                targets[targets.index(target)] = key


def _unknown_batch(ledger: ConversionLedger) -> bool:
    """Whether the source computes one of the two numbers from what is not known."""
    names = [setting.key for setting in ledger.recipe.settings if setting.missing]
    return any(re.search(r"batch_size|accum", name) for name in names)


def _default(ledger: ConversionLedger, name: str) -> Any:
    known = ledger.schema.fields.get(name)
    return None if known is None else known.default


def _complete(ledger: ConversionLedger) -> None:
    """Write what no stage file can do without, for a person to fill in."""
    draft = ledger.draft
    data = ledger.entry.names.data
    for name, advice in (("model_name_or_path", "the model"), (data, "the data set")):
        if name in draft.rows or (name == data and "datasets" in draft.rows):
            continue
        value: Any = f"{PLACEHOLDER}_{'model' if name != data else 'data'}"
        if ledger.schema.fields[name].many:
            value = [value, 1.0]
        draft.add_defaults({name: value}, note=f"{advice}: the source does not name it")
    if ledger.recipe.choices:
        draft.remarks += tuple(_choices(ledger))


def _choices(ledger: ConversionLedger) -> Iterator[str]:
    for name, reason in ledger.recipe.choices.items():
        yield f"`{name}`: {reason}"


def _sort(draft: Draft) -> None:
    first = [name for name in _FIRST if name in draft.rows]
    draft.rows = {name: draft.rows[name] for name in dict.fromkeys([*first, *draft.rows])}


def _others(recipes: tuple[Recipe, ...], chosen: Recipe, ledger: ConversionLedger) -> None:
    """Name the further trainings of a script."""
    further = len(recipes) - 1
    if further < 1:
        return
    programs = dict.fromkeys(recipe.program for recipe in recipes if recipe is not chosen)
    noun = "training" if further == 1 else "trainings"
    ledger.draft.remarks += (
        f"{chosen.path.name} starts {further} further {noun} ({', '.join(programs)}): one stage file each",
    )


def settle_refused(conversion: Conversion, findings: tuple[Finding, ...]) -> bool:
    """Take arguments out that launch refuses, with its reason; whether there were any."""
    ledger = conversion.ledger
    changed = False
    for finding in findings:
        if finding.severity != "error" or not (finding.key or "").startswith("args."):
            continue
        name = re.split(r"[.\[]", (finding.key or "").removeprefix("args."), maxsplit=1)[0]
        if name not in ledger.draft.rows or name in _KEPT or finding.code in _ABOUT_FILES:
            continue
        ledger.drop(name, finding.message if finding.help is None else f"{finding.message}; {finding.help}")
        changed = True
    return changed


# what no stage can do without, and findings about files that are not here
_KEPT = frozenset({"model_name_or_path", "dataset_name", "datasets", "dataset_mixer_list", "mixer_list", "output_dir"})
_ABOUT_FILES = frozenset({"missing-data", "missing-file", "no-such-data"})


def describe(conversion: Conversion) -> None:
    """Write what became of the settings into the draft's comments."""
    draft = conversion.draft
    draft.checks = {}
    for check in conversion.ledger.checks:
        name = check.setting.written.lstrip("-")
        before = draft.checks.get(name)
        draft.checks[name] = check.advice if before is None else f"{before}; {check.advice}"
    draft.lost = {}
    draft.unneeded = {}
    for written, omission in conversion.ledger.omissions.items():
        place = draft.lost if omission.matters else draft.unneeded
        place[written] = (_shown(omission.setting), omission.reason)


def _shown(setting: SourceSetting) -> str:
    """The value of a setting for people, without secrets."""
    is_variable = setting.key.isupper() and setting.written == setting.key
    if is_secret(setting) or (is_variable and is_secret_variable(setting.key)):
        return "<secret>"
    value = setting.value
    if value is True or value is None:
        return ""
    return brief(redact({setting.key: value})[setting.key])


def _findings(ledger: ConversionLedger) -> Iterator[Finding]:
    for check in ledger.checks:
        name = check.setting.written
        yield _finding(check.setting, "note", "converted", f"`{name}` is converted in part", check.advice)
    for file, cut in ledger.recipe.mended:
        message = (
            "a comment or a blank behind the backslash ends the command here: bash passes on nothing that follows"
        )
        help = "the options below are carried as if it did not; take the comment out"
        yield launch_finding("warning", "cut-command", message, help, file=file, line=cut)
    for name, line in ledger.recipe.absent.items():
        message = f"{brief(name)} is not here: what it says is missing"
        help = "put it where the script looks for it, or give it to `--from`"
        yield launch_finding("warning", "missing-source", message, help, file=str(ledger.recipe.path), line=line)
    reasons: dict[str, list[SourceSetting]] = {}
    for omission in ledger.omissions.values():
        if omission.matters:
            reasons.setdefault(omission.reason, []).append(omission.setting)
    for reason, settings in reasons.items():
        names = ", ".join(f"`{setting.written}`" for setting in settings)
        verb = "is" if len(settings) == 1 else "are"
        yield _finding(settings[0], "warning", "no-counterpart", f"{names} {verb} left out", reason)


def _finding(setting: SourceSetting, severity: Severity, code: str, message: str, help: str | None = None) -> Finding:
    place: dict[str, Any] = {"key": setting.key, "file": setting.file, "line": setting.line}
    return launch_finding(severity, code, message, help, **place)
