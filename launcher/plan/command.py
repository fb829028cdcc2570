"""`Plan` -> `Command`: argv lists, environment and working folder; nothing is started here."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from launcher.config.keys import EXPECT
from launcher.config.points import DEFAULTS, POINTS
from launcher.machine import isolation
from launcher.machine.python import Trainer
from launcher.paths import PACKAGE
from launcher.plan.plan import Plan, find_caches_only, find_model_in, find_output_folder
from launcher.redaction import Redactor
from launcher.runs import rendezvous
from launcher.runs.attempt import ARGUMENT, PROBE_SETTINGS, Command
from launcher.runs.rundir import RunFolder
from launcher.stage.options import Watch
from launcher.upstream.locate import SUBMODULE
from launcher.upstream.trainers import Backend

HUB = "HF_TOKEN"
# names a YAML file to TRL's parser
# (trl/scripts/utils.py::TrlParser.parse_args_and_config[config = yaml.safe_load])
CONFIG = "--config"
PROBE = PACKAGE / "probe" / "run.py"
START = PACKAGE / "probe" / "start.py"
SAFE_PATH_SINCE = (3, 11)  # the first Python that knows PYTHONSAFEPATH


class TrainerArguments(NamedTuple):
    """The trainer's arguments without secrets: every user of a machine may read a command line.

    `env` holds them instead, `variables` is as in `Command`. `exposed` are the arguments whose
    secret stays visible.
    """

    words: Mapping[str, Sequence[str]]
    env: Mapping[str, str]
    variables: Mapping[str, str]
    exposed: tuple[str, ...]


def hide_secrets(
    arguments: Mapping[str, Sequence[str]], plan: Plan, environ: Mapping[str, str], *, watched: bool
) -> TrainerArguments:
    """The arguments as they may be shown; the probe (`watched`) puts the words back."""
    redactor = Redactor.of(environ, plan.stage.config.borrowed)
    shown = redactor.redact({name: list(words) for name, words in arguments.items()})
    words = dict(arguments)
    env: dict[str, str] = {}
    exposed: list[str] = []
    for name, original in arguments.items():
        secret = _find_secret_places(name, original, shown[name], plan)
        if not secret:
            continue
        if name == "hub_token" and environ.get(HUB, original[0]) == original[0]:
            # where no token is passed, huggingface_hub takes this one
            del words[name]
            if HUB not in environ:
                env[HUB] = original[0]
        elif not watched:
            exposed.append(name)
        else:
            replaced = list(original)
            for index in secret:
                variable = f"{ARGUMENT}{name.upper()}"
                if len(original) > 1:
                    variable += f"_{index}"
                env[variable] = original[index]
                replaced[index] = f"${variable}"
            words[name] = replaced
    return TrainerArguments(words, env, _find_holders(env, environ), tuple(exposed))


def _find_holders(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variable of the user's that has the value of each variable in `env`, else itself."""
    holders: dict[str, str] = {}
    for variable, value in env.items():
        names = [name for name, held in environ.items() if held == value]
        holders[variable] = min(names, default=variable)
    return holders


def _find_secret_places(
    name: str, words: Sequence[str], shown: Sequence[str], plan: Plan
) -> list[int]:
    """Which words are redacted, or took a secret from the environment."""
    secret = {index for index, word in enumerate(words) if word != shown[index]}
    config = plan.stage.config
    if name not in config.args or name in plan.derived:
        return sorted(secret)
    pattern = re.compile(rf"args\.{re.escape(name)}(?:\[(\d+)\])?(?![\w-])")
    for key in config.secrets:
        match = pattern.match(key)
        if match is None:
            continue
        if match[1] is None:
            return list(range(len(words)))
        secret.add(int(match[1]))
    return [index for index in range(len(words)) if index in secret]


def build(
    plan: Plan,
    trainer: Trainer,
    folder: Path,
    *,
    environ: Mapping[str, str],
    caches: Mapping[str, str] | None = None,
    devices: Mapping[str, str] | None = None,
    attempt: int = 1,
) -> Command:
    """The `accelerate launch` or torchrun command of a plan, with the probe as the script it
    starts.

    Without the probe it starts upstream's script itself, and nothing of launch runs inside.
    `folder` is the run folder; `environ` the environment that training will inherit. Arguments that
    no flag can carry go into a file of the `attempt` there.
    """
    entry = plan.stage.entry
    root = plan.stage.upstream.root or _find_expected_root(plan, trainer)
    script = root / entry.script
    watched = plan.stage.options.probe is not None
    module, options = LAUNCHERS[entry.launcher]
    argv = [str(trainer.python), *_build_module_words(module, plan, trainer), *options(plan)]
    if watched:
        argv.append(str(PROBE))
    else:
        argv.append(str(script))
    arguments = hide_secrets(plan.arguments(), plan, environ, watched=watched)
    files: dict[str, str] = {}
    content = render_config_file(plan.file_arguments())
    if content:
        config = str(RunFolder(folder).trainer_config(attempt))
        files[config] = content
        argv += [CONFIG, config]
    for name, words in arguments.words.items():
        argv += [f"--{name}", *words]
    env = _build_environment(plan, root, script, folder, environ)
    env.update({**(caches or {}), **(devices or {}), **arguments.env})
    return Command(
        argv=tuple(argv), cwd=Path.cwd(), env=env, variables=arguments.variables, files=files
    )


def _find_expected_root(plan: Plan, trainer: Trainer) -> Path:
    """Where the source would be: only a dry run comes here without it."""
    if plan.stage.backend.CHECKOUT:
        return SUBMODULE
    for path in trainer.path:
        if path.name in {"site-packages", "dist-packages"}:
            return path
    return Path("site-packages").absolute()


def render_config_file(arguments: Mapping[str, Any]) -> str:
    """The text of a config file with these arguments
    (trl/scripts/utils.py::TrlParser.parse_args_and_config[config = yaml.safe_load]); empty without
    any.
    """
    if not arguments:
        return ""
    import yaml

    return yaml.safe_dump(dict(arguments), sort_keys=False, width=100)


def find_secrets_in_file(plan: Plan, environ: Mapping[str, str]) -> Iterator[str]:
    """The arguments with a secret that a config file would hold."""
    config = plan.stage.config
    redactor = Redactor.of(environ, config.borrowed)
    for name, value in plan.file_arguments().items():
        is_taken = any(key.startswith(f"args.{name}") for key in config.secrets)
        if is_taken or redactor.redact({name: value}) != {name: value}:
            yield name


def _build_module_words(name: str, plan: Plan, trainer: Trainer) -> list[str]:
    """The words that run a module: `-m`, or `START` where that would put the current folder on the
    path.
    """
    uses_deepspeed = plan.stage.options.deepspeed is not None and plan.gpus > 0
    is_old = bool(trainer.version) and trainer.version < SAFE_PATH_SINCE
    if is_old or (uses_deepspeed and plan.stage.entry.launcher == "accelerate"):
        return [str(START), name]
    return ["-m", name]


def _build_accelerate_options(plan: Plan) -> list[str]:
    """accelerate's own options; a config file of launch's, so that the user's default one is not
    read.
    """
    neutral = PACKAGE / "plan" / "accelerate" / "neutral.yaml"
    argv = ["--config_file", str(neutral)]
    argv += ["--num_machines", str(plan.nodes), "--num_processes", str(plan.processes)]
    argv += ["--mixed_precision", plan.mixed_precision, "--dynamo_backend", "no"]
    if not plan.gpus and plan.nodes == 1:
        return [*argv, "--cpu"]
    if not plan.gpus:
        # --cpu starts a process that knows of no other
        # (accelerate/commands/launch.py::launch_command[elif args.multi_gpu]): torchrun tells each
        # its rank, and ACCELERATE_USE_CPU makes gloo of it
        return [*argv, "--multi_gpu", *rendezvous.render_placeholders()]
    deepspeed = plan.stage.deepspeed
    if deepspeed is not None:
        argv += ["--use_deepspeed", "--deepspeed_config_file", str(deepspeed)]
    elif plan.processes > 1:
        argv.append("--multi_gpu")
    if plan.nodes > 1:
        if deepspeed is not None:
            # accelerate's own default needs pdsh, and starts the other machines itself
            argv += ["--deepspeed_multinode_launcher", "standard"]
        return [*argv, *rendezvous.render_placeholders()]
    if plan.processes > 1 or deepspeed is not None:
        # 0: accelerate picks a free port; DeepSpeed takes one for a single process too
        argv += ["--main_process_port", "0"]
    return argv


def _build_torchrun_options(plan: Plan) -> list[str]:
    """torchrun and its own options; on one machine it finds a free port by itself."""
    argv = ["--nnodes", str(plan.nodes), "--nproc-per-node", str(max(1, plan.gpus))]
    if plan.nodes > 1:
        return [*argv, *rendezvous.render_placeholders(rendezvous.TORCHRUN)]
    return [*argv, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


LAUNCHERS = {
    "accelerate": ("accelerate.commands.launch", _build_accelerate_options),
    "torchrun": ("torch.distributed.run", _build_torchrun_options),
}
"""The module that Python runs to start the processes, and its options, by `Entry.launcher`."""


def _build_environment(
    plan: Plan, root: Path, script: Path, folder: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    env: dict[str, str] = {}
    watch = plan.stage.options.probe
    if watch is not None:
        settings = _build_probe_settings(plan, script, folder, watch)
        env[PROBE_SETTINGS] = json.dumps(settings)
    # training writes straight into console.log: unbuffered, or the last lines die with it
    env["PYTHONUNBUFFERED"] = "1"
    env.update(build_source_environment(plan.stage.backend, root, environ))
    if plan.gpus == 0 and plan.stage.entry.launcher == "accelerate":
        env["ACCELERATE_USE_CPU"] = "true"
    if plan.gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    if plan.gpus == 1:
        # one process that sees several cards: transformers spreads it over all (nn.DataParallel)
        first, _, _ = environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")
        env["CUDA_VISIBLE_DEVICES"] = first
    return env


def build_source_environment(
    backend: Backend, root: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """What isolates a Python from the current folder, what it needs to import a trainer's source
    from `root`, and what the trainer's scripts need.
    """
    env = isolation.list_changes(environ)
    if backend.CHECKOUT:
        places = [str(root)]
        path = env.get("PYTHONPATH", environ.get("PYTHONPATH"))
        if path:
            places.append(path)
        env["PYTHONPATH"] = os.pathsep.join(places)
    return {**env, **backend.ENVIRON}


def _build_probe_settings(
    plan: Plan, script: Path, folder: Path, watch: Watch
) -> dict[str, object]:
    """The probe's settings; its `Settings` describes them."""
    entry = plan.stage.entry
    options = plan.stage.options
    pairs = plan.stage.schema.pairs
    expected = list_expectations(plan)
    enforced = set()
    for point in POINTS:
        # the other points need the end of the run
        if point.enforced and (pairs or not point.pairs_only):
            enforced.add(point.name)
    is_packed = entry.joins_rows(plan.values) or expected["packing"] in ("isolated", "on")
    settings = {
        "target": str(script),
        "out": str(folder / "probe"),
        "cpu": plan.gpus == 0,
        "watchers": dict(entry.watchers),
        "stand_ins": {},
        "divides_loss": entry.divides_loss,
        "packed": is_packed,
        "expect": {point: state for point, state in expected.items() if point in enforced},
        "on_violation": options.on_violation,
        "on_hang": options.on_hang,
        "pairs": pairs,
        "max_length": plan.values.get(entry.names.max_length),
        **asdict(watch),
    }
    if plan.gpus == 0:
        settings["stand_ins"] = dict(entry.stand_ins)
    if _begins_at_reference(plan):
        settings["first_loss"] = math.log(2)
    export = _build_export(plan)
    if export is not None:
        settings["export"] = export
    return settings


def _build_export(plan: Plan) -> dict[str, object] | None:
    """What is to be written after the training; None where it ends without a model."""
    phase = plan.stage.entry.export
    output = find_output_folder(plan)
    if phase is None or output is None or find_caches_only(plan.stage, plan.values) is not None:
        return None
    settings = phase.settings(plan.values)
    if settings is None:
        return None
    return {
        "function": phase.function,
        "output": str(output.absolute()),
        "into": str(find_model_in(plan, output).absolute()),
        **settings,
    }


def _begins_at_reference(plan: Plan) -> bool:
    """Whether DPO's loss before the first update is ln 2: the reference is the model it starts
    from.

    Of open-instruct's losses that holds for two (dpo_utils.py::compute_loss[if loss_type in]),
    without an auxiliary loss. Where a step is one packed row, the reference is computed beside
    other neighbours, whom a sample attends to (dpo.py::main[cache_batch_size = int]).
    """
    entry = plan.stage.entry
    values = plan.values
    if not entry.caches_reference or entry.takes_one_row(values):
        return False
    is_plain = str(values.get("loss_type")) in ("dpo", "dpo_norm")
    return is_plain and not values.get("load_balancing_loss")


def list_expectations(plan: Plan) -> dict[str, str]:
    """The state that each point of the verdict is expected to have."""
    entry = plan.stage.entry
    options = plan.stage.options
    expected = {**DEFAULTS, "liger": "off", "packing": "off"}
    if entry.liger(plan.values):
        expected["liger"] = "engaged"
    if entry.packs(plan.values, plan.per_device):
        expected["packing"] = "isolated"
    if options.probe is not None:
        expected["batch"] = "planned"
        # where one process trains alone, nothing stands between backward and optimizer
        if plan.processes > 1 or (plan.gpus and options.deepspeed is not None):
            expected["gradients"] = "true"
    # a kernel of the hub has a name of its own, which no point of a verdict knows
    if plan.attention in EXPECT["attention"]:
        expected["attention"] = plan.attention
    return {**expected, **options.expect}
