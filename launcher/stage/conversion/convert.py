"""A training file or script -> a draft of a stage file, and what became of every setting."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from launcher.config.keys import STAGES
from launcher.config.load import TOOLS
from launcher.errors import Finding, InvalidConfig, Severity, launch_finding, shorten
from launcher.lazy_dataclass import dataclass
from launcher.redaction import is_secret_variable, redact
from launcher.stage.conversion import launchers, replacement, sbatch, sources
from launcher.stage.conversion.ledger import (
    PLACEHOLDER,
    ConversionLedger,
    explain_missing,
    is_secret,
)
from launcher.stage.conversion.replacement import Replacements
from launcher.stage.conversion.settings import Recipe, SourceSetting, keep_last_of_each, make_flag
from launcher.stage.conversion.tools import (
    axolotl,
    llama_factory,
    open_instruct,
    other_tools,
    torchtune,
    trl,
)
from launcher.stage.draft import Draft
from launcher.stage.options import Batch
from launcher.upstream.locate import Locator, find_past
from launcher.upstream.trainers import BACKENDS


@dataclass(frozen=True, slots=True)
class _Tool:
    """How a tool's settings are settled, the trainer they are for, the key that names its stage."""

    convert: Callable[[ConversionLedger], None]
    backend: str = "trl"
    stage_key: str = ""
    prepare: Callable[[Recipe], None] | None = None
    name: str = ""


_TOOLS: Mapping[str, _Tool] = {
    "trl": _Tool(trl.convert, prepare=launchers.move_launcher_options),
    "handbook": _Tool(trl.convert_handbook, prepare=launchers.move_launcher_options),
    "own": _Tool(trl.convert_own, prepare=trl.flatten, name="a script of its own"),
    "axolotl": _Tool(axolotl.convert, stage_key="rl"),
    "llama_factory": _Tool(llama_factory.convert, stage_key="stage"),
    "torchtune": _Tool(torchtune.convert, prepare=torchtune.flatten),
    "open_instruct": _Tool(open_instruct.convert, backend="open_instruct", name="open-instruct"),
    "openrlhf": _Tool(
        other_tools.convert_openrlhf, prepare=other_tools.flatten_openrlhf, name="OpenRLHF"
    ),
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
        return {key: omission.reason for key, omission in self.ledger.omissions.items()}

    @property
    def lost(self) -> list[str]:
        """Those without which the stage trains, or is run, differently."""
        return [key for key, omission in self.ledger.omissions.items() if omission.matters]

    def findings(self) -> list[Finding]:
        return [*_collect_findings(self.ledger)]


def convert(
    path: Path,
    *,
    stage: str | None,
    gpus: int | None,
    locator: Locator,
    arguments: tuple[str, ...] = (),
    replacements: Replacements = replacement.NONE,
) -> Conversion:
    """The stage that a file or script describes; `arguments` are those that a script starts with.

    `replacements` take the place of the model and the data of the source. Raises InvalidConfig if
    the file cannot be read or its stage is neither SFT nor DPO, and UsageError if it describes no
    known training.
    """
    circumstances = sources.Circumstances(arguments=arguments, gpus=gpus)
    recipes = sources.read_recipes(path, circumstances)
    recipe = _choose_recipe(recipes, stage, locator)
    tool = _TOOLS[recipe.tool]
    if tool.prepare is not None:
        tool.prepare(recipe)
    name = _choose_stage(recipe, tool, stage, locator)
    launchers.read_configs(recipe)
    script = _choose_script(recipe, tool, name)
    schema = locator.schema(tool.backend, script)
    entry = BACKENDS[tool.backend].STAGES[script]
    draft = Draft(
        stage=name, backend=tool.backend, origin=_describe_origin(recipe, tool), gpus=gpus
    )
    if script != name:
        draft.script = script
    changes = functools.partial(find_past, locator.find(tool.backend), entry.script)
    ledger = ConversionLedger(recipe=recipe, draft=draft, schema=schema, entry=entry, past=changes)
    _settle(ledger, tool, gpus)
    replacement.apply(ledger, replacements)
    _sort_rows(draft)
    _mention_others(recipes, recipe, ledger)
    return Conversion(draft=draft, ledger=ledger)


def _describe_origin(recipe: Recipe, tool: _Tool) -> str:
    described = tool.name or TOOLS.get(recipe.tool, recipe.tool)
    name = "".join(sign if sign.isprintable() else "?" for sign in recipe.path.name)
    return f"from {name} ({described})"


def _choose_recipe(recipes: tuple[Recipe, ...], stage: str | None, locator: Locator) -> Recipe:
    """The first training of a script, or the first of the requested stage."""
    if stage is not None:
        for recipe in recipes:
            if _find_named_stage(recipe, _TOOLS[recipe.tool], locator) in (stage, None):
                return recipe
    return recipes[0]


def _choose_script(recipe: Recipe, tool: _Tool, stage: str) -> str:
    """The key of the script among those of its trainer: a further one if the source starts that."""
    module = recipe.program.removesuffix(".py").replace("/", ".")
    name = f"{module.rpartition('.')[2]}.py"
    for key, entry in BACKENDS[tool.backend].STAGES.items():
        is_same = name in (PurePath(entry.script).name, PurePath(entry.renamed).name)
        if is_same and entry.stage == stage:
            return key
    return stage


def _choose_stage(recipe: Recipe, tool: _Tool, stage: str | None, locator: Locator) -> str:
    named = _find_named_stage(recipe, tool, locator)
    if named is None or named in STAGES:
        return stage or named or "sft"
    place: dict[str, Any] = {"key": tool.stage_key or "stage", "file": str(recipe.path)}
    setting = recipe.get(tool.stage_key)
    if setting is not None:
        place["line"] = setting.line
    message = f"`{named}` is not a stage of launch, which trains {' and '.join(STAGES)}"
    raise InvalidConfig(launch_finding("error", "bad-stage", message, None, **place))


def _find_named_stage(recipe: Recipe, tool: _Tool, locator: Locator) -> str | None:
    if recipe.stage is not None:
        return recipe.stage
    value = recipe.value(tool.stage_key)
    if value is not None:
        return str(value)
    if tool.stage_key and recipe.get("train_dataset") is None:
        # what the tool trains without the key is SFT
        return None
    if _is_dpo(recipe, tool, locator):
        return "dpo"
    return None


def _is_dpo(recipe: Recipe, tool: _Tool, locator: Locator) -> bool:
    """Whether arguments, names or the loss of a source tell DPO."""
    sft = locator.schema(tool.backend, "sft").fields.keys()
    dpo = locator.schema(tool.backend, "dpo").fields.keys()
    only_dpo = dpo - sft - _NOT_OF_DPO
    only_dpo |= {"max_prompt_length", "dataset_mixer_pref"}
    if any(setting.key in only_dpo for setting in recipe.settings):
        return True
    path = recipe.path
    words = f"{recipe.program} {path.name} {path.parent.name}".lower()
    names_dpo = re.search(r"(?<![a-z])dpo(?![a-z])", words)
    if names_dpo and "sft" not in path.name.lower():
        return True
    loss = recipe.value("loss", "loss_name", "method", "rl_type")
    return "dpo" in str(loss).lower()


# arguments that other tools' SFT has too
_NOT_OF_DPO = {"loss_type", "run_name", "attn_implementation", "max_grad_norm", "label_smoothing"}


def _settle(ledger: ConversionLedger, tool: _Tool, gpus: int | None) -> None:
    recipe = ledger.recipe
    recipe.settings, earlier = keep_last_of_each(recipe.settings)
    recipe.launchers, earlier_options = keep_last_of_each(recipe.launchers)
    launchers.settle(recipe, ledger)
    launchers.settle_arguments(recipe, ledger)
    _write_placeholders(ledger)
    named_stage = recipe.get(tool.stage_key)
    if named_stage is not None:
        ledger.point(named_stage, "stage")
    tool.convert(ledger)
    _settle_directives(ledger)
    _settle_environment(ledger)
    replaced = [(setting, "a later one takes its place") for setting in earlier + earlier_options]
    for setting, reason in replaced + recipe.skipped:
        if not ledger.is_settled(setting):
            ledger.leave(setting, reason, matters=False)
    _leave_rest_of_script(ledger)
    for setting in recipe.others:
        ledger.leave(setting, "an argument without a name: launch does not know what it says")
    _settle_batch(ledger, gpus)
    _complete_draft(ledger)


_FLAG = re.compile(r"(?<![\w./=-])(--[A-Za-z][\w.-]*)")


def _leave_rest_of_script(ledger: ConversionLedger) -> None:
    """Name the flags in a script that belong to other commands than the training."""
    recipe = ledger.recipe
    settled = {written.rpartition(" ")[2] for written in (*ledger.carried, *ledger.omissions)}
    for number, line in enumerate(recipe.text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        for flag in _FLAG.findall(line):
            if flag not in settled:
                settled.add(flag)
                setting = make_flag(flag, str(recipe.path), number)
                reason = f"line {number} is no part of this training"
                ledger.leave(setting, reason, matters=False)


def _write_placeholders(ledger: ConversionLedger) -> None:
    """Names of model, data and output that the script does not tell: a person writes them."""
    fields = ledger.schema.fields
    data = ledger.entry.names.data
    missing = [setting for setting in ledger.recipe.settings if setting.missing]
    for setting in missing:
        if setting.key in _MODEL and "model_name_or_path" in fields:
            ledger.write_placeholder(setting, "model_name_or_path")
    for setting in missing:
        if setting.key in _OUTPUT and "output_dir" in fields:
            _carry_output(ledger, setting)
    for setting in missing:
        target = _NAMED.get(setting.key, "")
        if target in fields:
            _carry_name(ledger, setting, target)
    for setting in missing:
        if setting.key in _DATA and data not in ledger.draft.rows:
            ledger.write_placeholder(setting, data)
            row = ledger.draft.rows[data]
            if fields[data].many:
                ledger.draft.rows[data] = row._replace(value=[row.value, 1.0])


_MODEL = frozenset(
    "model_name_or_path model_name model base_model model_path pretrain "
    "pretrained_model_name_or_path model_id base_model_name_or_path model_dir "
    "checkpointer.checkpoint_dir checkpoint_dir model_id_or_path model.partial_pretrain "
    "model.path".split()
)
_OUTPUT = frozenset(
    "output_dir save_path save_dir output_path output checkpoint_dir out_dir "
    "trainer.default_local_dir".split()
)
_DATA = frozenset(
    "dataset_name dataset dataset_path data_path train_file train_files train_data "
    "dataset_mixer_list mixer_list train_data_path train_file_path preference_dataset "
    "dataset_name_or_path data_file data data.train_files".split()
)


_NAMED: Mapping[str, str] = {
    "exp_name": "exp_name",
    "run_name": "run_name",
    "wandb_run_name": "run_name",
    "wandb_name": "run_name",
    "experiment_name": "run_name",
    "hub_model_id": "hub_model_id",
}


def _carry_name(ledger: ConversionLedger, setting: SourceSetting, target: str) -> None:
    """The name of a run without the date and the like in it."""
    text = _remove_unknown(setting).strip("-_./ ")
    if text:
        ledger.carry(setting, target, text)
        ledger.check(setting, f"`{target}`: {explain_missing(setting)}")


def _remove_unknown(setting: SourceSetting) -> str:
    """A text without what only the shell knows, and without the signs that joined it."""
    text = str(setting.value)
    for expression in setting.missing:
        text = text.replace(expression, "")
    text = re.sub(r"[-_.]+(?=/|$)|(?<=/)[-_.]+(?!/|\.)", "", text)
    return re.sub(r"([-_])[-_]+", r"\1", text)


def _carry_output(ledger: ConversionLedger, setting: SourceSetting) -> None:
    """A folder whose name holds what only the shell knows, such as the date: the rest of it."""
    text = re.sub(r"/{2,}", "/", _remove_unknown(setting)).strip()
    text = text.rstrip("/") or text
    if not re.search(r"\w", text):
        text = f"output/{ledger.draft.stage}"
    ledger.carry(setting, "output_dir", text)
    ledger.check(setting, f"`output_dir`: {explain_missing(setting)}")


def _settle_directives(ledger: ConversionLedger) -> None:
    recipe = ledger.recipe
    carried = sbatch.carry(recipe.directives, recipe.gpus)
    ledger.draft.slurm = carried.options
    ledger.draft.name = carried.name
    for setting in recipe.directives:
        if setting.written in carried.targets:
            ledger.point(setting, carried.targets[setting.written])
        else:
            ledger.leave(setting, carried.reasons[setting.written], matters=False)


_HARMLESS = re.compile(
    r"CUDA_|NCCL_|OMP_|MKL_|PYTHON|PATH$|LD_|TOKENIZERS_|TORCH_|GLOO_|MASTER_|RANK$|NODE_RANK|WORLD_SIZE|"
    r"NPROC_PER_NODE|FORCE_TORCHRUN|ACCELERATE_|TRANSFORMERS_VERBOSITY|TF_|BITSANDBYTES|DS_|ASCEND_|HYDRA_|CMD$|LAUNCHER$"
)


def _settle_environment(ledger: ConversionLedger) -> None:
    """Variables that a script hands to its training; secrets by name alone."""
    for setting in ledger.recipe.environment:
        if ledger.is_settled(setting):
            continue
        if is_secret_variable(setting.key):
            ledger.leave(setting, "a secret: set it where launch runs; no file holds it")
        elif _HARMLESS.match(setting.key):
            ledger.leave(setting, "launch hands on the environment that it runs in", matters=False)
        else:
            matters = setting.key.startswith(("WANDB_", "HF_"))
            ledger.leave(setting, "set it where launch runs", matters=matters)


_PER_DEVICE = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"


def _settle_batch(ledger: ConversionLedger, gpus: int | None) -> None:
    """`batch:` in place of the two arguments, if the source or the command tells the GPUs."""
    draft = ledger.draft
    recipe = ledger.recipe
    draft.nodes = recipe.nodes or 1
    devices = gpus
    if recipe.gpus is not None:
        devices = recipe.gpus * draft.nodes
        if draft.gpus is None:
            draft.gpus = recipe.gpus
    devices = devices or recipe.counted
    if draft.batch is not None or devices is None or _is_batch_unknown(recipe):
        return
    per_device = _find_row_or_default(ledger, _PER_DEVICE)
    steps = _find_row_or_default(ledger, _ACCUMULATION)
    if per_device is None or steps is None:
        return
    total = per_device * steps * max(1, devices)
    draft.batch = Batch(total=total, per_device=per_device)
    for target, key in ((_PER_DEVICE, "batch.per_device"), (_ACCUMULATION, "batch.global")):
        draft.rows.pop(target, None)
        ledger.rename(target, key)


def _is_batch_unknown(recipe: Recipe) -> bool:
    """Whether the source computes one of the two numbers from something unknown."""
    names = [setting.key for setting in recipe.settings if setting.missing]
    return any(re.search(r"batch_size|accum", name) for name in names)


def _find_row_or_default(ledger: ConversionLedger, name: str) -> int | None:
    """An argument of the draft, or its default; None unless it is a whole number above 0."""
    row = ledger.draft.rows.get(name)
    field = ledger.schema.fields.get(name)
    value = None
    if row is not None:
        value = row.value
    elif field is not None:
        value = field.default
    if isinstance(value, int) and value > 0:
        return value
    return None


def _complete_draft(ledger: ConversionLedger) -> None:
    """Write what no stage file can do without, for a person to fill in."""
    draft = ledger.draft
    data = ledger.entry.names.data
    unnamed = "the source does not name it"
    model = f"{PLACEHOLDER}_model"
    draft.add_defaults({"model_name_or_path": model}, note=f"the model: {unnamed}")
    if "datasets" not in draft.rows:
        value: Any = f"{PLACEHOLDER}_data"
        if ledger.schema.fields[data].many:
            value = [value, 1.0]
        draft.add_defaults({data: value}, note=f"the data set: {unnamed}")
    for name, reason in ledger.recipe.choices.items():
        draft.remarks += (f"`{name}`: {reason}",)


def _sort_rows(draft: Draft) -> None:
    first = [name for name in _FIRST if name in draft.rows]
    draft.rows = {name: draft.rows[name] for name in dict.fromkeys([*first, *draft.rows])}


def _mention_others(recipes: tuple[Recipe, ...], chosen: Recipe, ledger: ConversionLedger) -> None:
    """Name the further trainings of a script."""
    further = [recipe.program for recipe in recipes if recipe is not chosen]
    if not further:
        return
    noun = "training" if len(further) == 1 else "trainings"
    programs = ", ".join(dict.fromkeys(further))
    starts = f"{chosen.path.name} starts {len(further)} further {noun} ({programs})"
    ledger.draft.remarks += (f"{starts}: one stage file each",)


def settle_refused(conversion: Conversion, findings: tuple[Finding, ...]) -> bool:
    """Take arguments out that launch refuses, with its reason; whether there were any."""
    ledger = conversion.ledger
    changed = False
    for finding in findings:
        key = re.match(r"args\.([^.\[]+)", finding.key or "")
        if finding.severity != "error" or finding.code in _ABOUT_FILES or key is None:
            continue
        name = key[1]
        if name in ledger.draft.rows and name not in _KEPT:
            ledger.drop(name, "; ".join(filter(None, [finding.message, finding.help])))
            changed = True
    return changed


# what no stage can do without, and findings about files that are not here
_KEPT = frozenset(
    "model_name_or_path dataset_name datasets dataset_mixer_list mixer_list output_dir".split()
)
_ABOUT_FILES = frozenset({"missing-data", "missing-file", "no-such-data"})


def describe(conversion: Conversion) -> None:
    """Write what became of the settings into the draft's comments."""
    draft = conversion.draft
    advice: dict[str, list[str]] = {}
    for check in conversion.ledger.checks:
        name = check.setting.written.lstrip("-")
        advice.setdefault(name, []).append(check.advice)
    draft.checks = {name: "; ".join(sentences) for name, sentences in advice.items()}
    draft.lost = {}
    draft.unneeded = {}
    for written, omission in conversion.ledger.omissions.items():
        place = draft.unneeded
        if omission.matters:
            place = draft.lost
        place[written] = (_render_value(omission.setting), omission.reason)


def _render_value(setting: SourceSetting) -> str:
    """The value of a setting for people, without secrets."""
    is_variable = setting.key.isupper() and setting.written == setting.key
    if is_secret(setting) or (is_variable and is_secret_variable(setting.key)):
        return "<secret>"
    value = setting.value
    if value is True or value is None:
        return ""
    return shorten(redact({setting.key: value})[setting.key])


def _collect_findings(ledger: ConversionLedger) -> Iterator[Finding]:
    for check in ledger.checks:
        name = check.setting.written
        yield _build_finding(
            check.setting, "note", "converted", f"`{name}` is converted in part", check.advice
        )
    for file, cut in ledger.recipe.mended:
        message = "a comment or a blank behind the backslash ends the command here: "
        message += "bash passes on nothing that follows"
        help = "the options below are carried as if it did not; take the comment out"
        yield launch_finding("warning", "cut-command", message, help, file=file, line=cut)
    for name, line in ledger.recipe.absent.items():
        message = f"{shorten(name)} is not here: what it says is missing"
        help = "put it where the script looks for it, or give it to `--from`"
        yield launch_finding(
            "warning", "missing-source", message, help, file=str(ledger.recipe.path), line=line
        )
    reasons: dict[str, list[SourceSetting]] = {}
    for omission in ledger.omissions.values():
        if omission.matters:
            reasons.setdefault(omission.reason, []).append(omission.setting)
    for reason, settings in reasons.items():
        names = ", ".join(f"`{setting.written}`" for setting in settings)
        verb = "is" if len(settings) == 1 else "are"
        yield _build_finding(
            settings[0], "warning", "no-counterpart", f"{names} {verb} left out", reason
        )


def _build_finding(
    setting: SourceSetting, severity: Severity, code: str, message: str, help: str | None = None
) -> Finding:
    place: dict[str, Any] = {"key": setting.key, "file": setting.file, "line": setting.line}
    return launch_finding(severity, code, message, help, **place)
