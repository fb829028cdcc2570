"""`Plan` -> `Command`: argv lists, environment and working folder; nothing is started here."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from launcher.config.keys import EXPECT
from launcher.config.points import DEFAULTS, POINTS
from launcher.machine import isolation
from launcher.machine.python import Trainer
from launcher.paths import PACKAGE
from launcher.plan.plan import Plan, caches_only, model_in, output_folder
from launcher.redaction import redact
from launcher.runs import rendezvous
from launcher.runs.attempt import ARGUMENT, PROBE_SETTINGS, Command
from launcher.runs.rundir import RunFolder
from launcher.stage.options import Watch
from launcher.upstream.locate import SUBMODULE
from launcher.upstream.trainers import Backend

HUB = "HF_TOKEN"
# names a YAML file to TRL's parser (trl/scripts/utils.py::TrlParser.parse_args_and_config[config = yaml.safe_load])
CONFIG = "--config"
PROBE = PACKAGE / "probe" / "run.py"
START = PACKAGE / "probe" / "start.py"
SAFE_PATH_SINCE = (3, 11)  # the first Python that knows PYTHONSAFEPATH


class TrainerArguments(NamedTuple):
    """The trainer's arguments, secrets taken out: every user of a machine may read a command line.

    `env` holds them instead, `variables` is as in `Command`. `exposed` are the arguments that could not
    be handed over so.
    """

    words: Mapping[str, Sequence[str]]
    env: Mapping[str, str]
    variables: Mapping[str, str]
    exposed: tuple[str, ...]


def hide_secrets(
    given: Mapping[str, Sequence[str]], plan: Plan, environ: Mapping[str, str], *, watched: bool
) -> TrainerArguments:
    """The arguments as they may be shown; what starts upstream's script (`watched`) puts the words back."""
    shown: dict[str, Any] = redact({name: list(words) for name, words in given.items()}, environ)
    words, env, variables, exposed = dict(given), dict[str, str](), dict[str, str](), list[str]()
    for name, own in given.items():
        taken = _secret_words(name, plan)
        secret = [at for at, word in enumerate(own) if word != shown[name][at] or taken & {-1, at}]
        if secret and name == "hub_token" and environ.get(HUB, own[0]) == own[0]:
            # where no token is given, huggingface_hub takes this one
            del words[name]
            if HUB not in environ:
                env[HUB], variables[HUB] = own[0], _variable(own[0], environ, HUB)
        elif secret and not watched:
            exposed.append(name)
        elif secret:
            words[name] = replaced = list(own)
            for at in secret:
                variable = f"{ARGUMENT}{name.upper()}" + (f"_{at}" if len(own) > 1 else "")
                env[variable], replaced[at] = own[at], f"${variable}"
                variables[variable] = _variable(own[at], environ, variable)
    return TrainerArguments(words, env, variables, tuple(exposed))


def _variable(word: str, environ: Mapping[str, str], default: str) -> str:
    return min((name for name, value in environ.items() if value == word), default=default)


def _secret_words(name: str, plan: Plan) -> set[int]:
    """Which words of an argument took a secret from the environment; -1 stands for all."""
    config, pattern = plan.stage.config, re.compile(rf"args\.{re.escape(name)}(?:\[(\d+)\])?(?![\w-])")
    if name not in config.args or name in plan.derived:
        return set()
    return {int(match[1] or -1) for key in config.secrets if (match := pattern.match(key)) is not None}


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
    """The `accelerate launch` or torchrun command of a plan, with the probe as the script it starts.

    Without the probe it starts upstream's script itself, and nothing of ours runs inside.
    `folder` is the run folder; `environ` the environment that training will inherit. Arguments that no flag can
    carry go into a file of the `attempt` there.
    """
    root = plan.stage.upstream.root
    if root is None:
        # only a dry run gets here: say where the source would be
        places = (path for path in trainer.path if path.name in {"site-packages", "dist-packages"})
        installed = next(places, Path("site-packages").absolute())
        root = SUBMODULE if plan.stage.backend.CHECKOUT else installed
    script = root / plan.stage.entry.script
    watched = plan.stage.options.probe is not None
    started = str(PROBE if watched else script)
    module, options = LAUNCHERS[plan.stage.entry.launcher]
    argv = [str(trainer.python), *_module(module, plan, trainer), *options(plan), started]
    arguments = hide_secrets(plan.arguments(), plan, environ, watched=watched)
    config = RunFolder(folder).trainer_config(attempt)
    written = config_file(plan.file_arguments())
    if written:
        argv += [CONFIG, str(config)]
    for name, words in arguments.words.items():
        argv += [f"--{name}", *words]
    env = _environment(plan, root, script, folder, environ) | {**(caches or {}), **(devices or {}), **arguments.env}
    return Command(
        argv=tuple(argv),
        cwd=Path.cwd(),
        env=env,
        variables=arguments.variables,
        files={str(config): written} if written else {},
    )


def config_file(arguments: Mapping[str, Any]) -> str:
    """The text of a config file with these arguments
    (trl/scripts/utils.py::TrlParser.parse_args_and_config[config = yaml.safe_load]); empty without any.
    """
    if not arguments:
        return ""
    import yaml

    return yaml.safe_dump(dict(arguments), sort_keys=False, width=100)


def secrets_in_file(plan: Plan, environ: Mapping[str, str]) -> Iterator[str]:
    """The arguments with a secret that a config file would hold."""
    for name, value in plan.file_arguments().items():
        is_taken = any(key.startswith(f"args.{name}") for key in plan.stage.config.secrets)
        if is_taken or redact({name: value}, environ) != {name: value}:
            yield name


def _module(name: str, plan: Plan, trainer: Trainer) -> list[str]:
    """The words that run a module: with `-m`, or by `START` where the current folder would get onto the path."""
    engine = plan.stage.options.deepspeed is not None and plan.gpus > 0
    deepspeed = engine and plan.stage.entry.launcher == "accelerate"
    old_python = bool(trainer.version) and trainer.version < SAFE_PATH_SINCE
    return [str(START), name] if deepspeed or old_python else ["-m", name]


def _accelerate(plan: Plan) -> list[str]:
    """accelerate's own options; an own config file, so that the user's default one changes nothing."""
    deepspeed = plan.stage.deepspeed
    neutral = files("launcher.plan.accelerate").joinpath("neutral.yaml")
    argv = ["--config_file", str(neutral), "--num_machines", str(plan.nodes), "--num_processes", str(plan.processes)]
    argv += ["--mixed_precision", plan.mixed_precision, "--dynamo_backend", "no"]
    if not plan.gpus and plan.nodes == 1:
        return [*argv, "--cpu"]
    if not plan.gpus:
        # --cpu starts a process that knows of no other
        # (accelerate/commands/launch.py::launch_command[elif args.multi_gpu]): torchrun tells each its rank, and
        # ACCELERATE_USE_CPU makes gloo of it
        return [*argv, "--multi_gpu", *rendezvous.placeholders()]
    if deepspeed is not None:
        argv += ["--use_deepspeed", "--deepspeed_config_file", str(deepspeed)]
    elif plan.processes > 1:
        argv += ["--multi_gpu"]
    if plan.nodes > 1:
        # accelerate's own default needs pdsh, and starts the other machines itself
        standard = ["--deepspeed_multinode_launcher", "standard"] if deepspeed is not None else []
        return [*argv, *standard, *rendezvous.placeholders()]
    # 0: accelerate picks a free port; DeepSpeed takes one for a single process too
    return [*argv, "--main_process_port", "0"] if plan.processes > 1 or deepspeed is not None else argv


def _torchrun(plan: Plan) -> list[str]:
    """torchrun and its own options; on one machine it finds a free port by itself."""
    argv = ["--nnodes", str(plan.nodes), "--nproc-per-node", str(max(1, plan.gpus))]
    if plan.nodes > 1:
        return [*argv, *rendezvous.placeholders(rendezvous.TORCHRUN)]
    return [*argv, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


LAUNCHERS = {
    "accelerate": ("accelerate.commands.launch", _accelerate),
    "torchrun": ("torch.distributed.run", _torchrun),
}
"""The module that Python runs to start the processes, and its options, by `Entry.launcher`."""


def _environment(plan: Plan, root: Path, script: Path, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    watch = plan.stage.options.probe
    env = {} if watch is None else {PROBE_SETTINGS: json.dumps(_probe(plan, script, folder, watch))}
    # training writes straight into console.log: unbuffered, or the last lines die with it
    env |= {"PYTHONUNBUFFERED": "1"} | source_environment(plan.stage.backend, root, environ)
    if plan.gpus == 0:
        if plan.stage.entry.launcher == "accelerate":
            env["ACCELERATE_USE_CPU"] = "true"
        env["CUDA_VISIBLE_DEVICES"] = ""
    if plan.gpus == 1:
        # one process that sees several cards: transformers spreads it over all (nn.DataParallel)
        env["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return env


def source_environment(backend: Backend, root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What isolates a Python from the current folder, what it needs to import a trainer's source from `root`,
    and what the trainer's scripts need.
    """
    env = isolation.changes(environ)
    if backend.CHECKOUT:
        path = env.get("PYTHONPATH", environ.get("PYTHONPATH"))
        env["PYTHONPATH"] = f"{root}{os.pathsep}{path}" if path else str(root)
    return {**env, **backend.ENVIRON}


def _probe(plan: Plan, script: Path, folder: Path, watch: Watch) -> dict[str, object]:
    """The probe's settings; what they mean stands in its `Settings`."""
    options, expected = plan.stage.options, expectations(plan)
    packs = plan.stage.entry.joins_rows(plan.values)
    pairs = plan.stage.schema.pairs
    # the other points need the end of the run
    enforced = {point.name for point in POINTS if point.enforced and (pairs or not point.pairs_only)}
    return {
        "target": str(script),
        "out": str(folder / "probe"),
        "cpu": plan.gpus == 0,
        "watchers": dict(plan.stage.entry.watchers),
        "stand_ins": dict(plan.stage.entry.stand_ins) if plan.gpus == 0 else {},
        "divides_loss": plan.stage.entry.divides_loss,
        "packed": packs or expected["packing"] in ("isolated", "on"),
        "expect": {point: state for point, state in expected.items() if point in enforced},
        "on_violation": options.on_violation,
        "on_hang": options.on_hang,
        "pairs": pairs,
        "max_length": plan.values.get(plan.stage.entry.names.max_length),
        **asdict(watch),
        **_first_loss(plan),
        **_export(plan),
    }


def _export(plan: Plan) -> dict[str, object]:
    """What is to be written once the training is over; nothing where it ends without a model."""
    phase = plan.stage.entry.export
    output = output_folder(plan)
    if phase is None or output is None or caches_only(plan.stage, plan.values) is not None:
        return {}
    settings = phase.settings(plan.values)
    if settings is None:
        return {}
    places = {"output": str(output.absolute()), "into": str(model_in(plan, output).absolute())}
    return {"export": {"function": phase.function, **places, **settings}}


def _first_loss(plan: Plan) -> dict[str, float]:
    """DPO's loss before the first update is ln 2 if the reference is the model that training starts from.

    Of open-instruct's losses that holds for these two (dpo_utils.py::compute_loss[if loss_type in]); an auxiliary loss
    is added.
    """
    values, entry = plan.values, plan.stage.entry
    # there the reference is computed beside other neighbours, whom a sample attends to
    # (dpo.py::main[cache_batch_size = int])
    beside = entry.takes_one_row(values)
    plain = str(values.get("loss_type")) in ("dpo", "dpo_norm") and not values.get("load_balancing_loss")
    return {"first_loss": math.log(2)} if entry.caches_reference and plain and not beside else {}


def expectations(plan: Plan) -> dict[str, str]:
    entry, values = plan.stage.entry, plan.values
    expected = {
        **DEFAULTS,
        "liger": "engaged" if entry.liger(values) else "off",
        "packing": "isolated" if entry.packs(values, plan.per_device) else "off",
    }
    if plan.stage.options.probe is not None:
        expected["batch"] = "planned"
        # where one process trains alone, nothing stands between backward and optimizer
        if plan.processes > 1 or (plan.gpus and plan.stage.options.deepspeed is not None):
            expected["gradients"] = "true"
    # a kernel of the hub has a name of its own, which no point of a verdict knows
    if (chosen := plan.attention) and chosen in EXPECT["attention"]:
        expected["attention"] = chosen
    return {**expected, **plan.stage.options.expect}
