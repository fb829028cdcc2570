"""A file that somebody trains with -> `Recipe`s: YAML of six tools, shell scripts, batch scripts of Slurm's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from launcher.config import document
from launcher.config.document import Document
from launcher.config.load import tool_of
from launcher.errors import InvalidConfig, usage
from launcher.files import read_bytes
from launcher.redaction import is_secret_variable
from launcher.stage.conversion import commands, names, olmo_core, sbatch, sharding
from launcher.stage.conversion.commands import Invocation
from launcher.stage.conversion.settings import Recipe, SourceSetting, from_mapping, name_of
from launcher.stage.shell import interpreter, syntax
from launcher.stage.shell.expansion import Argument
from launcher.stage.shell.interpreter import Script
from launcher.upstream.open_instruct import STAGES

_SHELL_SUFFIXES = frozenset({".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".sub", ".job", ".cmd"})
_YAML_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
_MOST_BYTES = 2**20
_STARTS = re.compile(
    r"accelerate\s+launch|torchrun|deepspeed\s|torch\.distributed|\btrl\s+(sft|dpo)\b|llamafactory-cli|swift\s+(sft|rlhf)"
    r"|axolotl\s+train|tune\s+run|python3?\s+\S+"
)
_TOOL_OF_PROGRAM = {
    "trl": "trl",
    "llamafactory-cli": "llama_factory",
    "lmf": "llama_factory",
    "swift": "swift",
    "megatron": "swift",
    "axolotl": "axolotl",
    "tune": "torchtune",
}
# programs that train, but neither SFT nor DPO
_OTHER_STAGES = re.compile(
    r"(?<![a-z])(grpo\w*|ppo\w*|rloo|kto|orpo|cpo|reinforce\w*|reward\w*|rm|rlvr|online_dpo|pretrain\w*|pt|gkd|eval\w*|"
    r"generate\w*|inference|infer|serve|merge\w*|convert\w*|prepare\w*|preprocess\w*|export|tokenize\w*|download\w*|"
    r"predict\w*|benchmark\w*|quantize\w*|upload\w*|sample|plot\w*|test|score\w*|vllm\w*|setup)(?![a-z])"
)


def _open_instruct_scripts() -> dict[str, str]:
    """The stage of each script of open-instruct's, by its name now, before or as it is announced."""
    stages = {"finetune1": "sft", "dpo_tune": "dpo"}
    for key, entry in STAGES.items():
        for path in filter(None, (entry.script, entry.renamed)):
            stages[PurePath(path).stem] = entry.stage or key
    return stages


_OPEN_INSTRUCT = _open_instruct_scripts()
_OPEN_INSTRUCT_SIGNS = frozenset(
    "with_tracking checkpointing_steps use_slow_tokenizer dataset_mixer_list mixer_list "
    "tokenizer_name max_train_steps preprocessing_num_workers exp_name add_bos chat_template_name "
    "dataset_mix_dir keep_last_n_checkpoints try_launch_beaker_eval_jobs num_epochs use_flash_attn "
    "clip_grad_norm hf_metadata_dataset".split()
)
_TRL_SIGNS = frozenset(
    "bf16 fp16 save_strategy save_steps eval_strategy evaluation_strategy torch_dtype dtype use_peft "
    "lora_r max_length max_prompt_length gradient_checkpointing_kwargs do_eval optim hub_model_id "
    "hub_strategy log_level dataset_splits dataset_mixture max_steps packing logging_strategy "
    "per_device_eval_batch_size overwrite_output_dir".split()
)


@dataclass(frozen=True, slots=True)
class TrainingSource:
    """`recipes` are the trainings of a file, the most likely one first; `document` is what a YAML file holds."""

    recipes: tuple[Recipe, ...]
    document: Document | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a script would find where it is started: variables, its arguments, GPUs of a machine."""

    environ: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    gpus: int | None = None


def read(path: Path, circumstances: Circumstances) -> TrainingSource:
    """The trainings that a file describes.

    Raises InvalidConfig of a file that cannot be read, and UsageError of one that describes no training that is known.
    """
    if path.suffix in (".py", ".ipynb"):
        message = f"{path} is a Python program: launch reads the script that starts it, or its config file"
        raise usage("unknown-format", message, "launch init --from train.sh")
    text = document.read_text(path)
    if _is_shell(path, text):
        return TrainingSource(_of_script(path, text, circumstances))
    content = document.read_yaml(path)
    values = {key: value for key, value in content.value.items()}
    if {"stage", "args"} <= values.keys():
        message = f"{path} is a stage file of launch already: --from reads what other tools train with"
        raise usage("unknown-format", message, f"launch validate-config {path}")
    tool = yaml_tool(values)
    if tool is None:
        raise _unknown(path)
    lines = {key: origin.line for key, origin in content.origins.items()}
    recipe = Recipe(path=path, tool=tool, program=path.name)
    recipe.settings = from_mapping(values, str(path), lines)
    return TrainingSource((recipe,), content)


def _unknown(path: Path) -> Exception:
    message = (
        f"{path} starts no SFT or DPO training: no file of TRL, open-instruct, Axolotl, LLaMA-Factory or torchtune, "
        "and no script that launches one"
    )
    return usage("unknown-format", message, f"launch validate-config {path}")


def _is_shell(path: Path, text: str) -> bool:
    if path.suffix in _SHELL_SUFFIXES:
        return True
    if path.suffix in _YAML_SUFFIXES:
        return False
    first = text.lstrip().partition("\n")[0]
    if first.startswith("#!"):
        return "sh" in first
    return "#SBATCH" in text or _STARTS.search(text) is not None


def yaml_tool(values: Mapping[str, Any]) -> str | None:
    """Whose file a YAML mapping is; None of a stage file of launch's, and of what is none of these."""
    keys = set(values)
    if keys & {"args", "open_instruct", "stages"}:
        return None
    tool = tool_of(values)
    if tool is not None:
        return tool
    if "model" in keys and keys & {"train_dataset", "init_config", "dist_config"}:
        return "llama_factory"
    signs = _OPEN_INSTRUCT_SIGNS | {"dataset_mixer"}
    if "model_name_or_path" in keys and keys & signs and not keys & {"backend", "extends"}:
        return "open_instruct"
    if "model_name_or_path" in keys and keys & _TRL_SIGNS and not keys & {"backend", "extends", "stage"}:
        return "trl"
    is_plain = {"model_name_or_path", "dataset_name"} <= keys or {"model_name_or_path", "datasets"} <= keys
    if is_plain and not keys & (_OPEN_INSTRUCT_SIGNS | {"backend", "extends", "stage"}):
        return "trl"
    return None


def _of_script(path: Path, text: str, circumstances: Circumstances) -> tuple[Recipe, ...]:
    job = sbatch.read(text, str(path))
    environ = circumstances.environ
    known = {name: environ[name] for name in ("HOME", "USER") if name in environ}
    values = {setting.key: str(setting.value) for setting in job.settings}
    if job.gpus is not None:
        values["gpus"] = str(job.gpus)
    if job.settings:
        # what sbatch takes where the script says nothing
        values.setdefault("nodes", "1")
    known |= interpreter.cluster_variables(values)
    folder = str(path.parent)

    directives = list(job.settings)

    def find(name: str) -> str | None:
        other = _script_text(path, name)
        if other is not None:
            directives.extend(sbatch.read(other, name).settings)
        return other

    try:
        setup = interpreter.ScriptSetup(
            folder=folder,
            known=known,
            arguments=circumstances.arguments,
            gpus=circumstances.gpus or job.gpus or 1,
            nodes=job.nodes or 1,
        )
        script = interpreter.read_script(text, str(path), find=find, setup=setup)
    except syntax.TooDeep:
        message = f"structures are nested deeper than {syntax.MAX_DEPTH} levels"
        raise InvalidConfig(document.bad(path, "too-deep", message)) from None
    recipes = []
    for command in script.commands:
        invocation = commands.read(command)
        if invocation is None:
            continue
        recipe = _recipe(path, invocation, script)
        if recipe is not None:
            recipe.text = text
            recipe.directives = [*directives, *sbatch.of_command_line(recipe.launchers)]
            whole = sbatch.of_settings(recipe.directives)
            recipe.launchers = [setting for setting in recipe.launchers if not sbatch.is_of_slurm(setting)]
            recipe.nodes = whole.nodes
            recipe.gpus = whole.gpus
            recipes.append((bool(invocation.unless), recipe))
    if not recipes:
        raise _no_training(path, script)
    # of commands that certainly run the first; what depends on a condition comes after
    recipes.sort(key=lambda pair: pair[0])
    return tuple(recipe for _, recipe in recipes)


def _script_text(path: Path, name: str) -> str | None:
    """The text of another script that a script starts: below this folder, or beside the script."""
    if os.path.isabs(name) or ".." in Path(name).parts[1:]:
        return None
    for folder in (Path(), path.parent, *path.parent.parents[:3]):
        candidate = folder / name
        try:
            if candidate.is_file() and candidate.resolve() != path.resolve():
                return read_bytes(candidate, _MOST_BYTES).decode(errors="replace")
        except (OSError, ValueError):
            continue
    return None


def _no_training(path: Path, script: Script) -> Exception:
    started = []
    any_flags = False
    for command in script.commands:
        invocation = commands.read(command)
        if invocation is not None:
            started.append((invocation.program, invocation.line))
            any_flags = any_flags or bool(invocation.settings or invocation.configs)
    for program, line in started:
        reason = olmo_core.refusal(program)
        if reason is not None:
            message = f"`{program}` {reason.what}"
            return InvalidConfig(document.bad(path, "no-training", message, line, reason.instead))
    if started:
        program, line = started[-1]
        if "$" in program or re.search(r"(^|/)\.py$", program):
            message = f"the script takes what it trains from its arguments: without them it starts `{program}`"
            help = 'give them as it is started: --script-args "ARGS"'
            return InvalidConfig(document.bad(path, "no-training", message, line, help))
        message = f"`{program}` is no SFT or DPO training that launch knows"
        if not any_flags and re.search(r"sft|dpo|train|tune", program):
            message = f"`{program}` is started without flags: what it trains stands in its code, which is not read"
        help = "launch reads scripts that start TRL, open-instruct, LLaMA-Factory, Axolotl, torchtune, and the like"
        return InvalidConfig(document.bad(path, "no-training", message, line, help))
    if script.absent:
        name, line = next(iter(script.absent.items()))
        message = f"it starts {name}, which is not here"
        help = f"put it beside {path.name}, or give it to `--from`"
        return InvalidConfig(document.bad(path, "missing-file", message, line, help))
    message = "no command of this script starts a training"
    return InvalidConfig(
        document.bad(path, "no-training", message, 1, "give the script that holds `accelerate launch` or the like")
    )


def _recipe(path: Path, invocation: Invocation, script: Script) -> Recipe | None:
    """A command as a recipe; None of one that trains neither SFT nor DPO."""
    named = _named_tool(invocation)
    if named is None:
        return None
    tool, stage = named
    recipe = Recipe(path=path, tool=tool, program=invocation.program, stage=stage)
    recipe.launchers = invocation.launchers
    recipe.environment = [*_exported(script, str(path)), *invocation.environment]
    recipe.texts = {name: argument.text for name, argument in script.files.items()}
    recipe.mended = script.mended
    recipe.choices = {name: why for name, why in script.choices.items() if name in script.scope.uses}
    if script.scope.counts:
        recipe.counted = script.scope.gpus * script.scope.nodes
    for expression, number in script.scope.counts.items():
        recipe.choices[expression] = f"taken as {number}; --gpus and --nodes say how many there are"
    recipe.absent = dict(script.absent)
    for argument, reason in script.skipped:
        flag = argument.text
        setting = SourceSetting(key=name_of(flag), value=None, written=flag, file=str(path), line=argument.line)
        recipe.skipped.append((setting, reason))
    configs = [*invocation.configs]
    configs += [Argument(s.value, s.line or 0, s.missing) for s in invocation.positional if _is_config(s, recipe)]
    for config in configs:
        _add_config(config, recipe)
    recipe.settings += invocation.settings
    positional = [s for s in invocation.positional if not _is_config(s, recipe)]
    recipe.others = positional
    if tool != "own":
        return recipe
    return recipe if _is_training(recipe) else None


def _is_config(setting: SourceSetting, recipe: Recipe) -> bool:
    """A word that names a config although it does not end like one: `"$CONFIG_FILE"`."""
    return bool(setting.missing) and re.search(r"(?i)conf|yaml|yml|recipe", str(setting.value)) is not None


def _exported(script: Script, file: str) -> list[SourceSetting]:
    settings = []
    for name, argument in script.exported.items():
        if name in script.scope.uses and not is_secret_variable(name):
            # its value stands where the script uses it
            continue
        setting = SourceSetting(
            key=name,
            value=argument.text,
            written=name,
            file=file,
            line=argument.line or None,
            missing=argument.missing,
        )
        settings.append(setting)
    return settings


def _add_config(config: Argument, recipe: Recipe) -> None:
    """The keys of a config file that a command names."""
    text = None if config.missing else sharding.read_text(config.text, recipe)
    if text is None:
        recipe.absent[config.text] = config.line
        return
    file = sharding.find(config.text, recipe)
    place = Path(config.text) if file is None else file
    try:
        content = document.parse(place, text)
    except (InvalidConfig, yaml.YAMLError):
        recipe.absent[config.text] = config.line
        return
    tool = yaml_tool(content.value)
    if tool is not None and recipe.tool in ("own", "trl"):
        recipe.tool = tool
    lines = {key: origin.line for key, origin in content.origins.items()}
    recipe.settings += from_mapping(content.value, str(place), lines)


def _named_tool(invocation: Invocation) -> tuple[str, str | None] | None:
    """Whose names the arguments of a program have, and its stage; None of what is no training of SFT or DPO."""
    program = invocation.program
    if olmo_core.refusal(program) is not None:
        return None
    words = program.split()
    keys = {setting.key for setting in invocation.settings}
    if invocation.kind in _TOOL_OF_PROGRAM:
        return _command_line_tool(invocation, words, keys)
    module = re.sub(r"\.py$", "", program).replace("/", ".")
    name = module.rpartition(".")[2]
    if "open_instruct" in module and name in _OPEN_INSTRUCT:
        return "open_instruct", _OPEN_INSTRUCT[name]
    if "openrlhf" in module:
        return ("openrlhf", name.removeprefix("train_")) if name in ("train_sft", "train_dpo") else None
    if module.endswith(("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer")):
        return "verl", "sft"
    if "axolotl" in module:
        return ("axolotl", None) if name in ("train", "finetune", "axolotl") else None
    is_llama_factory = keys & {"finetuning_type", "template", "cutoff_len"} and keys & {"stage", "do_train", "dataset"}
    if is_llama_factory or "llamafactory" in module.lower() or "llmtuner" in module:
        return "llama_factory", None
    if re.search(r"(LLaMA-Factory|llama_factory)/src/train(_bash)?\.py", program):
        return "llama_factory", None
    stage = _stage_of_name(name)
    if stage == _OTHER:
        return None
    if "trl" in module.split(".") or re.search(r"scripts\.(sft|dpo)$", module):
        return "trl", stage
    return "own", stage


def _command_line_tool(invocation: Invocation, words: list[str], keys: set[str]) -> tuple[str, str | None] | None:
    subcommand = words[1] if len(words) > 1 else ""
    tool = _TOOL_OF_PROGRAM[invocation.kind]
    if invocation.kind == "trl":
        return (tool, subcommand) if subcommand in ("sft", "dpo") else None
    if tool == "swift":
        if subcommand == "rlhf":
            kind = next((s.value for s in invocation.settings if s.key == "rlhf_type"), None)
            return (tool, "dpo") if kind in (None, "dpo") else None
        return (tool, "sft") if subcommand in ("sft",) else None
    if tool == "torchtune":
        if "dpo" in invocation.program:
            return tool, "dpo"
        return None if _OTHER_STAGES.search(invocation.program.removeprefix("tune run").lower()) else (tool, "sft")
    return tool, None


_OTHER = "another"
"""What a program trains that is neither SFT nor DPO, or does that is no training."""


def _stage_of_name(name: str) -> str | None:
    """The stage that a program's name tells; None where it tells none."""
    lower = name.lower()
    if re.search(r"(?<![a-z])(dpo|dpov2|dpo_align)(?![a-z])", lower) and "online" not in lower:
        return "dpo"
    is_training = re.search(r"(?<![a-z])(sft|finetune|finetuning|fine_tune|train|lora|qlora|unsloth)(?![a-z])", lower)
    if is_training and re.search(r"(?<![a-z])(grpo|ppo|kto|orpo|rm|reward|pretrain)", lower):
        return _OTHER
    if re.search(r"(?<![a-z])(sft|finetune|finetuning|fine_tune|lora|qlora)(?![a-z])", lower):
        return "sft"
    if not is_training and _OTHER_STAGES.search(lower):
        return _OTHER
    return None


_MODEL_NAMES = frozenset(
    "model model_name model_name_or_path base_model model_path pretrained_model_name_or_path pretrain model_id "
    "base_model_name_or_path hf_model model_dir".split()
)
_TRAINING_NAMES = frozenset(
    "learning_rate lr num_train_epochs per_device_train_batch_size gradient_accumulation_steps num_epochs epochs "
    "output_dir max_steps batch_size micro_batch_size dataset dataset_name data_path train_file lora_r lora_rank "
    "max_seq_length max_length".split()
)


def _is_training(recipe: Recipe) -> bool:
    """Whether the arguments of a program that nobody knows are those of a training."""
    keys = {setting.key for setting in recipe.settings}
    if recipe.absent and (re.search(r"sft|dpo|train|tune", recipe.program) or keys & _TRAINING_NAMES):
        return True
    trains = (_TRAINING_NAMES | names.OWN.keys() | _TRL_SIGNS) - _MODEL_NAMES
    return bool(keys & _MODEL_NAMES and keys & trains)
