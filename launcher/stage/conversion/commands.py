"""A command of a script -> what it starts (`Invocation`): launchers taken off one by one, flags as settings.

The options that take no value are those of accelerate/commands/launch.py, torch/distributed/run.py and
deepspeed/launcher/runner.py; of programs that only run others (srun, nohup, docker) they are guessed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.stage.conversion.settings import SourceSetting, name_of, value_of
from launcher.stage.shell.expansion import Argument
from launcher.stage.shell.interpreter import ScriptCommand

_ACCELERATE_SWITCHES = frozenset(
    "cpu multi_gpu tpu use_xpu ipex mps use_mps_device debug quiet q no_python module m same_network "
    "use_deepspeed use_fsdp use_megatron_lm use_tp use_parallelism_config tpu_use_cluster "
    "tpu_use_sudo no_tpu_cluster dynamo_use_fullgraph dynamo_use_dynamic "
    "dynamo_use_regional_compilation enable_cpu_affinity standalone".split()
)
_TORCHRUN_SWITCHES = frozenset("standalone module m no_python run_path use_env use-env".split())
_DEEPSPEED_SWITCHES = frozenset(
    "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank".split()
)
_PYTHON = re.compile(r"(.*/)?(python|python3|python3\.\d+|pypy3|\$\w*PYTHON\w*|\$\{\w*PYTHON\w*\})")
_ELASTIC = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_ACCELERATE_MODULES = frozenset({"accelerate.commands.launch", "accelerate.commands.accelerate_cli"})
_TOOLS: Mapping[str, frozenset[str]] = {
    "trl": frozenset({"sft", "dpo", "kto", "grpo", "reward", "rloo", "ppo", "orpo", "cpo"}),
    "llamafactory-cli": frozenset({"train"}),
    "lmf": frozenset({"train"}),
    "swift": frozenset({"sft", "pt", "rlhf"}),
    "megatron": frozenset({"sft", "pt", "rlhf"}),
    "axolotl": frozenset({"train"}),
    "tune": frozenset({"run"}),
}
# words behind which a value follows, of programs that run others
_SWITCHES_OF_OTHERS = frozenset(
    "pure_docker_mode preemptible no_auto_dataset_cache non_resumable exclusive verbose v l u export unbuffered "
    "overlap rm it gpus-all nv pty no_sync frozen active isolated no_project exact".split()
)


@dataclass(slots=True)
class Invocation:
    """What a command starts in the end: `program`, with `settings` of the trainer's and `launchers` before it.

    `kind` is `script`, `module` or the name of a command line tool; `configs` are YAML files among the arguments.
    """

    program: str
    kind: str
    line: int
    file: str
    settings: list[SourceSetting] = field(default_factory=list)
    launchers: list[SourceSetting] = field(default_factory=list)
    environment: list[SourceSetting] = field(default_factory=list)
    configs: list[Argument] = field(default_factory=list)
    positional: list[SourceSetting] = field(default_factory=list)
    with_accelerate: bool = False
    with_elastic: bool = False
    with_deepspeed: bool = False
    unless: str = ""


def read(command: ScriptCommand) -> Invocation | None:
    """What a command starts; None of one that starts no Python program."""
    words = command.arguments
    invocation = Invocation(program="", kind="", line=command.line, file=command.file, unless=command.unless)
    for name, value in command.environment:
        setting = SourceSetting(
            key=name, value=value.text, written=name, file=command.file, line=command.line, missing=value.missing
        )
        invocation.environment.append(setting)
    for prefix in command.prefixes:
        _prefix(prefix, invocation)
    at = 0
    while at < len(words):
        step = _launcher(words, at, invocation)
        if step is None:
            break
        at = step
        if invocation.program:
            _read_arguments(words[at:], invocation)
            return invocation
    return None


def _prefix(words: Sequence[Argument], invocation: Invocation) -> None:
    """The options of a program that runs another script: `srun --nodes=2 ./train.sh`."""
    if not words:
        return
    program = posixpath.basename(words[0].text)
    place = 1
    while place < len(words):
        if words[place].text.startswith("-") and words[place].text != "--":
            place = _wrapper_flag(words, place, program, invocation)
        else:
            place += 1


def _launcher(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """Read one program and its options; the place behind them, or None where nothing starts Python."""
    text = words[at].text
    name = posixpath.basename(text)
    following = words[at + 1].text if at + 1 < len(words) else ""
    if name == "accelerate" and following == "launch":
        invocation.with_accelerate = True
        return _options(words, at + 2, "accelerate", _ACCELERATE_SWITCHES, invocation)
    if name == "torchrun":
        invocation.with_elastic = True
        return _options(words, at + 1, "torchrun", _TORCHRUN_SWITCHES, invocation)
    if name in ("deepspeed", "deepspeed.exe") and at + 1 < len(words):
        invocation.with_deepspeed = True
        return _options(words, at + 1, "deepspeed", _DEEPSPEED_SWITCHES, invocation)
    if name in _TOOLS and following in _TOOLS[name]:
        if name == "tune":
            return _tune(words, at, invocation)
        invocation.program = f"{name} {following}"
        invocation.kind = name
        return at + 2
    if _PYTHON.fullmatch(text):
        return _python(words, at, invocation)
    if text.endswith(".py"):
        return _script(words, at, invocation)
    return _wrapper(words, at, invocation)


def _tune(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """`tune run [options of torchrun] RECIPE ...`."""
    invocation.with_elastic = True
    place = _flags(words, at + 2, "tune run", _TORCHRUN_SWITCHES, invocation)
    if place >= len(words):
        return None
    invocation.program = f"tune run {words[place].text}"
    invocation.kind = "tune"
    return place + 1


def _python(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    place = at + 1
    while place < len(words) and words[place].text.startswith("-"):
        flag = words[place].text
        if flag == "-m" and place + 1 < len(words):
            return _module(words, place + 1, invocation)
        if flag in ("-c", "-"):
            return None
        place += 2 if flag in ("-X", "-W") else 1
    return _script(words, place, invocation) if place < len(words) else None


def _module(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """What stands behind `python -m`."""
    module = words[at].text
    if module in _ELASTIC:
        invocation.with_elastic = True
        return _options(words, at + 1, module, _TORCHRUN_SWITCHES, invocation)
    if module in _ACCELERATE_MODULES:
        invocation.with_accelerate = True
        place = at + 2 if words[at + 1 : at + 2] and words[at + 1].text == "launch" else at + 1
        return _options(words, place, "accelerate", _ACCELERATE_SWITCHES, invocation)
    if module in ("deepspeed", "deepspeed.launcher.runner"):
        invocation.with_deepspeed = True
        return _options(words, at + 1, "deepspeed", _DEEPSPEED_SWITCHES, invocation)
    if module == "trl" and at + 1 < len(words):
        invocation.program = f"trl {words[at + 1].text}"
        invocation.kind = "trl"
        return at + 2
    invocation.program = module
    invocation.kind = "module"
    return at + 1


def _script(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """A Python file: the program, or one that itself starts what stands behind `--`."""
    rest = [word.text for word in words[at + 1 :]]
    if "--" in rest:
        behind = at + 1 + rest.index("--") + 1
        if _starts_something(words[behind:]):
            program = posixpath.basename(words[at].text)
            _all_flags(words[: behind - 1], at + 1, program, invocation)
            return _first_start(words, behind)
    invocation.program = words[at].text
    invocation.kind = "script"
    return at + 1


def _starts_something(words: Sequence[Argument]) -> bool:
    for word in words:
        name = posixpath.basename(word.text)
        if name in ("accelerate", "torchrun", "deepspeed", *_TOOLS) or _PYTHON.fullmatch(word.text):
            return True
        if word.text.endswith(".py"):
            return True
    return False


def _all_flags(words: Sequence[Argument], at: int, program: str, invocation: Invocation) -> None:
    """Read flags that may take several values each."""
    place = at
    while place < len(words):
        place = _flags(words, place, program, _SWITCHES_OF_OTHERS, invocation)
        if place < len(words) and invocation.launchers:
            last = invocation.launchers[-1]
            before = last.value if isinstance(last.value, list) else [last.value]
            invocation.launchers[-1] = replace(last, value=[*before, words[place].text])
            place += 1
        elif place < len(words):
            place += 1


def _first_start(words: Sequence[Argument], at: int) -> int:
    """The place of the first word that starts something: before it may stand `source profile.sh &&`."""
    for place in range(at, len(words)):
        if _starts_something(words[place : place + 1]):
            return place
    return at


def _options(
    words: Sequence[Argument], at: int, program: str, switches: frozenset[str], invocation: Invocation
) -> int | None:
    """The options of a launcher, then the script or module that it starts."""
    place = _flags(words, at, program, switches, invocation)
    if place >= len(words):
        return None
    is_module = any(setting.key in ("module", "m") for setting in invocation.launchers)
    text = words[place].text
    if is_module:
        return _module(words, place, invocation)
    if _PYTHON.fullmatch(text):
        return _python(words, place, invocation)
    following = words[place + 1].text if place + 1 < len(words) else ""
    if posixpath.basename(text) in _TOOLS and following:
        return _launcher(words, place, invocation)
    if "/" not in text and not text.endswith(".py") and re.fullmatch(r"[\w]+(\.[\w]+)+", text):
        return _module(words, place, invocation)
    return _script(words, place, invocation)


def _flags(words: Sequence[Argument], at: int, program: str, switches: frozenset[str], invocation: Invocation) -> int:
    """Read flags of a launcher up to the first word that belongs to none; its place."""
    place = at
    while place < len(words):
        word = words[place]
        if not word.text.startswith("-") or word.text == "--":
            break
        flag, equals, value = word.text.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        missing = word.missing
        place += 1
        if equals:
            parsed = value_of(value)
        elif name in switches or place >= len(words) or _is_flag(words[place].text):
            parsed = True
        else:
            parsed = value_of(words[place].text)
            missing = words[place].missing
            place += 1
        setting = SourceSetting(
            key=name, value=parsed, written=f"{program} {flag}", file=invocation.file, line=word.line, missing=missing
        )
        invocation.launchers.append(setting)
    return place


def _wrapper(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """A program that runs another one (`srun`, `nohup`, `uv run`): skip to that, its flags noted."""
    program = posixpath.basename(words[at].text)
    if program in _NO_WRAPPERS or not _starts_something(words[at + 1 :]):
        return None
    place = at + 1
    while place < len(words):
        text = words[place].text
        name = posixpath.basename(text)
        if name in _WRAPPERS:
            program = name
        is_start = name in ("accelerate", "torchrun", "deepspeed", *_TOOLS) or _PYTHON.fullmatch(text)
        if is_start or text.endswith(".py"):
            return place
        if text.startswith("-") and text != "--":
            place = _wrapper_flag(words, place, program, invocation)
            continue
        variable = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", text, re.S)
        if variable is not None:
            setting = SourceSetting(
                key=variable[1],
                value=variable[2],
                written=variable[1],
                file=invocation.file,
                line=words[place].line,
                missing=words[place].missing,
            )
            invocation.environment.append(setting)
        place += 1
    return None


def _wrapper_flag(words: Sequence[Argument], at: int, program: str, invocation: Invocation) -> int:
    word = words[at]
    flag, equals, value = word.text.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    place = at + 1
    parsed: object = True
    missing = word.missing
    if equals:
        parsed = value_of(value)
    elif place < len(words) and name not in _SWITCHES_OF_OTHERS and not _is_flag(words[place].text):
        following = words[place].text
        begins = _PYTHON.fullmatch(following) or posixpath.basename(following) in ("accelerate", "torchrun", *_TOOLS)
        if not begins and not following.endswith(".py") and following != "run":
            parsed = value_of(following)
            missing = words[place].missing
            place += 1
    setting = SourceSetting(
        key=name, value=parsed, written=f"{program} {flag}", file=invocation.file, line=word.line, missing=missing
    )
    invocation.launchers.append(setting)
    return place


_WRAPPERS = frozenset(
    "srun sbatch uv env nohup time timeout sudo numactl docker podman singularity apptainer conda mamba micromamba "
    "poetry pdm pixi hatch mpirun mpiexec stdbuf nice ionice taskset xvfb-run".split()
)
CONFIG = "trainer's config"
"""The key of a flag that names a file with arguments of the trainer."""
_NO_WRAPPERS = frozenset(
    "echo printf cat cp mv rm mkdir tee grep sed awk pip pip3 ls test [ [[ source . set module".split()
)


def _is_flag(text: str) -> bool:
    """Whether argparse takes a word for a flag: no negative number."""
    return text.startswith("-") and len(text) > 1 and not re.fullmatch(r"-\d*\.?\d+([eE][+-]?\d+)?", text)


def _read_arguments(words: Sequence[Argument], invocation: Invocation) -> None:
    """The arguments of the trainer: `--key value ...`, `--key=value`, `key=value` and files."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.text in ("--", "-", "&"):
            continue
        if _is_flag(word.text):
            place = _trainer_flag(words, place, invocation)
            continue
        override = re.fullmatch(r"[+~]{0,2}([A-Za-z_][\w.]*)=(.*)", word.text, re.S)
        if override is not None:
            invocation.settings.append(_setting(override[1], override[1], value_of(override[2]), word, word.missing))
        elif re.search(r"\.(ya?ml|json)$", word.text):
            invocation.configs.append(word)
        else:
            invocation.positional.append(_setting("", word.text, word.text, word, word.missing))
    invocation.settings = [replace(setting, file=invocation.file) for setting in invocation.settings]
    invocation.positional = [replace(setting, file=invocation.file) for setting in invocation.positional]
    invocation.launchers = [replace(setting, file=invocation.file) for setting in invocation.launchers]


def _trainer_flag(words: Sequence[Argument], place: int, invocation: Invocation) -> int:
    """Read the flag before `place` with its values; the place behind them."""
    word = words[place - 1]
    flag, equals, text = word.text.partition("=")
    if equals:
        value = value_of(text)
        if flag.lstrip("-") == "config" and re.search(r"\.(ya?ml|json)$", text):
            invocation.configs.append(Argument(text, word.line, word.missing))
            invocation.launchers.append(_setting(CONFIG, flag, text, word, word.missing))
            return place
        invocation.settings.append(_setting(name_of(flag), flag, value, word, word.missing))
        return place
    values: list[Argument] = []
    while place < len(words) and not _is_flag(words[place].text):
        if values and re.fullmatch(r"[A-Za-z_][\w.]*=.*", words[place].text, re.S):
            break
        values.append(words[place])
        place += 1
    missing = tuple(name for value in values for name in value.missing)
    names_config = flag in ("--config", "--training_config", "--yaml_config") and len(values) == 1
    is_recipe = invocation.kind == "tune"
    if names_config and (missing or is_recipe or re.search(r"\.(ya?ml|json)$", values[0].text)):
        invocation.configs.append(values[0])
        invocation.launchers.append(_setting(CONFIG, flag, values[0].text, word, missing))
        return place
    parsed: object = True
    if len(values) == 1:
        parsed = value_of(values[0].text)
    elif values:
        parsed = [value_of(value.text) for value in values]
    invocation.settings.append(_setting(name_of(flag), flag, parsed, word, missing))
    return place


def _setting(key: str, written: str, value: object, word: Argument, missing: tuple[str, ...]) -> SourceSetting:
    return SourceSetting(key=key, value=value, written=written, file="", line=word.line, missing=missing)
