"""The record of a run -> a model card (README.md): base, data, recipe, verdict, loss, versions."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from launcher import files
from launcher.artifacts import layout, model_config
from launcher.config.keys import PAIRED
from launcher.errors import NotReady, not_ready, unwritable
from launcher.lazy_dataclass import dataclass
from launcher.machine import python
from launcher.paths import is_dir
from launcher.report import series
from launcher.report.html import format_number
from launcher.report.progress import format_clock
from launcher.report.series import Run
from launcher.runs.record import as_list, as_mapping
from launcher.trained.model import Base, TrainedModel, find_in_folder
from launcher.upstream.schema import name_source
from launcher.verdict import summary

NAME = "README.md"
ASIDE = layout.PREVIOUS_CARD
_MARK = re.compile(r"<!-- launch card ([0-9a-f]{64}): what is edited here is kept -->\n")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LONGEST_CARD = 2**20
_LONGEST_LINEAGE = 10
_FIELDS_OF_FORM = 20
_LOSSES = 11
"""Steps of the table of losses, the first and the last among them."""
_PLACES = frozenset(
    "output_dir logging_dir run_name hub_token hub_model_id cache_dir local_cache_dir".split()
)
"""Arguments that tell where a run wrote, not what it trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCard:
    """A card that was written; `kept` is the old one, moved aside, `replaced` what it overwrote."""

    path: Path
    kept: Path | None = None
    replaced: str | None = None


def render(model: TrainedModel) -> str:
    """The card of a model, from the record of its run. Raises NotReady without a record."""
    if model.run is None:
        message = f"no run's record names {model.path}: there is nothing to write a card of"
        raise not_ready("no-such-run", message, "launch runs lists the runs that are known here")
    run = series.load_run(model.run.path)
    lineage = list(_trace_lineage(model))
    parts = filter(None, _render_parts(model, run, lineage))
    text = model.redactor.redact("\n\n".join(parts) + "\n")
    mark = f"<!-- launch card {_hash_text(text)}: what is edited here is kept -->\n"
    return _render_front_matter(model, run, lineage) + mark + text


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(model: TrainedModel, text: str, *, replace: bool) -> WrittenCard:
    """Write a card beside the model; `replace` moves another one aside first.

    Raises NotReady if the card cannot be written, or would replace one that launch did not write
    or somebody has edited. An empty form of peft is overwritten.
    """
    path = model.path / NAME
    kept: Path | None = None
    replaced: str | None = None
    try:
        if _is_form(path):
            replaced = "the empty form that peft wrote"
        elif is_foreign(path):
            if not replace:
                raise _refuse_existing_card(path)
            kept = path.with_name(ASIDE)
            if os.path.lexists(kept):
                raise _refuse_existing_card(kept)
            os.rename(path, kept)
        files.write_text(path, text)
    except OSError as error:
        raise unwritable(path, error) from None
    return WrittenCard(path=path, kept=kept, replaced=replaced)


def is_foreign(path: Path) -> bool:
    """Whether there is a card that somebody else wrote or edited."""
    return os.path.lexists(path) and not _is_own(path) and not _is_form(path)


def _is_form(path: Path) -> bool:
    """Whether a file is the empty form that peft writes beside an adapter.

    Source: peft/peft_model.py, create_or_update_model_card.
    """
    text = _read_card(path)
    empty_fields = text.count("[More Information Needed]")
    return "# Model Card for Model ID" in text and empty_fields >= _FIELDS_OF_FORM


def _refuse_existing_card(path: Path) -> NotReady:
    message = f"{path} is there already, {_describe_author(path)}"
    help = f"--replace moves it to {ASIDE}, --output FILE writes the card elsewhere"
    return not_ready("card-exists", message, help)


def _read_card(path: Path) -> str:
    try:
        return files.read_bytes(path, _LONGEST_CARD).decode(errors="replace")
    except OSError:
        return ""


def _is_own(path: Path) -> bool:
    """Whether launch wrote a card, and nobody has edited it since."""
    text = _read_card(path)
    mark = _MARK.search(text)
    return mark is not None and _hash_text(text[mark.end() :]) == mark[1]


def _describe_author(path: Path) -> str:
    text = _read_card(path)
    if _MARK.search(text):
        return "and was edited since launch wrote it"
    if "This model was trained with" in text and "TRL" in text:
        return "written by TRL"
    return "and launch did not write it"


def _trace_lineage(model: TrainedModel) -> Iterator[Base]:
    """The models that this one was trained from, the nearest first."""
    base = model.base
    for _ in range(_LONGEST_LINEAGE):
        if base is None:
            return
        yield base
        base = _find_base(base)


def _find_base(base: Base) -> Base | None:
    """The model that a base was itself trained from, if a record on this machine says so."""
    if not base.is_folder:
        return None
    model = find_in_folder(Path(base.name))
    if model is None:
        return None
    return model.base


def _find_public_base(lineage: Sequence[Base]) -> Base | None:
    """The nearest base that has a name on the hub."""
    for base in lineage:
        if not base.is_folder and model_config.is_hub_name(base.name):
            return base
    return None


def _find_license(lineage: Sequence[Base]) -> dict[str, str]:
    """The licence fields of the nearest base that has a card with a licence on this machine."""
    for base in lineage:
        folder: Path | None = Path(base.name)
        if not base.is_folder:
            folder = model_config.find_snapshot(base.name, os.environ, base.revision)
        if folder is None:
            continue
        metadata = _read_front_matter(folder / NAME)
        if not isinstance(metadata.get("license"), str):
            continue
        fields = {}
        for name in ("license", "license_name", "license_link"):
            if metadata.get(name):
                fields[name] = str(metadata[name])
        return fields
    return {}


def _read_front_matter(path: Path) -> Mapping[str, object]:
    """The YAML at the top of a card; empty if it has none."""
    match = _FRONT_MATTER.match(_read_card(path))
    if match is None:
        return {}
    try:
        content = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return {}
    return as_mapping(content)


def _render_front_matter(model: TrainedModel, run: Run, lineage: Sequence[Base]) -> str:
    backend = str(run.manifest.get("backend") or "").replace("_", "-")
    relation = "finetune"
    library = "transformers"
    tags = [str(run.stage), backend]
    if model.is_adapter:
        relation = "adapter"
        library = "peft"
        tags.append("lora")
    content: dict[str, object] = {}
    public = _find_public_base(lineage)
    if public is not None:
        content["base_model"] = public.name
        content["base_model_relation"] = relation
    datasets = []
    for record in _list_data_records(run):
        name = str(record.get("name"))
        is_public = model_config.is_hub_name(name) and not is_dir(name)
        if is_public and name not in datasets:
            datasets.append(name)
    if datasets:
        content["datasets"] = datasets
    content["library_name"] = library
    content |= _find_license(lineage)
    content["pipeline_tag"] = "text-generation"
    content["tags"] = [*tags, "launch"]
    clean = model.redactor.redact(content)
    dumped = yaml.safe_dump(clean, sort_keys=False, allow_unicode=True, width=100)
    return f"---\n{dumped}---\n"


def _list_data_records(run: Run) -> list[Mapping[str, object]]:
    records = map(as_mapping, as_list(run.manifest.get("contents")))
    return [record for record in records if record.get("role") == "data"]


def _render_parts(model: TrainedModel, run: Run, lineage: Sequence[Base]) -> Iterator[str]:
    yield f"# {model.path.name}"
    yield _render_introduction(model, run, lineage)
    yield _render_verdict(run)
    yield _render_training(run)
    yield _render_losses(run)
    yield _render_arguments(run)
    yield _render_data(run)
    yield _render_versions(run)


def _render_introduction(model: TrainedModel, run: Run, lineage: Sequence[Base]) -> str:
    kind = "An adapter" if model.is_adapter else "A model"
    text = f"{kind} from {(run.stage or 'training').upper()}"
    names = [_format_link(base) for base in lineage]
    if names:
        text += f" of {names[0]}"
    source = as_mapping(run.manifest.get("upstream"))
    trainer = name_source(str(source.get("backend") or ""), str(source.get("version") or ""))
    text += f", trained with {trainer}, started and checked by launch."
    if len(names) > 1:
        text += f" {names[0]} itself was trained from {', which came from '.join(names[1:])}."
    if not _find_license(lineage):
        text += " The licence of the base model is not known here: add it before you publish this."
    return text


def _format_link(base: Base) -> str:
    if base.is_folder or not model_config.is_hub_name(base.name):
        return f"`{Path(base.name).name}`"
    link = f"[{base.name}](https://huggingface.co/{base.name})"
    if base.revision:
        link += f" at `{base.revision}`"
    return link


def _render_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    rule = ["---"] * len(head)
    lines = []
    for row in (head, rule, *rows):
        cells = " | ".join(map(_format_cell, row))
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def _format_cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _render_verdict(run: Run) -> str:
    status = run.verdict.get("status")
    if not status:
        return ""
    rows = []
    words = {True: "ok", False: "**failed**", None: "unproven"}
    for point in summary.sort_failed_first(run.verdict):
        word = words[point.get("ok")]
        if point.get("ok") is True and not summary.is_wanted(point):
            word = ""
        rows.append([point.get("name"), point.get("state"), point.get("expected") or "", word])
    text = f"## Verdict: {status}\n\nWhat was proved of the run while it trained, and afterwards."
    return f"{text}\n\n{_render_table(('point', 'state', 'expected', ''), rows)}"


def _render_training(run: Run) -> str:
    measured = series.list_measured_figures(run)
    planned = series.list_planned_figures(run)
    plan = as_mapping(run.manifest.get("plan"))
    machine = as_mapping(run.manifest.get("machine"))
    tokens = filter(None, run.series.columns.get("tokens", ()))
    rows: list[tuple[str, object]] = []

    def add(name: str, value: float | None, unit: str = "") -> None:
        if value is not None:
            rows.append((name, f"{format_number(value)}{unit}"))

    add("optimizer steps", measured["steps"])
    add("rows a step", planned["rows_per_step"] or measured["rows_per_step"])
    add("tokens", sum(tokens) or None)
    add("tokens/s", measured["tokens_per_second"])
    add("peak memory", measured["peak_gib"], " GiB a GPU")
    hours = measured["hours"]
    if hours is not None:
        rows.append(("time", format_clock(round(hours * 3600))))
    gpus = plan.get("gpus")
    if gpus is not None:
        cards = as_list(machine.get("gpus"))
        rows.append(("GPUs", _describe_gpus(gpus, cards)))
    nodes = plan.get("nodes") or 1
    if nodes > 1:
        rows.append(("nodes", nodes))
    if run.manifest.get("deepspeed"):
        rows.append(("DeepSpeed", "yes"))
    return _render_part("Training", ("", ""), rows)


def _render_part(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A heading and a table; empty without rows."""
    if not rows:
        return ""
    return f"## {title}\n\n{_render_table(head, rows)}"


def _describe_gpus(count: object, cards: Sequence[object]) -> str:
    if not count:
        return "none, the CPU"
    if not cards:
        return str(count)
    return f"{count} x {cards[0]}"


def _render_losses(run: Run) -> str:
    """Losses at some steps, evenly apart, and every validation loss near them."""
    titles = {"loss": "loss", "eval_loss": "validation loss"}
    if run.stage in PAIRED:
        titles |= {"rewards/margins": "reward margin", "rewards/accuracies": "reward accuracy"}
    head = ["step"]
    columns = []
    for name, title in titles.items():
        column = run.series.columns.get(name, ())
        if series.has_number(column):
            head.append(title)
            columns.append(column)
    rows = []
    for number in _choose_rows(run.series.columns.get("loss", ())):
        row: list[object] = [run.series.steps[number]]
        for column in columns:
            row.append(_find_last_value(column, number))
        rows.append(row)
    return _render_part("Loss", head, rows)


def _choose_rows(losses: Sequence[float | None]) -> list[int]:
    """The numbers of some rows with a loss: the first, the last, and others evenly between."""
    numbers = [number for number, loss in enumerate(losses) if loss is not None]
    if len(numbers) <= _LOSSES:
        return numbers
    last = len(numbers) - 1
    chosen = []
    for nth in range(_LOSSES):
        even = last * nth / (_LOSSES - 1)
        chosen.append(numbers[round(even)])
    return chosen


def _find_last_value(column: Sequence[float | None], number: int) -> str:
    """The value of a column at this row, or at the last one before that has a value."""
    for earlier in range(number, -1, -1):
        value = column[earlier]
        if value is not None:
            return format_number(value)
    return ""


def _render_arguments(run: Run) -> str:
    """The arguments that were set, without the places on this machine's disk."""
    rows = []
    for name, item in run.arguments.items():
        origin = str(item.get("origin", ""))
        if origin.startswith("default: ") or name in _PLACES:
            continue
        rows.append([f"`{name}`", f"`{_strip_places(item.get('value'))}`"])
    return _render_part("Arguments", ("argument", "value"), rows)


def _strip_places(value: object) -> object:
    """Cut absolute paths in a value to their last name."""
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    if isinstance(value, list):
        return [_strip_places(item) for item in value]
    return value


def _render_data(run: Run) -> str:
    rows = []
    for record in _list_data_records(run):
        name = _strip_places(str(record.get("name")))
        digest = str(record.get("digest") or "unknown")
        rows.append([f"`{name}`", f"`{digest[:16]}`"])
    return _render_part("Data", ("data set", "sha256 (first 16 digits)"), rows)


def _render_versions(run: Run) -> str:
    source = as_mapping(run.manifest.get("upstream"))
    trainer = as_mapping(run.manifest.get("trainer"))
    packages = as_mapping(trainer.get("packages"))
    rows: list[list[object]] = [
        ["launch", run.manifest.get("launch_commit") or "unknown"],
        [source.get("backend"), source.get("version")],
    ]
    for name in python.DECISIVE:
        if name in packages:
            rows.append([name, packages[name]])
    return _render_part("Versions", ("", ""), rows)
