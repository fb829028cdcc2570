"""`Plan` -> `Command`: argv lists, environment and working folder; nothing is started here."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from launcher.config.keys import EXPECT
from launcher.machine.python import Trainer
from launcher.paths import PACKAGE
from launcher.plan.plan import Plan
from launcher.redaction import redact
from launcher.runs import rendezvous
from launcher.runs.attempt import Command
from launcher.stage.options import Watch
from launcher.upstream.locate import SUBMODULE
from launcher.upstream.trainers import Backend

HUB = "HF_TOKEN"
ARGUMENT = "LAUNCH_ARG_"
"""How variables begin that hold words of the command line; watching/script.py puts them back."""
PROBE = PACKAGE / "probe" / "run.py"
LAUNCHERS = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}
"""The module that Python runs to start the processes, by `Entry.launcher`."""

CONTRACT = ("liger", "packing", "attention", "dataset_cache", "reference_cache", "loss", "gradients")
"""The points that the probe enforces while training runs; the others need the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    """The trainer's arguments, secrets taken out: every user of a machine may read a command line.

    `env` holds them instead, `variables` is as in `Command`. `exposed` are the arguments that could not
    be handed over so.
    """

    words: Mapping[str, Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    exposed: tuple[str, ...] = ()


def hide_secrets(
    given: Mapping[str, Sequence[str]], plan: Plan, environ: Mapping[str, str], *, watched: bool
) -> TrainerArguments:
    """The arguments as they may be shown; what starts upstream's script (`watched`) puts the words back."""
    shown: dict[str, Any] = redact({name: list(words) for name, words in given.items()}, environ)
    words, env, variables, exposed = dict(given), dict[str, str](), dict[str, str](), list[str]()
    for name, own in given.items():
        taken = _secret_words(name, plan)
        secret = [at for at, word in enumerate(own) if word != shown[name][at] or taken & {-1, at}]
        if not secret:
            continue
        if name == "hub_token" and environ.get(HUB, own[0]) == own[0]:
            # where no token is given, huggingface_hub takes this one
            del words[name]
            if HUB not in environ:
                env[HUB], variables[HUB] = own[0], _variable(own[0], environ, HUB)
            continue
        if not watched:
            exposed.append(name)
            continue
        words[name] = replaced = list(own)
        for at in secret:
            variable = f"{ARGUMENT}{name.upper()}" + (f"_{at}" if len(own) > 1 else "")
            env[variable], replaced[at] = own[at], f"${variable}"
            variables[variable] = _variable(own[at], environ, variable)
    return TrainerArguments(words=words, env=env, variables=variables, exposed=tuple(exposed))


def _variable(word: str, environ: Mapping[str, str], default: str) -> str:
    """The variable of the shell that holds this word."""
    return min((name for name, value in environ.items() if value == word), default=default)


def _secret_words(name: str, plan: Plan) -> set[int]:
    """Which words of an argument took a secret from the environment; -1 stands for all."""
    found = set()
    for key in plan.stage.config.secrets:
        if (match := re.match(rf"args\.{re.escape(name)}(?:\[(\d+)\])?(?![\w-])", key)) is not None:
            found.add(int(match[1] or -1))
    return found if name in plan.stage.config.args and name not in plan.derived else set()


def build(
    plan: Plan,
    trainer: Trainer,
    folder: Path,
    *,
    environ: Mapping[str, str],
    caches: Mapping[str, str] | None = None,
    devices: Mapping[str, str] | None = None,
) -> Command:
    """The `accelerate launch` or torchrun command of a plan, with the probe as the script it starts.

    Without the probe it starts upstream's script itself, and nothing of ours runs inside.
    `folder` is the run folder; `environ` the environment that training will inherit.
    """
    # without a root, only a dry run gets here: say where the source would be
    root = plan.stage.upstream.root or _expected_root(plan, trainer)
    script = root / plan.stage.entry.script
    watched = plan.stage.options.probe is not None
    started = str(PROBE if watched else script)
    launcher = plan.stage.entry.launcher
    argv = [str(trainer.python), "-m", LAUNCHERS[launcher], *_OPTIONS[launcher](plan), started]
    arguments = hide_secrets(plan.arguments(), plan, environ, watched=watched)
    for name, words in arguments.words.items():
        argv += [f"--{name}", *words]
    return Command(
        argv=tuple(argv),
        cwd=Path.cwd(),
        env={
            **_environment(plan, root, script, folder, environ),
            **(caches or {}),
            **(devices or {}),
            **arguments.env,
        },
        variables=arguments.variables,
    )


def _expected_root(plan: Plan, trainer: Trainer) -> Path:
    if plan.stage.backend.CHECKOUT:
        return SUBMODULE
    places = [path for path in trainer.path if path.name in {"site-packages", "dist-packages"}]
    return places[0] if places else Path("site-packages").absolute()


def _accelerate(plan: Plan) -> list[str]:
    """accelerate's own options; an own config file, so that the user's default one changes nothing."""
    options = plan.stage.options
    neutral = files("launcher.plan.accelerate").joinpath("neutral.yaml")
    argv = ["--config_file", str(neutral), "--num_machines", str(plan.nodes)]
    argv += ["--num_processes", str(plan.processes)]
    argv += ["--mixed_precision", plan.mixed_precision, "--dynamo_backend", "no"]
    if not plan.gpus and plan.nodes == 1:
        return [*argv, "--cpu"]
    if not plan.gpus:
        # --cpu starts a process that knows of no other (accelerate/commands/launch.py:1403): torchrun
        # tells each its rank, and ACCELERATE_USE_CPU makes gloo of it
        return [*argv, "--multi_gpu", *rendezvous.placeholders()]
    if options.deepspeed is not None:
        argv += ["--use_deepspeed", "--deepspeed_config_file", str(options.deepspeed)]
    elif plan.processes > 1:
        argv += ["--multi_gpu"]
    if plan.nodes > 1:
        if options.deepspeed is not None:
            # accelerate's own default needs pdsh, and starts the other machines itself
            argv += ["--deepspeed_multinode_launcher", "standard"]
        argv += rendezvous.placeholders()
    elif plan.processes > 1 or options.deepspeed is not None:
        # 0: accelerate picks a free port; DeepSpeed takes one for a single process too
        argv += ["--main_process_port", "0"]
    return argv


def _torchrun(plan: Plan) -> list[str]:
    """torchrun and its own options; on one machine it finds a free port by itself."""
    argv = ["--nnodes", str(plan.nodes), "--nproc-per-node", str(max(1, plan.gpus))]
    if plan.nodes > 1:
        return [*argv, *rendezvous.placeholders(rendezvous.TORCHRUN)]
    return [*argv, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


_OPTIONS: Mapping[str, Callable[[Plan], list[str]]] = {"accelerate": _accelerate, "torchrun": _torchrun}


def _environment(plan: Plan, root: Path, script: Path, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    env = {}
    if plan.stage.options.probe is not None:
        env["LAUNCH_PROBE"] = json.dumps(_probe(plan, script, folder, plan.stage.options.probe))
    # training writes straight into console.log: unbuffered, or the last lines die with it
    env["PYTHONUNBUFFERED"] = "1"
    env |= source_environment(plan.stage.backend, root, environ)
    if plan.gpus == 0:
        if plan.stage.entry.launcher == "accelerate":
            env["ACCELERATE_USE_CPU"] = "true"
        env["CUDA_VISIBLE_DEVICES"] = ""
    if plan.gpus == 1:
        # one process that sees several cards: transformers spreads it over all (nn.DataParallel)
        env["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return env


def source_environment(backend: Backend, root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What Python needs to import a trainer's source from `root`, and what the trainer's scripts need."""
    if not backend.CHECKOUT:
        return {**backend.ENVIRON}
    path = environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{path}" if path else str(root), **backend.ENVIRON}


def _probe(plan: Plan, script: Path, folder: Path, watch: Watch) -> dict[str, object]:
    """The probe's settings; what they mean stands in its `Settings`."""
    options, expected = plan.stage.options, expectations(plan)
    packs = any(plan.values.get(name) for name in ("packing", "padding_free"))
    enforced = {*CONTRACT} - ({"reference_cache"} if not plan.stage.schema.pairs else set())
    return {
        "target": str(script),
        "out": str(folder / "probe"),
        "cpu": plan.gpus == 0,
        "stand_ins": not plan.stage.entry.runs_on_cpu,
        "divides_loss": plan.stage.entry.loop == "transformers",
        "packed": packs or expected["packing"] in ("isolated", "on"),
        "expect": {point: state for point, state in expected.items() if point in enforced},
        "on_violation": options.on_violation,
        "on_hang": options.on_hang,
        **asdict(watch),
        **_first_loss(plan),
    }


def _first_loss(plan: Plan) -> dict[str, float]:
    """DPO's loss before the first update is ln 2 if the reference is the model that training starts from.

    Of open-instruct's losses that holds for these two (dpo_utils.py:656); an auxiliary loss is added.
    """
    values, entry = plan.values, plan.stage.entry
    if not entry.caches_reference:
        return {}
    if entry.packing == "one-row" and values.get("packing"):
        # the reference is computed beside other neighbours, whom a sample attends to (dpo.py:244)
        return {}
    plain = str(values.get("loss_type")) in ("dpo", "dpo_norm")
    return {"first_loss": math.log(2)} if plain and not values.get("load_balancing_loss") else {}


def expectations(plan: Plan) -> dict[str, str]:
    """What the run must show: `expect:`, completed by what the arguments request."""
    entry, values = plan.stage.entry, plan.values
    expected = {"loss": "finite", "memory": "ok", "finish": "completed"}
    expected["liger"] = "engaged" if entry.liger(values) else "off"
    expected["packing"] = "isolated" if entry.packs(values, plan.per_device) else "off"
    if plan.stage.options.probe is not None:
        expected["batch"] = "planned"
        # where one process trains alone, nothing stands between backward and optimizer
        if plan.processes > 1 or (plan.gpus and plan.stage.options.deepspeed is not None):
            expected["gradients"] = "true"
    if chosen := plan.attention:
        # a kernel of the hub has a name of its own, which no point of a verdict knows
        expected |= {"attention": chosen} if chosen in EXPECT["attention"] else {}
    return {**expected, **plan.stage.options.expect}
