"""Rows of a stage as the trainer prepares them -> `Preview`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.artifacts import architecture
from launcher.dataset import mixture, reading, survey
from launcher.dataset.reading import CannotRead
from launcher.dataset.sources import Source
from launcher.dataset.survey import RowPlace
from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    LaunchError,
    NotReady,
    UsageError,
    errors,
    launch_finding,
    not_ready,
    usage,
)
from launcher.machine.python import Trainer
from launcher.stage.stage import Judged
from launcher.upstream.schema import source_name
from launcher.upstream.trainers import Entry, entry_of
from launcher.workflows.rehearse import arguments, further
from launcher.workflows.rehearse.ask import Server, Servers, crash, described

Say = Callable[[str], None]
LIMIT_S = 300.0
_COMMON = "qwen/qwen2.5-0.5b"  # the config where a model's own is not here
_LARGEST = 256 << 20  # bytes of a set that is read to its end for the counts
_REASONS = {
    "too_long": "no token that counts in the loss is within `{length}`: the prompt fills it",
    "untrained": "no token of it counts in the loss",
}


class PreviewFailed(LaunchError):
    """Launch's own code failed: nothing is known of the rows."""

    exit_code = Exit.BUG

    def __init__(self, refusal: Mapping[str, Any]) -> None:
        message = f"launch could not show these rows: {described(refusal)}"
        help = "this is a failure of launch, not of the stage file; please report it"
        super().__init__(launch_finding("error", "preview-failed", message, help))


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a row: its text in pieces, tokens that are left of it, trained ones, and those that are cut."""

    name: str
    tokens: int
    trained: int
    cut: int
    cut_at: str | None
    pieces: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewedRow:
    """One row as it is trained on. `number` counts the rows of the data from 1; `reason` is why it is dropped.

    `tokens` are those that the model gets: of a pair, the prompt counts in both sequences. `taken` is whether the
    mixture takes the row, `parts` in how many sequences it is.
    """

    number: int
    place: RowPlace | None
    status: str
    reason: str | None
    taken: bool
    parts: int
    tokens: int
    trained: int
    cut: int
    sections: tuple[Section, ...]
    difference: Mapping[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        place = self.place
        return {
            "row": self.number,
            "file": None if place is None else place.file,
            "line": None if place is None else place.number,
            "status": self.status,
            "reason": self.reason,
            "taken": self.taken,
            "tokens": self.tokens,
            "trained": self.trained,
            "cut": self.cut,
            "sequences": self.parts,
            "sections": [
                {
                    "name": section.name,
                    "tokens": section.tokens,
                    "trained": section.trained,
                    "cut": section.cut,
                    "cut_at": section.cut_at,
                    "pieces": [dict(piece) for piece in section.pieces],
                }
                for section in self.sections
            ],
            "difference": None if self.difference is None else dict(self.difference),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What the trainer makes of a stage's rows. `counts` is None where it refuses one of them."""

    title: str
    data: str
    model: str
    length_key: str
    limit: int | None
    packs: bool
    mixes: bool
    is_pairs: bool
    template: Mapping[str, Any]
    template_text: str
    counts: Mapping[str, Any] | None
    total: int | None
    sampled: bool
    rows: tuple[PreviewedRow, ...]
    findings: tuple[Finding, ...]
    exit: Exit = Exit.OK

    @property
    def dropped(self) -> int:
        return 0 if self.counts is None else self.counts["too_long"] + self.counts["untrained"]

    def as_json(self) -> dict[str, Any]:
        counts = None
        if self.counts is not None:
            counts = {
                "total": self.total,
                "looked_at": self.counts["rows"],
                "sampled": self.sampled,
                "cut": self.counts["cut"],
                "dropped": {"too_long": self.counts["too_long"], "untrained": self.counts["untrained"]},
                "tokens": self.counts["tokens"],
                "trained": self.counts["trained"],
                "sequences": self.counts["sequences"],
                "lengths": self.counts["lengths"],
            }
        return {
            "stage": self.title,
            "data": self.data,
            "model": self.model,
            "limit": self.limit,
            "packing": self.packs,
            "template": {**self.template, "description": self.template_text},
            "counts": counts,
            "rows": [row.as_json() for row in self.rows],
        }


def preview(judged: Judged, trainer: Trainer, *, first: int, row: str | None, say: Say) -> Preview:
    """The first rows of a stage, or the one that `row` names: a number from 1, or FILE:LINE.

    Raises UsageError for a row that is not there, NotReady where tokenizer, data or packages are not here,
    InvalidConfig where there is nothing that could be prepared, or the trainer refuses all of it.
    """
    if judged.schema is None or judged.options is None or judged.upstream is None:
        raise InvalidConfig(judged.findings)
    entry = entry_of(judged.schema)
    sources = list(further.sources_of(judged.config.args, entry))
    totals = [_count(source) for source in sources]
    number = None if row is None else _number(row, sources, totals)
    say("preparing rows on the CPU: importing packages, usually 15 to 60 s")
    with Servers() as servers:
        key = judged.schema.backend, judged.schema.key, judged.upstream.root
        inquiry = _Inquiry(judged, entry, servers.of(trainer, *key), first=first, number=number)
        answer, content = inquiry.answer(dict(zip([source.name for source in sources], totals, strict=True)))
        findings = inquiry.findings(answer, content, sources, totals)
    if content is None:
        # without what is wrong with the file, the trainer may refuse what the file does not say
        wrong = errors(judged.findings)
        raise InvalidConfig(judged.findings if wrong else (*judged.findings, *map(judged.config.placed, findings)))
    if number is not None and not content["rows"] and content["refused"] is None:
        raise _no_such_row(str(row), content["total"])
    shown = [_row(about, sources, totals, entry) for about in content["rows"]]
    source = source_name(judged.upstream.backend, judged.upstream.version)
    found = (*judged.findings, *map(judged.config.placed, findings))
    return Preview(
        title=f"{judged.options.stage} on {source}",
        data=", ".join(dict.fromkeys(_shown_source(source) for source in sources)) or _named_data(judged, entry),
        model=str(judged.config.args.get(entry.names.model)),
        length_key=entry.names.max_length,
        limit=content["limit"],
        packs=content["packs"],
        mixes=entry.mixes,
        is_pairs=judged.schema.pairs,
        template={key: value for key, value in content["template"].items() if key != "bos"},
        template_text=_about_template(content["template"], judged, entry),
        counts=content["counts"],
        total=content["total"],
        sampled=content["sampled"],
        rows=tuple(shown),
        findings=found,
        exit=Exit.CONFIG if errors(found) else Exit.OK,
    )


@dataclass(frozen=True, slots=True)
class _SetSize:
    """Rows of a set, and bytes of its files; None where they were not counted."""

    rows: int | None
    bytes: int | None

    @property
    def read_bytes(self) -> int | None:
        """Bytes that are read to look at rows from all parts; None where only the first rows are looked at."""
        if self.bytes is None or self.bytes > _LARGEST:
            return None
        return self.bytes


def _count(source: Source) -> _SetSize:
    if not source.files:
        return _SetSize(None, None)
    surveyed = survey.look(source.files)
    if surveyed.unread:
        return _SetSize(None, None)
    try:
        size = sum(file.stat().st_size for file in source.files)
    except OSError:
        return _SetSize(None, None)
    return _SetSize(surveyed.rows, size)


class _Inquiry:
    """A request to the server, and what its answers mean."""

    def __init__(self, judged: Judged, entry: Entry, server: Server, *, first: int, number: int | None) -> None:
        assert judged.schema is not None and judged.options is not None
        self.judged = judged
        self.schema = judged.schema
        self.entry = entry
        self.server = server
        self.first = first
        self.number = number
        refused = {_argument(finding) for finding in errors(judged.findings)}
        refused -= {entry.names.data, entry.names.model}
        # which rows are split off is drawn anew at each start: all are shown
        refused |= {"test_split_size"}
        # what is wrong with others need not hide the rows
        args = {name: value for name, value in judged.config.args.items() if name not in refused}
        self.arguments = arguments.of_stage(args, judged.options, judged.schema, entry)

    def answer(self, totals: Mapping[str, _SetSize]) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
        """The answer to the request, and the rows as JSON. Raises NotReady for what is not on this machine."""
        folder = self.server.folder()
        result = folder.with_suffix(".json")
        table = architecture.table()
        model = str(self.judged.config.args.get(self.entry.names.model))
        request = {
            "kind": "preview",
            "words": self.arguments.words(self.schema),
            "config": self.arguments.in_file(self.schema),
            "mixture": further.mixture_as_json(self.arguments.given),
            "entry": self.schema.key,
            "revision": self.judged.config.args.get("model_revision"),
            "shape": dict(table.get(model.lower()) or table[_COMMON]),
            "out": str(folder),
            "result": str(result),
            "first": self.first,
            "numbers": [] if self.number is None else [self.number],
            "sizes": {name: [size.rows, size.read_bytes] for name, size in totals.items()},
        }
        (answer,) = self.server.ask(request, limit_s=LIMIT_S)
        if "absent" in answer:
            raise _absent(*answer["absent"])
        try:
            content = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = None
        return answer, content

    def findings(
        self,
        answer: Mapping[str, Any],
        content: Mapping[str, Any] | None,
        sources: Sequence[Source],
        totals: Sequence[_SetSize],
    ) -> list[Finding]:
        """What the trainer refuses. Raises NotReady where its process ended, PreviewFailed where launch did."""
        if "phase" not in answer:
            raise NotReady(crash(answer, self.server.log(answer)))
        refusal = answer.get("refusal")
        if refusal is None:
            return list(self.notes(answer))
        if refusal["type"] == "NoRehearsal":
            message = f"these rows cannot be shown: {refusal['message']}"
            return [launch_finding("error", "no-preview", message)]
        if refusal.get("own"):
            raise PreviewFailed(refusal)
        what = "the trainer refuses this stage before it prepares the rows"
        if content is not None:
            what = "the trainer refuses these rows"
            refused = content["refused"]
            place = None if refused is None else _place(refused, sources, totals)
            if refused is not None:
                what = f"the trainer refuses row {refused + 1}" if place is None else f"the trainer refuses {place}"
        key = f"args.{self.entry.names.data}" if content is not None else None
        message = f"{what}: {described(refusal)}"
        finding = Finding(severity="error", layer="trainer", code="trainer-refuses", message=message, key=key)
        return [finding, *self.notes(answer)]

    def notes(self, answer: Mapping[str, Any]) -> Iterator[Finding]:
        for kind, name in answer.get("notes", ()):
            if kind == "config":
                message = f"the config of {name} is not on this machine: its tokenizer is used with another model's"
                yield launch_finding("note", "stand-in", message)


def _argument(finding: Finding) -> str:
    """The argument that a finding is about."""
    return (finding.key or "").removeprefix("args.").partition("[")[0]


def _absent(kind: str, name: str) -> NotReady:
    if kind == "data":
        message = f"the data set {name} is not on this machine"
        return not_ready("absent-data", message, "download it: launch prepare CONFIG")
    message = (
        f"there is no tokenizer of {name} on this machine: no folder of that name, and nothing in the hub's cache"
    )
    return not_ready("absent-tokenizer", message, "correct the name, or download it: launch prepare CONFIG")


def _no_such_row(row: str, total: int | None) -> UsageError:
    known = "the data have fewer rows" if total is None else f"the data have {total:,} rows"
    return usage("no-such-row", f"--row {row}: there is no such row", known)


def _number(row: str, sources: Sequence[Source], totals: Sequence[_SetSize]) -> int:
    """The number of a row from 0 among those of all sets. Raises UsageError where there is none."""
    file, _, last = row.rpartition(":")
    if not last.isdigit() or int(last) == 0:
        help = "a number from 1, or FILE:LINE as findings write it"
        raise usage("bad-row", f"--row {row} names no row", help)
    if not file:
        number = int(last) - 1
        counts = [size.rows for size in totals]
        total = _sum(counts)
        if counts and total is not None and number >= total:
            raise _no_such_row(row, total)
        return number
    before = 0
    for source, size in zip(sources, totals, strict=True):
        for index, (path, line) in enumerate(_places(source)):
            if line == int(last) and (path == Path(file) or path.absolute() == Path(file).absolute()):
                return before + index
        before += size.rows or 0
    raise _no_such_row(row, _sum([size.rows for size in totals]))


def _sum(counts: Sequence[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _places(source: Source) -> Iterator[tuple[Path, int]]:
    """Where each row of a set stands: its file, and its line or number there."""
    for path in source.files:
        try:
            for number, _ in reading.read_rows(path):
                yield path, number
        except (CannotRead, OSError):
            return


def _place(number: int, sources: Sequence[Source], totals: Sequence[_SetSize]) -> RowPlace | None:
    """Where a row of the data stands; None where its files are not here, or cannot be read without pyarrow."""
    before = 0
    for source, size in zip(sources, totals, strict=True):
        if size.rows is None:
            return None
        if number < before + size.rows:
            for index, (path, line) in enumerate(_places(source)):
                if index == number - before:
                    return RowPlace(_relative(path), line, index)
            return None
        before += size.rows
    return None


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _shown_source(source: Source) -> str:
    if len(source.files) == 1:
        return _relative(source.files[0])
    return _relative(Path(source.name)) if os.path.isabs(source.name) else source.name


def _named_data(judged: Judged, entry: Entry) -> str:
    named = judged.config.args.get(entry.names.data)
    if named is None:
        mixed = mixture.of_values(judged.config.args, os.environ)
        return "datasets" if mixed is None else ", ".join(mixed.names())
    return " ".join(map(str, named)) if isinstance(named, list) else str(named)


def _row(
    about: Mapping[str, Any], sources: Sequence[Source], totals: Sequence[_SetSize], entry: Entry
) -> PreviewedRow:
    reason = about["reason"]
    if reason is not None:
        reason = _REASONS[reason].format(length=entry.names.max_length)
    sections = []
    for section in about["sequences"]:
        sections.append(Section(**{**section, "pieces": tuple(section["pieces"])}))
    return PreviewedRow(
        number=about["number"] + 1,
        place=_place(about["number"], sources, totals),
        status=about["status"],
        reason=reason,
        taken=about["taken"],
        parts=about.get("parts", 1),
        tokens=about["tokens"],
        trained=about["trained"],
        cut=about["cut"],
        sections=tuple(sections),
        difference=about.get("difference"),
    )


def _about_template(template: Mapping[str, Any], judged: Judged, entry: Entry) -> str:
    """Which chat template it is, in words, with what is to be known of it."""
    model = judged.config.args.get("tokenizer_name_or_path") or judged.config.args.get(entry.names.model)
    own = f"of the tokenizer of {model}{_template_file(str(model))}"
    name = template["name"]
    if template["source"] == "none":
        text = f"none: the tokenizer of {model} has none"
    elif not template["used"]:
        return "not applied: these rows are text, not messages"
    elif template["fallback"]:
        text = f"{own}, a fallback: open-instruct has no template `{name}`"
    elif template["source"] == "tokenizer":
        text = own
    elif entry.mixes:
        text = f"`{name}` of open-instruct (chat_template_name)"
    elif os.path.isfile(str(name)):
        text = f"{name} (chat_template_path)"
    else:
        text = f"that of the tokenizer of {name} (chat_template_path)"
    if template.get("bos"):
        text += ", with the BOS token in front (add_bos)"
    if template["replaced"]:
        text += "; TRL replaces it by its own version, which marks the answers"
    return text


def _template_file(model: str) -> str:
    """The file of a local model that holds its template, in brackets."""
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        path = Path(model) / name
        if path.is_file() and (name.endswith(".jinja") or '"chat_template"' in path.read_text(errors="replace")):
            return f" ({name})"
    return ""
