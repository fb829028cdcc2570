"""The arguments of one stage, tried again without what was refused until nothing is."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launcher.artifacts import architecture
from launcher.errors import DISK_FULL, Finding, launch_finding, shorten
from launcher.rules import registry
from launcher.rules.context import Context
from launcher.stage.stage import Judged
from launcher.workflows.rehearse import arguments
from launcher.workflows.rehearse.arguments import ROWS
from launcher.workflows.rehearse.ask import Server, describe_crash, describe_error
from launcher.workflows.rehearse.cause import DOING, CauseSearch
from launcher.workflows.rehearse.inside.records import (
    ErrorRecord,
    PreparedRows,
    ServerRequest,
    ServerResponse,
)
from launcher.workflows.rehearse.remarks import check_rows, create_trainer_finding
from launcher.workflows.rehearse.result import FAILED, Rehearsal
from launcher.workflows.rehearse.trials import MADE_UP_ROWS, TrainerRefusal, Trials, refusal_in

_MOST_REFUSALS = 8
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
_COMMON = "qwen/qwen2.5-0.5b"


def guess_config(model: str) -> dict[str, Any]:
    """A config by the name of a hub's model; that of the most common family where it is unknown."""
    table = architecture.load_known_shapes()
    return dict(table.get(model.lower()) or table[_COMMON])


class Attempts:
    """One rehearsal: what the trainer refuses is reported and left out of the next attempt.

    `tried` are the arguments of that attempt. What errors of validation are about is left out from
    the start.
    """

    def __init__(self, judged: Judged, server: Server) -> None:
        assert judged.schema is not None and judged.options is not None
        self.judged = judged
        self.options = judged.options
        self.config = judged.config
        self.schema = judged.schema
        self.server = server
        self.trials = Trials(judged, server)
        self.entry = self.trials.entry
        self.findings: list[Finding] = []
        self.stand_ins: list[str] = []
        self.refused = arguments.list_refused_names(judged)
        whole = arguments.fit_for_cpu(self.config.args, judged.options, self.schema, self.entry)
        self.tried = self.trials.without(whole, self.refused)

    def run(self) -> Rehearsal:
        self.findings += self.find_missing_packages()
        self.make_small_model()
        self.parse_what_is_left_out()
        response = self.try_until_nothing_is_refused()
        rows = _get_own_rows(response)
        if rows is not None:
            name = "datasets" if self.config.args.get("datasets") else self.entry.names.data
            self.findings += check_rows(rows, self.entry, f"args.{name}")
        for what, names in self.tried.left_out.items():
            key = f"args.{names[0]}" if names else "deepspeed"
            self.note("not-rehearsed", f"not rehearsed on the CPU: {what}", key)
        for text in self.stand_ins:
            self.note("stand-in", f"rehearsed with {text}", None)
        return Rehearsal(
            findings=tuple(map(self.config.placed, self.findings)),
            seconds=0,
            rows=rows,
            losses=() if rows is None else tuple(response.losses),
            left_out=tuple(self.tried.left_out),
            stand_ins=tuple(self.stand_ins),
        )

    def note(self, code: str, message: str, key: str | None) -> None:
        self.findings.append(launch_finding("note", code, message, key=key))

    def try_until_nothing_is_refused(self) -> ServerResponse:
        """Each refusal becomes a finding; returns the last response."""
        for _ in range(_MOST_REFUSALS):
            response = self.trials.run(self.tried)
            self.note_stand_ins(response)
            if response.phase is None:
                self.findings.append(describe_crash(response, self.server.log(response)))
                return response
            refusal = refusal_in(response, self.tried)
            if refusal is None:
                return response
            obstacle = _find_obstacle(refusal.error)
            if obstacle is not None:
                self.findings.append(obstacle)
                return response
            causes = CauseSearch(self.trials, refusal).find_causes()
            self.report_refusal(refusal, causes)
            if not causes:
                return response
            self.tried = self.trials.without(self.tried, causes[:1])
        return response

    def report_refusal(self, refusal: TrainerRefusal, causes: list[str]) -> None:
        if not _NEEDS_GPU.search(refusal.error.message):
            self.findings.append(self.describe_refusal(refusal, causes))
            return
        # what a CPU alone lacks is no fault of the file
        key = f"args.{causes[0]}" if causes else None
        message = f"not rehearsed on the CPU: {describe_error(refusal.error)}"
        self.note("not-rehearsed", message, key)

    def find_missing_packages(self) -> Iterator[Finding]:
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

    def make_small_model(self) -> None:
        """Without a small model the arguments are only parsed, which is said."""
        name = str(self.config.args.get(self.entry.names.model))
        request = ServerRequest(
            kind="shrink",
            model=name,
            out=str(self.server.folder()),
            shape=guess_config(name),
            revision=self.config.args.get("model_revision"),
        )
        (response,) = self.server.ask(request)
        self.note_stand_ins(response)
        if response.is_fine:
            self.trials.model = request.out
            self.trials.special = response.special
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
            is_tried = name in self.tried.kept or name in self.refused
            if name in self.schema.fields and value is not None and not is_tried:
                left_out[name] = value
        if not left_out:
            return
        added = {name: value for name, value in self.tried.added.items() if name not in left_out}
        whole = replace(self.tried, kept={**self.tried.kept, **left_out}, added=added)
        refusal = refusal_in(self.trials.run(whole, only_parses=True), whole)
        if refusal is None or re.search(r"GPU|CUDA|cuda", refusal.error.message):
            return
        if self.trials.run(self.tried, only_parses=True).refusal is not None:
            return
        if refusal.error.by_launch:
            self.findings.append(_report_own_failure(refusal.error))
            return
        causes = CauseSearch(self.trials, refusal).confirm(list(left_out))
        self.findings.append(self.describe_refusal(refusal, causes))

    def note_stand_ins(self, response: ServerResponse) -> None:
        """Keep what stood in for something that is not on this machine."""
        for kind, name in response.notes:
            text = _STAND_INS[kind].format(name)
            if name == MADE_UP_ROWS:
                text = "made-up rows in place of those that are refused"
            if text not in self.stand_ins:
                self.stand_ins.append(text)

    def describe_refusal(self, refusal: TrainerRefusal, causes: list[str]) -> Finding:
        """What the trainer said, in its words, at the argument that it is about."""
        doing = DOING[refusal.phase]
        error = describe_error(refusal.error)
        key = None
        message = f"the trainer refuses this stage {doing}: {error}"
        if causes:
            name = causes[0]
            key = f"args.{name}"
            value = shorten(self.config.args.get(name))
            message = f"the trainer refuses `{name}: {value}` {doing}: {error}"
        help = self.advise(refusal, causes)
        return create_trainer_finding("error", "trainer-refuses", message, help, key=key)

    def advise(self, refusal: TrainerRefusal, causes: list[str]) -> str | None:
        """What to do about a refusal; None if nothing is known."""
        if causes and causes[0] in self.trials.data_names:
            places = list(CauseSearch(self.trials, refusal).find_rows())
            if places:
                which = " and ".join(places[:_MOST_NAMED])
                reason = f"the first {ROWS} rows are not refused"
                return f"correct or remove {which}, and rows like it: {reason}"
        for words, text in _ADVICE.items():
            if words in refusal.error.message:
                return text
        others = " and ".join(f"`{name}`" for name in causes[1:_MOST_NAMED])
        return f"it is also gone without {others}" if others else None


def _get_own_rows(response: ServerResponse) -> PreparedRows | None:
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
