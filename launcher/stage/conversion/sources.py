"""A training file -> `Recipe`s: YAML of six tools, shell scripts, batch scripts of Slurm."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from launcher.config import document
from launcher.config.load import recognise_tool
from launcher.errors import Finding, InvalidConfig, usage
from launcher.files import read_bytes
from launcher.lazy_dataclass import dataclass
from launcher.redaction import is_secret_variable
from launcher.stage.conversion import commands, names, olmo_core, sbatch, sharding
from launcher.stage.conversion.commands import Invocation
from launcher.stage.conversion.settings import (
    Recipe,
    SourceSetting,
    find_near,
    make_flag,
    read_document,
)
from launcher.stage.shell import interpreter, syntax
from launcher.stage.shell.expansion import Argument, ShellScope, make_text_variable
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


def _list_open_instruct_scripts() -> dict[str, str]:
    """The stage of each script of open-instruct, by its past, present and announced name."""
    stages = {"finetune1": "sft", "dpo_tune": "dpo"}
    for key, entry in STAGES.items():
        for path in filter(None, (entry.script, entry.renamed)):
            stages[PurePath(path).stem] = entry.stage or key
    return stages


_OPEN_INSTRUCT = _list_open_instruct_scripts()
_OPEN_INSTRUCT_SIGNS = frozenset(
    "with_tracking checkpointing_steps use_slow_tokenizer dataset_mixer_list mixer_list "
    "tokenizer_name max_train_steps preprocessing_num_workers exp_name add_bos chat_template_name "
    "dataset_mix_dir keep_last_n_checkpoints try_launch_beaker_eval_jobs num_epochs use_flash_attn "
    "clip_grad_norm hf_metadata_dataset".split()
)
_TRL_SIGNS = frozenset(
    "bf16 fp16 save_strategy save_steps eval_strategy evaluation_strategy torch_dtype dtype "
    "use_peft lora_r max_length max_prompt_length gradient_checkpointing_kwargs do_eval optim "
    "hub_model_id hub_strategy log_level dataset_splits dataset_mixture max_steps packing "
    "logging_strategy per_device_eval_batch_size overwrite_output_dir".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a script would find where it is started: its arguments, and GPUs of a machine."""

    arguments: tuple[str, ...] = ()
    gpus: int | None = None


def read_recipes(path: Path, circumstances: Circumstances) -> tuple[Recipe, ...]:
    """The trainings that a file describes, the most likely one first.

    Raises InvalidConfig if the file cannot be read, and UsageError if it describes no known
    training.
    """
    if path.suffix in (".py", ".ipynb"):
        reads = "launch reads the script that starts it, or its config file"
        message = f"{path} is a Python program: {reads}"
        raise usage("unknown-format", message, "launch init --from train.sh")
    text = document.read_text(path)
    if _is_shell(path, text):
        return _read_recipes(path, text, circumstances)
    content = document.read_yaml(path)
    tool = recognise_yaml(content.value)
    if {"stage", "args"} <= content.value.keys():
        message = (
            f"{path} is a stage file of launch already: --from reads what other tools train with"
        )
        raise usage("unknown-format", message, f"launch validate-config {path}")
    if tool is None:
        message = (
            f"{path} starts no SFT or DPO training: no file of TRL, open-instruct, Axolotl, "
            "LLaMA-Factory or torchtune, and no script that launches one"
        )
        raise usage("unknown-format", message, f"launch validate-config {path}")
    settings = read_document(content, str(path))
    return (Recipe(path=path, tool=tool, program=path.name, settings=settings),)


def _is_shell(path: Path, text: str) -> bool:
    if path.suffix in _SHELL_SUFFIXES:
        return True
    if path.suffix in _YAML_SUFFIXES:
        return False
    first = text.lstrip().partition("\n")[0]
    if first.startswith("#!"):
        return "sh" in first
    return "#SBATCH" in text or _STARTS.search(text) is not None


def recognise_yaml(values: Mapping[str, Any]) -> str | None:
    """Whose file a YAML mapping is; None for a stage file of launch, and for anything else."""
    keys = set(values)
    if keys & {"args", "open_instruct", "stages"}:
        return None
    tool = recognise_tool(values)
    if tool is not None:
        return tool
    if "model" in keys and keys & {"train_dataset", "init_config", "dist_config"}:
        return "llama_factory"
    if "model_name_or_path" not in keys or keys & {"backend", "extends"}:
        return None
    if keys & (_OPEN_INSTRUCT_SIGNS | {"dataset_mixer"}):
        return "open_instruct"
    if "stage" not in keys and keys & (_TRL_SIGNS | {"dataset_name", "datasets"}):
        return "trl"
    return None


def _read_recipes(path: Path, text: str, circumstances: Circumstances) -> tuple[Recipe, ...]:
    """The trainings that a shell script starts; last those that it starts under a condition."""
    directives = sbatch.read_directives(text, str(path))
    scope = _build_scope(path, directives, circumstances)

    def find(name: str) -> str | None:
        other = _read_script_text(path, name)
        if other is not None:
            directives.extend(sbatch.read_directives(other, name))
        return other

    try:
        script = interpreter.read_script(text, str(path), find=find, scope=scope)
    except syntax.TooDeep:
        message = f"structures are nested deeper than {syntax.MAX_DEPTH} levels"
        raise InvalidConfig(document.bad(path, "too-deep", message)) from None
    invocations = list(filter(None, map(commands.read_invocation, script.commands)))
    recipes = []
    for invocation in sorted(invocations, key=lambda invocation: bool(invocation.unless)):
        recipe = _build_recipe(path, invocation, script)
        if recipe is None:
            continue
        recipe.text = text
        recipe.directives = [*directives, *sbatch.select_options(recipe.launchers)]
        recipe.launchers = [s for s in recipe.launchers if not sbatch.is_of_slurm(s)]
        job = sbatch.read_job(recipe.directives)
        recipe.nodes = job.nodes
        recipe.gpus = job.gpus
        recipes.append(recipe)
    if not recipes:
        raise InvalidConfig(_explain_no_training(path, invocations, script))
    return tuple(recipes)


def _build_scope(
    path: Path, directives: list[SourceSetting], circumstances: Circumstances
) -> ShellScope:
    """What the shell knows when a script begins: variables, arguments, folder, GPUs."""
    job = sbatch.read_job(directives)
    values = {setting.key: str(setting.value) for setting in directives}
    if job.gpus is not None:
        values["gpus"] = str(job.gpus)
    if directives:
        # the default of sbatch
        values.setdefault("nodes", "1")
    variables = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
    variables |= interpreter.list_cluster_variables(values)
    return ShellScope(
        variables={name: make_text_variable(value) for name, value in variables.items()},
        parameters=tuple(Argument(argument, 0) for argument in circumstances.arguments),
        folder=str(path.parent),
        gpus=circumstances.gpus or job.gpus or 1,
        nodes=job.nodes or 1,
    )


def _read_script_text(path: Path, name: str) -> str | None:
    """The text of another script that a script starts."""
    file = find_near(name, path)
    if file is None or os.path.isabs(name) or ".." in Path(name).parts[1:]:
        return None
    try:
        if file.samefile(path):
            return None
        return read_bytes(file, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def _explain_no_training(path: Path, invocations: list[Invocation], script: Script) -> Finding:
    code = "no-training"
    for invocation in invocations:
        reason = olmo_core.find_refusal(invocation.program)
        if reason is not None:
            message = f"`{invocation.program}` {reason.what}"
            return document.bad(path, code, message, invocation.line, reason.instead)
    if invocations:
        program = invocations[-1].program
        line = invocations[-1].line
        has_flags = any(each.settings or each.configs for each in invocations)
        if "$" in program or re.search(r"(^|/)\.py$", program):
            message = "the script takes what it trains from its arguments: "
            message += f"without them it starts `{program}`"
            help = 'give them as it is started: --script-args "ARGS"'
            return document.bad(path, code, message, line, help)
        message = f"`{program}` is no SFT or DPO training that launch knows"
        if not has_flags and re.search(r"sft|dpo|train|tune", program):
            message = f"`{program}` is started without flags: "
            message += "what it trains stands in its code, which is not read"
        help = "launch reads scripts that start TRL, open-instruct, LLaMA-Factory, Axolotl, "
        help += "torchtune, and the like"
        return document.bad(path, code, message, line, help)
    if script.absent:
        name, line = next(iter(script.absent.items()))
        message = f"it starts {name}, which is not here"
        help = f"put it beside {path.name}, or give it to `--from`"
        return document.bad(path, "missing-file", message, line, help)
    message = "no command of this script starts a training"
    help = "give the script that holds `accelerate launch` or the like"
    return document.bad(path, code, message, 1, help)


def _build_recipe(path: Path, invocation: Invocation, script: Script) -> Recipe | None:
    """A command as a recipe; None if it trains neither SFT nor DPO."""
    named = _identify_tool(invocation)
    if named is None:
        return None
    tool, stage = named
    recipe = Recipe(path=path, tool=tool, program=invocation.program, stage=stage)
    recipe.launchers = invocation.launchers
    recipe.environment = [*_list_exported(script, str(path)), *invocation.environment]
    recipe.texts = {name: argument.text for name, argument in script.files.items()}
    recipe.mended = script.mended
    scope = script.scope
    recipe.choices = {name: why for name, why in script.choices.items() if name in scope.uses}
    if scope.counts:
        recipe.counted = scope.gpus * scope.nodes
    for expression, number in scope.counts.items():
        reason = f"taken as {number}; --gpus and --nodes say how many there are"
        recipe.choices[expression] = reason
    recipe.absent = dict(script.absent)
    for argument, reason in script.skipped:
        setting = make_flag(argument.text, str(path), argument.line)
        recipe.skipped.append((setting, reason))
    configs = list(invocation.configs)
    for setting in invocation.positional:
        # a word that names a config although it does not end like one: `"$CONFIG_FILE"`
        if setting.missing and re.search(r"(?i)conf|yaml|yml|recipe", setting.value):
            configs.append(Argument(setting.value, setting.line or 0, setting.missing))
        else:
            recipe.others.append(setting)
    for config in configs:
        _add_config(config, recipe)
    recipe.settings += invocation.settings
    if tool == "own" and not _is_training(recipe):
        return None
    return recipe


def _list_exported(script: Script, file: str) -> list[SourceSetting]:
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
    place = sharding.find(config.text, recipe) or Path(config.text)
    content = None
    text = sharding.read_text(config.text, recipe)
    if text is not None and not config.missing:
        with contextlib.suppress(InvalidConfig, yaml.YAMLError):
            content = document.parse(place, text)
    if content is None:
        recipe.absent[config.text] = config.line
        return
    tool = recognise_yaml(content.value)
    if tool is not None and recipe.tool in ("own", "trl"):
        recipe.tool = tool
    recipe.settings += read_document(content, str(place))


def _identify_tool(invocation: Invocation) -> tuple[str, str | None] | None:
    """Whose names a program's arguments have, and its stage; None if it trains no SFT or DPO."""
    program = invocation.program
    if olmo_core.find_refusal(program) is not None:
        return None
    if invocation.kind in _TOOL_OF_PROGRAM:
        return _identify_command_line_tool(invocation)
    keys = {setting.key for setting in invocation.settings}
    module = re.sub(r"\.py$", "", program).replace("/", ".")
    name = module.rpartition(".")[2]
    if "open_instruct" in module and name in _OPEN_INSTRUCT:
        return "open_instruct", _OPEN_INSTRUCT[name]
    if name in ("train_sft", "train_dpo") and "openrlhf" in module:
        return "openrlhf", name.removeprefix("train_")
    if "openrlhf" in module:
        return None
    if module.endswith(("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer")):
        return "verl", "sft"
    if "axolotl" in module and name in ("train", "finetune", "axolotl"):
        return "axolotl", None
    if "axolotl" in module:
        return None
    has_its_keys = keys & {"finetuning_type", "template", "cutoff_len"}
    if has_its_keys and keys & {"stage", "do_train", "dataset"}:
        return "llama_factory", None
    if re.search(r"(?i)llamafactory|llmtuner|(LLaMA-Factory|llama_factory)/src/train", program):
        return "llama_factory", None
    stage = _guess_stage(name)
    if stage == _OTHER:
        return None
    if "trl" in module.split(".") or re.search(r"scripts\.(sft|dpo)$", module):
        return "trl", stage
    return "own", stage


def _identify_command_line_tool(invocation: Invocation) -> tuple[str, str | None] | None:
    tool = _TOOL_OF_PROGRAM[invocation.kind]
    subcommand = invocation.program.rpartition(" ")[2]
    if tool == "torchtune":
        if "dpo" in subcommand:
            return tool, "dpo"
        if _OTHER_STAGES.search(subcommand.lower()):
            return None
        return tool, "sft"
    if tool not in ("trl", "swift"):
        return tool, None
    if tool == "swift" and subcommand == "rlhf":
        subcommand = "dpo"
        for setting in invocation.settings:
            if setting.key == "rlhf_type":
                subcommand = setting.value
                break
    if subcommand not in ("sft", "dpo"):
        return None
    return tool, subcommand


_OTHER = "another"
"""What a program trains that is neither SFT nor DPO, or does that is no training."""


def _guess_stage(name: str) -> str | None:
    """The stage that a program's name tells, if any."""
    lower = name.lower()
    if re.search(r"(?<![a-z])(dpo|dpov2|dpo_align)(?![a-z])", lower) and "online" not in lower:
        return "dpo"
    tunes = re.search(r"(?<![a-z])(sft|finetune|finetuning|fine_tune|lora|qlora)(?![a-z])", lower)
    is_training = tunes or re.search(r"(?<![a-z])(train|unsloth)(?![a-z])", lower)
    if is_training and re.search(r"(?<![a-z])(grpo|ppo|kto|orpo|rm|reward|pretrain)", lower):
        return _OTHER
    if tunes:
        return "sft"
    if not is_training and _OTHER_STAGES.search(lower):
        return _OTHER
    return None


_MODEL_NAMES = frozenset(
    "model model_name model_name_or_path base_model model_path pretrained_model_name_or_path "
    "pretrain model_id base_model_name_or_path hf_model model_dir".split()
)
_TRAINING_NAMES = frozenset(
    "learning_rate lr num_train_epochs per_device_train_batch_size gradient_accumulation_steps "
    "num_epochs epochs output_dir max_steps batch_size micro_batch_size dataset dataset_name "
    "data_path train_file lora_r lora_rank max_seq_length max_length".split()
)


def _is_training(recipe: Recipe) -> bool:
    """Whether the arguments of a program that nobody knows are those of a training."""
    keys = {setting.key for setting in recipe.settings}
    if recipe.absent and (
        re.search(r"sft|dpo|train|tune", recipe.program) or keys & _TRAINING_NAMES
    ):
        return True
    trains = (_TRAINING_NAMES | names.OWN.keys() | _TRL_SIGNS) - _MODEL_NAMES
    return bool(keys & _MODEL_NAMES and keys & trains)
