"""Rows as TRL's trainers prepare and collate them; no weights are loaded."""

import copy
import inspect
from typing import Any

from . import preview, rows
from .calls import call_trainer
from .preview import ROW, Finished, Loader, PreparedSet
from .trl_stage import SCRIPT, parse


def run(request: dict[str, Any], report: dict[str, Any]) -> None:
    """Build the script's trainer around an empty model, and write what it makes of the rows to `request["result"]`."""
    import datasets
    import trl

    script, parts = parse(request)
    data, training, model, mixture = parts
    for entry in mixture.datasets:
        # the rows of a set are already those that its fraction leaves
        entry.fraction = None
        if entry.columns is not None:
            entry.columns = [*entry.columns, ROW]
    request["split"] = data.dataset_train_split
    loader = Loader(request)
    real = datasets.load_dataset
    rows.replace_everywhere("trl", "load_dataset", real, loader.replace(real))
    name = model.model_name_or_path
    try:
        model.model_name_or_path = preview.model_folder(request, report, str(name))
        # none of them changes a row
        model.use_peft = False
        training.eval_strategy = "no"
        if hasattr(training, "precompute_ref_log_probs"):
            training.precompute_ref_log_probs = False
        report["phase"] = "construct"
        build_no_model()
        look_instead_of_training(getattr(trl, SCRIPT["trainer"]), loader, request)
        call_trainer(script.main, *parts)
    except preview.Absent as absent:
        report["absent"] = [absent.kind, absent.name]
    except Finished:
        pass


def build_no_model() -> None:
    """Have every model be a tiny one: what is prepared depends on the tokenizer alone."""
    import transformers

    def build(kind: Any, name: Any, *_: Any, **__: Any) -> Any:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = transformers.Qwen2Config(vocab_size=8, num_key_value_heads=1, **sizes)
        config._name_or_path = str(name)
        model = transformers.Qwen2ForCausalLM(config)
        model.name_or_path = str(name)
        return model

    transformers.PreTrainedModel.from_pretrained = classmethod(build)


def look_instead_of_training(kind: Any, loader: Loader, request: dict[str, Any]) -> None:
    """Let the trainer be built with its rows as they are; its preparation is called once they are looked at."""
    prepare = kind._prepare_dataset
    signature = inspect.signature(prepare)
    calls: list[inspect.BoundArguments] = []

    def remember(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(signature.bind(self, dataset, *args, **kwargs))
        return dataset

    def look(self: Any, *_: Any, **__: Any) -> None:
        view = view_of(self, prepare, calls)
        preview.finish([view], loader, request, template_of(self, view))

    kind._prepare_dataset = remember
    kind.train = look


def view_of(trainer: Any, prepare: Any, calls: list[inspect.BoundArguments]) -> PreparedSet:
    whole = copy.copy(trainer.data_collator)
    if hasattr(whole, "max_length"):
        whole.max_length = None

    def prepare_rows(dataset: Any, limited: bool) -> Any:
        if not calls:
            # `skip_prepare_dataset`
            return dataset
        (call, *_) = calls
        arguments = {**call.arguments, "dataset": dataset}
        if not limited:
            arguments["args"] = copy.copy(arguments["args"])
            arguments["args"].max_length = None
            if "packing" in arguments:
                arguments["packing"] = False
        return call_trainer(prepare, **arguments)

    def collate(row: dict[str, Any], limited: bool) -> dict[str, Any]:
        used = trainer.data_collator if limited else whole
        batch: dict[str, Any] = call_trainer(used, [row])
        return batch

    selected = trainer.train_dataset
    if ROW not in selected.column_names:
        # a mixture may name the columns that it takes
        selected = selected.add_column(ROW, range(len(selected)))
    return PreparedSet(
        selected=selected,
        loaded=selected,
        prepare=prepare_rows,
        collate=collate,
        tokenizer=trainer._tokenizer,
        limit=getattr(trainer.args, "max_length", None),
        packs=bool(getattr(trainer.args, "packing", False)) and bool(calls),
    )


def template_of(trainer: Any, view: PreparedSet) -> dict[str, Any]:
    """The chat template: whose it is, and whether these rows go through it."""
    from trl import data_utils

    example = next(iter(view.selected))
    is_chat = bool(data_utils.is_conversational(example))
    from_value = getattr(data_utils, "is_conversational_from_value", None)
    if from_value is not None:
        is_chat = is_chat or bool(from_value(example))
    path = getattr(trainer.args, "chat_template_path", None)
    replacement = getattr(trainer, "chat_template", None)
    own = trainer._tokenizer.chat_template
    source = "argument" if path else "tokenizer"
    return {
        "used": is_chat,
        "source": source if own else "none",
        "name": path,
        "fallback": False,
        "replaced": replacement is not None,
        "text": replacement or own,
    }
