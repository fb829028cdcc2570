"""Rows as open-instruct's transforms and collators make them; no weights are loaded."""

import copy
import inspect
from typing import Any

from . import preview
from .calls import call_trainer
from .loading import replace_everywhere
from .open_instruct_stage import adapt, limit_sets, parse, supply_for_cpu
from .preview import PreparedSet
from .records import ServerRequest, ServerResponse, TemplateFacts
from .sampling import MOST_ROWS, ROW, SampledRows

_UNLIMITED = 1 << 30
_EMPTY = "No examples left after transformation"


def run(request: ServerRequest, response: ServerResponse) -> None:
    """Run the script up to its data set, and write what becomes of the rows."""
    script, arguments, tokenizer = parse(request)
    with preview.until_finished(response):
        look(request, response, script, arguments, tokenizer)


def look(
    request: ServerRequest, response: ServerResponse, script: Any, arguments: Any, tokenizer: Any
) -> None:
    import open_instruct.dataset_transformation as transformation

    supply_for_cpu()
    limit_sets(MOST_ROWS)
    # a list of sets names the split of each
    loader = SampledRows(request, response, None)
    loader.install("open_instruct")
    prepare = transformation.get_cached_dataset_tulu

    def look_at_rows(**kwargs: Any) -> Any:
        views = list_views(script, arguments, loader, kwargs)
        response.phase = "data"
        preview.finish(views, loader, request, describe_template(kwargs["tc"]))

    replace_everywhere("open_instruct", "get_cached_dataset_tulu", prepare, look_at_rows)
    name = tokenizer.tokenizer_name_or_path or arguments.model_name_or_path
    tokenizer.tokenizer_name_or_path = preview.prepare_model_folder(request, response, str(name))
    # a revision is that of the folder
    tokenizer.tokenizer_revision = None
    adapt(script, request)
    response.phase = "construct"
    call_trainer(script.main, arguments, tokenizer)


def list_views(script: Any, arguments: Any, loader: SampledRows, kwargs: Any) -> list[PreparedSet]:
    """A view of each set of the mixture."""
    import open_instruct.dataset_transformation as transformation

    columns = kwargs.get("target_columns")
    if columns is not None:
        kwargs["target_columns"] = [*columns, ROW]
    # dpo.py loads them before, for the name of its reference's cache
    loader.sets.clear()
    load = transformation.load_dataset_configs
    options = {}
    for name in inspect.signature(load).parameters:
        if name in kwargs:
            options[name] = kwargs[name]
    configs = call_trainer(load, **options)
    facts = kwargs["tc"]
    collator = make_collator(script, arguments, facts.tokenizer)
    views = []
    for config, loaded in zip(configs, loader.sets, strict=True):
        views.append(view_of(config, loaded.rows, facts, collator, arguments.max_seq_length))
    return views


def view_of(config: Any, loaded: Any, facts: Any, collator: Any, limit: int | None) -> PreparedSet:
    """`facts` is open-instruct's `TokenizerConfig`."""
    import open_instruct.dataset_transformation as transformation

    def prepare(dataset: Any, *, limited: bool) -> Any:
        changed = copy.copy(config)
        changed.dataset = dataset
        if not limited:
            lift_limits(changed)
        try:
            prepared = call_trainer(transformation.get_dataset_v1, changed, facts)
        except ValueError as error:
            if _EMPTY in str(error):
                return dataset.select([])
            raise
        prepared = transformation.remove_dataset_source_field(prepared)
        prepared = prepared.add_column("index", range(len(prepared)))
        prepared.set_format(type="pt")
        return prepared

    def collate(row: Any, *, limited: bool) -> Any:
        features = {key: value for key, value in row.items() if key != ROW}
        return call_trainer(collator, [features])

    return PreparedSet(
        selected=config.dataset,
        loaded=loaded,
        prepare=prepare,
        collate=collate,
        tokenizer=facts.tokenizer,
        limit=limit,
    )


def lift_limits(config: Any) -> None:
    """Leave out the transforms that leave out rows, and the limit on tokens of the others."""
    names = []
    options = []
    # what does not match is refused where the rows are prepared as they are trained on
    for name, values in zip(config.transform_fn, config.transform_fn_args, strict=False):
        if not is_map(name):
            continue
        names.append(name)
        if "max_seq_length" in values:
            values = {**values, "max_seq_length": _UNLIMITED}
        options.append(values)
    config.transform_fn = names
    config.transform_fn_args = options


def is_map(name: str) -> bool:
    """Whether a transform changes rows, and leaves none out."""
    import open_instruct.dataset_transformation as transformation

    _, kind = transformation.TRANSFORM_FNS.get(name, (None, "map"))
    return bool(kind == "map")


def make_collator(script: Any, arguments: Any, tokenizer: Any) -> Any:
    """The collator that the script makes for these arguments (finetune.py::main[if args.packing],
    dpo_tune_cache.py::main[if args.packing]).
    """
    from open_instruct import dpo_utils

    is_pairs = hasattr(arguments, "mixer_list")
    if arguments.packing and is_pairs:
        return script.TensorDataCollatorWithFlatteningDPO(
            return_position_ids=True, return_flash_attn_kwargs=True
        )
    if arguments.packing:
        return script.TensorDataCollatorWithFlattening()
    kind = dpo_utils.DataCollatorForSeq2SeqDPO if is_pairs else script.DataCollatorForSeq2Seq
    return kind(tokenizer=tokenizer, model=None, padding="longest")


def describe_template(facts: Any) -> TemplateFacts:
    """The chat template: which one it is, and whether it stands in for one that is not there."""
    import open_instruct.dataset_transformation as transformation

    name = facts.chat_template_name
    is_named = name in transformation.CHAT_TEMPLATES
    text = facts.tokenizer.chat_template
    source = "argument" if is_named else "tokenizer"
    return TemplateFacts(
        used=True,
        source=source if text else "none",
        name=name,
        fallback=name is not None and not is_named,
        text=text,
        bos=bool(facts.add_bos),
    )
