"""Rules about what the output folder holds already, and what a run is to resume from.

Whose checkpoints a folder holds, and whether they are whole, is `launcher.resume`'s to judge at a
start.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from launcher import files
from launcher.artifacts import checkpoints
from launcher.artifacts.checkpoints import Checkpoint
from launcher.errors import Finding, shorten
from launcher.files import read_json
from launcher.paths import exists, is_file
from launcher.rules.context import Context, RuleTable, caches_only
from launcher.rules.places import unintended_output
from launcher.rules.rule import cites, needs, say, superseded_by

_OUTPUT = "output_dir"
_RESUME = "resume_from_checkpoint"
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model).*\.(safetensors|bin)\Z")
# DeepSpeed and FSDP write other files in place of plain weights
_STATES = re.compile(_WEIGHTS.pattern + r"|global_step\d|pytorch_model_fsdp")


def _find_resumed(context: Context) -> Checkpoint | None:
    """The checkpoint that open-instruct would resume from: steps before epochs
    (utils.py::get_last_checkpoint[if len(checkpoint_steps) > 0]).
    """
    if context.entry.names.resume is not None:
        return None
    saved = checkpoints.find(context.values.schema.backend, context.output)
    kind = "epoch"
    if any(checkpoint.kind == "step" for checkpoint in saved):
        kind = "step"
    for checkpoint in reversed(saved):
        if checkpoint.kind == kind and checkpoint.marked:
            return checkpoint
    return None


@cites("utils.py::get_last_checkpoint_path[if args.output_dir]")
@needs("machine")
@superseded_by("attempts")
def foreign_checkpoints(context: Context) -> Iterator[Finding]:
    """Upstream resumes from the newest checkpoint in its output folder, whoever made it."""
    last = _find_resumed(context)
    if last is not None and not caches_only(context):
        message = (
            f"{context.output} holds {last.name} of another run: upstream would resume from it"
        )
        help = f"give another `output_dir` or `exp_name`, or empty {context.output}"
        yield say("warning", "foreign-checkpoints", _OUTPUT, message, help)


@cites(
    "utils.py::get_last_checkpoint_path[logger.warning]",
    "finetune.py::main[if args.clean_checkpoints_at_end]",
    "trl/scripts/sft.py::main[trainer.train(resume_from_checkpoint]",
    reviewed=("e6c3044aa620",),
)
@needs("machine")
@superseded_by("attempts")
def finished_model(context: Context) -> Iterator[Finding]:
    """A run that ended is begun from zero again."""
    names = files.list_names(context.output)
    if caches_only(context) or not {"config.json", "adapter_config.json"} & {*names}:
        return
    resume = context.entry.names.resume
    if (resume and context.values[resume]) or not any(map(_WEIGHTS.match, names)):
        return
    last = _find_resumed(context)
    begin = "train from zero" if last is None else f"continue from {last.name}"
    message = f"{context.output} holds a trained model: upstream would {begin} and write over it"
    help = f"give another `output_dir`, or empty {context.output}"
    yield say("warning", "finished-output", _OUTPUT, message, help)


@cites(
    "transformers/trainer.py::Trainer._load_from_checkpoint[Can]",
    "transformers/trainer.py::Trainer.train[state = TrainerState.load_from_json]",
)
def named_checkpoint(context: Context) -> Iterator[Finding]:
    """A name is looked up as a folder, and its state is read."""
    name = context.values[_RESUME]
    # true and false have a rule of their own
    if not isinstance(name, str) or not name or name.lower() in ("true", "false"):
        return
    folder = Path(name)
    fault = _find_checkpoint_fault(context, folder, shorten(name))
    if fault is None:
        yield from _check_remaining(context, folder)
        return
    help = "relative paths start where launch is started; delete the line to start over"
    saved = checkpoints.find("trl", folder) or checkpoints.find("trl", context.output)
    if saved:
        help = f"write `{_RESUME}: {saved[-1].path}`"
    yield say("error", "resume-missing", _RESUME, fault, help)


def _find_checkpoint_fault(context: Context, folder: Path, name: str) -> str | None:
    if not exists(folder):
        # another machine may have it
        if context.machine is None:
            return None
        return f"there is no folder {name} here"
    if not is_file(folder / "trainer_state.json"):
        return f"{name} is not a checkpoint: it has no trainer_state.json"
    if not any(map(_STATES.match, files.list_names(folder))):
        return f"{name} holds no weights"
    return None


def _check_remaining(context: Context, folder: Path) -> Iterator[Finding]:
    """Training begins at the checkpoint's step, and may be over.

    transformers/trainer.py::Trainer._init_training_state[self.state = TrainerState.load_from_json]
    transformers/trainer.py::Trainer._init_training_state[epochs_trained = int]
    """
    state = read_json(folder / "trainer_state.json")
    steps = state.get("global_step")
    key = "max_steps"
    done = steps
    limit = context.values[key]
    if not isinstance(limit, int) or limit <= 0:
        key = "num_train_epochs"
        done = state.get("epoch")
        limit = context.values[key]
    if isinstance(limit, int | float) and isinstance(done, int | float) and done >= limit:
        message = (
            f"{shorten(str(folder))} was saved after {steps} steps, and `{key}` is {limit}: "
            "nothing would be trained"
        )
        help = "raise the limit, or delete the line to start over"
        yield say("error", "resume-finished", _RESUME, message, help)


_OPEN_INSTRUCT = (unintended_output, foreign_checkpoints, finished_model)
_TRL = (unintended_output, named_checkpoint, finished_model)

RULES: RuleTable = {
    "open_instruct": dict.fromkeys(("sft", "dpo"), _OPEN_INSTRUCT),
    "trl": dict.fromkeys(("sft", "dpo"), _TRL),
}
