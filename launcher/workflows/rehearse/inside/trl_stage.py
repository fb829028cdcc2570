"""TRL's `scripts/sft.py` and `scripts/dpo.py`, asked what they make of a stage's arguments."""

import importlib
import os
from collections.abc import Callable
from typing import Any

from . import rows, shrink, steps
from .calls import NoRehearsal, Refused, call_trainer

SCRIPT: dict[str, Any] = {}
"""What launch says of the entry script that this server rehearses (`script_as_json` of `ask.py`)."""


def load(setup: dict[str, Any]) -> None:
    import datasets.packaged_modules.json.json  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    import trl

    SCRIPT.update(setup["script"])
    if SCRIPT:
        importlib.import_module(SCRIPT["module"])
        getattr(trl, SCRIPT["trainer"])
    torch.set_num_threads(1)
    rows.prepare_in_process()


def answer(request: dict[str, Any], report: dict[str, Any]) -> None:
    """One request: `shrink` makes the small model, `run` rehearses.

    Raises what the trainer raises.
    """
    if request["kind"] == "shrink":
        shrink_model(request, report)
    else:
        run(request, report)


def shrink_model(request: dict[str, Any], report: dict[str, Any]) -> None:
    """Make the small model of a request; `report` says what of it is not the run's own."""
    report["phase"] = "shrink"
    folder = shrink.source_folder(request["model"], request.get("revision"))
    notes = shrink.make(folder, request["out"], request.get("shape"))
    report["notes"] += [["model", request["model"]]] if folder is None else []
    report["notes"] += [["tokenizer", request["model"]]] if notes else []
    report["special"] = steps.special_tokens(request["out"])


def run(request: dict[str, Any], report: dict[str, Any]) -> None:
    """Parse; then the script's own `main` on the small model, two steps of it, evaluation, save, load."""
    import transformers

    script, parts = parse(request)
    data, training, model = parts[:3]
    if request.get("report_to"):
        find_reporters: Callable[..., Any] = transformers.integrations.get_reporting_integration_callbacks
        call_trainer(find_reporters, request["report_to"])
    if request["level"] == "parse":
        return
    import datasets
    import trl

    real = datasets.load_dataset
    request["split"] = data.dataset_train_split
    rows.replace_everywhere("trl", "load_dataset", real, rows.limit(real, request, report))
    model.model_name_or_path = request["model"]
    report["phase"] = "construct"
    watch(getattr(trl, SCRIPT["trainer"]), request, report)
    with steps.losses(report) as losses:
        call_trainer(script.main, *parts)
    report["losses"] = losses
    steps.require_finite(losses)
    report["phase"] = "load"
    steps.load_again(training.output_dir)


def parse(request: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The script of a request, and what its parser makes of the words."""
    if not SCRIPT:
        raise NoRehearsal(f"which trainer the script `{request['entry']}` builds is not known")
    script: Any = importlib.import_module(SCRIPT["module"])
    parser = call_trainer(script.make_parser)
    words = [*config_words(request), *request["words"]]
    parts = call_trainer(parser.parse_args_and_config, words, fail_with_unknown_args=False)
    return script, parts


def config_words(request: dict[str, Any]) -> list[str]:
    """The flag of a config file with the arguments that no flag can carry; the file is written here."""
    if not request.get("config"):
        return []
    import yaml

    path = os.path.join(request["scratch"], f"{request['id']}.yaml")
    with open(path, "w", encoding="utf-8") as stream:
        yaml.safe_dump(request["config"], stream, sort_keys=False)
    return ["--config", path]


def watch(kind: Any, request: dict[str, Any], report: dict[str, Any]) -> None:
    """Let the trainer train two steps, evaluate and save; its prepared rows are described before."""
    from transformers import TrainerCallback

    class Two(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            last = state.global_step >= steps.STEPS
            control.should_training_stop = last
            control.should_evaluate = last and args.eval_strategy != "no"
            control.should_save = last and args.save_strategy != "no"
            if control.should_evaluate:
                report["phase"] = "evaluate"

    train, save = kind.train, kind.save_model

    def train_two(self: Any, *args: Any, **kwargs: Any) -> Any:
        longest = getattr(self.args, "max_length", None)
        report["data"] = rows.describe(self.train_dataset, longest, request["special"])
        report["dropped"] = rows.dropped(of="train")
        if report["data"].get("rows") == 0:
            raise Refused("no row is left after the trainer has prepared the data")
        self.train_dataset = rows.shorten(self.train_dataset)
        if hasattr(self.eval_dataset, "column_names"):
            self.eval_dataset = rows.shorten(rows.head(self.eval_dataset, 8))
        self.add_callback(Two())
        before = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
        report["phase"] = "train"
        result = call_trainer(train, self, *args, **kwargs)
        report["phase"] = "train"
        steps.require_moved(before, dict(self.model.named_parameters()))
        return result

    def save_it(self: Any, *args: Any, **kwargs: Any) -> Any:
        report["phase"] = "save"
        return call_trainer(save, self, *args, **kwargs)

    kind.train, kind.save_model = train_two, save_it
