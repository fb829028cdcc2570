"""`Plan` -> `Command`: argv lists, environment and working folder; nothing is started here."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from launcher.machine import Trainer
from launcher.paths import expanded
from launcher.plan import Plan
from launcher.redaction import redact
from launcher.upstream import SUBMODULE

PROBE = Path(__file__).resolve().parent / "probe.py"


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


def build(plan: Plan, trainer: Trainer, folder: Path, *, environ: Mapping[str, str]) -> Command:
    """The `accelerate launch` command of a plan, with the probe as the script it starts.

    `folder` is the run folder; `environ` the environment that training will inherit.
    """
    # without a root, only a dry run gets here: say where the source would be
    root = plan.stage.upstream.root or _expected_root(plan, trainer)
    script = root / plan.stage.entry.script
    argv = [str(trainer.python), "-m", "accelerate.commands.launch", *_accelerate(plan), str(PROBE)]
    for name, words in plan.arguments().items():
        argv += [f"--{name}", *words]
    return Command(
        argv=tuple(argv), env=_environment(plan, root, script, folder, environ), cwd=Path.cwd()
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
    argv = ["--config_file", str(neutral)]
    argv += ["--num_machines", str(plan.nodes), "--num_processes", str(plan.processes)]
    argv += ["--mixed_precision", options.mixed_precision or _precision(plan)]
    argv += ["--dynamo_backend", "no"]
    if not plan.gpus:
        return [*argv, "--cpu"]
    if options.deepspeed is not None:
        argv += ["--use_deepspeed", "--deepspeed_config_file", str(options.deepspeed)]
    elif plan.processes > 1:
        argv += ["--multi_gpu"]
    if plan.nodes > 1:
        if options.deepspeed is not None:
            # accelerate's own default needs pdsh, and starts the other machines itself
            argv += ["--deepspeed_multinode_launcher", "standard"]
        argv += ["--machine_rank", "NODE_RANK", "--main_process_ip", "HEAD_ADDRESS"]
        argv += ["--main_process_port", "29500"]
    elif plan.processes > 1 or options.deepspeed is not None:
        # 0: accelerate picks a free port; DeepSpeed takes one for a single process too
        argv += ["--main_process_port", "0"]
    return argv


def _precision(plan: Plan) -> str:
    # TRL's own `bf16`, `fp16` decide; accelerate's bf16 would win over `bf16: false`
    own = plan.stage.options.backend == "trl"
    return "bf16" if plan.gpus and not own else "no"


def _environment(
    plan: Plan, root: Path, script: Path, folder: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    probe = {
        "target": str(script),
        "out": str(folder / "probe"),
        "cpu": plan.gpus == 0,
        "backend": plan.stage.options.backend,
    }
    env = {
        "LAUNCH_PROBE": json.dumps(probe),
        # training writes straight into console.log: unbuffered, or the last lines die with it
        "PYTHONUNBUFFERED": "1",
    }
    if plan.stage.options.backend == "open_instruct":
        path = environ.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{root}{os.pathsep}{path}" if path else str(root)
        # importing litellm would otherwise ask the network for model prices, 5 s where there is none
        env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        if plan.stage.options.stage == "dpo" and "REFERENCE_LOGPROBS_CACHE_PATH" not in environ:
            env["REFERENCE_LOGPROBS_CACHE_PATH"] = str(_reference_cache(plan, folder))
    if plan.gpus == 0:
        env["ACCELERATE_USE_CPU"] = "true"
        env["CUDA_VISIBLE_DEVICES"] = ""
    if plan.gpus == 1:
        # one process that sees several cards: transformers spreads it over all (nn.DataParallel)
        env["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return env


def _reference_cache(plan: Plan, folder: Path) -> Path:
    """A folder of its own for each content of a local model.

    Upstream's key holds the model's path, not its weights (dpo_utils.py:377): a model retrained into
    the same folder would meet the old reference. Upstream's default folder exists only inside Ai2.
    """
    name = str(plan.values[plan.stage.entry.names.model])
    digest = hashlib.sha256(name.encode(errors="surrogateescape"))
    try:
        entries = sorted(os.scandir(expanded(name)), key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_file():
                status = entry.stat()
                told = f"{entry.name}:{status.st_size}:{status.st_mtime_ns}"
                digest.update(told.encode(errors="surrogateescape"))
    except (OSError, ValueError):
        # a model of the hub: its name is all there is
        pass
    return folder.parent / "cache" / "reference_logprobs" / digest.hexdigest()[:12]
