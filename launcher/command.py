"""`Plan` -> `Command`: argv lists, environment and working folder; nothing is started here."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from launcher import rendezvous
from launcher.machine import Trainer
from launcher.options import EXPECT, Watch
from launcher.plan import Plan
from launcher.redaction import redact
from launcher.upstream import SUBMODULE

PROBE = Path(__file__).resolve().parent / "probe.py"

CONTRACT = ("liger", "packing", "attention", "dataset_cache", "reference_cache", "loss")
"""The points that the probe enforces while training runs; the others need the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The whole intention to start one stage. `env` holds only what is added to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path

    def shell(self) -> str:
        """The command as it can be pasted into a POSIX shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*words, shlex.join(self.argv)])

    def redacted(self) -> Command:
        """The same without tokens, for whatever is shown or kept."""
        return redact(self)


def build(
    plan: Plan, trainer: Trainer, folder: Path, *, environ: Mapping[str, str],
    caches: Mapping[str, str] | None = None, devices: Mapping[str, str] | None = None,
) -> Command:  # fmt: skip
    """The `accelerate launch` or torchrun command of a plan, with the probe as the script it starts.

    Without the probe it starts upstream's script itself, and nothing of ours runs inside.
    `folder` is the run folder; `environ` the environment that training will inherit.
    """
    # without a root, only a dry run gets here: say where the source would be
    root = plan.stage.upstream.root or _expected_root(plan, trainer)
    script = root / plan.stage.entry.script
    watched = plan.stage.options.probe is not None
    started = str(PROBE if watched else script)
    starter = _torchrun(plan) if plan.stage.entry.torchrun else _accelerate(plan)
    argv = [str(trainer.python), "-m", *starter, started]
    for name, words in plan.arguments().items():
        argv += [f"--{name}", *words]
    return Command(
        argv=tuple(argv),
        cwd=Path.cwd(),
        env={
            **_environment(plan, root, script, folder, environ),
            **(caches or {}),
            **(devices or {}),
        },
    )


def _expected_root(plan: Plan, trainer: Trainer) -> Path:
    if plan.stage.options.backend == "open_instruct":
        return SUBMODULE
    places = [path for path in trainer.path if path.name in {"site-packages", "dist-packages"}]
    return places[0] if places else Path("site-packages").absolute()


def _accelerate(plan: Plan) -> list[str]:
    """accelerate's own options; an own config file, so that the user's default one changes nothing."""
    options = plan.stage.options
    neutral = files("launcher.accelerate").joinpath("neutral.yaml")
    argv = ["accelerate.commands.launch", "--config_file", str(neutral)]
    argv += ["--num_machines", str(plan.nodes), "--num_processes", str(plan.processes)]
    argv += ["--mixed_precision", plan.mixed_precision]
    argv += ["--dynamo_backend", "no"]
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
    argv = ["torch.distributed.run", "--nnodes", str(plan.nodes)]
    argv += ["--nproc-per-node", str(max(1, plan.gpus))]
    if plan.nodes > 1:
        return [*argv, *rendezvous.placeholders(rendezvous.TORCHRUN)]
    return [*argv, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def _environment(
    plan: Plan, root: Path, script: Path, folder: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    env = {}
    if plan.stage.options.probe is not None:
        env["LAUNCH_PROBE"] = json.dumps(_probe(plan, script, folder, plan.stage.options.probe))
    # training writes straight into console.log: unbuffered, or the last lines die with it
    env["PYTHONUNBUFFERED"] = "1"
    if plan.stage.options.backend == "open_instruct":
        path = environ.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{root}{os.pathsep}{path}" if path else str(root)
        # importing litellm would otherwise ask the network for model prices, 5 s where there is none
        env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    if plan.gpus == 0:
        if not plan.stage.entry.torchrun:
            env["ACCELERATE_USE_CPU"] = "true"
        env["CUDA_VISIBLE_DEVICES"] = ""
    if plan.gpus == 1:
        # one process that sees several cards: transformers spreads it over all (nn.DataParallel)
        env["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return env


def _probe(plan: Plan, script: Path, folder: Path, watch: Watch) -> dict[str, object]:
    """The probe's settings; what they mean stands in its `Settings`."""
    options, expected = plan.stage.options, expectations(plan)
    asked = [plan.values.get(name) for name in ("packing", "padding_free")]
    return {
        "target": str(script),
        "out": str(folder / "probe"),
        "cpu": plan.gpus == 0,
        "backend": options.backend,
        "stage": options.stage,
        "packed": any(asked) or expected["packing"] in ("isolated", "on"),
        "expect": {point: state for point, state in expected.items() if point in CONTRACT},
        "on_violation": options.on_violation,
        "on_hang": options.on_hang,
        **asdict(watch),
        **_first_loss(plan),
    }


def _first_loss(plan: Plan) -> dict[str, float]:
    """DPO's loss before the first update is ln 2 if the reference is the model that training starts from.

    Of open-instruct's losses that holds for these two (dpo_utils.py:656); an auxiliary loss is added.
    """
    values = plan.values
    if plan.stage.options.backend != "open_instruct" or plan.stage.options.stage != "dpo":
        return {}
    if plan.stage.entry.torchrun and values.get("packing"):
        # the reference is computed beside other neighbours, whom a sample attends to (dpo.py:244)
        return {}
    plain = str(values.get("loss_type")) in ("dpo", "dpo_norm")
    return {"first_loss": math.log(2)} if plain and not values.get("load_balancing_loss") else {}


def expectations(plan: Plan) -> dict[str, str]:
    """What the run is held to: `expect:`, completed by what the arguments ask for."""
    names, values = plan.stage.entry.names, plan.values
    expected = {"loss": "finite", "memory": "ok", "finish": "completed"}
    expected["liger"] = "engaged" if values.get(names.liger) else "off"
    expected["packing"] = "isolated" if plan.stage.entry.packs(values, plan.per_device) else "off"
    if plan.stage.options.probe is not None:
        expected["batch"] = "planned"
    if chosen := plan.attention:
        # a kernel of the hub has a name of its own, which no point of a verdict knows
        expected |= {"attention": chosen} if chosen in EXPECT["attention"] else {}
    return {**expected, **plan.stage.options.expect}
