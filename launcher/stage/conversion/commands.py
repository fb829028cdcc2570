"""A command of a script -> what it starts (`Invocation`): launchers removed, flags as settings.

The options that take no value are those of accelerate/commands/launch.py,
torch/distributed/run.py and deepspeed/launcher/runner.py; of programs that only run others (srun,
nohup, docker) they are guessed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from launcher.lazy_dataclass import dataclass
from launcher.stage.conversion.settings import SourceSetting, as_list, normalise_name, parse_value
from launcher.stage.shell.expansion import Argument
from launcher.stage.shell.interpreter import ScriptCommand

_ACCELERATE_SWITCHES = frozenset(
    "cpu multi_gpu tpu use_xpu ipex mps use_mps_device debug quiet q no_python module m "
    "same_network use_deepspeed use_fsdp use_megatron_lm use_tp use_parallelism_config "
    "tpu_use_cluster tpu_use_sudo no_tpu_cluster dynamo_use_fullgraph dynamo_use_dynamic "
    "dynamo_use_regional_compilation enable_cpu_affinity standalone".split()
)
_TORCHRUN_SWITCHES = frozenset("standalone module m no_python run_path use_env use-env".split())
_DEEPSPEED_SWITCHES = frozenset(
    "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid "
    "bind_cores_to_rank".split()
)
_PYTHON = re.compile(r"(.*/)?(python|python3|python3\.\d+|pypy3|\$\w*PYTHON\w*|\$\{\w*PYTHON\w*\})")
_ELASTIC = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_ACCELERATE_MODULES = frozenset(
    {"accelerate.commands.launch", "accelerate.commands.accelerate_cli"}
)
_TOOLS: Mapping[str, frozenset[str]] = {
    "trl": frozenset({"sft", "dpo", "kto", "grpo", "reward", "rloo", "ppo", "orpo", "cpo"}),
    "llamafactory-cli": frozenset({"train"}),
    "lmf": frozenset({"train"}),
    "swift": frozenset({"sft", "pt", "rlhf"}),
    "megatron": frozenset({"sft", "pt", "rlhf"}),
    "axolotl": frozenset({"train"}),
    "tune": frozenset({"run"}),
}
_SWITCHES_OF_OTHERS = frozenset(
    "pure_docker_mode preemptible no_auto_dataset_cache non_resumable exclusive verbose v l u "
    "export unbuffered overlap rm it gpus-all nv pty no_sync frozen active isolated no_project "
    "exact".split()
)
_SWITCHES: Mapping[str, frozenset[str]] = {
    "accelerate": _ACCELERATE_SWITCHES,
    "deepspeed": _DEEPSPEED_SWITCHES,
    **dict.fromkeys(("torchrun", "tune run", *_ELASTIC), _TORCHRUN_SWITCHES),
}
_STARTERS = frozenset({"accelerate", "torchrun", "deepspeed", *_TOOLS})
_CONFIG_FILE = re.compile(r"\.(ya?ml|json)$")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


@dataclass(slots=True)
class Invocation:
    """What a command starts: `program`, with the trainer's `settings` and those of `launchers`.

    `kind` is `script`, `module` or the name of a command line tool; `configs` are YAML files among
    the arguments.
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
    unless: str = ""

    def setting(
        self, key: str, written: str, value: object, word: Argument, missing: tuple[str, ...]
    ) -> SourceSetting:
        return SourceSetting(
            key=key, value=value, written=written, file=self.file, line=word.line, missing=missing
        )

    def add_option(
        self, program: str, flag: str, value: object, word: Argument, missing: tuple[str, ...]
    ) -> None:
        """Add an option of a launcher."""
        key = _name_option(flag)
        setting = self.setting(key, f"{program} {flag}", value, word, missing)
        self.launchers.append(setting)

    def add_config(self, flag: str, file: Argument, word: Argument) -> None:
        """Add a file of arguments that a flag names."""
        self.configs.append(file)
        setting = self.setting(CONFIG, flag, file.text, word, file.missing)
        self.launchers.append(setting)


def read_invocation(command: ScriptCommand) -> Invocation | None:
    """What a command starts; None if it starts no Python program."""
    words = command.arguments
    invocation = Invocation(
        program="", kind="", line=command.line, file=command.file, unless=command.unless
    )
    for name, value in command.environment:
        word = Argument("", command.line)
        setting = invocation.setting(name, name, value.text, word, value.missing)
        invocation.environment.append(setting)
    for prefix in command.prefixes:
        _read_prefix(prefix, invocation)
    at: int | None = 0
    while at is not None and at < len(words):
        at = _read_launcher(words, at, invocation)
        if at is not None and invocation.program:
            _read_arguments(words[at:], invocation)
            return invocation
    return None


def _name_option(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _read_text(words: Sequence[Argument], at: int) -> str:
    return words[at].text if at < len(words) else ""


def _read_prefix(words: Sequence[Argument], invocation: Invocation) -> None:
    """The options of a program that runs another script: `srun --nodes=2 ./train.sh`."""
    program = posixpath.basename(_read_text(words, 0))
    place = 1
    while place < len(words):
        if words[place].text.startswith("-") and words[place].text != "--":
            place = _read_wrapper_flag(words, place, program, invocation)
        else:
            place += 1


def _read_launcher(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """Read one program and its options; the place behind them, or None if it starts no Python."""
    text = words[at].text
    name = posixpath.basename(text)
    following = _read_text(words, at + 1)
    if name == "accelerate" and following == "launch":
        return _read_options(words, at + 2, name, invocation)
    if name in ("torchrun", "deepspeed") and following:
        return _read_options(words, at + 1, name, invocation)
    if name in _TOOLS and following in _TOOLS[name]:
        if name == "tune":
            return _read_tune(words, at, invocation)
        invocation.program = f"{name} {following}"
        invocation.kind = name
        return at + 2
    if _PYTHON.fullmatch(text):
        return _read_python(words, at, invocation)
    if text.endswith(".py"):
        return _read_script(words, at, invocation)
    return _read_wrapper(words, at, invocation)


def _read_tune(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """`tune run [options of torchrun] RECIPE ...`."""
    place = _read_flags(words, at + 2, "tune run", invocation)
    if place >= len(words):
        return None
    invocation.program = f"tune run {words[place].text}"
    invocation.kind = "tune"
    return place + 1


def _read_python(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    place = at + 1
    while place < len(words):
        flag = words[place].text
        if not flag.startswith("-"):
            return _read_script(words, place, invocation)
        place += 1
        if flag == "-m" and place < len(words):
            return _read_module(words, place, invocation)
        if flag in ("-c", "-"):
            return None
        if flag in ("-X", "-W"):
            place += 1
    return None


def _read_module(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """What stands behind `python -m`."""
    module = words[at].text
    following = _read_text(words, at + 1)
    if module in _ELASTIC:
        return _read_options(words, at + 1, module, invocation)
    if module in _ACCELERATE_MODULES:
        place = at + 2 if following == "launch" else at + 1
        return _read_options(words, place, "accelerate", invocation)
    if module in ("deepspeed", "deepspeed.launcher.runner"):
        return _read_options(words, at + 1, "deepspeed", invocation)
    if module == "trl" and following:
        invocation.program = f"trl {following}"
        invocation.kind = "trl"
        return at + 2
    invocation.program = module
    invocation.kind = "module"
    return at + 1


def _read_script(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """A Python file: the program, or one that itself starts what stands behind `--`."""
    texts = [word.text for word in words]
    if "--" in texts[at:]:
        behind = texts.index("--", at) + 1
        start = _find_first_start(words, behind)
        if start is not None:
            program = posixpath.basename(words[at].text)
            _read_all_flags(words[: behind - 1], at + 1, program, invocation)
            return start
    invocation.program = words[at].text
    invocation.kind = "script"
    return at + 1


def _starts(text: str) -> bool:
    """Whether a word starts something that may be a training."""
    is_program = posixpath.basename(text) in _STARTERS or _PYTHON.fullmatch(text)
    return bool(is_program) or text.endswith(".py")


def _find_first_start(words: Sequence[Argument], at: int) -> int | None:
    """The place of the first word that starts something: `source profile.sh &&` may precede it."""
    for place in range(at, len(words)):
        if _starts(words[place].text):
            return place
    return None


def _read_all_flags(
    words: Sequence[Argument], at: int, program: str, invocation: Invocation
) -> None:
    """Read flags that may take several values each."""
    place = at
    while place < len(words):
        place = _read_flags(words, place, program, invocation)
        if place < len(words) and invocation.launchers:
            last = invocation.launchers.pop()
            values = [*as_list(last.value), words[place].text]
            invocation.launchers.append(replace(last, value=values))
        place += 1


def _read_options(
    words: Sequence[Argument], at: int, program: str, invocation: Invocation
) -> int | None:
    """The options of a launcher, then the script or module that it starts."""
    place = _read_flags(words, at, program, invocation)
    if place >= len(words):
        return None
    text = words[place].text
    is_module = any(setting.key in ("module", "m") for setting in invocation.launchers)
    if is_module:
        return _read_module(words, place, invocation)
    if _PYTHON.fullmatch(text):
        return _read_python(words, place, invocation)
    if posixpath.basename(text) in _TOOLS and place + 1 < len(words):
        return _read_launcher(words, place, invocation)
    if not text.endswith(".py") and re.fullmatch(r"\w+(\.\w+)+", text):
        return _read_module(words, place, invocation)
    return _read_script(words, place, invocation)


def _read_flags(words: Sequence[Argument], at: int, program: str, invocation: Invocation) -> int:
    """Read flags of a launcher up to the first word that belongs to none; its place."""
    switches = _SWITCHES.get(program, _SWITCHES_OF_OTHERS)
    place = at
    while place < len(words):
        word = words[place]
        if not word.text.startswith("-") or word.text == "--":
            break
        flag, equals, value = word.text.partition("=")
        missing = word.missing
        place += 1
        parsed: object = True
        if equals:
            parsed = parse_value(value)
        elif _name_option(flag) not in switches and _is_value(words, place):
            parsed = parse_value(words[place].text)
            missing = words[place].missing
            place += 1
        invocation.add_option(program, flag, parsed, word, missing)
    return place


def _read_wrapper(words: Sequence[Argument], at: int, invocation: Invocation) -> int | None:
    """A program that runs another one (`srun`, `nohup`, `uv run`): skip to that, note its flags."""
    program = posixpath.basename(words[at].text)
    if program in _NO_WRAPPERS or _find_first_start(words, at + 1) is None:
        return None
    place = at + 1
    while place < len(words):
        word = words[place]
        name = posixpath.basename(word.text)
        if _starts(word.text):
            return place
        if name in _WRAPPERS:
            program = name
        if word.text.startswith("-") and word.text != "--":
            place = _read_wrapper_flag(words, place, program, invocation)
            continue
        variable = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word.text, re.DOTALL)
        if variable is not None:
            name = variable[1]
            setting = invocation.setting(name, name, variable[2], word, word.missing)
            invocation.environment.append(setting)
        place += 1
    return None


def _read_wrapper_flag(
    words: Sequence[Argument], at: int, program: str, invocation: Invocation
) -> int:
    """Read one flag of a program that runs another; the place behind its value."""
    word = words[at]
    flag, equals, value = word.text.partition("=")
    place = at + 1
    parsed: object = True
    missing = word.missing
    if equals:
        parsed = parse_value(value)
    elif _name_option(flag) not in _SWITCHES_OF_OTHERS and _is_value(words, place):
        following = words[place].text
        if not _starts(following) and following != "run":
            parsed = parse_value(following)
            missing = words[place].missing
            place += 1
    invocation.add_option(program, flag, parsed, word, missing)
    return place


_WRAPPERS = frozenset(
    "srun sbatch uv env nohup time timeout sudo numactl docker podman singularity apptainer conda "
    "mamba micromamba poetry pdm pixi hatch mpirun mpiexec stdbuf nice ionice taskset "
    "xvfb-run".split()
)
CONFIG = "trainer's config"
"""The key of a flag that names a file with arguments of the trainer."""
_NO_WRAPPERS = frozenset(
    "echo printf cat cp mv rm mkdir tee grep sed awk pip pip3 ls test [ [[ source . set "
    "module".split()
)


def _is_flag(text: str) -> bool:
    """Whether argparse takes a word for a flag: no negative number."""
    is_number = re.fullmatch(r"-\d*\.?\d+([eE][+-]?\d+)?", text)
    return text.startswith("-") and len(text) > 1 and not is_number


def _is_value(words: Sequence[Argument], place: int) -> bool:
    return place < len(words) and not _is_flag(words[place].text)


def _read_arguments(words: Sequence[Argument], invocation: Invocation) -> None:
    """The arguments of the trainer: `--key value ...`, `--key=value`, `key=value` and files."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.text in ("--", "-", "&"):
            continue
        if _is_flag(word.text):
            place = _read_trainer_flag(words, place, invocation)
            continue
        override = _OVERRIDE.fullmatch(word.text)
        if override is not None:
            name = override[1]
            value = parse_value(override[2])
            setting = invocation.setting(name, name, value, word, word.missing)
            invocation.settings.append(setting)
        elif _CONFIG_FILE.search(word.text):
            invocation.configs.append(word)
        else:
            setting = invocation.setting("", word.text, word.text, word, word.missing)
            invocation.positional.append(setting)


def _read_trainer_flag(words: Sequence[Argument], place: int, invocation: Invocation) -> int:
    """Read the flag before `place` with its values; the place behind them."""
    word = words[place - 1]
    flag, equals, text = word.text.partition("=")
    values: list[Argument] = []
    if equals:
        values.append(Argument(text, word.line, word.missing))
    while not equals and _is_value(words, place):
        if values and re.fullmatch(r"[A-Za-z_][\w.]*=.*", words[place].text, re.DOTALL):
            break
        values.append(words[place])
        place += 1
    if len(values) == 1 and flag in ("--config", "--training_config", "--yaml_config"):
        is_unknown = bool(values[0].missing) and not equals
        is_config = is_unknown or _CONFIG_FILE.search(values[0].text) is not None
        if is_config or (invocation.kind == "tune" and not equals):
            invocation.add_config(flag, values[0], word)
            return place
    parsed: object = True
    if len(values) == 1:
        parsed = parse_value(values[0].text)
    elif values:
        parsed = [parse_value(value.text) for value in values]
    missing = tuple(name for value in values for name in value.missing)
    setting = invocation.setting(normalise_name(flag), flag, parsed, word, missing)
    invocation.settings.append(setting)
    return place
