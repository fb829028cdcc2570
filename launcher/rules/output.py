"""Rules about what the output folder holds already, and what a run is to resume from.

Whose checkpoints a folder holds, and whether they are whole, is `launcher.resume`'s to judge at a start.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher import files
from launcher.artifacts import checkpoints
from launcher.artifacts.checkpoints import Checkpoint
from launcher.errors import Finding, brief
from launcher.files import read_json
from launcher.paths import exists, is_file
from launcher.rules.context import Context, StageRule, caches_only
from launcher.rules.places import unintended_output
from launcher.rules.rule import cites, needs, say, superseded_by

_OUTPUT, _RESUME = "output_dir", "resume_from_checkpoint"
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model).*\.(safetensors|bin)\Z")
# DeepSpeed and FSDP write other files in place of plain weights
_STATES = re.compile(_WEIGHTS.pattern + r"|global_step\d|pytorch_model_fsdp")


def _taken(context: Context) -> Checkpoint | None:
    """The checkpoint that open-instruct would resume from: steps before epochs
    (utils.py::get_last_checkpoint[if len(checkpoint_steps) > 0]).
    """
    if context.entry.names.resume is not None:
        return None
    found = checkpoints.find(context.values.schema.backend, context.output)
    kind = "step" if any(one.kind == "step" for one in found) else "epoch"
    marked = [one for one in found if one.kind == kind and one.marked]
    return marked[-1] if marked else None


@cites("utils.py::get_last_checkpoint_path[if args.output_dir]")
@needs("machine")
@superseded_by("attempts")
def foreign_checkpoints(context: Context) -> Iterator[Finding]:
    """Upstream resumes from the newest checkpoint in its output folder, whoever made it."""
    last = _taken(context)
    if last is not None and not caches_only(context):
        message = f"{context.output} holds {last.name} of another run: upstream would resume from it"
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
    names, resume = files.names(context.output), context.entry.names.resume
    if caches_only(context) or not {"config.json", "adapter_config.json"} & {*names}:
        return
    if (resume and context.values[resume]) or not any(map(_WEIGHTS.match, names)):
        return
    last = _taken(context)
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
    if not exists(folder):
        what = None if context.machine is None else f"there is no folder {brief(name)} here"
    elif not is_file(folder / "trainer_state.json"):
        what = f"{brief(name)} is not a checkpoint: it has no trainer_state.json"
    else:
        what = None if any(map(_STATES.match, files.names(folder))) else f"{brief(name)} holds no weights"
    if what is None:
        yield from _remaining(context, folder)
        return
    help = "relative paths start where launch is started; delete the line to start over"
    if newest := checkpoints.find("trl", folder)[-1:] or checkpoints.find("trl", context.output)[-1:]:
        help = f"write `{_RESUME}: {newest[0].path}`"
    yield say("error", "resume-missing", _RESUME, what, help)


def _remaining(context: Context, folder: Path) -> Iterator[Finding]:
    """transformers/trainer.py::Trainer._init_training_state[self.state = TrainerState.load_from_json],
    transformers/trainer.py::Trainer._init_training_state[epochs_trained = int]: training begins at the checkpoint's
    step, and may be over.
    """
    values, state, named = context.values, read_json(folder / "trainer_state.json"), brief(str(folder))
    limit, key, done = values["max_steps"], "max_steps", state.get("global_step")
    if not isinstance(limit, int) or limit <= 0:
        limit, key, done = values["num_train_epochs"], "num_train_epochs", state.get("epoch")
    if isinstance(limit, int | float) and isinstance(done, int | float) and done >= limit:
        until = f"`{key}` is {limit}: nothing would be trained"
        message = f"{named} was saved after {state.get('global_step')} steps, and {until}"
        help = "raise the limit, or delete the line to start over"
        yield say("error", "resume-finished", _RESUME, message, help)


RULES: Mapping[str, Mapping[str, tuple[StageRule, ...]]] = {
    "open_instruct": dict.fromkeys(("sft", "dpo"), (unintended_output, foreign_checkpoints, finished_model)),
    "trl": dict.fromkeys(("sft", "dpo"), (unintended_output, named_checkpoint, finished_model)),
}
