"""The arguments of one stage, tried again without what was refused until nothing is."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from launcher.artifacts import architecture
from launcher.errors import DISK_FULL, Finding, brief, launch_finding
from launcher.rules import registry
from launcher.rules.context import Context
from launcher.stage.stage import Judged
from launcher.upstream.trainers import Entry, entry_of
from launcher.workflows.rehearse import arguments, local_data
from launcher.workflows.rehearse.arguments import ROWS, Arguments
from launcher.workflows.rehearse.ask import Server, crash, describe_error
from launcher.workflows.rehearse.cause import DOING, Effect, compare, find_suspects, quotes
from launcher.workflows.rehearse.inside.records import (
    ErrorRecord,
    PreparedRows,
    ServerRequest,
    ServerResponse,
)
from launcher.workflows.rehearse.remarks import check_rows, create_trainer_finding
from launcher.workflows.rehearse.result import FAILED, Rehearsal

_MOST_REFUSALS = 8
_MOST_SUSPECTS = 6
_MOST_NAMED = 3
_PACKAGES = frozenset({"optim-missing", "quantiser-missing", "report-missing"})
"""Codes of rules about packages for what a rehearsal leaves out: they know the trainer's Python."""
# what to do about words of the trainers that do not say it
_ADVICE = {
    "No examples left": "longer rows, or a chat template that marks the answers",
    "No columns in the dataset": "leave `skip_prepare_dataset` out: these rows are not tokenised",
    "Please check the target modules": "`all-linear`, or a list of names such as q_proj",
    "Repo id must": "a folder that is here, or the name of a repository: organisation/name",
    "change no weight": "a learning rate above 0, and rows with tokens that count in the loss",
    "no row is left": "a larger `max_length`: rows whose prompt fills it are dropped",
}
_NEEDS_GPU = re.compile(
    r"(requires?|needs?|without|no|only|not)\b[^.\n]*(\bGPUs?\b|\bCUDA|\bcuda|[Ff]lash.?[Aa]tt|\bTriton\b)"
)
_STAND_INS = {
    "model": "random weights in the shape of {}, whose config is not on this machine",
    "tokenizer": "a tokenizer of single bytes, as that of {} is not on this machine",
    "data": "made-up rows, as {} is not on this machine",
    "package": "an empty package, as {} is not installed",
}
_MADE_UP_ROWS = "launch/made-up-rows"
_MADE_UP_MODEL = "launch/made-up-model"
_COMMON = "qwen/qwen2.5-0.5b"


def shape_of(model: str) -> dict[str, Any]:
    """A config by the name of a hub's model; that of the most common family where it is unknown."""
    table = architecture.table()
    return dict(table.get(model.lower()) or table[_COMMON])


class Attempts:
    """One rehearsal: what errors of validation are about is left out from the start."""

    def __init__(self, judged: Judged, server: Server) -> None:
        assert judged.schema is not None and judged.options is not None
        self.judged = judged
        self.options = judged.options
        self.config = judged.config
        self.schema = judged.schema
        self.server = server
        self.entry: Entry = entry_of(self.schema)
        self.data_names = (self.entry.names.data, "datasets", "dataset_mixer", "dataset_config")
        self.findings: list[Finding] = []
        self.stand_ins: list[str] = []
        self.model: str | None = None
        self.special: dict[str, int] = {}
        args = self.config.args
        sets = local_data.sets_of(args, self.entry)
        self.further = local_data.further_rows(args, sets)
        self.sizes = {local.source.name: local.size for local in sets}
        self.refused = arguments.refused_names(judged)
        whole = arguments.of_stage(args, judged.options, self.schema, self.entry)
        self.whole = self.without(whole, self.refused)

    def all(self) -> Rehearsal:
        self.findings += self.missing_packages()
        self.shrink()
        self.parse_what_is_left_out()
        response = self.try_until_nothing_is_refused()
        rows = seen_rows(response)
        if rows is not None:
            name = "datasets" if self.config.args.get("datasets") else self.entry.names.data
            self.findings += check_rows(rows, self.entry, f"args.{name}")
        for what, names in self.whole.left_out.items():
            key = f"args.{names[0]}" if names else "deepspeed"
            self.note("not-rehearsed", f"not rehearsed on the CPU: {what}", key)
        for text in self.stand_ins:
            self.note("stand-in", f"rehearsed with {text}", None)
        return Rehearsal(
            findings=tuple(map(self.config.placed, self.findings)),
            seconds=0,
            rows=rows,
            losses=() if rows is None else tuple(response.losses),
            left_out=tuple(self.whole.left_out),
            stand_ins=tuple(self.stand_ins),
        )

    def note(self, code: str, message: str, key: str | None) -> None:
        self.findings.append(launch_finding("note", code, message, key=key))

    def try_until_nothing_is_refused(self) -> ServerResponse:
        """Each refusal becomes a finding; returns the last response."""
        for _ in range(_MOST_REFUSALS):
            response = self.ask(self.whole)
            self.note_stand_ins(response)
            refusal = response.refusal
            if response.phase is None:
                self.findings.append(crash(response, self.server.log(response)))
                return response
            if refusal is None:
                return response
            obstacle = _find_obstacle(refusal)
            if obstacle is not None:
                self.findings.append(obstacle)
                return response
            culprits = self.blame(response, refusal)
            if _NEEDS_GPU.search(refusal.message):
                # what a CPU alone lacks is no fault of the file
                key = f"args.{culprits[0]}" if culprits else None
                message = f"not rehearsed on the CPU: {describe_error(refusal)}"
                self.note("not-rehearsed", message, key)
            else:
                self.findings.append(self.refusal(response, culprits))
            if not culprits:
                return response
            self.whole = self.without(self.whole, culprits[:1])
        return response

    def request(self, whole: Arguments, *, only_parses: bool = False) -> ServerRequest:
        """A request about some arguments; without a model it only parses."""
        further = {}
        for name, rows in self.further.items():
            further[name] = [exemplar.row for exemplar in rows]
        return ServerRequest(
            kind="run",
            words=whole.words(self.schema),
            config=whole.in_file(self.schema),
            mixture=local_data.mixture_parts(whole.kept),
            sizes=self.sizes,
            model=self.model,
            only_parses=only_parses or self.model is None,
            pairs=self.schema.pairs,
            rows=ROWS,
            further=further,
            special=self.special,
        )

    def ask(self, whole: Arguments, *, only_parses: bool = False) -> ServerResponse:
        return self.server.ask(self.request(whole, only_parses=only_parses))[0]

    def missing_packages(self) -> Iterator[Finding]:
        """Packages that arguments ask for and that the trainer's Python lacks."""
        if self.judged.values is None:
            return
        context = Context(
            values=self.judged.values,
            environ=os.environ,
            deepspeed=self.options.read_deepspeed()[0],
            packages=self.server.trainer.packages,
        )
        for finding in registry.apply_in(context):
            if finding.code in _PACKAGES:
                yield finding

    def shrink(self) -> None:
        """Have the small model made; without one the arguments are only parsed, which is said."""
        name = str(self.config.args.get(self.entry.names.model))
        request = ServerRequest(
            kind="shrink",
            model=name,
            out=str(self.server.folder()),
            shape=shape_of(name),
            revision=self.config.args.get("model_revision"),
        )
        (response,) = self.server.ask(request)
        self.note_stand_ins(response)
        if response.is_fine:
            self.model = request.out
            self.special = response.special
            return
        reason = "its process ended"
        if response.refusal is not None:
            reason = describe_error(response.refusal)
        message = "no small model of this kind can be made, so the arguments are only parsed: "
        self.note("not-rehearsed", message + reason, f"args.{self.entry.names.model}")

    def parse_what_is_left_out(self) -> None:
        """Arguments that are left out or replaced are at least parsed, with the others."""
        left_out = {}
        for name, value in self.config.args.items():
            is_tried = name in self.whole.kept or name in self.refused
            if name in self.schema.fields and value is not None and not is_tried:
                left_out[name] = value
        if not left_out:
            return
        added = {name: value for name, value in self.whole.added.items() if name not in left_out}
        whole = replace(self.whole, kept={**self.whole.kept, **left_out}, added=added)
        response = self.ask(whole, only_parses=True)
        refusal = response.refusal
        if refusal is None or re.search(r"GPU|CUDA|cuda", refusal.message):
            return
        if self.ask(self.whole, only_parses=True).refusal is not None:
            return
        if refusal.by_launch:
            self.findings.append(_report_own_failure(refusal))
            return
        culprits = self.causes(response, whole, list(left_out))
        self.findings.append(self.refusal(response, culprits))

    def note_stand_ins(self, response: ServerResponse) -> None:
        """Keep what stood in for something that is not on this machine."""
        for kind, name in response.notes:
            text = _STAND_INS[kind].format(name)
            if name == _MADE_UP_ROWS:
                text = "made-up rows in place of those that are refused"
            if text not in self.stand_ins:
                self.stand_ins.append(text)

    def blame(self, response: ServerResponse, refusal: ErrorRecord) -> list[str]:
        """The arguments of the file that are shown to cause a refusal, likeliest first.

        Shown is what the refusal does not come without: it is gone, or the trainer gets to a later
        phase. Another refusal in the same phase may be an earlier one, which the argument kept from
        coming: then the argument has to bring the refusal about without the others, or to stand in
        its words.
        """
        args = self.whole.kept
        names = [name for name in args if name != self.entry.names.model]
        likely = find_suspects(refusal, args, names)
        if response.phase in {"data", "construct"} or refusal.type == "KeyError":
            for name in self.data_names:
                if name in args and name not in likely:
                    likely.append(name)
        likely = likely[:_MOST_SUSPECTS]
        effects = self.effects(response, self.whole, likely)
        best = max(effects.values(), default=Effect.NONE)
        shown = []
        if best >= Effect.LATER:
            shown = [name for name in likely if effects[name] == best]
        unsure = [name for name in likely if effects[name] == Effect.ELSEWHERE]
        quoted = [name for name in shown + unsure if quotes(refusal.message, args[name])]
        named = list(dict.fromkeys(quoted + shown))
        # with other data much is gone that is not about the data
        if not set(named) <= set(self.data_names):
            return named
        unlikely = [name for name in names if name not in likely]
        others = self.causes(response, self.whole, unlikely)
        # a switch brings others into play, and one of those is rather what is wrong
        others.sort(key=lambda name: args[name] is True)
        if others or named or not unsure:
            return others + named
        kept = {*likely, *self.data_names}
        dropped = [name for name in names if name not in kept]
        few = self.without(self.whole, dropped)
        again = self.ask(few)
        if again.refusal is None or compare(response, again) != Effect.NONE:
            return []
        return self.causes(again, few, unsure)

    def causes(self, response: ServerResponse, whole: Arguments, names: Sequence[str]) -> list[str]:
        """Those arguments of `whole` without which its refusal does not come."""
        effects = self.effects(response, whole, names)
        return [name for name in names if effects[name] >= Effect.LATER]

    def effects(
        self, response: ServerResponse, whole: Arguments, names: Sequence[str]
    ) -> dict[str, Effect]:
        """What becomes of a refusal of `whole` without each of some arguments."""
        only_parses = response.phase == "parse"
        requests = []
        for name in names:
            requests.append(self.request(self.without(whole, [name]), only_parses=only_parses))
        effects = {}
        for name, other in zip(names, self.server.ask(*requests), strict=True):
            effects[name] = compare(response, other)
        return effects

    def without(self, whole: Arguments, names: Iterable[str]) -> Arguments:
        """The arguments without some; data are replaced by rows that each trainer takes."""
        left = set(names)
        added = dict(whole.added)
        keys = self.entry.names
        if keys.model in left:
            added[keys.model] = _MADE_UP_MODEL
        if not left.isdisjoint(self.data_names):
            left.update(self.data_names)
            data = [_MADE_UP_ROWS, "1.0"] if self.entry.mixes else _MADE_UP_ROWS
            added[keys.data] = data
        kept = {}
        for name, value in whole.kept.items():
            if name not in left:
                kept[name] = value
        return replace(whole, kept=kept, added=added)

    def refused_rows(self, response: ServerResponse) -> list[str]:
        """Which of the further rows bring a refusal about; none where the first rows do already."""
        request = self.request(self.whole)
        if not self.further:
            return []
        (without_further,) = self.server.ask(replace(request, further={}))
        if compare(response, without_further) == Effect.NONE:
            return []
        places = []
        requests = []
        for name, rows in self.further.items():
            for exemplar in rows:
                places.append(str(exemplar.place))
                requests.append(replace(request, further={name: [exemplar.row]}))
        refused = []
        others = self.server.ask(*requests[:_MOST_SUSPECTS])
        for place, other in zip(places, others, strict=False):
            if compare(response, other) == Effect.NONE:
                refused.append(place)
        return refused

    def refusal(self, response: ServerResponse, culprits: list[str]) -> Finding:
        """What the trainer said, in its words, at the argument that it is about."""
        refusal = response.refusal
        assert refusal is not None
        doing = DOING[str(response.phase)]
        help = self.advice(response, refusal, culprits)
        if not culprits:
            message = f"the trainer refuses this stage {doing}: {describe_error(refusal)}"
            return create_trainer_finding("error", "trainer-refuses", message, help, key=None)
        name = culprits[0]
        value = brief(self.config.args.get(name))
        message = f"the trainer refuses `{name}: {value}` {doing}: {describe_error(refusal)}"
        return create_trainer_finding("error", "trainer-refuses", message, help, key=f"args.{name}")

    def advice(
        self, response: ServerResponse, refusal: ErrorRecord, culprits: list[str]
    ) -> str | None:
        if culprits and culprits[0] in self.data_names:
            places = self.refused_rows(response)
            if places:
                which = " and ".join(places[:_MOST_NAMED])
                reason = f"the first {ROWS} rows are not refused"
                return f"correct or remove {which}, and rows like it: {reason}"
        for words, text in _ADVICE.items():
            if words in refusal.message:
                return text
        others = " and ".join(f"`{name}`" for name in culprits[1:_MOST_NAMED])
        return f"it is also gone without {others}" if others else None


def seen_rows(response: ServerResponse) -> PreparedRows | None:
    """The run's own rows; None where others stood in for them, or nothing was trained."""
    is_made_up = any(kind == "data" for kind, _ in response.notes)
    if not response.is_fine or is_made_up or not response.rows.rows:
        return None
    return response.rows


def _find_obstacle(refusal: ErrorRecord) -> Finding | None:
    """A finding if it is no refusal of the trainer: no room, or a failure of launch."""
    what = None
    if refusal.type == "MemoryError":
        what = "there is not enough memory"
        help = "free some"
    elif refusal.errno in DISK_FULL:
        what = "there is no space left"
        help = "free some, or set TMPDIR to a larger disk"
    if what is not None:
        message = f"{what} for a rehearsal: {describe_error(refusal)}"
        return launch_finding("error", "rehearsal-no-room", message, help)
    return _report_own_failure(refusal) if refusal.by_launch else None


def _report_own_failure(refusal: ErrorRecord) -> Finding:
    """A note for a failure of launch, not of the stage."""
    message = f"launch could not rehearse this: {describe_error(refusal)}"
    help = (
        "this is a failure of launch, not of the stage file: nothing is refused; please report it"
    )
    return launch_finding("note", FAILED, message, help)
