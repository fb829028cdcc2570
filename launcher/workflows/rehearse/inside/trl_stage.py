"""TRL's `scripts/sft.py` and `scripts/dpo.py` on the CPU, with few rows."""

import importlib
import os
from typing import Any

from . import rows, steps
from .calls import call_trainer
from .loading import FirstRows
from .records import ScriptFacts, ServerRequest, ServerResponse


def load(script: ScriptFacts) -> None:
    import datasets.packaged_modules.json.json  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    import trl

    importlib.import_module(script.module)
    getattr(trl, script.trainer)
    torch.set_num_threads(1)
    rows.prepare_in_process()


def run(request: ServerRequest, response: ServerResponse) -> None:
    """Parse; then the script's own `main` on the small model: two steps, evaluation, save, load.

    Raises what the trainer raises.
    """
    script, parts = parse(request)
    if request.only_parses:
        return
    import trl

    data, training, model = parts[:3]
    FirstRows(request, response, data.dataset_train_split).install("trl")
    model.model_name_or_path = request.model
    response.phase = "construct"
    watch(getattr(trl, request.script.trainer), request, response)
    with steps.record_losses(response) as losses:
        call_trainer(script.main, *parts)
    response.losses = losses
    response.phase = "train"
    steps.require_trained(training.output_dir, str(request.model))
    steps.require_finite(losses)
    response.phase = "load"
    steps.load_again(training.output_dir)


def parse(request: ServerRequest) -> tuple[Any, tuple[Any, ...]]:
    """The script of a request, and what its parser makes of the words."""
    script: Any = importlib.import_module(request.script.module)
    parser = call_trainer(script.make_parser)
    words = [*write_config_words(request), *request.words]
    parts = call_trainer(parser.parse_args_and_config, words, fail_with_unknown_args=False)
    return script, parts


def write_config_words(request: ServerRequest) -> list[str]:
    """Write a config file with the arguments that no flag can carry; returns its flag."""
    if not request.config:
        return []
    import yaml

    path = os.path.join(request.scratch, f"{request.id}.yaml")
    with open(path, "w", encoding="utf-8") as stream:
        yaml.safe_dump(request.config, stream, sort_keys=False)
    return ["--config", path]


def watch(kind: Any, request: ServerRequest, response: ServerResponse) -> None:
    """Describe the trainer's prepared rows, and let it train two steps, evaluate and save."""
    train = kind.train
    save = kind.save_model
    callback = make_last_step_callback(response)

    def train_two_steps(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        limit = getattr(trainer.args, "max_length", None)
        dropped = []
        for entry in rows.DROPPING:
            if "train" in entry.what:
                dropped.append(entry)
        response.rows.dropped = dropped
        rows.describe(trainer.train_dataset, limit, request.special, response.rows)
        trainer.train_dataset = rows.shorten_rows(trainer.train_dataset)
        if trainer.eval_dataset is not None:
            trainer.eval_dataset = rows.shorten_rows(trainer.eval_dataset)
        trainer.add_callback(callback())
        response.phase = "train"
        return call_trainer(train, trainer, *args, **kwargs)

    def save_model(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        response.phase = "save"
        return call_trainer(save, trainer, *args, **kwargs)

    kind.train = train_two_steps
    kind.save_model = save_model


def make_last_step_callback(response: ServerResponse) -> Any:
    """A class of callbacks: stop after two steps, evaluate and save if the stage does."""
    from transformers import TrainerCallback

    class LastStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_last = state.global_step >= steps.STEPS
            control.should_training_stop = is_last
            control.should_evaluate = is_last and args.eval_strategy != "no"
            control.should_save = is_last and args.save_strategy != "no"
            if control.should_evaluate:
                response.phase = "evaluate"

    return LastStep
