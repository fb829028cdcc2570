"""Rows as TRL's trainers prepare and collate them; no weights are loaded."""

import copy
import inspect
from typing import Any

from . import preview
from .calls import call_trainer
from .preview import PreparedSet
from .records import ServerRequest, ServerResponse, TemplateFacts
from .sampling import ROW, SampledRows
from .trl_stage import parse


def run(request: ServerRequest, response: ServerResponse) -> None:
    """Build the script's trainer around a tiny model, and write what becomes of the rows."""
    script, parts = parse(request)
    with preview.until_finished(response):
        look(request, response, script, parts)


def look(
    request: ServerRequest, response: ServerResponse, script: Any, parts: tuple[Any, ...]
) -> None:
    import trl

    data, training, model, mixture = parts
    for entry in mixture.datasets:
        # the rows of a set are already those that its fraction leaves
        entry.fraction = None
        if entry.columns is not None:
            entry.columns = [*entry.columns, ROW]
    loader = SampledRows(request, response, data.dataset_train_split)
    loader.install("trl")
    model.model_name_or_path = preview.prepare_model_folder(
        request, response, str(model.model_name_or_path)
    )
    # none of them changes a row
    model.use_peft = False
    training.eval_strategy = "no"
    if hasattr(training, "precompute_ref_log_probs"):
        training.precompute_ref_log_probs = False
    response.phase = "construct"
    build_tiny_models()
    look_instead_of_training(getattr(trl, request.script.trainer), loader, request)
    call_trainer(script.main, *parts)


def build_tiny_models() -> None:
    """Have every model be a tiny one: what is prepared depends on the tokenizer alone."""
    import transformers

    def build(kind: Any, name: Any, *_: Any, **__: Any) -> Any:
        config = transformers.Qwen2Config(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
        config._name_or_path = str(name)
        model = transformers.Qwen2ForCausalLM(config)
        model.name_or_path = str(name)
        return model

    transformers.PreTrainedModel.from_pretrained = classmethod(build)


def look_instead_of_training(kind: Any, loader: SampledRows, request: ServerRequest) -> None:
    """Let the trainer be built with unprepared rows, and look at them instead of training."""
    prepare = kind._prepare_dataset
    signature = inspect.signature(prepare)
    calls: list[inspect.BoundArguments] = []

    def remember(trainer: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(signature.bind(trainer, dataset, *args, **kwargs))
        return dataset

    def look(trainer: Any, *_: Any, **__: Any) -> None:
        view = view_of(trainer, prepare, calls)
        preview.finish([view], loader, request, describe_template(trainer, view))

    kind._prepare_dataset = remember
    kind.train = look


def view_of(trainer: Any, prepare: Any, calls: list[inspect.BoundArguments]) -> PreparedSet:
    unlimited_collator = copy.copy(trainer.data_collator)
    if hasattr(unlimited_collator, "max_length"):
        unlimited_collator.max_length = None

    def prepare_rows(dataset: Any, *, limited: bool) -> Any:
        if not calls:
            # `skip_prepare_dataset`
            return dataset
        arguments = {**calls[0].arguments, "dataset": dataset}
        if not limited:
            arguments["args"] = copy.copy(arguments["args"])
            arguments["args"].max_length = None
            if "packing" in arguments:
                arguments["packing"] = False
        return call_trainer(prepare, **arguments)

    def collate(row: Any, *, limited: bool) -> Any:
        collator = trainer.data_collator if limited else unlimited_collator
        return call_trainer(collator, [row])

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


def describe_template(trainer: Any, view: PreparedSet) -> TemplateFacts:
    """The chat template: whose it is, and whether these rows go through it."""
    from trl import data_utils

    example = next(iter(view.selected))
    is_chat = data_utils.is_conversational(example)
    is_chat = is_chat or data_utils.is_conversational_from_value(example)
    path = getattr(trainer.args, "chat_template_path", None)
    replacement = getattr(trainer, "chat_template", None)
    template = trainer._tokenizer.chat_template
    source = "argument" if path else "tokenizer"
    return TemplateFacts(
        used=bool(is_chat),
        source=source if template else "none",
        name=path,
        replaced=replacement is not None,
        text=replacement or template,
    )
