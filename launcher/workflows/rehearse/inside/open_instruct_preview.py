"""Rows as open-instruct's transforms and collators make them; no weights are loaded."""

import copy
import inspect
from typing import Any

from . import preview, rows
from .calls import call_trainer
from .open_instruct_stage import adapt, parse, supply_for_cpu
from .preview import ROW, Finished, Loader, PreparedSet

_UNLIMITED = 1 << 30
_EMPTY = "No examples left after transformation"


def run(request: dict[str, Any], report: dict[str, Any]) -> None:
    """Run the script up to its data set, and write what it makes of the rows to `request["result"]`."""
    import datasets
    import open_instruct.dataset_transformation as transformation

    script, arguments, tokenizer = parse(request)
    supply_for_cpu()
    # a list of sets names the split of each
    request["split"] = None
    loader = Loader(request)
    real = datasets.load_dataset
    rows.replace_everywhere("open_instruct", "load_dataset", real, loader.replace(real))
    transformation.get_commit_hash = lambda *_, **__: "0" * 40
    prepare = transformation.get_cached_dataset_tulu

    def look(**kwargs: Any) -> Any:
        views = views_of(script, arguments, loader, kwargs)
        report["phase"] = "data"
        preview.finish(views, loader, request, template_of(kwargs["tc"]))

    rows.replace_everywhere("open_instruct", "get_cached_dataset_tulu", prepare, look)
    try:
        name = str(arguments.model_name_or_path)
        if tokenizer.tokenizer_name_or_path in (None, name):
            tokenizer.tokenizer_name_or_path = preview.model_folder(request, report, name)
        else:
            own = str(tokenizer.tokenizer_name_or_path)
            tokenizer.tokenizer_name_or_path = preview.model_folder(request, report, own)
        # a revision is that of the folder
        tokenizer.tokenizer_revision = None
        adapt(script)
        report["phase"] = "construct"
        call_trainer(script.main, arguments, tokenizer)
    except preview.Absent as absent:
        report["absent"] = [absent.kind, absent.name]
    except Finished:
        pass


def views_of(script: Any, arguments: Any, loader: Loader, kwargs: dict[str, Any]) -> list[PreparedSet]:
    """A view of each set of the mixture."""
    import open_instruct.dataset_transformation as transformation

    update = transformation.DatasetConfig.update_range

    def at_most(self: Any, dataset_range: int) -> Any:
        # rows are repeated where the set has too few
        return call_trainer(update, self, min(dataset_range, max(preview.MOST_ROWS, len(self.dataset))))

    transformation.DatasetConfig.update_range = at_most
    columns = kwargs.get("target_columns")
    if columns is not None:
        kwargs["target_columns"] = [*columns, ROW]
    # dpo.py loads them before, for the name of its reference's cache
    loader.sets.clear()
    load = transformation.load_dataset_configs
    taken = {name: value for name, value in kwargs.items() if name in inspect.signature(load).parameters}
    configs = call_trainer(load, **taken)
    tokenizer = kwargs["tc"].tokenizer
    collator = collator_of(script, arguments, tokenizer)
    views = []
    for place, config in enumerate(configs):
        views.append(view_of(config, kwargs["tc"], loader.sets[place].rows, collator, arguments))
    return views


def view_of(config: Any, about: Any, loaded: Any, collator: Any, arguments: Any) -> PreparedSet:
    import open_instruct.dataset_transformation as transformation

    def prepare(dataset: Any, limited: bool) -> Any:
        changed = copy.copy(config)
        changed.dataset = dataset
        if not limited:
            # what does not match is refused where the rows are prepared as they are trained on
            steps = zip(config.transform_fn, config.transform_fn_args, strict=False)
            maps = [step for step in steps if is_map(step[0])]
            changed.transform_fn = [name for name, _ in maps]
            changed.transform_fn_args = [unlimited(values) for _, values in maps]
        try:
            prepared = call_trainer(transformation.get_dataset_v1, changed, about)
        except ValueError as error:
            if _EMPTY in str(error):
                return dataset.select([])
            raise
        prepared = transformation.remove_dataset_source_field(prepared)
        prepared = prepared.add_column("index", range(len(prepared)))
        prepared.set_format(type="pt")
        return NumberedRows(prepared)

    def collate(row: dict[str, Any], limited: bool) -> dict[str, Any]:
        features = {key: value for key, value in row.items() if key != ROW}
        batch: dict[str, Any] = call_trainer(collator, [features])
        return batch

    return PreparedSet(
        selected=config.dataset,
        loaded=loaded,
        prepare=prepare,
        collate=collate,
        tokenizer=about.tokenizer,
        limit=arguments.max_seq_length,
    )


def is_map(name: str) -> bool:
    """Whether a transform changes rows, and leaves none out."""
    import open_instruct.dataset_transformation as transformation

    _, kind = transformation.TRANSFORM_FNS.get(name, (None, "map"))
    return bool(kind == "map")


class NumberedRows:
    """Prepared rows as tensors, each with its number as a number."""

    def __init__(self, prepared: Any) -> None:
        self.prepared = prepared

    def __len__(self) -> int:
        return len(self.prepared)

    def __iter__(self) -> Any:
        for row in self.prepared:
            yield {**row, ROW: int(row[ROW])}


def unlimited(values: dict[str, Any]) -> dict[str, Any]:
    if "max_seq_length" not in values:
        return values
    return {**values, "max_seq_length": _UNLIMITED}


def collator_of(script: Any, arguments: Any, tokenizer: Any) -> Any:
    """The collator that the script makes for these arguments (finetune.py::main[if args.packing],
    dpo_tune_cache.py::main[if args.packing]).
    """
    from open_instruct import dpo_utils

    is_pairs = hasattr(arguments, "mixer_list")
    if arguments.packing and is_pairs:
        return script.TensorDataCollatorWithFlatteningDPO(return_position_ids=True, return_flash_attn_kwargs=True)
    if arguments.packing:
        return script.TensorDataCollatorWithFlattening()
    if is_pairs:
        return dpo_utils.DataCollatorForSeq2SeqDPO(tokenizer=tokenizer, model=None, padding="longest")
    return script.DataCollatorForSeq2Seq(tokenizer=tokenizer, model=None, padding="longest")


def template_of(about: Any) -> dict[str, Any]:
    """The chat template: which one it is, and whether it stands in for one that is not there."""
    import open_instruct.dataset_transformation as transformation

    name = about.chat_template_name
    named = name in transformation.CHAT_TEMPLATES
    text = about.tokenizer.chat_template
    source = "argument" if named else "tokenizer"
    return {
        "used": True,
        "source": source if text else "none",
        "name": name,
        "fallback": name is not None and not named,
        "replaced": False,
        "bos": bool(about.add_bos),
        "text": text,
    }
