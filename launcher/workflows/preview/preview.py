"""Rows of a stage as the trainer prepares them -> `Preview`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.dataset import mixture, reading
from launcher.dataset.reading import CannotRead
from launcher.dataset.survey import RowPlace
from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    LaunchError,
    NotReady,
    UsageError,
    launch_finding,
    not_ready,
    select_errors,
    usage,
)
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.python import Trainer
from launcher.stage.stage import Judged
from launcher.upstream.schema import Schema, name_source
from launcher.upstream.trainers import Entry, find_entry
from launcher.workflows.rehearse import arguments, local_data
from launcher.workflows.rehearse.ask import Server, Servers, describe_crash, describe_error
from launcher.workflows.rehearse.attempts import guess_config
from launcher.workflows.rehearse.inside.records import (
    ErrorRecord,
    PreviewContent,
    ServerRequest,
    ServerResponse,
    ShownRow,
    TemplateFacts,
)
from launcher.workflows.rehearse.local_data import LocalSet

Say = Callable[[str], None]
LIMIT_S = 300.0
_REASONS = {
    "too_long": "no token that counts in the loss is within `{length}`: the prompt fills it",
    "untrained": "no token of it counts in the loss",
}


class PreviewFailed(LaunchError):
    """Launch's own code failed: nothing is known of the rows."""

    exit_code = Exit.BUG

    def __init__(self, refusal: ErrorRecord) -> None:
        message = f"launch could not show these rows: {describe_error(refusal)}"
        help = "this is a failure of launch, not of the stage file; please report it"
        super().__init__(launch_finding("error", "preview-failed", message, help))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What the trainer makes of a stage's rows."""

    title: str
    data: str
    model: str
    entry: Entry
    is_pairs: bool
    content: PreviewContent
    findings: tuple[Finding, ...]

    @property
    def limit(self) -> str:
        """The limit on tokens as the stage file says it."""
        return f"`{self.entry.names.max_length}: {self.content.limit}`"

    @property
    def exit(self) -> Exit:
        if select_errors(self.findings):
            return Exit.CONFIG
        return Exit.OK

    def as_json(self) -> dict[str, Any]:
        content = asdict(self.content, dict_factory=_as_object)
        del content["template"]["bos"]
        return {
            "stage": self.title,
            "data": self.data,
            "model": self.model,
            "limit": content["limit"],
            "packing": content["packs"],
            "template": content["template"],
            "counts": content["counts"],
            "rows": content["rows"],
        }


def _as_object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(fields)
    if content.get("differs", False) is None:
        # the piece of a row that is no pair
        del content["differs"]
    return content


def preview(judged: Judged, trainer: Trainer, *, first: int, row: str | None, say: Say) -> Preview:
    """The first rows of a stage, or the one that `row` names: a number from 1, or FILE:LINE.

    Raises UsageError for a row that is not there, NotReady where tokenizer, data or packages are
    not here, InvalidConfig where there is nothing that could be prepared, or the trainer refuses
    all of it.
    """
    if judged.schema is None or judged.options is None or judged.upstream is None:
        raise InvalidConfig(judged.findings)
    entry = find_entry(judged.schema)
    if entry.rehearsal is None:
        message = f"these rows cannot be shown: how {entry.script} prepares them is not described"
        raise _refuse_file(judged, [launch_finding("error", "no-preview", message)])
    data = _Data(local_data.find_local_sets(judged.config.args, entry))
    numbers = []
    if row is not None:
        numbers.append(data.number(row))
    say("preparing rows on the CPU: importing packages, usually 15 to 60 s")
    with Servers() as servers:
        server = servers.of(trainer, judged.schema.backend, judged.schema.key, judged.upstream.root)
        request = _build_request(judged, judged.schema, entry, data, server.folder())
        request.first = first
        request.numbers = numbers
        response, content = _ask_server(server, request)
    findings = list(_report_response(response, content, entry, data))
    if content is None:
        raise _refuse_file(judged, findings)
    if row is not None and not content.rows and content.refused is None:
        raise _refuse_row(row, content.total)
    for shown in content.rows:
        _place_row(shown, data, entry)
    content.template.description = _describe_template(content.template, judged, entry)
    source = name_source(judged.upstream.backend, judged.upstream.version)
    return Preview(
        title=f"{judged.options.stage} on {source}",
        data=_name_data(judged, entry),
        model=str(judged.config.args.get(entry.names.model)),
        entry=entry,
        is_pairs=judged.schema.pairs,
        content=content,
        findings=(*judged.findings, *map(judged.config.placed, findings)),
    )


def _refuse_file(judged: Judged, findings: Sequence[Finding]) -> InvalidConfig:
    if select_errors(judged.findings):
        # without what is wrong with the file, the trainer may refuse what the file does not say
        return InvalidConfig(judged.findings)
    return InvalidConfig((*judged.findings, *map(judged.config.placed, findings)))


def _build_request(
    judged: Judged, schema: Schema, entry: Entry, data: _Data, folder: Path
) -> ServerRequest:
    """A request without what is wrong with the file, which need not hide the rows."""
    assert judged.options is not None
    # which rows are split off is drawn anew at each start: all are shown
    left_out = arguments.list_refused_names(judged) | {"test_split_size"}
    left_out -= {entry.names.data, entry.names.model}
    args = {name: value for name, value in judged.config.args.items() if name not in left_out}
    whole = arguments.fit_for_cpu(args, judged.options, schema, entry)
    model = str(judged.config.args.get(entry.names.model))
    return ServerRequest(
        kind="preview",
        words=whole.words(schema),
        config=whole.in_file(schema),
        mixture=local_data.list_mixture_parts(whole.kept),
        sizes={local.source.name: local.size for local in data.sets},
        revision=judged.config.args.get("model_revision"),
        shape=guess_config(model),
        out=str(folder),
        result=str(folder.with_suffix(".json")),
    )


def _ask_server(
    server: Server, request: ServerRequest
) -> tuple[ServerResponse, PreviewContent | None]:
    """The response, and the rows if it has written any.

    Raises NotReady for what is not on this machine or where the process ended, and PreviewFailed.
    """
    (response,) = server.ask(request, limit_s=LIMIT_S)
    if response.absent is not None:
        raise _explain_absence(*response.absent)
    if response.phase is None:
        raise NotReady(describe_crash(response, server.log(response)))
    if response.refusal is not None and response.refusal.by_launch:
        raise PreviewFailed(response.refusal)
    try:
        content = json.loads(Path(request.result).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return response, None
    return response, codec.read_record(PreviewContent, content)


def _report_response(
    response: ServerResponse, content: PreviewContent | None, entry: Entry, data: _Data
) -> Iterator[Finding]:
    """What the trainer refuses, and what stood in for something that is not here."""
    if response.refusal is not None:
        what = "this stage before it prepares the rows"
        key = None
        if content is not None:
            what = "these rows"
            key = f"args.{entry.names.data}"
            if content.refused is not None:
                what = str(data.place(content.refused) or f"row {content.refused + 1}")
        message = f"the trainer refuses {what}: {describe_error(response.refusal)}"
        yield Finding(
            severity="error", layer="trainer", code="trainer-refuses", message=message, key=key
        )
    for kind, name in response.notes:
        if kind == "config":
            message = f"the config of {name} is not on this machine: "
            message += "its tokenizer is used with another model's"
            yield launch_finding("note", "stand-in", message)


def _explain_absence(kind: str, name: str) -> NotReady:
    if kind == "data":
        message = f"the data set {name} is not on this machine"
        return not_ready("absent-data", message, "download it: launch prepare CONFIG")
    message = f"there is no tokenizer of {name} on this machine: "
    message += "no folder of that name, and nothing in the hub's cache"
    return not_ready(
        "absent-tokenizer", message, "correct the name, or download it: launch prepare CONFIG"
    )


def _refuse_row(row: str, total: int | None) -> UsageError:
    help = "the data have fewer rows"
    if total is not None:
        help = f"the data have {total:,} rows"
    return usage("no-such-row", f"--row {row}: there is no such row", help)


@dataclass(frozen=True, slots=True)
class _Data:
    """The sets of a stage, whose rows are numbered one set after the other."""

    sets: Sequence[LocalSet]

    def total(self) -> int | None:
        total = 0
        for local in self.sets:
            if local.rows is None:
                return None
            total += local.rows
        return total

    def number(self, row: str) -> int:
        """The number of a row from 0. Raises UsageError where there is none."""
        file, _, last = row.rpartition(":")
        if not last.isdigit() or int(last) == 0:
            help = "a number from 1, or FILE:LINE as findings write it"
            raise usage("bad-row", f"--row {row} names no row", help)
        total = self.total()
        if file:
            wanted = Path(file).absolute()
            for number, place in enumerate(self.places()):
                if place.number == int(last) and Path(place.file).absolute() == wanted:
                    return number
            raise _refuse_row(row, total)
        number = int(last) - 1
        if self.sets and total is not None and number >= total:
            raise _refuse_row(row, total)
        return number

    def place(self, number: int) -> RowPlace | None:
        return next(itertools.islice(self.places(), number, None), None)

    def places(self) -> Iterator[RowPlace]:
        """Where the rows stand, by their numbers, up to a set whose files are not all here."""
        folder = Path.cwd()
        for local in self.sets:
            if local.rows is None:
                return
            for path in local.source.files:
                shown = path.relative_to(folder) if path.is_relative_to(folder) else path
                try:
                    for line, _ in reading.read_rows(path):
                        yield RowPlace(str(shown), line)
                except (CannotRead, OSError):
                    return


def _name_data(judged: Judged, entry: Entry) -> str:
    named = judged.config.args.get(entry.names.data)
    if isinstance(named, list):
        return " ".join(map(str, named))
    if named is not None:
        return str(named)
    mixed = mixture.read_mixture(judged.config.args, os.environ)
    if mixed is None:
        return "datasets"
    return ", ".join(mixed.names())


def _place_row(row: ShownRow, data: _Data, entry: Entry) -> None:
    """Number a row from 1, and say where it stands, and why it is dropped."""
    place = data.place(row.row)
    if place is not None:
        row.file = place.file
        row.line = place.number
    row.row += 1
    if row.reason is not None:
        row.reason = _REASONS[row.reason].format(length=entry.names.max_length)


def _describe_template(template: TemplateFacts, judged: Judged, entry: Entry) -> str:
    """Which chat template the trainer applies, and where it comes from."""
    args = judged.config.args
    model = str(args.get("tokenizer_name_or_path") or args.get(entry.names.model))
    tokenizers = f"of the tokenizer of {model}{_name_template_file(model)}"
    name = str(template.name)
    if template.source == "none":
        text = f"none: the tokenizer of {model} has none"
    elif not template.used:
        return "not applied: these rows are text, not messages"
    elif template.fallback:
        text = f"{tokenizers}, a fallback: open-instruct has no template `{name}`"
    elif template.source == "tokenizer":
        text = tokenizers
    elif entry.mixes:
        text = f"`{name}` of open-instruct (chat_template_name)"
    elif os.path.isfile(name):
        text = f"{name} (chat_template_path)"
    else:
        text = f"that of the tokenizer of {name} (chat_template_path)"
    if template.bos:
        text += ", with the BOS token in front (add_bos)"
    if template.replaced:
        text += "; TRL replaces it by its own version, which marks the answers"
    return text


def _name_template_file(model: str) -> str:
    """The name of a local model's template file in brackets; empty if it has none."""
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        path = Path(model) / name
        if not path.is_file():
            continue
        if name.endswith(".jinja") or '"chat_template"' in path.read_text(errors="replace"):
            return f" ({name})"
    return ""
